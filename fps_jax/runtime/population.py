"""Trains a population: runs that differ in seeds and numbers alone, in one program.

Every member is kept as a run of its own would be: a folder with its configuration,
records and checkpoints, which `Run` and whoever reads runs can go on with. A member
that is no longer finite, or whose environments are not, stops and says why in
``failure.json``; the others go on as if it had never been there.
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fps_jax.runtime import envs, parallel, runs, stacking
from fps_jax.runtime.checkpoints import open_checkpoints
from fps_jax.runtime.evaluation import Evaluation
from fps_jax.runtime.exchange import NonFiniteError, Segment
from fps_jax.runtime.interrupts import Interrupt, interrupts
from fps_jax.runtime.journal import History
from fps_jax.runtime.keeping import Keeper
from fps_jax.runtime.layout import Layout, choose
from fps_jax.runtime.loop import EVALUATE, INIT, Loop
from fps_jax.runtime.options import TrainConfig
from fps_jax.runtime.program import build, make_agent
from fps_jax.types import AgentConfig, Metrics, Trajectory

FAILURE = "failure.json"


class Member(NamedTuple):
    """One of a population.

    Attributes:
      name: of its folder.
      agent: its options; members may differ in numeric hyper-parameters alone.
      seed: root of its random numbers.
    """

    name: str
    agent: AgentConfig
    seed: int


class Outcome(NamedTuple):
    """What became of a member.

    Attributes:
      member: which.
      history: up to its end.
      failure: why it stopped before; None if it did not.
    """

    member: Member
    history: History
    failure: str | None


def train_population(
    members: Sequence[Member],
    config: TrainConfig | None = None,
    *,
    make_env: Callable[..., envs.VectorEnv] = envs.make_env,
) -> list[Outcome]:
    """Trains several members at once.

    A member's curve is that of `training.train` with its options and seed: to rounding
    at first, and in distribution once rounding has grown. But for what is due every so
    many env steps: rows that only reset an environment count there, so that it is due
    for all members at once.

    Args:
      members: at least one, with different names.
      config: the options of each of their runs, but for the seed; members' folders are
        made in ``directory`` itself. None is all defaults.
      make_env: makes environments, with the arguments of `envs.make_env`.

    Returns:
      What became of each, in their order.

    Raises:
      ValueError: if an option is impossible, or two members need different programs;
        nothing has run then.
      CheckpointError: if a checkpoint to resume from is damaged.
      KeyboardInterrupt: after Ctrl-C, once checkpoints are saved; SystemExit after
        SIGTERM likewise.
    """
    return Population(members, config or TrainConfig(), make_env=make_env).train()


class Population(Loop):
    """P members in one program, on one set of environments.

    Attributes:
      members: in the order of the axis P.
      failures: why members stopped, by their places.
    """

    def __init__(
        self,
        members: Sequence[Member],
        config: TrainConfig,
        *,
        make_env: Callable[..., envs.VectorEnv] = envs.make_env,
        on_failure: Callable[[Member, str], None] = lambda member, reason: None,
        on_evaluation: Callable[[list[dict[str, Any]], bool], None] | None = None,
    ):
        """Builds everything, or goes back to the last update that all have saved.

        Args:
          members: see `train_population`.
          config: likewise.
          make_env: likewise.
          on_failure: told of a member that stops, and why.
          on_evaluation: told the records of the members that live, once an evaluation
            is in them, and whether it was the last. What it raises ends the run.

        Raises:
          ValueError: if an option is impossible; nothing has been written then.
        """
        _check(members, config)
        # Should a crash part the members' newest checkpoints, all have the one before.
        keep = max(2, config.keep_checkpoints)
        config = dataclasses.replace(config, keep_checkpoints=keep)
        seeds = [member.seed for member in members]
        root = jnp.stack([jax.random.key(seed) for seed in seeds])
        super().__init__(config, seeds=seeds, root=root, make_env=make_env)
        self.members, self.failures = members, dict[int, str]()
        self._on_failure, self._on_evaluation = on_failure, on_evaluation
        self._folders = _folders(members, config)
        step, metas = self._find_checkpoints()
        self._resumes = max(m["resumes"] for m in metas) + 1 if step is not None else 0

        self._eval_env = self.make_envs(EVALUATE, 0, max(1, config.eval_episodes))
        self._layout = self._build()
        self.program = self._layout.program
        self.state = self._layout.init(self.key(INIT))
        self.num_updates = self.updates_in_all()
        self.actors = [
            self.make_actor(i, masks_nonfinite=True) for i in range(config.num_actors)
        ]
        if step is not None:
            self._restore(step)
        elif config.resume:
            self._clear()
        self._keepers = self._open_keepers(metas)

    def train(self) -> list[Outcome]:
        """Runs to the end, or to a signal, or until no member is left."""
        try:
            with interrupts() as interrupt:
                self.loop(interrupt)
            states = self._layout.of_members(self.state)
            return [
                Outcome(member, keeper.history(states[p]), self.failures.get(p))
                for p, (member, keeper) in enumerate(zip(self.members, self._keepers))
            ]
        finally:
            for keeper in self._keepers:
                keeper.journal.close()
            self._eval_env.close()

    # ------------------------------------------------------------ within the loop

    def is_over(self) -> bool:
        """Whether all updates are made, or no member is left to make them."""
        return super().is_over() or len(self.failures) == len(self.members)

    def learner_view(self) -> Any:
        """All members' learners, on one device."""
        return self._layout.learner_view(self.state)

    def batch_of(self, trajectories: Sequence[Trajectory]) -> Any:
        """The environments member by member, split over the devices."""
        return self._layout.batch_of(trajectories)

    def status(self) -> tuple[int, float, float]:
        """Env steps of all, env steps per second, and the mean return of the living."""
        journals = [self._keepers[p].journal for p in self._living()]
        steps = self.update * self.steps_of_update() * len(self.members)
        returns = [journal.recent_return() for journal in journals]
        speed = sum((journal.steps_per_s() for journal in journals), start=0.0)
        return steps, speed, float(np.mean(returns)) if returns else float("nan")

    def note(
        self, metrics: Metrics, segments: Sequence[Segment], lag: int, end: Interrupt
    ) -> None:
        """Takes note of an update of every member; those that fail stop."""
        for p in self._living():
            values = {name: float(value[p]) for name, value in metrics.items()}
            mine = [_of_member(segment, p, len(self.members)) for segment in segments]
            try:
                self._check_envs(mine)
                self._keepers[p].add(values, mine, update=self.update, lag=lag)
            except NonFiniteError as error:
                self._fail(p, error)
        self.is_whole = True
        self._tell(end)

    def _check_envs(self, segments: Sequence[Segment]) -> None:
        if self.config.on_nonfinite == "stop" and any(
            segment.nonfinite.any() for segment in segments
        ):
            raise NonFiniteError(
                f"an environment of {self.config.env} returned a NaN or an infinity "
                f"in rollout {self.update - 1} (on_nonfinite is 'stop')."
            )

    def _tell(self, interrupt: Interrupt) -> None:
        """Evaluates, records and saves what is due after an update."""
        config, steps = self.config, self.update * self.steps_of_update()
        before = steps - self.steps_of_update()
        is_due = functools.partial(self.is_due, before=before, now=steps)
        extras: dict[int, dict[str, float]] = {}
        if config.eval_episodes and is_due(config.eval_every) and self._living():
            extras = self._evaluate(interrupt)
        for p in self._living():
            extra = extras.get(p, {})
            if extra or config.log_every == 0 or is_due(config.log_every):
                keeper = self._keepers[p]
                keeper.journal.write(keeper.env_steps, extra)
        if is_due(config.checkpoint_every):
            self.save()
        if extras and self._living() and self._on_evaluation is not None:
            records = [self._keepers[p].journal.records[-1] for p in self._living()]
            self._on_evaluation(records, self.update == self.num_updates)

    def _evaluate(self, interrupt: Interrupt) -> dict[int, dict[str, float]]:
        """Evaluates all members at once; those that are not finite stop."""
        evaluation = self.evaluate(self._eval_env, interrupt)
        if evaluation is None:
            return {}
        split = lambda x: np.split(x, len(self.members), axis=1)
        parts = zip(split(evaluation.returns), split(evaluation.lengths))
        values = [Evaluation(*part).metrics() for part in parts]
        for p in self._living():
            try:
                if self.config.on_nonfinite == "stop":
                    self._keepers[p].check_finite(values[p], self.update)
            except NonFiniteError as error:
                self._fail(p, error)
        return dict(enumerate(values))

    def _living(self) -> list[int]:
        return [p for p in range(len(self.members)) if p not in self.failures]

    def _fail(self, p: int, error: NonFiniteError) -> None:
        """Stops a member; what it had recorded and saved stays."""
        reason, keeper = str(error), self._keepers[p]
        self.failures[p] = reason
        keeper.flush()
        if self._folders[p] is not None:
            steps = keeper.env_steps
            about = {"reason": reason, "update": self.update, "env_steps": steps}
            runs.write_whole(self._folders[p] / FAILURE, json.dumps(about) + "\n")
        self._on_failure(self.members[p], reason)

    # ----------------------------------------------------------------- what lasts

    def save(self) -> None:
        """Saves a checkpoint of every member that lives, unless this update has one."""
        due = [p for p in self._living() if not self._keepers[p].is_saved(self.update)]
        if not due:
            return
        states = self._layout.of_members(self.state)
        for p in due:
            self._keepers[p].save(self.update, {"agent": states[p], "actors": []})

    def _find_checkpoints(self) -> tuple[int | None, list[dict[str, Any]]]:
        """The last update that all members have saved, and what they say of it.

        Members that have failed are not asked.
        """
        nothing: list[dict[str, Any]] = [{} for _ in self.members]
        if not self.config.resume:
            return None, nothing
        failed = _failed(self._folders)
        checkpoints = [self._checkpoints(p) for p in range(len(self.members))]
        saved = [set(c.steps()) for p, c in enumerate(checkpoints) if p not in failed]
        # If all have failed there is nothing to go on with: the end was their last.
        ends = {about["update"] for about in failed.values()}
        steps = set.intersection(*saved) if saved else {max(ends)}
        if not steps:
            return None, nothing
        step, metas = max(steps), []
        for p, mine in enumerate(checkpoints):
            about = failed.get(p)
            last = mine.latest() if about else step
            meta = {"resumes": 0} if last is None else mine.meta(last)
            metas.append(meta | (about or {}))
        self.failures |= {p: about["reason"] for p, about in failed.items()}
        return step, metas

    def _checkpoints(self, p: int):
        keep = self.config.keep_checkpoints
        return open_checkpoints(self._folders[p] / "checkpoints", keep_last=keep)

    def _restore(self, step: int) -> None:
        """Goes on where all members have saved; numeric options hold as given now."""
        states = self._layout.of_members(self.state)
        for p in self._living():
            target = {"agent": states[p], "actors": []}
            saved = self._checkpoints(p).restore(step, target)[0]["agent"]
            hyper = states[p].learner.hyper
            states[p] = saved._replace(learner=saved.learner._replace(hyper=hyper))
            self._checkpoints(p).discard_after(step)
        self.state = self._layout.place(states)
        self.update = step

    def _clear(self) -> None:
        """Forgets what a start that came to nothing has left."""
        for p, folder in enumerate(self._folders):
            self._checkpoints(p).discard_after(-1)
            (folder / FAILURE).unlink(missing_ok=True)

    def _open_keepers(self, metas: Sequence[dict[str, Any]]) -> list[Keeper]:
        keepers = []
        for member, folder, meta in zip(self.members, self._folders, metas):
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
            config = dataclasses.replace(self.config, seed=member.seed)
            timers = self.timers
            keepers.append(Keeper(folder, config, member.agent, meta, timers=timers))
        return keepers

    def _build(self) -> Layout:
        """Compiles one program for all members."""
        config, spec = self.config, self._eval_env.spec
        configs = [member.agent for member in self.members]
        hyper = stacking.stack_hyper(configs, config.total_env_steps)
        devices = parallel.learner_devices(config.learner_devices)
        alone = make_agent(configs[0], spec, config, devices=1)
        layout = choose(alone, len(configs), parallel.learner_mesh(devices))
        for agent_config in dict.fromkeys(configs):
            build(agent_config, spec, config, layout.member_mesh)  # Refuses misfits.
        agent = make_agent(configs[0], spec, config, devices=layout.devices_each)
        layout.build(agent, spec, hyper, mapping=config.mapping)
        return layout


def _of_member(segment: Segment, p: int, members: int) -> Segment:
    """A member's part of what an actor's rollout tells, without its rows."""
    envs_each = len(segment.nonfinite) // members
    mine = range(p * envs_each, (p + 1) * envs_each)
    return segment._replace(
        episodes=[episode for episode in segment.episodes if episode.env in mine],
        nonfinite=segment.nonfinite[mine.start : mine.stop],
    )


def _failed(folders: Sequence[Path]) -> dict[int, dict[str, Any]]:
    """What members that have failed left behind of it, by their places."""
    paths = ((p, folder / FAILURE) for p, folder in enumerate(folders))
    read = lambda path: json.loads(path.read_text(encoding="utf-8"))
    return {p: read(path) for p, path in paths if path.exists()}


def _folders(members: Sequence[Member], config: TrainConfig) -> list[Any]:
    """Each member's folder; None if nothing is written."""
    if config.directory is None:
        return [None] * len(members)
    folders = [Path(config.directory) / member.name for member in members]
    there = [folder for folder in folders if (folder / "metrics.jsonl").exists()]
    if there and not config.resume:
        raise ValueError(f"directory: {there[0]} is there; resume goes on with it.")
    return folders


def _check(members: Sequence[Member], config: TrainConfig) -> None:
    if not members:
        raise ValueError("members: there must be at least one.")
    names = [member.name for member in members]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"members: {twice!r} names two of them; each must differ.")
    for refused in ("distributed", "resume_step"):
        if getattr(config, refused):
            raise ValueError(
                f"{refused} {getattr(config, refused)} is not for a population, which "
                f"lives on one host and resumes where all members can."
            )
