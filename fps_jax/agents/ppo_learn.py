"""What PPO learns, and how it learns it from one segment of experience."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, Key

from fps_jax.agents import gradient
from fps_jax.agents.ppo_loss import Batch, Loss, advantages_and_targets, make_loss
from fps_jax.agents.ppo_options import Hyper, PPOOptions
from fps_jax.models.networks import ActorCritic
from fps_jax.models.normalize import (
    AverageState,
    MomentsState,
    MovingAverage,
    PercentileScale,
    PercentileState,
    moving_average,
    percentile_scale,
    running_moments,
)
from fps_jax.objectives import masked, tally
from fps_jax.objectives.clip_ppo import Interval
from fps_jax.types import Metrics, Trajectory


class PPOState(NamedTuple):
    """What PPO learns; the same on every device.

    Attributes:
      params: of the network.
      optimizer: of optax.
      average: moving average of the parameters; None without ``ewma_decay``.
      observation_moments: of the observations that the actors saw.
      return_moments: of the value targets; scalars.
      return_percentiles: of the value targets; None unless advantages are divided by
        their range.
      hyper: the numeric hyper-parameters.
      key: root of the learner's random numbers; folded with `update`.
      update: updates made, scalar.
    """

    params: Any
    optimizer: optax.OptState
    average: AverageState | None
    observation_moments: MomentsState
    return_moments: MomentsState
    return_percentiles: PercentileState | None
    hyper: Hyper
    key: Key[Array, ""]
    update: Int[Array, ""]


class Learning(NamedTuple):
    """The part of PPO that moves the parameters.

    Attributes:
      init: ``init(params, observation_moments, hyper, key) -> PPOState``.
      step: ``step(state, trajectory, observation, axis_name) -> (state, metrics)``
        with observations as the network reads them, ``[T + 1, E, ...]``. The count of
        updates and the moments of the observations are left to the caller.
    """

    init: Callable[..., PPOState]
    step: Callable[..., tuple[PPOState, Metrics]]


def make_learning(options: PPOOptions, network: ActorCritic) -> Learning:
    """Makes PPO's learner.

    Args:
      options: the static choices; its numbers are only read from the state's `hyper`.
      network: the policy and the value function.
    """
    moments = running_moments(())

    def init(params, observation_moments, hyper, key) -> PPOState:
        averaging = averaging_of(options, hyper)
        divides = options.normalize_advantage == "percentile"
        return PPOState(
            params=params,
            optimizer=optimizer_of(options, hyper).init(params),
            average=None if averaging is None else averaging.init(params),
            observation_moments=observation_moments,
            return_moments=moments.init(),
            return_percentiles=percentiles_of(options, hyper).init()
            if divides
            else None,
            hyper=hyper,
            key=key,
            update=jnp.zeros((), jnp.int32),
        )

    def step(
        state: PPOState, trajectory: Trajectory, observation, axis_name: str | None
    ) -> tuple[PPOState, Metrics]:
        rows, devices = trajectory.reward.size, gradient.axis_size(axis_name)
        hyper, is_valid = state.hyper, trajectory.is_valid
        schedule = scheduled(hyper, state.update, rows * devices)
        scale = jnp.ones((), jnp.float32)
        if options.scale_returns:
            scale = deviation(state.return_moments)
        signals = lambda params: advantages_and_targets(
            network, params, trajectory, observation, scale=scale, hyper=hyper
        )
        value, _, target = at_start = signals(state.params)
        state = state._replace(
            return_moments=moments.update(
                state.return_moments, target, is_valid, axis_name=axis_name
            )
        )
        if state.return_percentiles is not None:
            seen = percentiles_of(options, hyper).update(
                state.return_percentiles, target, is_valid, axis_name=axis_name
            )
            state = state._replace(return_percentiles=seen)

        make_batch = batches(options, state, trajectory, observation, value, scale)
        batch = make_batch(*at_start[1:], axis_name)

        def batch_of(params) -> Batch:
            if not options.recompute_advantages:
                return batch
            return make_batch(*signals(params)[1:], axis_name)

        loss = make_loss(
            network,
            options,
            hyper,
            clip_epsilon=schedule.clip_epsilon,
            axis_name=axis_name,
        )
        state, metrics = descend(
            options, state, loss, batch_of, schedule, rows=rows, axis_name=axis_name
        )
        # How well the values foretold this segment, before they learned from it.
        foretold = tally.explained_variance(
            value, target, is_valid, axis_name=axis_name
        )
        return state, metrics | foretold | {"return_scale": scale}

    return Learning(init, step)


class Schedule(NamedTuple):
    """The numbers that move with the progress of a run, as they are now."""

    learning_rate: Float[Array, ""]
    clip_epsilon: Interval


def scheduled(hyper: Hyper, update: Int[Array, ""], rows: int) -> Schedule:
    """Where the schedules stand.

    Args:
      hyper: starts, ends and length.
      update: updates made.
      rows: env steps of each, over all devices.
    """
    progress = update.astype(jnp.float32) * (rows / hyper.total_env_steps)
    decay = gradient.linear_decay
    narrowed = lambda width: decay(width, hyper.final_clip_epsilon_fraction, progress)
    low, high = hyper.clip_epsilon, hyper.clip_epsilon_high
    return Schedule(
        decay(hyper.learning_rate, hyper.final_learning_rate_fraction, progress),
        narrowed(low) if high is None else (narrowed(low), narrowed(high)),
    )


def batches(
    options: PPOOptions,
    state: PPOState,
    trajectory: Trajectory,
    observation: Any,
    value: Float[Array, "T E"],
    scale: Float[Array, ""],
) -> Callable[..., Batch]:
    """Makes what flattens a segment into rows.

    Args:
      options: how advantages are normalised.
      state: its statistics have seen the segment.
      trajectory: the segment.
      observation: ``[T + 1, E, ...]`` as the network reads it.
      value: of each row, before learning, in units of reward.
      scale: the network's own unit of it.

    Returns:
      ``make_batch(advantage, target, axis_name)`` of arrays ``[T, E]`` in units of
      reward.
    """
    flat = lambda x: x.reshape(trajectory.reward.size, *x.shape[2:])
    is_valid, action = flat(trajectory.is_valid), flat(trajectory.action)
    # Not even a NaN of a row that is not valid may reach a gradient.
    acted = is_valid.reshape(-1, *(1 for _ in action.shape[1:]))
    action = jnp.where(acted, action, 0)
    unit = jnp.ones((), jnp.float32)
    if options.normalize_advantage == "running":
        unit = deviation(state.return_moments)
    elif state.return_percentiles is not None:
        unit = percentiles_of(options, state.hyper).scale(state.return_percentiles)

    def make_batch(advantage, target, axis_name: str | None) -> Batch:
        advantage = flat(advantage) / unit
        if options.normalize_advantage == "batch":
            advantage = masked.standardize(advantage, is_valid, axis_name=axis_name)
        return Batch(
            observation=flat(observation[:-1]),
            action=action,
            log_prob=flat(trajectory.behaviour["log_prob"]),
            advantage=advantage,
            target=flat(target) / scale,
            old_value=flat(value) / scale,
            is_valid=is_valid,
        )

    return make_batch


def descend(
    options: PPOOptions,
    state: PPOState,
    loss: Loss,
    batch_of: Callable[[Any], Batch],
    schedule: Schedule,
    *,
    rows: int,
    axis_name: str | None,
) -> tuple[PPOState, Metrics]:
    """Takes all gradient steps of one update.

    Args:
      options: the static choices.
      state: its parameters, optimiser and average are moved.
      loss: to be lessened.
      batch_of: see `gradient.minibatch_epochs`.
      schedule: gives the step size.
      rows: of the batch on this device.
      axis_name: the device axis, if any.

    Returns:
      The state, and metrics over all rows of all steps: those of `tally.metrics`.
    """
    averaging = averaging_of(options, state.hyper)
    step = gradient.gradient_step(
        loss.of_params,
        optimizer_of(options, state.hyper),
        learning_rate=schedule.learning_rate,
        averaging=averaging,
        axis_name=axis_name,
    )
    learned, (told, norms) = gradient.minibatch_epochs(
        step,
        gradient.Learned(state.params, state.optimizer, state.average),
        batch_of,
        lambda out, batch: (loss.evaluate(out[0], batch)[1], out[1]),
        gradient.device_key(jax.random.fold_in(state.key, state.update), axis_name),
        rows=rows,
        num_epochs=options.num_epochs,
        num_minibatches=gradient.num_minibatches(
            options.minibatch_size, rows, gradient.axis_size(axis_name)
        ),
    )
    told = tally.merge(told)
    told = told if axis_name is None else tally.across(told, axis_name)
    metrics = tally.metrics(told)
    losses = [x for name, x in metrics.items() if name.startswith("loss_")]
    metrics |= {
        "loss": sum(losses),
        "grad_norm": jnp.mean(norms),
        "learning_rate": schedule.learning_rate,
    }
    return state._replace(**learned._asdict()), metrics


def deviation(moments: MomentsState) -> Float[Array, ""]:
    """Standard deviation of returns, in units of reward, above 0.

    Args:
      moments: of the returns.
    """
    return jnp.sqrt(moments.variance + 1e-8)


def averaging_of(options: PPOOptions, hyper: Hyper) -> MovingAverage | None:
    """What averages the parameters, if the options ask for it.

    Args:
      options: say whether the average is debiased.
      hyper: gives the decay.
    """
    if hyper.ewma_decay is None:
        return None
    return moving_average(hyper.ewma_decay, is_debiased=options.ewma_debias)


def percentiles_of(options: PPOOptions, hyper: Hyper) -> PercentileScale:
    """What follows the range of returns.

    Args:
      options: say whether it is debiased.
      hyper: gives the rate.
    """
    is_debiased = options.advantage_norm_debias
    return percentile_scale(hyper.advantage_norm_rate, is_debiased=is_debiased)


def optimizer_of(options: PPOOptions, hyper: Hyper) -> optax.GradientTransformation:
    """The optimiser that the options name.

    Args:
      options: name it.
      hyper: gives the longest gradient.
    """
    return gradient.gradient_transform(
        options.optimizer,
        max_grad_norm=hyper.max_grad_norm,
        adam_epsilon=options.adam_epsilon,
    )
