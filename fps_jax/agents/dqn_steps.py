"""The gradient steps of DQN: draw, descend, prioritize, copy."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fps_jax.agents import dqn_exploration as exploration
from fps_jax.agents import gradient
from fps_jax.agents.dqn_options import Hyper
from fps_jax.agents.dqn_state import DQNState, Parts
from fps_jax.agents.gradient import Learned
from fps_jax.agents.memory import Memory
from fps_jax.objectives import masked, q_learning
from fps_jax.replay import priorities
from fps_jax.replay.states import ReplayState, Sample


class Replayed(NamedTuple):
    """What the gradient steps of an update change.

    Attributes:
      learned: see `DQNState.q`.
      target: see `DQNState`.
      memory: its priorities.
      gradient_steps: made so far.
      told: sums over the steps, for the metrics.
      levels: ``[K]``, transitions replayed on this device, by level of exploration.
    """

    learned: Learned
    target: Any
    memory: Memory
    gradient_steps: Int[Array, ""]
    told: dict[str, Array]
    levels: Float[Array, " K"]


TOLD = ("loss", "td_error", "q", "grad_norm", "importance_weight")


def replay(
    parts: Parts,
    state: DQNState,
    memory: Memory,
    progress: Float[Array, ""],
    count: Int[Array, ""],
    axis_name: str | None,
) -> Replayed:
    """Takes gradient steps, each on transitions that are drawn anew.

    Args:
      parts: of the agent.
      state: before them.
      memory: what is drawn from; its priorities move.
      progress: how far the run is.
      count: how many steps.
      axis_name: the device axis, if any.

    Raises:
      ValueError: if the devices can't share a batch.
    """
    before = Replayed(
        learned=state.q,
        target=state.target,
        memory=memory,
        gradient_steps=state.gradient_steps,
        told={name: jnp.zeros(()) for name in TOLD},
        levels=jnp.zeros(parts.num_levels),
    )
    one = _one_step(parts, state, progress, axis_name)
    return jax.lax.fori_loop(0, count, one, before)


def beta(hyper: Hyper, progress: Float[Array, ""]) -> Float[Array, ""]:
    """The exponent of the importance weights, which moves linearly.

    Args:
      hyper: where it starts and ends.
      progress: how far the run is.
    """
    first, last = hyper.importance_exponent, hyper.final_importance_exponent
    return gradient.linear(first, last, progress)


def _one_step(
    parts: Parts, state: DQNState, progress: Float[Array, ""], axis_name: str | None
) -> Callable[[Array, Replayed], Replayed]:
    """Lines 7 to 15 of Algorithm 1, as the body of a loop."""
    options, devices = parts.options, gradient.axis_size(axis_name)
    if options.batch_size % devices:
        raise ValueError(
            f"batch_size {options.batch_size} must be a multiple of the {devices} "
            "learner devices."
        )
    hyper = state.hyper
    key, exponent = jax.random.fold_in(state.key, state.update), beta(hyper, progress)
    descend = gradient.gradient_step(
        _loss(parts, state, axis_name),
        parts.transform(hyper),
        learning_rate=gradient.linear_decay(
            hyper.learning_rate, hyper.final_learning_rate_fraction, progress
        ),
        averaging=None,
        axis_name=axis_name,
    )
    copy_every = options.target_period // options.replay_period

    def one(index: Array, before: Replayed) -> Replayed:
        replay_state, sample = parts.replay.sample(
            before.memory.replay,
            jax.random.fold_in(key, index),
            batch_size=options.batch_size // devices,
            importance_exponent=exponent,
            axis_name=axis_name,
            discount=hyper.gamma,
        )
        learned, (aux, norm) = descend(before.learned, (sample, before.target))
        td_error, q, loss = aux
        if options.is_prioritized:
            replay_state = _prioritize(
                parts, hyper, replay_state, sample, td_error, axis_name
            )
        made = before.gradient_steps + 1
        target = jax.lax.cond(
            made % copy_every == 0,
            lambda: learned.params,
            lambda: before.target,
        )
        mean = lambda x: masked.mean(x, sample.is_valid)
        new = {
            "loss": mean(loss),
            "td_error": mean(jnp.abs(td_error)),
            "q": mean(q),
            "grad_norm": norm,
            "importance_weight": mean(sample.importance_weights),
        }
        levels = before.levels
        if parts.num_levels:
            level = sample.items.behaviour["level"]
            levels += exploration.count(level, sample.is_valid, parts.num_levels)
        return Replayed(
            learned=learned,
            target=target,
            memory=before.memory._replace(replay=replay_state),
            gradient_steps=made,
            told=jax.tree.map(jnp.add, before.told, new),
            levels=levels,
        )

    return one


def _loss(parts: Parts, state: DQNState, axis_name: str | None) -> Callable[..., Any]:
    """This device's share of the weighted loss, with errors, values and losses."""
    moments = state.observation_moments
    values = lambda params, observation: parts.values(params, moments, observation)

    def loss_fn(params: Any, average: Any, given: tuple[Sample, Any]):
        sample, target = given
        items = sample.items
        following = values(target, items.next_observation)
        selector = following
        if parts.options.double:
            selector = values(params, items.next_observation)
        q_tm1 = values(params, items.observation)
        td_error = jax.vmap(q_learning.q_td_error)(
            q_tm1, items.action, items.reward, items.discount, following, selector
        )
        loss = q_learning.clipped_loss(td_error, state.hyper.td_error_clip)
        mean = masked.share_of_mean(sample.is_valid, axis_name=axis_name)
        taken = jnp.take_along_axis(q_tm1, items.action[:, None], axis=1)[:, 0]
        return mean(sample.importance_weights * loss), (td_error, taken, loss)

    return loss_fn


def _prioritize(
    parts: Parts,
    hyper: Hyper,
    state: ReplayState,
    sample: Sample,
    td_error: Float[Array, " B"],
    axis_name: str | None,
) -> ReplayState:
    """Line 11 of Algorithm 1: the priorities of what was drawn."""
    options = parts.options
    if options.clips_priority and hyper.td_error_clip is not None:
        td_error = jnp.clip(td_error, -hyper.td_error_clip, hyper.td_error_clip)
    boost = None
    if options.predecessor_coef:
        boost = hyper.predecessor_coef * jnp.abs(td_error)
    return parts.replay.update(
        state,
        sample.ticket,
        priorities.absolute(td_error, epsilon=hyper.priority_epsilon),
        predecessor_boost=boost,
        axis_name=axis_name,
    )
