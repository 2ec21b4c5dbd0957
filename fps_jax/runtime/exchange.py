"""What the learner and its actors hand each other, and how they wait for it.

Every wait here ends early when the crew stops; the learner's fails after a time limit.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from fps_jax.types import Trajectory


class Stopped(Exception):
    """A wait was ended because the crew stops."""


class StalledError(RuntimeError):
    """A wait took longer than its limit: something that it waited for hangs."""


class NonFiniteError(RuntimeError):
    """A NaN or an infinity appeared where none may be."""


class Episode(NamedTuple):
    """A finished episode.

    Attributes:
      total_reward: undiscounted return.
      length: env steps.
      env: which of the actor's environments it was in.
    """

    total_reward: float
    length: int
    env: int


class ActorCarry(NamedTuple):
    """Where an actor stands between two rollouts.

    Attributes:
      observation: ``[E, ...]``, what the next action answers.
      episode_return: ``[E]``, reward of the running episodes so far.
      episode_length: ``[E]``, env steps of the running episodes so far.
      env_state: of an environment that can be restored; ``()`` otherwise.
    """

    observation: np.ndarray
    episode_return: np.ndarray
    episode_length: np.ndarray
    env_state: Any


class Segment(NamedTuple):
    """One rollout of one actor.

    Attributes:
      trajectory: host arrays, ``[T, E, ...]``.
      episodes: that ended in it, each once.
      rollout: its number k.
      version: of the parameters that acted.
      nonfinite: ``[E]``, rows masked because something in them was NaN or infinite.
      carry: where the actor stands after it.
      seconds: where its time went, by name.
    """

    trajectory: Trajectory
    episodes: list[Episode]
    rollout: int
    version: int
    nonfinite: np.ndarray
    carry: ActorCarry
    seconds: dict[str, float]


class Exchange:
    """What the learner and its actors hand each other, under one lock.

    Parameters go to the actors by version; segments come back through one bounded
    first-in-first-out queue an actor, read in the actors' order. The first failure of
    any thread ends every wait.
    """

    def __init__(self, num_actors: int, *, max_lag: int, time_limit_s: float):
        """Opens the exchange.

        Args:
          num_actors: how many queues there are.
          max_lag: versions that acting may be behind; each queue holds one more.
          time_limit_s: longest wait, in seconds.
        """
        self._changed = threading.Condition()
        self._queues = [deque[Segment]() for _ in range(num_actors)]
        self._capacity = max_lag + 1
        self._versions: dict[int, Sequence[Any]] = {}
        self._time_limit_s = time_limit_s
        self._stopped = False
        self.error: BaseException | None = None

    def publish(self, version: int, params: Sequence[Any]) -> None:
        """Offers the parameters of a version, one entry an actor."""
        with self._changed:
            self._versions[version] = params
            self._versions.pop(version - self._capacity, None)
            self._changed.notify_all()

    def params(self, version: int, actor: int, *, limit_s: float | None = None) -> Any:
        """Waits for the parameters of a version, if need be longer than `take` does."""
        is_there = lambda: version in self._versions
        with self._changed:
            self._wait(is_there, f"parameters {version}", limit_s=limit_s)
            return self._versions[version][actor]

    def put(self, actor: int, segment: Segment, *, limit_s: float | None = None):
        """Waits for room in an actor's queue and adds a segment."""
        queue = self._queues[actor]
        is_room = lambda: len(queue) < self._capacity
        with self._changed:
            self._wait(is_room, "room in the queue", limit_s=limit_s)
            queue.append(segment)
            self._changed.notify_all()

    def take(self, *, is_interrupted: Callable[[], bool]) -> list[Segment]:
        """Waits for the oldest segment of every actor.

        Args:
          is_interrupted: asked several times a second; True ends the wait.

        Raises:
          Stopped: if it was interrupted.
          Exception: whatever ended an actor.
        """
        ready = lambda: all(self._queues)
        with self._changed:
            try:
                self._wait(ready, "a rollout of every actor", is_interrupted)
            except Stopped:
                if self.error is not None:
                    raise self.error from None
                raise
            segments = [queue.popleft() for queue in self._queues]
            self._changed.notify_all()
            return segments

    def stop(self, error: BaseException | None = None) -> None:
        """Ends every wait, now and later; keeps the first error that it is given."""
        with self._changed:
            self._stopped = True
            self.error = self.error or error
            self._changed.notify_all()

    def is_stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._stopped

    def _wait(self, is_ready, what, is_interrupted=lambda: False, *, limit_s=None):
        """Waits for a condition; signals interrupt only the main thread's waits."""
        limit_s = self._time_limit_s if limit_s is None else limit_s
        limit = time.monotonic() + limit_s
        while not is_ready() or self._stopped:
            if self._stopped or is_interrupted():
                raise Stopped(f"stopped while waiting for {what}.")
            if time.monotonic() > limit:
                raise StalledError(
                    f"waited {limit_s:g} s for {what} (the limit is stall_limit_s)."
                )
            self._changed.wait(timeout=0.2)
