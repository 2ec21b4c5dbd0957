"""The acting loop: threads that step environments and feed the learner.

The lag between acting and learning is a protocol: rollout k acts with parameter
version ``max(first, k - max_lag)``, where version v is what v updates made. With
``max_lag=0`` acting and learning take turns, with 1 they overlap; both reproduce bit
for bit.
"""

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from fps_jax.runtime.envs import RestorableEnv, VectorEnv
from fps_jax.runtime.exchange import (
    ActorCarry,
    Episode,
    Exchange,
    NonFiniteError,
    Segment,
    Stopped,
)
from fps_jax.runtime.metrics import Timers
from fps_jax.types import Trajectory


class Actor:
    """Acts in its own environments with its own key on its own device."""

    def __init__(
        self,
        env: VectorEnv,
        act: Callable[..., Any],
        key: jax.Array,
        *,
        device: jax.Device,  # pyright: ignore[reportInvalidTypeForm]
        rollout_steps: int,
        masks_nonfinite: bool = False,
    ):
        """Prepares an actor; nothing is stepped yet.

        Args:
          env: its environments.
          act: ``act(params, observation, key, count)``, compiled.
          key: of this actor alone; folded with the count of its acts.
          device: where it acts.
          rollout_steps: length T of a segment.
          masks_nonfinite: mask rows with a NaN or an infinity instead of failing.
        """
        self._env = env
        self._act = act
        self._key = jax.device_put(key, device)
        self.device = device
        self._rollout_steps = rollout_steps
        self._masks_nonfinite = masks_nonfinite
        self._carry: ActorCarry | None = None

    @property
    def is_restorable(self) -> bool:
        """Whether `restore` can put it back exactly where a carry says."""
        return isinstance(self._env, RestorableEnv)

    def carry(self) -> ActorCarry:
        """Where it stands; starts the environments if nothing has yet."""
        if self._carry is None:
            envs = self._env.num_envs
            self._carry = ActorCarry(
                observation=self._env.reset(),
                episode_return=np.zeros(envs, np.float64),
                episode_length=np.zeros(envs, np.int64),
                env_state=self._env_state(),
            )
        return self._carry

    def restore(self, carry: ActorCarry) -> None:
        """Goes back to where a carry says.

        Args:
          carry: what `carry` or a segment gave.

        Raises:
          TypeError: if the environments are no `RestorableEnv`.
        """
        if not isinstance(self._env, RestorableEnv):
            raise TypeError(f"{self._env.spec.env_id} cannot be restored.")
        self._env.set_state(carry.env_state)
        self._carry = carry

    def close(self) -> None:
        """Frees its environments."""
        self._env.close()

    def rollout(
        self,
        params: Any,
        *,
        rollout: int,
        version: int,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> Segment:
        """Steps the environments T times.

        Args:
          params: what `Agent.actor_params` made, on this actor's device.
          rollout: its number k; with t it counts the acts, so that a resumed run
            draws the same random numbers.
          version: of the parameters.
          is_stopped: asked at every step; True ends the rollout, and the actor for
            good: its environments have gone on from its carry.

        Raises:
          NonFiniteError: if an environment returned a NaN or an infinity.
          Stopped: if it was stopped.
        """
        timers = Timers()
        observation, returns, lengths, _ = self.carry()
        returns, lengths = returns.copy(), lengths.copy()
        rows, observations = [], [observation]
        # Host arrays go in and come out as part of the call, and of its time: an
        # explicit transfer of so little costs ten times as much. The environments wait
        # for whatever is done within this loop.
        with jax.transfer_guard("allow"):
            for t in range(self._rollout_steps):
                if is_stopped():
                    raise Stopped(f"stopped in rollout {rollout}.")
                clock = time.perf_counter()
                count = np.uint32((rollout * self._rollout_steps + t) % 2**32)
                acted = self._act(params, observation, self._key, count)
                action, behaviour = jax.tree.map(np.asarray, acted)
                timers.add("inference", -clock + (clock := time.perf_counter()))
                step = self._env.step(action)
                timers.add("env", -clock + time.perf_counter())
                rows.append((action, behaviour, step))
                observation = step.observation
                observations.append(observation)
        trajectory = _stack(rows, observations, version)
        episodes = _count_episodes(trajectory, returns, lengths)
        trajectory, nonfinite = self._check_finite(trajectory)
        self._carry = ActorCarry(observation, returns, lengths, self._env_state())
        return Segment(
            trajectory,
            episodes,
            rollout,
            version,
            nonfinite,
            self._carry,
            timers.totals(),
        )

    def _env_state(self) -> Any:
        return self._env.get_state() if isinstance(self._env, RestorableEnv) else ()

    def _check_finite(self, trajectory: Trajectory) -> tuple[Trajectory, np.ndarray]:
        """Fails on, or masks, rows that touch a NaN or an infinity."""
        good: Any = np.isfinite(trajectory.observation)
        good = good.reshape(*good.shape[:2], -1).all(axis=2)
        good_rows = good[:-1] & good[1:] & np.isfinite(trajectory.reward)
        if good_rows.all():
            return trajectory, np.zeros(self._env.num_envs, np.int64)
        t, env = np.argwhere(~good_rows)[0]
        if not self._masks_nonfinite:
            raise NonFiniteError(
                f"environment {env} of {self._env.spec.env_id} returned a NaN or an "
                f"infinity at step {t} of its rollout (on_nonfinite is 'stop')."
            )
        masked = trajectory._replace(
            observation=_zero_nonfinite(trajectory.observation),
            reward=_zero_nonfinite(trajectory.reward),
            is_valid=trajectory.is_valid & good_rows,
        )
        nonfinite: Any = trajectory.is_valid & ~good_rows
        return masked, nonfinite.sum(axis=0)


def _zero_nonfinite(x: Any) -> Any:
    """Replaces NaNs and infinities by 0; integers have none."""
    if x.dtype.kind != "f":
        return x
    return np.where(np.isfinite(x), x, np.zeros((), x.dtype))


def _count_episodes(
    rows: Trajectory, returns: np.ndarray, lengths: np.ndarray
) -> list[Episode]:
    """Adds rows to the running episodes; takes out those that ended with one of them.

    Args:
      rows: of which a non-finite reward counts as 0, and a reset row as no step.
      returns: ``[E]`` float64, of each running episode; changed in place.
      lengths: ``[E]``, in env steps; changed in place.

    Returns:
      The episodes in the order of their ends.
    """
    reward = _zero_nonfinite(rows.reward).astype(np.float64)
    is_step: Any = rows.is_valid
    first, episodes = np.zeros(len(returns), np.int64), []
    for t, i in np.argwhere(rows.terminated | rows.truncated):
        mine = slice(first[i], t + 1), i
        returns[i] += reward[mine].sum()
        lengths[i] += is_step[mine].sum()
        episodes.append(Episode(float(returns[i]), int(lengths[i]), int(i)))
        returns[i], lengths[i], first[i] = 0.0, 0, t + 1
    is_running = np.arange(len(reward))[:, None] >= first
    returns += reward.sum(axis=0, where=is_running)
    lengths += is_step.sum(axis=0, where=is_running)
    return episodes


def _stack(rows, observations, version: int) -> Trajectory:
    """Joins the rows of a rollout along time."""
    stack = lambda trees: jax.tree.map(lambda *xs: np.stack(xs), *trees)
    action, behaviour, step = stack(rows)
    versions: Any = np.full_like(step.is_reset, version, np.int32)
    return Trajectory(
        observation=stack(observations),
        action=action,
        reward=step.reward,
        terminated=step.terminated,
        truncated=step.truncated,
        is_valid=~step.is_reset,
        behaviour=behaviour,
        policy_version=versions,
    )


class Crew:
    """The actors' threads, from start to join."""

    def __init__(
        self,
        actors: Sequence[Actor],
        *,
        max_lag: int,
        first_rollout: int,
        num_rollouts: int,
        stall_limit_s: float,
    ):
        """Starts one thread an actor.

        Args:
          actors: each is used by its own thread alone from here on.
          max_lag: versions that acting may be behind the learner.
          first_rollout: number of the first rollout; its version is what is published
            first.
          num_rollouts: number of the last rollout plus one.
          stall_limit_s: longest wait of the learner for its actors, in seconds.
        """
        self.exchange = Exchange(
            len(actors), max_lag=max_lag, time_limit_s=stall_limit_s
        )
        self._max_lag = max_lag
        self._rollouts = range(first_rollout, num_rollouts)
        # Threads that hang in an environment must not keep the process alive, so they
        # are daemons; all others are joined, as JAX in a dying thread would abort.
        self._threads = [
            threading.Thread(
                target=self._run, args=(i, actor), name=f"actor-{i}", daemon=True
            )
            for i, actor in enumerate(actors)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, index: int, actor: Actor) -> None:
        try:
            for k in self._rollouts:
                clock = time.perf_counter()
                version = max(self._rollouts.start, k - self._max_lag)
                # The learner compiles, evaluates and saves for as long as it needs;
                # should it hang, its own thread could not be told of it here.
                params = self.exchange.params(version, index, limit_s=math.inf)
                waited = time.perf_counter() - clock
                segment = actor.rollout(
                    params,
                    rollout=k,
                    version=version,
                    is_stopped=self.exchange.is_stopped,
                )
                segment.seconds["queue_wait"] = waited
                self.exchange.put(index, segment, limit_s=math.inf)
        except Stopped:
            pass
        except BaseException as error:
            self.exchange.stop(error)

    def stop(self, *, join_limit_s: float = 5.0) -> bool:
        """Stops and joins the threads.

        Args:
          join_limit_s: longest wait for all of them, in seconds.

        Returns:
          Whether all have ended; one that has not hangs in its environment.
        """
        self.exchange.stop()
        limit = time.monotonic() + join_limit_s
        for thread in self._threads:
            thread.join(max(0.0, limit - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)
