"""What is kept of one run, or of one member of a population: records, checkpoints."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fps_jax.runtime import metrics, runs
from fps_jax.runtime.checkpoints import open_checkpoints
from fps_jax.runtime.exchange import NonFiniteError, Segment
from fps_jax.runtime.journal import History, Journal
from fps_jax.runtime.options import TrainConfig
from fps_jax.runtime.progress import summary_table
from fps_jax.types import AgentConfig, AgentState


class Keeper:
    """The folder of a run, and all that is written there.

    Attributes:
      directory: the folder; None writes nothing.
      journal: the records.
      checkpoints: those of the run; None if it writes nothing.
      env_steps: env steps made, those before it was resumed included.
    """

    def __init__(
        self,
        directory: Path | None,
        config: TrainConfig,
        agent_config: AgentConfig,
        meta: Mapping[str, Any],
        *,
        timers: metrics.Timers,
    ):
        """Writes the configuration and opens the records.

        Args:
          directory: the folder, which is there; None writes nothing.
          config: the options of the run.
          agent_config: those of its agent.
          meta: of the checkpoint that it goes on from; empty at its start.
          timers: of the learner.
        """
        self.directory, self._timers = directory, timers
        self._resumes = meta["resumes"] + 1 if meta else 0
        self.env_steps = meta.get("env_steps", 0)
        self.checkpoints = None
        sink, past = metrics.fan_out([]), []
        if directory is not None:
            options = dataclasses.asdict(config) | {
                "agent": dataclasses.asdict(agent_config)
            }
            runs.write_config(directory / "config.json", options)
            sink, past = metrics.open_sinks(
                directory,
                resume_at=self.env_steps,
                tensorboard=config.tensorboard,
                wandb_project=config.wandb_project,
                options=options,
            )
            self.checkpoints = open_checkpoints(
                directory / "checkpoints", keep_last=config.keep_checkpoints
            )
        past = past if meta else []
        self.journal = Journal(sink, past, config.num_actors, timers=timers)
        self.journal.recent_returns.extend(meta.get("recent_returns", ()))

    def add(
        self,
        values: Mapping[str, float],
        segments: Sequence[Segment],
        *,
        update: int,
        lag: int,
    ) -> None:
        """Takes note of an update.

        Args:
          values: the learner's metrics.
          segments: what it learned from, one an actor.
          update: its number.
          lag: versions between the acting and the learning policy.

        Raises:
          NonFiniteError: if one of the metrics is not finite; nothing was noted then.
        """
        self.check_finite(values, update)
        self.env_steps += int(values["env_steps"])
        self.journal.add(values, segments, lag=lag)

    def check_finite(self, values: Mapping[str, float], update: int) -> None:
        """Refuses numbers that are not finite.

        Args:
          values: by name.
          update: the number of the update that they came from.

        Raises:
          NonFiniteError: naming them.
        """
        bad = sorted(name for name, value in values.items() if not math.isfinite(value))
        if bad:
            raise NonFiniteError(
                f"{', '.join(bad)} became NaN or infinite at update {update}, "
                f"after {self.env_steps} env steps."
            )

    def is_saved(self, update: int) -> bool:
        """Whether this update has a checkpoint, or none is ever made.

        Args:
          update: its number.
        """
        return self.checkpoints is None or self.checkpoints.latest() == update

    def flush(self) -> None:
        """Writes a record of what none holds yet."""
        if self.env_steps and self.journal.latest("env_steps") != self.env_steps:
            self.journal.write(self.env_steps, {})

    def save(self, update: int, state: Any) -> None:
        """Saves a checkpoint.

        Args:
          update: its number; the last was saved before it.
          state: what `Run` restores.
        """
        if self.checkpoints is None:
            return
        self.flush()  # A resumed run would know nothing of what no record holds.
        meta = {
            "update": update,
            "env_steps": self.env_steps,
            "resumes": self._resumes,
            "recent_returns": list(self.journal.recent_returns),
        }
        with self._timers("checkpoint"):
            score = self.journal.latest("eval/return")
            self.checkpoints.save(update, state, meta=meta, score=score)

    def history(self, state: AgentState) -> History:
        """What the run leaves behind.

        Args:
          state: of the agent, on the host.
        """
        journal = self.journal
        latest = journal.latest("eval/return")
        latest = journal.recent_return() if math.isnan(latest) else latest
        return History(
            records=journal.records,
            state=state,
            directory=self.directory,
            summary=summary_table(
                env_steps=journal.env_steps(),
                wall_s=journal.wall_s(),
                episode_return=latest,
                threads=journal.seconds(),
            ),
        )
