"""What a segment tells at frozen parameters: returns, advantages, the signal."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from fps_jax.agents.dfps_networks import Gaussian, Params
from fps_jax.agents.dfps_options import Hyper
from fps_jax.agents.dfps_state import DFPSState, Frozen, Parts
from fps_jax.objectives import fusion, ratios, returns, tally
from fps_jax.objectives.returns import TruncatedISReturns
from fps_jax.replay.ring import Window
from fps_jax.types import Metrics, Trajectory


class Segment(NamedTuple):
    """Rows that follow each other, as the networks read them.

    Attributes:
      observation: ``[T + 1, B, ...]``, standardised.
      drawn: ``[T, B, A]``, what the policy drew, before it was squashed.
      log_prob: ``[T, B]``, of the policy that acted.
      reward: ``[T, B]``, in the unit of the values.
      terminated: ``[T, B]``.
      truncated: ``[T, B]``.
      is_valid: ``[T, B]``.
    """

    observation: Float[Array, "T+1 B features"]
    drawn: Float[Array, "T B A"]
    log_prob: Float[Array, "T B"]
    reward: Float[Array, "T B"]
    terminated: Bool[Array, "T B"]
    truncated: Bool[Array, "T B"]
    is_valid: Bool[Array, "T B"]


class Signals(NamedTuple):
    """What a segment tells, without gradient.

    Attributes:
      old: the policy at the start of the update, ``[T, B, A]`` each.
      log_prob: ``[T, B]``, of what was drawn, under that policy.
      behaviour_log_prob: ``[T, B]``, under the one that acted.
      value: ``[T, B]``, of the states that were acted in.
      target: ``[T, B]``, of the value.
      signal: ``[T, B]``, what the score function is multiplied by.
      coef: ``[T, B]``, of the control variate.
      critic_weight: what the critic's term is multiplied by, scalar.
      slope: of the control variate, scalar.
    """

    old: Gaussian
    log_prob: Float[Array, "T B"]
    behaviour_log_prob: Float[Array, "T B"]
    value: Float[Array, "T B"]
    target: Float[Array, "T B"]
    signal: Float[Array, "T B"]
    coef: Float[Array, "T B"]
    critic_weight: Float[Array, ""]
    slope: Float[Array, ""]


def segment_of(trajectory: Trajectory, frozen: Frozen) -> Segment:
    """A trajectory as the networks read it.

    Args:
      trajectory: as the actors recorded it.
      frozen: how observations and rewards are scaled.
    """
    behaviour = trajectory.behaviour
    return _segment(
        trajectory, trajectory.observation, behaviour, trajectory.is_valid, frozen
    )


def segment_of_window(window: Window, frozen: Frozen) -> Segment:
    """A window of the replay as the networks read it; its last row only follows.

    Args:
      window: ``[T + 1, B]``.
      frozen: how observations and rewards are scaled.
    """
    rows = jax.tree.map(lambda x: x[:-1], window.items)
    is_valid = window.is_valid[:-1]
    return _segment(rows, window.items.observation, rows.behaviour, is_valid, frozen)


def _segment(rows: Any, observation, behaviour, is_valid, frozen: Frozen) -> Segment:
    drawn = behaviour.get("drawn", rows.action)
    return Segment(
        observation=frozen.observe(observation),
        # Not even a NaN of a row that is not valid may reach a gradient.
        drawn=jnp.where(is_valid[..., None], drawn, 0.0),
        log_prob=jnp.where(is_valid, behaviour["log_prob"], 0.0),
        reward=jnp.where(is_valid, rows.reward, 0.0) / frozen.scale,
        terminated=rows.terminated,
        truncated=rows.truncated,
        is_valid=is_valid,
    )


def joined(a: Segment, b: Segment) -> Segment:
    """Two segments side by side.

    Args:
      a: ``[T, B]``.
      b: ``[T, C]``.
    """
    return jax.tree.map(lambda x, y: jnp.concatenate([x, y], axis=1), a, b)


def corrected_returns(
    parts: Parts,
    hyper: Hyper,
    segment: Segment,
    log_ratio: Float[Array, "T B"],
    values: Float[Array, "T+1 B"],
) -> TruncatedISReturns:
    """Equations 12 and 13 for a segment; each array ``[T, B]``.

    The advantage is that of generalised advantages where ``lambda_`` is below 1:
    ``r_t + discount_t (v_t + lambda (Y_{t+1} - v_t)) - v_tm1``.

    Args:
      parts: which equation, and the length of its window.
      hyper: the numbers.
      segment: the rows.
      log_ratio: ``log pi - log b``.
      values: of all observations.
    """
    options = parts.options

    def one(segment_rows, log_ratio, values):
        reward, terminated, truncated, is_valid = segment_rows
        discount, trace = returns.discounts_and_traces(
            terminated, truncated, is_valid, gamma=hyper.gamma
        )
        found = returns.truncated_is_returns(
            log_ratio,
            reward,
            discount,
            trace,
            values[:-1],
            values[1:],
            is_valid,
            rho_bar=hyper.rho_bar,
            c_bar=hyper.c_bar,
            lambda_=hyper.lambda_,
            n=options.n_step,
            trace=options.trace,
        )
        one_step = reward + discount * values[1:] - values[:-1]
        advantage = one_step + hyper.lambda_ * (found.advantage - one_step)
        return found._replace(advantage=jnp.where(is_valid, advantage, 0.0))

    rows = segment.reward, segment.terminated, segment.truncated, segment.is_valid
    found = jax.vmap(one, in_axes=1, out_axes=1)(rows, log_ratio, values)
    return jax.lax.stop_gradient(found)


def log_ratio_of(
    parts: Parts, params: Params, segment: Segment
) -> tuple[Gaussian, Float[Array, "T B"], Float[Array, "T B"]]:
    """A policy on a segment, its log-probabilities, and their distance from those kept.

    Args:
      parts: of the agent; without `corrects_lag` the distance is 0.
      params: of the policy.
      segment: the rows.
    """
    policy = parts.networks.policy(params, segment.observation[:-1])
    log_prob = jnp.where(segment.is_valid, policy.log_prob(segment.drawn), 0.0)
    if not parts.options.corrects_lag:
        return policy, log_prob, jnp.zeros_like(log_prob)
    return policy, log_prob, log_prob - segment.log_prob


def signals_of(
    parts: Parts, state: DFPSState, segment: Segment, frozen: Frozen
) -> tuple[Signals, Metrics]:
    """Everything that the policy's gradient is made of, at the parameters as they are.

    Args:
      parts: of the agent.
      state: its parameters.
      segment: the rows.
      frozen: the numbers of this iteration.

    Returns:
      The signals, and metrics over all devices.
    """
    options, hyper = parts.options, state.hyper
    axis_name, is_valid = frozen.axis_name, segment.is_valid
    old, log_prob, log_ratio = log_ratio_of(parts, state.policy.params, segment)
    values = parts.networks.value(state.value.params, segment.observation)
    found = corrected_returns(parts, hyper, segment, log_ratio, values)
    expansion = jnp.zeros_like(found.advantage)
    if state.critics is not None:
        expansion = _expansion(parts, state, segment, old)
        expansion = jnp.where(frozen.is_ready & is_valid, expansion, 0.0)
    coef = fusion.control_variate_coef(
        found.advantage,
        expansion,
        is_valid,
        kind=options.control_variate,
        axis_name=axis_name,
    )
    residual = found.advantage - coef * expansion
    signal = fusion.learning_signal(
        found.advantage,
        residual,
        is_valid,
        statistics=options.statistics,
        axis_name=axis_name,
    )
    told = fusion.diagnostics(
        found.advantage, expansion, residual, is_valid, axis_name=axis_name
    )
    weight = fusion.critic_weight(
        signal.std, expansion, is_valid, scale=options.dpg_scale, axis_name=axis_name
    )
    signals = Signals(
        old=old,
        log_prob=log_prob,
        behaviour_log_prob=log_prob - log_ratio,
        value=values[:-1],
        target=found.target,
        signal=signal.value,
        coef=coef,
        critic_weight=weight,
        slope=told["control_variate_slope"],
    )
    told |= {"signal_std": signal.std, "ipg_nu": frozen.nu}
    told |= {"return_scale": frozen.scale}
    told |= _of_ratios(log_ratio, is_valid, hyper, axis_name)
    told |= _explained(parts, state, segment, values, found, axis_name)
    return jax.lax.stop_gradient(signals), told


def _of_ratios(
    log_ratio: Float[Array, "T B"],
    is_valid: Bool[Array, "T B"],
    hyper: Hyper,
    axis_name: str | None,
) -> Metrics:
    """How far the policy is from the one that acted."""
    capped = lambda cap: ratios.capped_fraction(
        log_ratio, cap, is_valid, axis_name=axis_name
    )
    return {
        "ESS": ratios.effective_sample_size(log_ratio, is_valid, axis_name=axis_name),
        "rho_capped": capped(hyper.rho_bar),
        "c_capped": capped(hyper.c_bar),
    }


def _explained(
    parts: Parts,
    state: DFPSState,
    segment: Segment,
    values: Float[Array, "rows B"],
    found: TruncatedISReturns,
    axis_name: str | None,
) -> Metrics:
    """How well the value and the critic foretold this segment."""
    explained = lambda value, target: tally.explained_variance(
        value, target, segment.is_valid, axis_name=axis_name
    )
    told = explained(values[:-1], found.target)
    if state.critics is not None:
        q = jnp.where(segment.is_valid, _critic_value(parts, state, segment), 0.0)
        # Of the action and not of the state: with the next row's target.
        of_critic = explained(q, found.advantage + values[:-1])
        told |= {f"critic_{name}": x for name, x in of_critic.items()}
    return told


def _critic_value(
    parts: Parts, state: DFPSState, segment: Segment
) -> Float[Array, "T B"]:
    """What the critic says of what was done."""
    networks, critics = parts.networks, state.critics
    assert critics is not None
    action = networks.execute(segment.drawn)
    return networks.critic(critics.params, segment.observation[:-1], action)


def _expansion(
    parts: Parts, state: DFPSState, segment: Segment, old: Gaussian
) -> Float[Array, "T B"]:
    """The control variate; what is drawn is expanded, before it is squashed."""
    networks, critics = parts.networks, state.critics
    assert critics is not None
    q_of_drawn = lambda drawn: networks.critic(
        critics.params, segment.observation[:-1], networks.reach(drawn)
    )
    return fusion.control_variate(q_of_drawn, old.mean, segment.drawn)
