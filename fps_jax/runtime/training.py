"""Trains any agent: one loop for all of them, which knows none by name."""

import contextlib
import dataclasses
import datetime
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from fps_jax.runtime import envs, metrics, parallel, runs
from fps_jax.runtime.acting import Actor, Crew
from fps_jax.runtime.checkpoints import Checkpoints, open_checkpoints
from fps_jax.runtime.evaluation import evaluate
from fps_jax.runtime.exchange import NonFiniteError, Segment, Stopped
from fps_jax.runtime.interrupts import Interrupt, interrupts, watched
from fps_jax.runtime.journal import History, Journal
from fps_jax.runtime.options import TrainConfig
from fps_jax.runtime.program import build
from fps_jax.runtime.progress import progress, summary_table
from fps_jax.types import AgentConfig

# Independent streams of random numbers, each folded into the root key of a run.
_INIT, _ACT, _PUBLISH, _EVALUATE = range(4)


def train(
    agent: AgentConfig,
    config: TrainConfig | None = None,
    *,
    make_env: Callable[..., envs.VectorEnv] = envs.make_env,
) -> History:
    """Trains an agent on an environment.

    Args:
      agent: the agent's options, such as `PPOConfig`.
      config: the run's; None is all defaults.
      make_env: makes environments, with the arguments of `envs.make_env`.

    Returns:
      The history of the run, including what it was before it was resumed.

    Raises:
      ValueError: if an option is impossible; nothing has run then.
      NonFiniteError: if a NaN or an infinity appeared, under ``on_nonfinite="stop"``.
      CheckpointError: if the checkpoint to resume from is damaged.
      KeyboardInterrupt: after Ctrl-C, once a checkpoint is saved; SystemExit after
        SIGTERM likewise.
    """
    return Run(agent, config or TrainConfig(), make_env=make_env).train()


class Run:
    """One training run: what it holds, and the steps of its loop.

    Attributes:
      config: its options.
      directory: its folder; None if it writes nothing.
      update: updates made.
      env_steps: env steps made, those before it was resumed included.
      state: of the agent, on the learner's devices.
    """

    def __init__(
        self,
        agent_config: AgentConfig,
        config: TrainConfig,
        *,
        make_env: Callable[..., envs.VectorEnv] = envs.make_env,
    ):
        """Builds everything, or goes back to where a checkpoint was made.

        Raises:
          ValueError: if an option is impossible; nothing has been written then.
        """
        if config.distributed and not jax.distributed.is_initialized():
            parallel.join_hosts(
                config.coordinator_address, config.num_processes, config.process_id
            )
        self.config, self._make_env = config, make_env
        self._root = jax.random.key(config.seed)
        self.update = self.env_steps = 0
        self.is_whole = True  # False within an update, and if it is not finite.

        place = config.directory or "", config.env, agent_config.name, config.seed
        self.directory = runs.find_latest_run(*place) if config.resume else None
        checkpoint, meta = self._find_checkpoint()
        self._resumes = meta["resumes"] + 1 if meta else 0

        mesh = parallel.learner_mesh(parallel.learner_devices(config.learner_devices))
        self._eval_env = self._make_envs(_EVALUATE, 0, max(1, config.eval_episodes))
        spec = self._eval_env.spec
        self.program = build(agent_config, spec, config, mesh)
        envs_here = config.num_actors * config.num_envs
        steps = envs_here * config.rollout_steps * jax.process_count()
        self.num_updates = math.ceil(config.total_env_steps / steps)
        self.state = self.program.init(self._key(_INIT))
        self.actors = [self._make_actor(i) for i in range(config.num_actors)]
        # Of several hosts only the first writes, and it knows only its own actors.
        restorable = self.actors if jax.process_count() == 1 else []
        self._carries = [a.carry() for a in restorable if a.is_restorable]

        if checkpoint is not None and self.checkpoints is not None:
            self._restore(self.checkpoints, checkpoint, meta)
        if self.directory is None and config.directory and jax.process_index() == 0:
            self.directory = runs.run_directory(*place, datetime.datetime.now())
        self.journal = self._open_journal(agent_config)
        self.journal.recent_returns.extend(meta.get("recent_returns", ()))

    def train(self) -> History:
        """Runs to the end, or to a signal, or to the first failure."""
        try:
            with interrupts() as interrupt:
                self._loop(interrupt)
            parallel.meet_hosts()  # The first may still evaluate.
            return self._history()
        finally:
            self.journal.close()
            self._eval_env.close()

    def params_of_actors(self) -> list[Any]:
        """What each actor acts with at the present version, on its own device."""
        view = parallel.first_replica(self.state.learner)
        params = []
        for i, actor in enumerate(self.actors):
            key = self._key(_PUBLISH, self.update, self._global_actor(i))
            params.append(
                jax.device_put(self.program.actor_params(view, key), actor.device)
            )
        return params

    # ------------------------------------------------------------------- the loop

    def _loop(self, interrupt: Interrupt) -> None:
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
                progress(config.total_env_steps, enabled=shows) as bar,
                contextlib.suppress(Stopped),  # A signal ended a wait for the actors.
            ):
                self._publish(crew)
                while self.update < self.num_updates and not interrupt.is_requested():
                    self._iterate(crew, interrupt, bar.update)
            if interrupt.is_requested():
                # Saved before the actors are waited for: they may hang.
                self._save()
                raise interrupt.error()
        except BaseException as error:
            self._save_after(error)
            raise
        finally:
            if crew.stop(join_limit_s=3.0):
                for actor in self.actors:
                    actor.close()

    def _iterate(self, crew: Crew, interrupt: Interrupt, show) -> None:
        """One update: take, learn, publish, then tell and save what is due."""
        timers = self.journal.timers
        with timers("queue_wait"):
            segments = crew.exchange.take(is_interrupted=interrupt.is_requested)
        lag = self._check_lag(segments)
        mesh = self.program.mesh
        with timers("transfer"):
            trajectories = [segment.trajectory for segment in segments]
            batch = parallel.shard(
                parallel.shard_environments(trajectories, mesh.local_mesh.size), mesh
            )
        with timers("learn"):
            self.is_whole = False
            self.state, metrics_ = self.program.learn(self.state, batch)
            if jax.default_backend() == "cpu":
                # Two updates in flight would wait for each other's threads.
                jax.block_until_ready(self.state)
        self.update += 1
        with timers("publish"):
            self._publish(crew)
        with timers("learn"):
            values = {k: float(v) for k, v in parallel.read(metrics_).items()}
        self._check_finite(values)
        before = self.env_steps
        self.env_steps += int(values["env_steps"])
        if self._carries:
            self._carries = [segment.carry for segment in segments]
        self.journal.add(values, segments, lag=lag)
        self.is_whole = True
        self._tell(before, interrupt)
        show(
            self.env_steps,
            self.journal.steps_per_s(),
            self.journal.recent_return(),
            float(lag),
        )

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

    def _check_finite(self, values: dict[str, float]) -> None:
        bad = sorted(name for name, value in values.items() if not math.isfinite(value))
        if bad:
            raise NonFiniteError(
                f"{', '.join(bad)} became NaN or infinite at update {self.update}, "
                f"after {self.env_steps} env steps."
            )

    def _tell(self, before: int, interrupt: Interrupt) -> None:
        """Evaluates, records and saves what is due after an update."""
        config, is_last = self.config, self.update == self.num_updates
        is_due = lambda every: (
            is_last or (every > 0 and self.env_steps // every > before // every)
        )
        extra: dict[str, float] = {}
        if config.eval_episodes and is_due(config.eval_every):
            extra = self._evaluate(interrupt)
        if extra or config.log_every == 0 or is_due(config.log_every):
            self.journal.write(self.env_steps, extra)
        if is_due(config.checkpoint_every):
            self._save()

    def _evaluate(self, interrupt: Interrupt) -> dict[str, float]:
        if jax.process_index() != 0:
            return {}
        with self.journal.timers("evaluate"):
            view = parallel.first_replica(self.state.learner)
            evaluation = watched(
                functools.partial(
                    evaluate,
                    self.program.act_greedily,
                    self.program.actor_params(view, None),
                    self._eval_env,
                    self._key(_EVALUATE, self.update),
                ),
                interrupt,
                name="an evaluation",
                stall_limit_s=self.config.stall_limit_s,
            )
        values = {} if evaluation is None else evaluation.metrics()
        if self.config.on_nonfinite == "stop":
            self._check_finite(values)
        return values

    # ----------------------------------------------------------------- what lasts

    @property
    def checkpoints(self) -> Checkpoints | None:
        """Those of this run; None if it writes nothing."""
        if self.directory is None:
            return None
        keep = self.config.keep_checkpoints
        return open_checkpoints(self.directory / "checkpoints", keep_last=keep)

    def _find_checkpoint(self) -> tuple[int | None, dict[str, Any]]:
        """The checkpoint to go on with, and what it says of its run."""
        step = self.config.resume_step
        if self.checkpoints is None:
            if step is not None:
                raise ValueError(f"resume_step {step}: there is no run to resume.")
            return None, {}
        step = self.checkpoints.latest() if step is None else step
        return step, ({} if step is None else self.checkpoints.meta(step))

    def _restore(
        self, checkpoints: Checkpoints, step: int, meta: dict[str, Any]
    ) -> None:
        """Goes on where a checkpoint was made; numeric options hold as given now."""
        saved, _ = checkpoints.restore(step, self._saved())
        hyper = parallel.read(self.state.learner.hyper)
        learner = saved["agent"].learner._replace(hyper=hyper)
        state = saved["agent"]._replace(learner=learner)
        self.state = parallel.place_state(state, self.program.mesh)
        self._carries = saved["actors"]
        for actor, carry in zip(self.actors, self._carries):
            actor.restore(carry)
        self.update, self.env_steps = meta["update"], meta["env_steps"]
        checkpoints.discard_after(step)

    def _save(self) -> None:
        """Saves a checkpoint, unless this update has one."""
        if self.checkpoints is None or self.checkpoints.latest() == self.update:
            return
        if self.update and self.journal.latest("env_steps") != self.env_steps:
            # A resumed run would know nothing of what no record holds.
            self.journal.write(self.env_steps, {})
        meta = {
            "update": self.update,
            "env_steps": self.env_steps,
            "resumes": self._resumes,
            "recent_returns": list(self.journal.recent_returns),
        }
        with self.journal.timers("checkpoint"):
            score = self.journal.latest("eval/return")
            self.checkpoints.save(self.update, self._saved(), meta=meta, score=score)

    def _save_after(self, error: BaseException) -> None:
        """Saves what a failure left whole; that failure is what is to be seen."""
        if not self.is_whole or isinstance(error, OSError) or self.update == 0:
            return
        try:
            self._save()
        except Exception as second:
            error.add_note(f"Saving a checkpoint after it failed too: {second}")

    def _saved(self) -> dict[str, Any]:
        """What a checkpoint holds; the actors only if they can be put back."""
        return {"agent": parallel.read_state(self.state), "actors": self._carries}

    def _open_journal(self, agent_config: AgentConfig) -> Journal:
        """Opens the journal; only that of the first host has sinks."""
        config = self.config
        if self.directory is None or jax.process_index() != 0:
            return Journal(metrics.fan_out([]), [], config.num_actors)
        options = dataclasses.asdict(config) | {
            "agent": dataclasses.asdict(agent_config)
        }
        runs.write_config(self.directory / "config.json", options)
        sink, past = metrics.open_sinks(
            self.directory,
            resume_at=self.env_steps,
            tensorboard=config.tensorboard,
            wandb_project=config.wandb_project,
            options=options,
        )
        return Journal(sink, past if self.update else [], config.num_actors)

    def _history(self) -> History:
        journal = self.journal
        latest = journal.latest("eval/return")
        latest = journal.recent_return() if math.isnan(latest) else latest
        return History(
            records=journal.records,
            state=parallel.read_state(self.state),
            directory=self.directory,
            summary=summary_table(
                env_steps=journal.env_steps(),
                wall_s=journal.wall_s(),
                episode_return=latest,
                threads=journal.seconds(),
            ),
        )

    # -------------------------------------------------------------------- parts

    def _key(self, *path: int) -> jax.Array:
        """A key by its path from the root: a stream, then numbers within it."""
        key = self._root
        for number in path:
            key = jax.random.fold_in(key, jax.device_put(np.uint32(number)))
        return key

    def _global_actor(self, index: int) -> int:
        """The number of an actor among those of all hosts: names its key."""
        return jax.process_index() * self.config.num_actors + index

    def _make_envs(self, purpose: int, first: int, count: int) -> envs.VectorEnv:
        """Makes environments whose seeds nothing else in this run, or before, has."""
        config = self.config
        seeds = envs.env_seeds(
            config.seed,
            stream=2 * self._resumes + (purpose == _EVALUATE),
            first=first,
            count=count,
        )
        return self._make_env(
            config.env,
            num_envs=count,
            seeds=seeds,
            num_threads=config.env_threads,
            max_episode_steps=config.max_episode_steps,
            env_options=config.env_options,
        )

    def _make_actor(self, index: int) -> Actor:
        config, mesh = self.config, self.program.mesh
        number = self._global_actor(index)
        learners = set(mesh.devices.flat)
        spare = [d for d in jax.local_devices() if d not in learners]
        devices = spare or list(mesh.local_mesh.devices.flat)
        return Actor(
            self._make_envs(_ACT, number * config.num_envs, config.num_envs),
            self.program.act,
            self._key(_ACT, number),
            device=devices[index % len(devices)],
            rollout_steps=config.rollout_steps,
            masks_nonfinite=config.on_nonfinite == "mask",
        )
