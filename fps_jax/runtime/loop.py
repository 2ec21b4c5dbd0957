"""The loop of acting and learning: what a single run and a population have in common.

It takes one rollout of every actor, learns, publishes, and hands what came of it to
`Loop.note`; what is then evaluated, recorded and saved is the subclass's own.
"""

import abc
import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from fps_jax.runtime import envs, parallel
from fps_jax.runtime.acting import Actor, Crew
from fps_jax.runtime.evaluation import Evaluation, evaluate
from fps_jax.runtime.exchange import Segment, Stopped
from fps_jax.runtime.interrupts import Interrupt, watched
from fps_jax.runtime.metrics import Timers
from fps_jax.runtime.options import TrainConfig
from fps_jax.runtime.program import Program, fold
from fps_jax.runtime.progress import progress
from fps_jax.types import AgentState, Metrics, Trajectory

# Independent streams of random numbers, each folded into the root key of a run.
INIT, ACT, PUBLISH, EVALUATE = range(4)


class Loop(abc.ABC):
    """Acting and learning in turns; subclasses say of what and what is kept of it.

    Attributes:
      config: the options of the run.
      update: updates made.
      num_updates: updates to make in all.
      is_whole: False within an update, and if it is not finite.
      timers: where the learner's time goes.
      program: the compiled agent.
      state: of the agent, on the learner's devices.
      actors: one a thread.
    """

    program: Program
    state: AgentState
    actors: list[Actor]
    num_updates: int

    def __init__(
        self,
        config: TrainConfig,
        *,
        seeds: Sequence[int],
        root: jax.Array,
        make_env: Callable[..., envs.VectorEnv],
    ):
        """Prepares a loop; nothing runs yet.

        Args:
          config: the options of the run; its seed is not read.
          seeds: of the members; each has environments of its own.
          root: key of all random numbers; one a member if there is a population.
          make_env: makes environments, with the arguments of `envs.make_env`.
        """
        self.config, self._make_env = config, make_env
        self._seeds, self._root = seeds, root
        self._resumes = self.update = 0
        self.timers = Timers()
        self.is_whole = True

    # ------------------------------------------------------------ what subclasses say

    @abc.abstractmethod
    def learner_view(self) -> Any:
        """The learner's state as `Program.actor_params` takes it, without a copy."""

    @abc.abstractmethod
    def batch_of(self, trajectories: Sequence[Trajectory]) -> Any:
        """Lays the actors' host arrays ``[T, E, ...]`` out for devices."""

    @abc.abstractmethod
    def note(
        self, metrics: Metrics, segments: Sequence[Segment], lag: int, end: Interrupt
    ) -> None:
        """Takes note of an update; then evaluates, records and saves what is due."""

    @abc.abstractmethod
    def save(self) -> None:
        """Saves a checkpoint, unless this update has one."""

    @abc.abstractmethod
    def status(self) -> tuple[int, float, float]:
        """Env steps, env steps per second and return, as the progress bar shows."""

    # --------------------------------------------------------------------- the loop

    def params_of_actors(self) -> list[Any]:
        """What each actor acts with at the present version, on its own device."""
        view = self.learner_view()
        params = []
        for i, actor in enumerate(self.actors):
            key = self.key(PUBLISH, self.update, self._global_actor(i))
            params.append(
                jax.device_put(self.program.actor_params(view, key), actor.device)
            )
        return params

    def is_over(self) -> bool:
        """Whether all updates are made."""
        return self.update >= self.num_updates

    def is_due(self, every: int, before: int, now: int) -> bool:
        """Whether something is due after an update: at the end, and on the way.

        Args:
          every: env steps from one time to the next; 0 is never on the way.
          before: env steps before the update.
          now: env steps after it.
        """
        is_last = self.update == self.num_updates
        return is_last or (every > 0 and now // every > before // every)

    def loop(self, interrupt: Interrupt) -> None:
        """Runs to the end, or to a signal, or to the first failure.

        Args:
          interrupt: asks it to end.
        """
        config = self.config
        crew = Crew(
            self.actors,
            max_lag=config.max_lag,
            first_rollout=self.update,
            num_rollouts=self.num_updates,
            stall_limit_s=config.stall_limit_s,
        )
        shows = config.show_progress and jax.process_index() == 0
        try:
            with (
                progress(self._planned_env_steps(), enabled=shows) as bar,
                contextlib.suppress(Stopped),  # A signal ended a wait for the actors.
            ):
                self._publish(crew)
                while not self.is_over() and not interrupt.is_requested():
                    self._iterate(crew, interrupt, bar.update)
            if interrupt.is_requested():
                # Saved before the actors are waited for: they may hang.
                self.save()
                raise interrupt.error()
        except BaseException as error:
            self._save_after(error)
            raise
        finally:
            if crew.stop(join_limit_s=3.0):
                for actor in self.actors:
                    actor.close()

    def _iterate(self, crew: Crew, interrupt: Interrupt, show) -> None:
        """One update: take, learn, publish, then note what came of it."""
        with self.timers("queue_wait"):
            segments = crew.exchange.take(is_interrupted=interrupt.is_requested)
        lag = self._check_lag(segments)
        with self.timers("transfer"):
            trajectories = [segment.trajectory for segment in segments]
            batch = parallel.shard(self.batch_of(trajectories), self.program.mesh)
        with self.timers("learn"):
            self.is_whole = False
            self.state, metrics = self.program.learn(self.state, batch)
            if jax.default_backend() == "cpu":
                # Two updates in flight would wait for each other's threads.
                jax.block_until_ready(self.state)
        self.update += 1
        with self.timers("publish"):
            self._publish(crew)
        with self.timers("learn"):
            values = parallel.read(metrics)
        self.note(values, segments, lag, interrupt)
        show(*self.status(), float(lag))

    def _publish(self, crew: Crew) -> None:
        crew.exchange.publish(self.update, self.params_of_actors())

    def _check_lag(self, segments: Sequence[Segment]) -> int:
        """The lag of a batch; the protocol bounds it, and this holds it to that."""
        lags = {self.update - segment.version for segment in segments}
        rollouts = {segment.rollout for segment in segments}
        if rollouts != {self.update} or max(lags) > self.config.max_lag:
            raise AssertionError(
                f"update {self.update} was given rollouts {rollouts} with lags {lags}; "
                f"max_lag is {self.config.max_lag}."
            )
        return max(lags)

    def _save_after(self, error: BaseException) -> None:
        """Saves what a failure left whole; that failure is what is to be seen."""
        if not self.is_whole or isinstance(error, OSError) or self.update == 0:
            return
        try:
            self.save()
        except Exception as second:
            error.add_note(f"Saving a checkpoint after it failed too: {second}")

    def evaluate(self, env: envs.VectorEnv, interrupt: Interrupt) -> Evaluation | None:
        """Full episodes of the policies as they are; None if a signal ended it.

        Args:
          env: environments of its own, those of one member after another.
          interrupt: asks it to end.
        """
        with self.timers("evaluate"):
            return watched(
                functools.partial(
                    evaluate,
                    self.program.act_greedily,
                    self.program.actor_params(self.learner_view(), None),
                    env,
                    self.key(EVALUATE, self.update),
                ),
                interrupt,
                name="an evaluation",
                stall_limit_s=self.config.stall_limit_s,
            )

    # -------------------------------------------------------------------- parts

    def key(self, *path: int) -> jax.Array:
        """A key, or one a member, by its path from the root: numbers folded in.

        Args:
          *path: a stream, such as `ACT`, then numbers within it.
        """
        key = self._root
        for number in path:
            key = fold(key, jax.device_put(np.uint32(number)))
        return key

    def steps_of_update(self) -> int:
        """Env steps that one member makes between two updates, resets counted."""
        config = self.config
        envs_here = config.num_actors * config.num_envs
        return envs_here * config.rollout_steps * jax.process_count()

    def updates_in_all(self) -> int:
        """Updates that the planned length takes, rounded up."""
        return math.ceil(self.config.total_env_steps / self.steps_of_update())

    def _planned_env_steps(self) -> int:
        return self.config.total_env_steps * len(self._seeds)

    def _global_actor(self, index: int) -> int:
        """The number of an actor among those of all hosts: names its key."""
        return jax.process_index() * self.config.num_actors + index

    def make_envs(self, purpose: int, first: int, count: int) -> envs.VectorEnv:
        """Makes environments whose seeds nothing else in this run, or before, has.

        Args:
          purpose: `ACT` or `EVALUATE`.
          first: number of the first among those of its purpose, of each member.
          count: how many, of each member.
        """
        config = self.config
        stream = 2 * self._resumes + (purpose == EVALUATE)
        seeds = [
            number
            for seed in self._seeds
            for number in envs.env_seeds(seed, stream=stream, first=first, count=count)
        ]
        return self._make_env(
            config.env,
            num_envs=len(seeds),
            seeds=seeds,
            num_threads=config.env_threads,
            max_episode_steps=config.max_episode_steps,
            env_options=config.env_options,
        )

    def make_actor(self, index: int, *, masks_nonfinite: bool) -> Actor:
        """Makes an actor with environments and a key of its own.

        Args:
          index: its number on this host.
          masks_nonfinite: see `Actor`.
        """
        config, mesh = self.config, self.program.mesh
        number = self._global_actor(index)
        learners = set(mesh.devices.flat)
        spare = [d for d in jax.local_devices() if d not in learners]
        devices = spare or list(mesh.local_mesh.devices.flat)
        return Actor(
            self.make_envs(ACT, number * config.num_envs, config.num_envs),
            self.program.act,
            self.key(ACT, number),
            device=devices[index % len(devices)],
            rollout_steps=config.rollout_steps,
            masks_nonfinite=masks_nonfinite,
        )
