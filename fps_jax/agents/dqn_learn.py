"""How DQN learns from a segment: it remembers, and replays."""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, Key, Shaped

from fps_jax.agents import dqn_exploration as exploration
from fps_jax.agents import gradient
from fps_jax.agents import memory as memories
from fps_jax.agents.dqn_exploration import Feedback
from fps_jax.agents.dqn_options import DQNOptions, Hyper
from fps_jax.agents.gradient import Learned
from fps_jax.agents.memory import Memory
from fps_jax.models.normalize import MomentsState, normalize, running_moments
from fps_jax.objectives import masked, q_learning
from fps_jax.replay import priorities
from fps_jax.replay.replay import Replay
from fps_jax.replay.states import Sample
from fps_jax.types import Metrics, Trajectory


class DQNState(NamedTuple):
    """What DQN learns; the same on every device.

    Attributes:
      q: parameters of the network, and their optimiser.
      target: parameters of the target network.
      observation_moments: of the observations that the actors saw; None unless they
        are standardised.
      feedback: counts by level of exploration; ``[0]`` without levels.
      hyper: the numeric hyper-parameters.
      key: root of the learner's random numbers; folded with `update`.
      update: updates made, scalar.
      gradient_steps: made, scalar.
      env_steps: seen, scalar.
    """

    q: Learned
    target: Any
    observation_moments: MomentsState | None
    feedback: Feedback
    hyper: Hyper
    key: Key[Array, ""]
    update: Int[Array, ""]
    gradient_steps: Int[Array, ""]
    env_steps: Int[Array, ""]


class Learning(NamedTuple):
    """DQN's learner.

    Attributes:
      init: ``init(params, observation_moments, hyper, key) -> DQNState``.
      step: ``step(state, memory, trajectory, axis_name) -> (state, memory, metrics)``.
    """

    init: Callable[..., DQNState]
    step: Callable[..., tuple[DQNState, Memory, Metrics]]


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


def make_learning(
    options: DQNOptions, network: nn.Module, of_replay: Replay
) -> Learning:
    """Makes DQN's learner.

    Args:
      options: the static choices; its numbers are only read from the state's `hyper`.
      network: maps observations ``[B, ...]`` to values ``[B, A]``.
      of_replay: a device's replay.
    """
    num_levels = len(options.exploration_levels)

    def init(
        params: Any,
        observation_moments: MomentsState | None,
        hyper: Hyper,
        key: Key[Array, ""],
    ) -> DQNState:
        zero = jnp.zeros((), jnp.int32)
        optimizer = _transform(options, hyper).init(params)
        return DQNState(
            q=Learned(params, optimizer, None),
            target=params,
            observation_moments=observation_moments,
            feedback=exploration.init(num_levels),
            hyper=hyper,
            key=key,
            update=zero,
            gradient_steps=zero,
            env_steps=zero,
        )

    def step(
        state: DQNState, memory: Memory, trajectory: Trajectory, axis_name: str | None
    ) -> tuple[DQNState, Memory, Metrics]:
        hyper, devices = state.hyper, gradient.axis_size(axis_name)
        steps = num_steps(options, trajectory.reward.size * devices)
        if hyper.reward_clip is not None:
            limit = hyper.reward_clip
            reward = jnp.clip(trajectory.reward, -limit, limit)
            trajectory = trajectory._replace(reward=reward)
        memory = memories.remember(
            of_replay, memory, trajectory, kept=("level",), axis_name=axis_name
        )
        progress = state.env_steps.astype(jnp.float32) / hyper.total_env_steps
        memory = _with_exponent(options, of_replay, hyper, memory, progress, axis_name)
        size = memory.replay.cursor.size * devices
        is_ready = size >= options.learning_starts
        one = _replay_once(
            options, network, of_replay, state, progress, devices, axis_name
        )
        replayed = jax.lax.fori_loop(
            0,
            jnp.where(is_ready, steps, 0),
            one,
            Replayed(
                learned=state.q,
                target=state.target,
                memory=memory,
                gradient_steps=state.gradient_steps,
                told={name: jnp.zeros(()) for name in TOLD},
                levels=jnp.zeros(num_levels),
            ),
        )
        made = jnp.sum(trajectory.is_valid)
        if axis_name is not None:
            made = jax.lax.psum(made, axis_name)
        feedback = _fed_back(options, state, trajectory, replayed.levels, axis_name)
        metrics = _means(replayed, jnp.where(is_ready, steps, 1), axis_name) | {
            "env_steps": made,
            "exploration": exploration.scheduled(options, hyper, state.env_steps),
            "importance_exponent": _beta(hyper, progress),
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

    return Learning(init, step)


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


def observe(
    state: MomentsState | None, observation: Shaped[Array, "*batch"]
) -> Shaped[Array, "*batch"]:
    """Observations as the network reads them.

    Args:
      state: by what they are standardised, if they are.
      observation: as the environment gave them.
    """
    return observation if state is None else normalize(state, observation)


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
    options: DQNOptions,
    state: DQNState,
    trajectory: Trajectory,
    levels: Float[Array, " K"],
    axis_name: str | None,
) -> Feedback:
    """The counts by level of exploration after an update."""
    num_levels = len(options.exploration_levels)
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


def _transform(options: DQNOptions, hyper: Hyper) -> optax.GradientTransformation:
    return gradient.gradient_transform(
        options.optimizer,
        max_grad_norm=hyper.max_grad_norm,
        adam_epsilon=options.adam_epsilon,
    )


def _beta(hyper: Hyper, progress: Float[Array, ""]) -> Float[Array, ""]:
    """The exponent of the importance weights, how far the run is."""
    first, last = hyper.importance_exponent, hyper.final_importance_exponent
    return gradient.linear(first, last, progress)


def _with_exponent(
    options: DQNOptions,
    of_replay: Replay,
    hyper: Hyper,
    memory: Memory,
    progress: Float[Array, ""],
    axis_name: str | None,
) -> Memory:
    """The memory with the priorities' exponent of this update, if that moves."""
    if hyper.final_priority_exponent is None:
        return memory
    alpha, _ = options.exponents
    exponent = gradient.linear(alpha, hyper.final_priority_exponent, progress)
    state = of_replay.set_exponent(memory.replay, exponent, axis_name=axis_name)
    return memory._replace(replay=state)


def _replay_once(
    options: DQNOptions,
    network: nn.Module,
    of_replay: Replay,
    state: DQNState,
    progress: Float[Array, ""],
    devices: int,
    axis_name: str | None,
) -> Callable[[Array, Replayed], Replayed]:
    """Lines 7 to 15 of Algorithm 1, as the body of a loop."""
    if options.batch_size % devices:
        raise ValueError(
            f"batch_size {options.batch_size} must be a multiple of the {devices} "
            "learner devices."
        )
    hyper, num_levels = state.hyper, len(options.exploration_levels)
    key, beta = jax.random.fold_in(state.key, state.update), _beta(hyper, progress)
    descend = gradient.gradient_step(
        _loss(options, network, state, axis_name),
        _transform(options, hyper),
        learning_rate=gradient.linear_decay(
            hyper.learning_rate, hyper.final_learning_rate_fraction, progress
        ),
        averaging=None,
        axis_name=axis_name,
    )
    copy_every = options.target_period // options.replay_period

    def one(index: Array, before: Replayed) -> Replayed:
        replay_state, sample = of_replay.sample(
            before.memory.replay,
            jax.random.fold_in(key, index),
            batch_size=options.batch_size // devices,
            importance_exponent=beta,
            axis_name=axis_name,
            discount=hyper.gamma,
        )
        learned, (aux, norm) = descend(before.learned, (sample, before.target))
        td_error, q, loss = aux
        replay_state = _prioritize(
            options, of_replay, hyper, replay_state, sample, td_error, axis_name
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
        if num_levels:
            level = sample.items.behaviour["level"]
            levels += exploration.count(level, sample.is_valid, num_levels)
        return Replayed(
            learned=learned,
            target=target,
            memory=before.memory._replace(replay=replay_state),
            gradient_steps=made,
            told=jax.tree.map(jnp.add, before.told, new),
            levels=levels,
        )

    return one


def _loss(
    options: DQNOptions, network: nn.Module, state: DQNState, axis_name: str | None
) -> Callable[..., Any]:
    """This device's share of the weighted loss, with errors, values and losses."""

    def values(params: Any, observation: Array) -> Any:
        return network.apply(params, observe(state.observation_moments, observation))

    def loss_fn(params: Any, average: Any, given: tuple[Sample, Any]):
        sample, target = given
        items = sample.items
        following = values(target, items.next_observation)
        selector = following
        if options.double:
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
    options: DQNOptions,
    of_replay: Replay,
    hyper: Hyper,
    state: Any,
    sample: Sample,
    td_error: Float[Array, " B"],
    axis_name: str | None,
) -> Any:
    """Line 11 of Algorithm 1: the priorities of what was drawn."""
    if not options.is_prioritized:
        return state
    if options.clips_priority and hyper.td_error_clip is not None:
        td_error = jnp.clip(td_error, -hyper.td_error_clip, hyper.td_error_clip)
    boost = None
    if options.predecessor_coef:
        boost = hyper.predecessor_coef * jnp.abs(td_error)
    return of_replay.update(
        state,
        sample.ticket,
        priorities.absolute(td_error, epsilon=hyper.priority_epsilon),
        predecessor_boost=boost,
        axis_name=axis_name,
    )
