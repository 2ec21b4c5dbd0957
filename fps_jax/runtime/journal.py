"""What happened in a run, gathered between records and written to its sinks."""

import dataclasses
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from fps_jax.runtime.exchange import Episode, Segment
from fps_jax.runtime.metrics import Sink, Timers
from fps_jax.types import AgentState


@dataclasses.dataclass(frozen=True)
class History:
    """What a run leaves behind.

    Attributes:
      records: one dict a record, in order; ``env_steps`` is in each.
      state: the agent's state at the end, on the host.
      directory: the run's folder; None if it wrote nothing.
      summary: a table of its return, its speed and where its time went.
    """

    records: list[dict[str, Any]]
    state: AgentState
    directory: Path | None
    summary: Table

    def column(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """The env steps and values of one metric, where it was recorded.

        Args:
          name: such as ``eval/return``.

        Raises:
          KeyError: if no record has it.
        """
        rows = [(r["env_steps"], r[name]) for r in self.records if name in r]
        if not rows:
            known = sorted({key for record in self.records for key in record})
            raise KeyError(f"no record has {name!r}; there are {known}.")
        steps, values = zip(*rows, strict=True)
        return np.asarray(steps), np.asarray(values)


class Journal:
    """Gathers updates into records.

    Attributes:
      records: one dict a record, in order.
      recent_returns: of the last hundred training episodes.
      timers: where the learner's time goes.
    """

    def __init__(
        self,
        sink: Sink,
        past: Sequence[dict[str, Any]],
        num_actors: int,
        *,
        timers: Timers | None = None,
    ):
        """Opens the journal.

        Args:
          sink: where records are written.
          past: records of the run before it was resumed.
          num_actors: how many actors report where their time goes.
          timers: of the learner; None makes new ones.
        """
        self.records = list(past)
        self.recent_returns: deque[float] = deque(maxlen=100)
        self.timers = timers or Timers()
        self._sink = sink
        self._actors = [Timers() for _ in range(num_actors)]
        self._updates: list[Mapping[str, float]] = []
        self._episodes: list[Episode] = []
        self._started_at = time.perf_counter()
        self._env_steps = 0
        self._nonfinite_rows = 0

    def add(
        self, update: Mapping[str, float], segments: Sequence[Segment], *, lag: int
    ) -> None:
        """Takes note of one update.

        Args:
          update: the learner's metrics.
          segments: what it learned from, one an actor.
          lag: versions between the acting and the learning policy.
        """
        self._updates.append({**update, "lag": lag})
        self._env_steps += int(update["env_steps"])
        self._nonfinite_rows += sum(int(s.nonfinite.sum()) for s in segments)
        episodes = [e for s in segments for e in s.episodes]
        self._episodes += episodes
        self.recent_returns.extend(e.total_reward for e in episodes)
        for timers, segment in zip(self._actors, segments, strict=True):
            for name, seconds in segment.seconds.items():
                timers.add(name, seconds)

    def write(self, env_steps: int, extra: Mapping[str, float]) -> None:
        """Writes a record of all that was added since the last one.

        Args:
          env_steps: of the whole run, those before it was resumed included.
          extra: what else it says, such as an evaluation.
        """
        record: dict[str, float] = dict(extra)
        if self._updates:
            means = {
                f"learn/{name}": float(np.mean([u[name] for u in self._updates]))
                for name in self._updates[0]
                if name != "env_steps"
            }
            record = {**means, **record, **self._episode_means()}
        record["wall_s"] = self.wall_s()
        record["steps_per_s"] = self.steps_per_s()
        record["nonfinite_rows"] = self._nonfinite_rows
        for thread, seconds in self.seconds().items():
            record |= {f"seconds/{thread}/{k}": v for k, v in seconds.items()}
        self._updates, self._episodes = [], []
        self.records.append({"env_steps": env_steps, **record})
        self._sink.write(env_steps, record)

    def close(self) -> None:
        """Closes the sinks."""
        self._sink.close()

    def steps_per_s(self) -> float:
        """Env steps per second since the journal was opened, everything counted."""
        return self._env_steps / self.wall_s()

    def wall_s(self) -> float:
        """Seconds since the journal was opened."""
        return time.perf_counter() - self._started_at

    def env_steps(self) -> int:
        """Env steps since the journal was opened."""
        return self._env_steps

    def seconds(self) -> dict[str, dict[str, float]]:
        """Where the time of each thread went."""
        actors = {f"actor {i}": t.totals() for i, t in enumerate(self._actors)}
        return actors | {"learner": self.timers.totals()}

    def latest(self, name: str) -> float:
        """The last recorded value of a metric; NaN if there is none."""
        values = (r[name] for r in reversed(self.records) if name in r)
        return float(next(values, math.nan))

    def recent_return(self) -> float:
        """Mean return of the last hundred training episodes; NaN before the first."""
        returns = self.recent_returns
        return float(np.mean(returns)) if returns else math.nan

    def _episode_means(self) -> dict[str, float]:
        if not self._episodes:
            return {}
        return {
            "train/return": float(np.mean([e.total_reward for e in self._episodes])),
            "train/length": float(np.mean([e.length for e in self._episodes])),
            "train/episodes": len(self._episodes),
        }
