"""Trains any agent: one loop for all of them, which knows none by name."""

import datetime
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from fps_jax.runtime import envs, parallel, runs
from fps_jax.runtime.checkpoints import Checkpoints, open_checkpoints
from fps_jax.runtime.exchange import Segment
from fps_jax.runtime.interrupts import Interrupt, interrupts
from fps_jax.runtime.journal import History, Journal
from fps_jax.runtime.keeping import Keeper
from fps_jax.runtime.loop import EVALUATE, INIT, Loop
from fps_jax.runtime.options import TrainConfig
from fps_jax.runtime.program import build
from fps_jax.types import AgentConfig, Metrics, Trajectory


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


class Run(Loop):
    """One training run: what it holds, and what it does after every update.

    Attributes:
      directory: its folder; None if it writes nothing.
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
        root = jax.random.key(config.seed)
        super().__init__(config, seeds=(config.seed,), root=root, make_env=make_env)

        place = config.directory or "", config.env, agent_config.name, config.seed
        self.directory = runs.find_latest_run(*place) if config.resume else None
        checkpoint, meta = self._find_checkpoint()
        self._resumes = meta["resumes"] + 1 if meta else 0

        mesh = parallel.learner_mesh(parallel.learner_devices(config.learner_devices))
        self._eval_env = self.make_envs(EVALUATE, 0, max(1, config.eval_episodes))
        self.program = build(agent_config, self._eval_env.spec, config, mesh)
        self.num_updates = self.updates_in_all()
        self.state = self.program.init(self.key(INIT))
        masks = config.on_nonfinite == "mask"
        self.actors = [
            self.make_actor(i, masks_nonfinite=masks) for i in range(config.num_actors)
        ]
        # Of several hosts only the first writes, and it knows only its own actors.
        restorable = self.actors if jax.process_count() == 1 else []
        self._carries = [a.carry() for a in restorable if a.is_restorable]

        if checkpoint is not None and self.checkpoints is not None:
            self._restore(self.checkpoints, checkpoint, meta)
        is_first = jax.process_index() == 0
        if self.directory is None and config.directory and is_first:
            self.directory = runs.run_directory(*place, datetime.datetime.now())
        # Of several hosts only the first has records.
        folder = self.directory if is_first else None
        self._keeper = Keeper(folder, config, agent_config, meta, timers=self.timers)

    def train(self) -> History:
        """Runs to the end, or to a signal, or to the first failure."""
        try:
            with interrupts() as interrupt:
                self.loop(interrupt)
            parallel.meet_hosts()  # The first may still evaluate.
            return self._keeper.history(parallel.read_state(self.state))
        finally:
            self.journal.close()
            self._eval_env.close()

    @property
    def env_steps(self) -> int:
        """Env steps made, those before it was resumed included."""
        return self._keeper.env_steps

    @property
    def journal(self) -> Journal:
        """The records of the run."""
        return self._keeper.journal

    # ------------------------------------------------------------ within the loop

    def learner_view(self) -> Any:
        """This host's first copy of what is learned."""
        return parallel.first_replica(self.state.learner)

    def batch_of(self, trajectories: Sequence[Trajectory]) -> Trajectory:
        """The environments, split over this host's devices."""
        parts = self.program.mesh.local_mesh.size
        return parallel.shard_environments(trajectories, parts)

    def status(self) -> tuple[int, float, float]:
        """Env steps, env steps per second and return, as the progress bar shows."""
        journal = self.journal
        return self.env_steps, journal.steps_per_s(), journal.recent_return()

    def note(
        self, metrics: Metrics, segments: Sequence[Segment], lag: int, end: Interrupt
    ) -> None:
        """Takes note of an update; fails if it is not finite."""
        values = {name: float(value) for name, value in metrics.items()}
        before = self.env_steps
        self._keeper.add(values, segments, update=self.update, lag=lag)
        if self._carries:
            self._carries = [segment.carry for segment in segments]
        self.is_whole = True
        self._tell(before, end)

    def _tell(self, before: int, interrupt: Interrupt) -> None:
        """Evaluates, records and saves what is due after an update."""
        config = self.config
        is_due = functools.partial(self.is_due, before=before, now=self.env_steps)
        extra: dict[str, float] = {}
        if config.eval_episodes and is_due(config.eval_every):
            extra = self._evaluate(interrupt)
        if extra or config.log_every == 0 or is_due(config.log_every):
            self.journal.write(self.env_steps, extra)
        if is_due(config.checkpoint_every):
            self.save()

    def _evaluate(self, interrupt: Interrupt) -> dict[str, float]:
        if jax.process_index() != 0:
            return {}
        evaluation = self.evaluate(self._eval_env, interrupt)
        values = {} if evaluation is None else evaluation.metrics()
        if self.config.on_nonfinite == "stop":
            self._keeper.check_finite(values, self.update)
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
        self.update = meta["update"]
        checkpoints.discard_after(step)

    def save(self) -> None:
        """Saves a checkpoint, unless this update has one."""
        if not self._keeper.is_saved(self.update):
            self._keeper.save(self.update, self._saved())

    def _saved(self) -> dict[str, Any]:
        """What a checkpoint holds; the actors only if they can be put back."""
        return {"agent": parallel.read_state(self.state), "actors": self._carries}
