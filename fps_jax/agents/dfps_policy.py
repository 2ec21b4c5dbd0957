"""How the policy moves: along the fusion gradient, within a trust region."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Key

from fps_jax.agents import dfps_dpg
from fps_jax.agents.dfps_networks import Gaussian, Params
from fps_jax.agents.dfps_signals import Segment, Signals
from fps_jax.agents.dfps_state import DFPSState, Frozen, Parts
from fps_jax.agents.gradient import (
    Learned,
    axis_size,
    gradient_step,
    minibatch_epochs,
    num_minibatches,
)
from fps_jax.agents.memory import Memory
from fps_jax.objectives import fusion, masked, ratios
from fps_jax.objectives.trust_region import kl_penalty_share
from fps_jax.types import Metrics


class Rows(NamedTuple):
    """What the policy learns from, each ``[B, ...]``.

    Attributes:
      observation: as the networks read it.
      drawn: what the policy drew.
      behaviour_log_prob: of the policy that acted.
      old_log_prob: at the start of the update.
      old: that policy.
      signal: what the score function is multiplied by.
      is_valid: which rows count.
      critic_observation: where the critic's term is taken.
      critic_coef: of that term, beside what all rows share.
      critic_is_valid: which of those count.
    """

    observation: Float[Array, "B features"]
    drawn: Float[Array, "B A"]
    behaviour_log_prob: Float[Array, " B"]
    old_log_prob: Float[Array, " B"]
    old: Gaussian
    signal: Float[Array, " B"]
    is_valid: Bool[Array, " B"]
    critic_observation: Float[Array, "B features"]
    critic_coef: Float[Array, " B"]
    critic_is_valid: Bool[Array, " B"]


class Stoppable(NamedTuple):
    """What the epochs of an update move.

    Attributes:
      learned: the policy.
      is_stopped: whether it has gone far enough.
    """

    learned: Learned
    is_stopped: Bool[Array, ""]

    @property
    def params(self) -> Any:
        """Of the policy."""
        return self.learned.params


def rows_of(
    parts: Parts,
    segment: Segment,
    signals: Signals,
    memory: Memory | None,
    frozen: Frozen,
    key: Key[Array, ""],
) -> Rows:
    """Flattens a segment and its signals.

    Args:
      parts: says where the critic's term is taken.
      segment: the rows.
      signals: what it tells.
      memory: gives states, if they are those of the replay.
      frozen: how those are standardised.
      key: of this device, to draw them.
    """
    options, size = parts.options, segment.reward.size
    flat = lambda x: x.reshape(size, *x.shape[2:])
    observation, is_valid = flat(segment.observation[:-1]), flat(segment.is_valid)
    coef = flat(signals.coef)
    if options.control_variate == "zero":
        coef = jnp.ones_like(coef)
    states = observation, is_valid
    if options.dpg_states == "replay" and parts.experience and memory is not None:
        drawn, is_there = parts.experience.states(memory, key, size)
        states = frozen.observe(drawn), is_there
        # These states have no advantage of their own to choose a coefficient by.
        mean = masked.mean(coef, is_valid, axis_name=frozen.axis_name)
        coef = jnp.full_like(coef, mean)
    return Rows(
        observation=observation,
        drawn=flat(segment.drawn),
        behaviour_log_prob=flat(signals.behaviour_log_prob),
        old_log_prob=flat(signals.log_prob),
        old=jax.tree.map(flat, signals.old),
        signal=flat(signals.signal),
        is_valid=is_valid,
        critic_observation=states[0],
        critic_coef=coef,
        critic_is_valid=states[1],
    )


class Terms(NamedTuple):
    """This device's shares of what the policy's loss is made of; scalars.

    Attributes:
      score: the surrogate of the score function's term, to be maximised.
      critic: the critic's value of what the policy would do, to be maximised.
      entropy: of the policy.
      penalty: on its divergence.
    """

    score: Float[Array, ""]
    critic: Float[Array, ""]
    entropy: Float[Array, ""]
    penalty: Float[Array, ""]

    def loss(self) -> Float[Array, ""]:
        """What is minimised."""
        return self.penalty - self.score - self.critic - self.entropy


def terms(parts: Parts, state: DFPSState, signals: Signals, frozen: Frozen) -> Any:
    """Makes the policy's loss from its parameters and rows.

    Args:
      parts: of the agent.
      state: gives the critic and the trust region.
      signals: gives the weight of the critic's term.
      frozen: the numbers of this iteration.

    Returns:
      ``terms_of(params, rows) -> Terms``.
    """
    options, networks, hyper = parts.options, parts.networks, state.hyper
    axis_name = frozen.axis_name
    clips = options.trust_region == "clip"
    rho_bar = hyper.rho_bar
    if hyper.rho_bar_gradient is not None:
        rho_bar = hyper.rho_bar_gradient

    def terms_of(params: Params, rows: Rows) -> Terms:
        policy = networks.policy(params, rows.observation)
        log_prob = policy.log_prob(rows.drawn)
        share = masked.share_of_mean(rows.is_valid, axis_name=axis_name)
        gain = fusion.surrogate(
            log_prob,
            rows.old_log_prob,
            rows.behaviour_log_prob,
            rows.signal,
            rows.is_valid,
            kind=options.surrogate,
            rho_bar=rho_bar,
            clip_epsilon=hyper.clip_epsilon if clips else None,
        )
        zero = jnp.zeros(())
        penalty = zero
        if options.trust_region == "kl_hinge":
            penalty = kl_penalty_share(
                divergence(parts, policy, log_prob, rows),
                rows.is_valid,
                kl_coef=state.trust_region.kl_coef,
                kl_hinge_coef=hyper.kl_hinge_coef,
                kl_target=hyper.kl_target,
                axis_name=axis_name,
            )
        critic = zero
        if dfps_dpg.is_joint(parts):
            mean = policy.mean
            if options.dpg_states == "replay":
                mean = networks.policy(params, rows.critic_observation).mean
            critic = dfps_dpg.critic_share(parts, state, mean, *rows[-3:], frozen)
            critic = hyper.dpg_coef * signals.critic_weight * critic
        entropy = zero
        if options.entropy_coef:
            entropy = hyper.entropy_coef * share(policy.entropy())
        return Terms((1.0 - frozen.nu) * share(gain), critic, entropy, penalty)

    return terms_of


def divergence(
    parts: Parts, policy: Gaussian, log_prob: Float[Array, " B"], rows: Rows
) -> Float[Array, " B"]:
    """How far the policy is from the one that it should stay close to.

    From the old policy exactly; from the one that acted, of which only the actions are
    known, by the estimator k3.

    Args:
      parts: of the agent.
      policy: as it is.
      log_prob: of what was drawn.
      rows: what it is compared on.
    """
    if parts.options.kl_reference == "behaviour":
        kl = ratios.kl_k3(ratios.bounded(log_prob - rows.behaviour_log_prob))
        return jnp.where(rows.is_valid, kl, 0.0)
    return ratios.gaussian_kl(*rows.old, *policy)


def mean_divergence(
    parts: Parts, params: Params, rows: Rows, frozen: Frozen
) -> Float[Array, ""]:
    """The mean of `divergence` over every device's rows.

    Args:
      parts: of the agent.
      params: of the policy.
      rows: what it is compared on.
      frozen: names the device axis.
    """
    policy = parts.networks.policy(params, rows.observation)
    kl = divergence(parts, policy, policy.log_prob(rows.drawn), rows)
    return masked.mean(kl, rows.is_valid, axis_name=frozen.axis_name)


def learn(
    parts: Parts,
    state: DFPSState,
    rows: Rows,
    signals: Signals,
    frozen: Frozen,
    key: Key[Array, ""],
) -> tuple[DFPSState, Metrics]:
    """Takes the policy's epochs.

    Args:
      parts: of the agent.
      state: its policy moves.
      rows: what it learns from.
      signals: what they tell.
      frozen: the numbers of this iteration.
      key: of this device and this phase.

    Returns:
      The state, and metrics over all devices.
    """
    options, hyper, axis_name = parts.options, state.hyper, frozen.axis_name
    terms_of = terms(parts, state, signals, frozen)
    kl_stop = None if options.trust_region == "none" else hyper.kl_stop

    def loss_fn(params: Params, average: Any, minibatch: Rows):
        found = terms_of(params, minibatch)
        return found.loss(), found

    base = gradient_step(
        loss_fn,
        parts.transform(hyper),
        learning_rate=frozen.learning_rate * state.trust_region.learning_rate_scale,
        averaging=None,
        axis_name=axis_name,
    )

    def step(carry: Stoppable, minibatch: Rows):
        learned, out = base(carry.learned, minibatch)
        if kl_stop is not None:
            keep = lambda old, new: jnp.where(carry.is_stopped, old, new)
            learned = jax.tree.map(keep, carry.learned, learned)
        return carry._replace(learned=learned), out

    def settle(carry: Stoppable) -> Stoppable:
        if kl_stop is None:
            return carry
        kl = mean_divergence(parts, carry.params, rows, frozen)
        too_far = kl > kl_stop * hyper.kl_target
        return carry._replace(is_stopped=carry.is_stopped | too_far)

    start = Stoppable(state.policy, jnp.zeros((), bool))
    size = rows.signal.size
    carry, (found, norms) = minibatch_epochs(
        step,
        start,
        lambda params: rows,
        lambda out, minibatches: out,
        key,
        rows=size,
        num_epochs=options.num_epochs,
        num_minibatches=num_minibatches(
            options.minibatch_size, size, axis_size(axis_name)
        ),
        after_epoch=settle,
    )
    means = jax.tree.map(jnp.mean, found)
    if axis_name is not None:
        means = jax.lax.psum(means, axis_name)
    metrics = {f"policy_{name}": x for name, x in means._asdict().items()}
    metrics |= {
        "policy_grad_norm": jnp.mean(norms),
        "kl": mean_divergence(parts, carry.params, rows, frozen),
        "is_stopped": carry.is_stopped.astype(jnp.float32),
    }
    if dfps_dpg.follows_critic(parts):
        metrics["gradient_cosine"] = _cosine(parts, state, rows, terms_of, frozen)
    return state._replace(policy=carry.learned), metrics


def _cosine(
    parts: Parts, state: DFPSState, rows: Rows, terms_of: Any, frozen: Frozen
) -> Float[Array, ""]:
    """Of the angle between the two terms' gradients, at the start of the update."""

    def critic(params: Params) -> Float[Array, ""]:
        mean = parts.networks.policy(params, rows.critic_observation).mean
        return dfps_dpg.critic_share(parts, state, mean, *rows[-3:], frozen)

    score = lambda params: terms_of(params, rows).score
    a, b = (jax.grad(f)(state.policy.params) for f in (score, critic))
    if frozen.axis_name is not None:
        a, b = jax.lax.psum((a, b), frozen.axis_name)
    norms = optax.tree.norm(a) * optax.tree.norm(b)
    dot: Any = optax.tree.vdot(a, b)
    return dot / jnp.maximum(norms, 1e-12)
