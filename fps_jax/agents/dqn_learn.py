"""How DQN learns from a segment: it remembers, and replays."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fps_jax.agents import dqn_exploration as exploration
from fps_jax.agents import dqn_steps, gradient
from fps_jax.agents import memory as memories
from fps_jax.agents.dqn_exploration import Feedback
from fps_jax.agents.dqn_options import DQNOptions, Hyper
from fps_jax.agents.dqn_state import DQNState, Parts
from fps_jax.agents.dqn_steps import Replayed
from fps_jax.agents.memory import Memory
from fps_jax.models.normalize import MomentsState, running_moments
from fps_jax.types import Metrics, Trajectory


def learn(
    parts: Parts,
    state: DQNState,
    memory: Memory,
    trajectory: Trajectory,
    axis_name: str | None,
) -> tuple[DQNState, Memory, Metrics]:
    """One update: remembers a segment, and replays.

    Args:
      parts: of the agent.
      state: what it has learned.
      memory: what this device remembers.
      trajectory: what its environments did.
      axis_name: the device axis, if any.

    Returns:
      Both as they are after it, and metrics over all devices.
    """
    options, hyper = parts.options, state.hyper
    devices = gradient.axis_size(axis_name)
    steps = num_steps(options, trajectory.reward.size * devices)
    if hyper.reward_clip is not None:
        limit = hyper.reward_clip
        reward = jnp.clip(trajectory.reward, -limit, limit)
        trajectory = trajectory._replace(reward=reward)
    memory = memories.remember(
        parts.replay, memory, trajectory, kept=("level",), axis_name=axis_name
    )
    progress = state.env_steps.astype(jnp.float32) / hyper.total_env_steps
    memory = _with_exponent(parts, hyper, memory, progress, axis_name)
    size = memory.replay.cursor.size * devices
    is_ready = size >= options.learning_starts
    count = jnp.where(is_ready, steps, 0)
    replayed = dqn_steps.replay(parts, state, memory, progress, count, axis_name)
    made = jnp.sum(trajectory.is_valid)
    if axis_name is not None:
        made = jax.lax.psum(made, axis_name)
    feedback = _fed_back(parts, state, trajectory, replayed.levels, axis_name)
    metrics = _means(replayed, jnp.maximum(count, 1), axis_name) | {
        "env_steps": made,
        "exploration": exploration.scheduled(options, hyper, state.env_steps),
        "importance_exponent": dqn_steps.beta(hyper, progress),
        "gradient_steps": replayed.gradient_steps,
        "replay_size": size,
    }
    shares = exploration.probabilities(feedback, hyper.feedback_floor)
    for k, level in enumerate(options.exploration_levels):
        metrics[f"exploration_share_{level:g}"] = shares[k]
    state = state._replace(
        q=replayed.learned,
        target=replayed.target,
        observation_moments=_seen(state, trajectory, axis_name),
        feedback=feedback,
        update=state.update + 1,
        gradient_steps=replayed.gradient_steps,
        env_steps=state.env_steps + made,
    )
    return state, replayed.memory, metrics


def num_steps(options: DQNOptions, rows: int) -> int:
    """Gradient steps of an update: one for every K of its rows.

    Args:
      options: give K.
      rows: of the update, over all devices.

    Raises:
      ValueError: if K does not divide the rows.
    """
    if rows % options.replay_period:
        raise ValueError(
            f"replay_period {options.replay_period} must divide the {rows} rows of an "
            "update (num_envs x rollout_steps x actors)."
        )
    return rows // options.replay_period


def _with_exponent(
    parts: Parts,
    hyper: Hyper,
    memory: Memory,
    progress: Float[Array, ""],
    axis_name: str | None,
) -> Memory:
    """The memory with the priorities' exponent of this update, if that moves."""
    if hyper.final_priority_exponent is None:
        return memory
    alpha, _ = parts.options.exponents
    exponent = gradient.linear(alpha, hyper.final_priority_exponent, progress)
    state = parts.replay.set_exponent(memory.replay, exponent, axis_name=axis_name)
    return memory._replace(replay=state)


def _seen(
    state: DQNState, trajectory: Trajectory, axis_name: str | None
) -> MomentsState | None:
    """The moments after an update, in which they were frozen."""
    moments = state.observation_moments
    if moments is None:
        return None
    return running_moments(moments.mean.shape).update(
        moments,
        trajectory.observation[:-1],
        trajectory.is_valid,
        axis_name=axis_name,
    )


def _fed_back(
    parts: Parts,
    state: DQNState,
    trajectory: Trajectory,
    levels: Float[Array, " K"],
    axis_name: str | None,
) -> Feedback:
    """The counts by level of exploration after an update."""
    num_levels = parts.num_levels
    if not num_levels:
        return state.feedback
    transitions = exploration.count(
        trajectory.behaviour["level"], trajectory.is_valid, num_levels
    )
    if axis_name is not None:
        transitions, levels = jax.lax.psum((transitions, levels), axis_name)
    decay = state.hyper.feedback_decay
    return exploration.tell(state.feedback, transitions, levels, decay)


def _means(replayed: Replayed, count: Int[Array, ""], axis_name: str | None) -> Metrics:
    """What the gradient steps told, over all devices."""
    told = {name: x / count.astype(x.dtype) for name, x in replayed.told.items()}
    rejected = replayed.memory.replay.num_rejected.astype(jnp.float32)
    if axis_name is not None:
        told = jax.lax.pmean(told, axis_name)
        rejected = jax.lax.psum(rejected, axis_name)
    return told | {"rejected_priorities": rejected}
