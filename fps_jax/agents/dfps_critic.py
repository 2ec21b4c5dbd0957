"""How the critics learn: equation 7 of the paper and its variants."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Key

from fps_jax.agents.dfps_networks import Params
from fps_jax.agents.dfps_replay import CriticItems
from fps_jax.agents.dfps_signals import log_ratio_of, segment_of_window
from fps_jax.agents.dfps_state import DFPSState, Frozen, Parts
from fps_jax.agents.gradient import gradient_step
from fps_jax.agents.memory import Memory
from fps_jax.models.normalize import AverageState, moving_average
from fps_jax.objectives import masked, q_learning, returns
from fps_jax.replay.ring import Window
from fps_jax.replay.states import Ticket
from fps_jax.types import Metrics


class Batch(NamedTuple):
    """What a critic step learns from, as far as it does not depend on the critics.

    Attributes:
      observation: ``[B, ...]``, as the networks read it.
      action: ``[B, A]``.
      importance_weights: ``[B]``.
      is_valid: ``[B]``.
      ticket: of the first of them, which were drawn by priority.
      following: ``[*n, B, ...]``, the states that are bootstrapped from.
      following_action: ``[S, *n, B, A]``, what the target policy does there.
      outcome: what `target_of` makes a target from, beside their values.
    """

    observation: Float[Array, " B features"]
    action: Float[Array, " B A"]
    importance_weights: Float[Array, " B"]
    is_valid: Bool[Array, " B"]
    ticket: Ticket
    following: Float[Array, "*n B features"]
    following_action: Float[Array, "S *n B A"]
    outcome: Any


def learn(
    parts: Parts,
    state: DFPSState,
    memory: Memory,
    frozen: Frozen,
    key: Key[Array, ""],
    *,
    steps: int,
) -> tuple[DFPSState, Memory, Metrics]:
    """Takes the critic's steps of an update; none before it may be used.

    Args:
      parts: of the agent.
      state: its critics and their targets move.
      memory: what they learn from; its priorities move.
      frozen: the numbers of this iteration.
      key: of this device and this phase.
      steps: how many.

    Returns:
      The state, the memory, and metrics over all devices.
    """
    options, hyper = parts.options, state.hyper
    assert state.critics is not None
    next_batch = _batches(parts, state, memory, frozen, key, steps=steps)
    step = gradient_step(
        _loss(parts, frozen.axis_name),
        parts.transform(hyper),
        learning_rate=hyper.critic_learning_rate,
        averaging=None,
        axis_name=frozen.axis_name,
    )
    follow = moving_average(1.0 - hyper.target_rate, is_debiased=False)

    def one(index: Array, carry: Any):
        learned, targets, memory, sums = carry
        memory, batch = next_batch(memory, index)
        target = target_of(parts, state, targets.value, batch)
        learned, (error, norm) = step(learned, (batch, target))
        if options.priority_exponent is not None and parts.experience is not None:
            memory = parts.experience.prioritize(memory, batch.ticket, error)
        mean = lambda x: masked.mean(x, batch.is_valid)
        new = mean(jnp.square(error)), mean(target), norm
        sums = jax.tree.map(jnp.add, sums, new)
        return learned, follow.update(targets, learned.params), memory, sums

    targets = AverageState(jnp.ones(()), state.target_critics)
    sums = (jnp.zeros(()),) * 3
    count = jnp.where(frozen.is_ready, steps, 0)
    learned, targets, memory, sums = jax.lax.fori_loop(
        0, count, one, (state.critics, targets, memory, sums)
    )
    names = "critic_loss", "critic_target", "critic_grad_norm"
    means = [x / jnp.maximum(count, 1).astype(x.dtype) for x in sums]
    if frozen.axis_name is not None:
        means = jax.lax.pmean(means, frozen.axis_name)
    state = state._replace(critics=learned, target_critics=targets.value)
    return state, memory, dict(zip(names, means, strict=True))


def _loss(parts: Parts, axis_name: str | None):
    def loss_fn(params: Params, average: Any, given: Any):
        batch, target = given
        q = parts.networks.critics(params, batch.observation, batch.action)
        share = q_learning.squared_error_share(
            q, target, batch.importance_weights, batch.is_valid, axis_name=axis_name
        )
        return share, q[0] - target

    return loss_fn


def _batches(
    parts: Parts,
    state: DFPSState,
    memory: Memory,
    frozen: Frozen,
    key: Key[Array, ""],
    *,
    steps: int,
) -> Callable[[Memory, Array], tuple[Memory, Batch]]:
    """Makes what gives each step its batch.

    Without priorities nothing that is drawn depends on what was learned before: all
    batches are drawn, and read by the networks, at once.
    """
    experience, hyper = parts.experience, state.hyper
    assert experience is not None
    key_draw, key_noise = jax.random.split(key)
    draw = lambda memory, key, steps: experience.critic_items(
        memory, key, hyper.gamma, hyper.importance_exponent, steps
    )
    prepare = lambda items, index: prepared(
        parts, state, items, frozen, jax.random.fold_in(key_noise, index)
    )
    if parts.options.priority_exponent is not None:

        def drawn_now(memory: Memory, index: Array) -> tuple[Memory, Batch]:
            memory, items = draw(memory, jax.random.fold_in(key_draw, index), 1)
            return memory, prepare(items, index)

        return drawn_now
    dealt = _deal(draw(memory, key_draw, steps)[1], steps)
    every = jax.vmap(prepare)(dealt, jnp.arange(steps))
    return lambda memory, index: (memory, jax.tree.map(lambda x: x[index], every))


def _deal(batch: CriticItems, steps: int) -> CriticItems:
    """Deals one draw out to several steps, ``[steps, ...]``."""

    def deal(x: Array, axis: int) -> Array:
        shape = *x.shape[:axis], -1, steps, *x.shape[axis + 1 :]
        return jnp.moveaxis(x.reshape(shape), axis + 1, 0)

    axis = 1 if isinstance(batch.items, Window) else 0
    items = jax.tree.map(lambda x: deal(x, axis), batch.items)
    others = jax.tree.map(lambda x: deal(x, 0), batch._replace(items=()))
    return others._replace(items=items)


def prepared(
    parts: Parts,
    state: DFPSState,
    drawn: CriticItems,
    frozen: Frozen,
    key: Key[Array, ""],
) -> Batch:
    """Reads what was drawn, and asks the target policy what it would do next.

    Args:
      parts: of the agent.
      state: gives the policies.
      drawn: from the memory.
      frozen: the numbers of this iteration.
      key: of this step's noise.
    """
    items: Any = drawn.items
    if isinstance(items, Window):
        first = jax.tree.map(lambda x: x[0], items.items)
        segment = segment_of_window(items, frozen)
        _, _, log_ratio = log_ratio_of(parts, state.policy.params, segment)
        following, outcome = segment.observation, (segment[3:], log_ratio)
    else:
        first = items
        following = frozen.observe(items.next_observation)
        outcome = items.reward / frozen.scale, items.discount
    action = first.action
    if parts.options.critic_action == "clipped":
        action = jnp.clip(action, -1.0, 1.0)
    return Batch(
        observation=frozen.observe(first.observation),
        action=jnp.where(drawn.is_valid[:, None], action, 0.0),
        importance_weights=drawn.importance_weights,
        is_valid=drawn.is_valid,
        ticket=drawn.ticket,
        following=following,
        following_action=_target_actions(parts, state, following, key),
        outcome=outcome,
    )


def _target_actions(
    parts: Parts, state: DFPSState, observation: Array, key: Key[Array, ""]
) -> Float[Array, "S *n B A"]:
    """What the target policy does: its mean, that with noise, or several samples."""
    options, networks, hyper = parts.options, parts.networks, state.hyper
    policy = networks.policy(state.target_policy, observation)
    if options.target_action == "expected":
        keys = jax.random.split(key, options.target_samples)
        return networks.execute(jax.vmap(policy.sample)(keys))
    action = networks.execute(policy.mean)
    if options.target_action == "smoothed":
        noise = hyper.target_noise * jax.random.normal(key, action.shape)
        action = q_learning.smoothed(action, noise, clip=hyper.target_noise_clip)
    return action[None]


def target_of(
    parts: Parts, state: DFPSState, target_critics: Params, batch: Batch
) -> Float[Array, " B"]:
    """What the critics should have said, in the unit of the values.

    Args:
      parts: of the agent.
      state: gives the hyper-parameters.
      target_critics: whose least values are bootstrapped from.
      batch: what was drawn.
    """
    hyper = state.hyper
    least = lambda action: q_learning.least(
        parts.networks.critics(target_critics, batch.following, action)
    )
    samples = [least(action) for action in batch.following_action]
    values = sum(samples[1:], samples[0]) / len(samples)
    if parts.options.critic_trace == "none":
        reward, discount = batch.outcome
        return q_learning.td_target(reward, discount, values)

    def one(rows: Any, log_ratio: Array, values: Array) -> Array:
        reward, terminated, truncated, is_valid = rows
        discount, trace = returns.discounts_and_traces(
            terminated, truncated, is_valid, gamma=hyper.gamma
        )
        return q_learning.corrected_q_target(
            log_ratio,
            reward,
            discount,
            trace,
            values[:-1],
            values[1:],
            is_valid,
            rho_bar=hyper.rho_bar,
            c_bar=hyper.c_bar,
        )

    rows, log_ratio = batch.outcome
    return jax.vmap(one, in_axes=1)(rows, log_ratio, values)
