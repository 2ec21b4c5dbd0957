"""How the value learns: equation 15, after the policy, from what is remembered."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Key

from fps_jax.agents.dfps_networks import Params
from fps_jax.agents.dfps_signals import (
    Segment,
    Signals,
    corrected_returns,
    log_ratio_of,
    segment_of_window,
)
from fps_jax.agents.dfps_state import DFPSState, Frozen, Parts
from fps_jax.agents.gradient import (
    Learned,
    axis_size,
    gradient_step,
    minibatch_epochs,
    num_minibatches,
)
from fps_jax.agents.memory import Memory
from fps_jax.objectives import masked
from fps_jax.types import Metrics


class Fit(NamedTuple):
    """What a value is fitted to, each ``[B, ...]``."""

    observation: Float[Array, "B features"]
    target: Float[Array, " B"]
    is_valid: Bool[Array, " B"]


def learn(
    parts: Parts,
    state: DFPSState,
    memory: Memory | None,
    segment: Segment,
    signals: Signals | None,
    frozen: Frozen,
    key: Key[Array, ""],
) -> tuple[DFPSState, Metrics]:
    """Fits the value; the gradient is that of ``(Y_t - V(s_t))^2 / 2``.

    From the replay, each step draws segments and computes their targets with the policy
    and the value as they are. From the queue, there are passes over its rows.

    Args:
      parts: of the agent.
      state: its value moves.
      memory: what was remembered.
      segment: what came last.
      signals: what it told before the policy moved; None tells targets anew.
      frozen: the numbers of this iteration.
      key: of this device and this phase.

    Returns:
      The state, and metrics over all devices.
    """
    options, axis_name = parts.options, frozen.axis_name
    count = num_minibatches(
        options.minibatch_size, segment.reward.size, axis_size(axis_name)
    )
    step = gradient_step(
        _loss(parts, axis_name),
        parts.transform(state.hyper),
        learning_rate=frozen.value_learning_rate,
        averaging=None,
        axis_name=axis_name,
    )
    if options.value_data == "replay":
        learned, told = _from_replay(
            parts, state, memory, segment, frozen, key, step, count=count
        )
    else:
        learned, told = minibatch_epochs(
            step,
            state.value,
            _queue(parts, state, segment, signals),
            lambda out, minibatches: out,
            key,
            rows=segment.reward.size,
            num_epochs=options.value_epochs,
            num_minibatches=count,
        )
    loss, norm = (jnp.mean(x) for x in told)
    if axis_name is not None:
        loss = jax.lax.psum(loss, axis_name)
    metrics = {"value_loss": loss, "value_grad_norm": norm}
    return state._replace(value=learned), metrics


def _loss(parts: Parts, axis_name: str | None):
    def loss_fn(params: Params, average: Any, fit: Fit):
        value = parts.networks.value(params, fit.observation)
        share = masked.share_of_mean(fit.is_valid, axis_name=axis_name)
        loss = share(0.5 * jnp.square(value - fit.target))
        return loss, loss

    return loss_fn


def _fit(segment: Segment, target: Float[Array, "T B"]) -> Fit:
    flat = lambda x: x.reshape(segment.reward.size, *x.shape[2:])
    observation = flat(segment.observation[:-1])
    return Fit(observation, flat(target), flat(segment.is_valid))


def _queue(parts: Parts, state: DFPSState, segment: Segment, signals: Signals | None):
    """What an epoch over the last segment fits."""
    if parts.options.value_target == "precomputed" and signals is not None:
        fit = _fit(segment, signals.target)
        return lambda params: fit
    _, _, log_ratio = log_ratio_of(parts, state.policy.params, segment)

    def batch_of(params: Params) -> Fit:
        values = parts.networks.value(params, segment.observation)
        found = corrected_returns(parts, state.hyper, segment, log_ratio, values)
        return _fit(segment, found.target)

    return batch_of


def _from_replay(
    parts: Parts,
    state: DFPSState,
    memory: Memory | None,
    segment: Segment,
    frozen: Frozen,
    key: Key[Array, ""],
    step: Any,
    *,
    count: int,
) -> tuple[Learned, Any]:
    """As many steps as the queue would have, on segments of the replay."""
    experience = parts.experience
    assert experience is not None
    assert memory is not None
    size = max(1, segment.reward.shape[1] // count)

    def one(learned: Learned, index: Array):
        window = experience.segments(memory, jax.random.fold_in(key, index), size)
        drawn = segment_of_window(window, frozen)
        _, _, log_ratio = log_ratio_of(parts, state.policy.params, drawn)
        values = parts.networks.value(learned.params, drawn.observation)
        found = corrected_returns(parts, state.hyper, drawn, log_ratio, values)
        return step(learned, _fit(drawn, found.target))

    steps = jnp.arange(parts.options.value_epochs * count)
    return jax.lax.scan(one, state.value, steps)
