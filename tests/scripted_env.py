"""A deterministic environment for tests of the runtime, with state that can be saved.

Everything about it can be foretold: environment i runs through episodes of
`episode_length` steps, which end terminated and truncated in turn. What the policy
does is mixed, bit by bit, into a hash that it sees ever after, so two runs that show
the same observations have taken the same actions.
"""

import time
from typing import NamedTuple

import numpy as np

from fps_jax.runtime.envs import EnvStep, to_env_action
from fps_jax.types import Continuous, Discrete, EnvSpec

SHORTEST, LONGEST = 3, 8
THREE_ACTIONS = Discrete(3)


class ScriptedState(NamedTuple):
    """All that the environments remember.

    Attributes:
      episode: ``[E]``, episodes begun before this one.
      step: ``[E]``, steps taken in this episode.
      hash: ``[E]``, of every action that was not ignored, uint32.
      is_done: ``[E]``, the next step only resets.
      num_calls: calls of `step`, scalar.
    """

    episode: np.ndarray
    step: np.ndarray
    hash: np.ndarray
    is_done: np.ndarray
    num_calls: np.ndarray


def episode_length(index: np.ndarray, episode: np.ndarray) -> np.ndarray:
    """The number of steps of an episode of environment `index`."""
    return SHORTEST + (7 * index + 5 * episode) % (LONGEST - SHORTEST + 1)


def is_terminal(index: np.ndarray, episode: np.ndarray) -> np.ndarray:
    """Whether an episode of environment `index` terminates; if not, it is cut."""
    return (index + episode) % 2 == 0


class ScriptedEnv:
    """A `RestorableEnv` of global environments ``first .. first + num_envs - 1``.

    An observation is ``(global index, episode, step in the episode, hash in [0, 1))``.
    Rewards are in [0, 1]: 1 for the action ``step % num_actions``, or, if actions are
    continuous, less the farther the mean of the action is from 0.5 in even steps and
    from -0.5 in odd ones.

    Args:
      num_envs: E.
      first: global index of the first environment.
      action: the action space.
      fail_at_step: this call of `step`, counted from 0, raises a RuntimeError.
      nan_at_step: this call of `step` returns NaN as the first environment's
        `nan_field`.
      nan_field: ``"reward"`` or ``"observation"``.
      sleep_s: how long every step takes, in seconds.
    """

    def __init__(
        self,
        num_envs: int = 4,
        *,
        first: int = 0,
        action: Discrete | Continuous = THREE_ACTIONS,
        fail_at_step: int | None = None,
        nan_at_step: int | None = None,
        nan_field: str = "reward",
        sleep_s: float = 0.0,
    ):
        self.spec = EnvSpec("Scripted-v0", (4,), np.dtype(np.float32), action, LONGEST)
        self.num_envs = num_envs
        self._index = np.arange(first, first + num_envs)
        self._fail_at_step = fail_at_step
        self._nan_at_step = nan_at_step
        self._nan_field = nan_field
        self._sleep_s = sleep_s
        self.reset()

    def reset(self) -> np.ndarray:
        zeros = np.zeros(self.num_envs, np.int32)
        self._state = ScriptedState(
            episode=zeros,
            step=zeros,
            hash=np.full(self.num_envs, 2166136261, np.uint32),  # FNV's first value
            is_done=np.zeros(self.num_envs, bool),
            num_calls=np.zeros((), np.int32),
        )
        return self._observe()

    def step(self, action: np.ndarray) -> EnvStep:
        time.sleep(self._sleep_s)
        if self._state.num_calls == self._fail_at_step:
            raise RuntimeError(f"Scripted failure at step {self._fail_at_step}.")
        action = to_env_action(
            action,
            self.spec,
            num_envs=self.num_envs,
            dtype=np.dtype(np.int32 if self._is_discrete else np.float32),
        )
        old = self._state
        is_reset = old.is_done
        episode = old.episode + is_reset
        step = np.where(is_reset, 0, old.step + 1).astype(np.int32)
        is_done = step == episode_length(self._index, episode)
        is_terminal_now = is_done & is_terminal(self._index, episode)
        reward = np.where(is_reset, 0, self._reward(action)).astype(np.float32)
        self._state = ScriptedState(
            episode=episode,
            step=step,
            hash=np.where(is_reset, old.hash, _mix(old.hash, action)),
            is_done=is_done,
            num_calls=old.num_calls + np.int32(1),
        )
        result = EnvStep(
            observation=self._observe(),
            reward=reward,
            terminated=is_terminal_now,
            truncated=is_done & ~is_terminal_now,
            is_reset=is_reset,
        )
        if old.num_calls == self._nan_at_step:
            getattr(result, self._nan_field)[0] = np.nan
        return result

    def close(self) -> None:
        pass

    def get_state(self) -> ScriptedState:
        return self._state

    def set_state(self, state: ScriptedState) -> np.ndarray:
        self._state = state
        return self._observe()

    @property
    def _is_discrete(self) -> bool:
        return isinstance(self.spec.action, Discrete)

    def _observe(self) -> np.ndarray:
        state = self._state
        # 24 of the hash's bits: as many as a float32 holds.
        seen = (state.hash >> 8) / 2.0**24
        fields = [self._index, state.episode, state.step, seen]
        return np.stack(fields, axis=1).astype(np.float32)

    def _reward(self, action: np.ndarray) -> np.ndarray:
        step, space = self._state.step, self.spec.action
        if isinstance(space, Discrete):
            return action == step % space.num_actions
        low, high = np.array(space.low), np.array(space.high)
        mean = np.mean(2 * (action - low) / (high - low) - 1, axis=1)
        return 1 - np.abs(mean - np.where(step % 2 == 0, 0.5, -0.5)) / 1.5


def _mix(hash_: np.ndarray, action: np.ndarray) -> np.ndarray:
    """Mixes the bits of an action into a uint32 hash: FNV-1a, a word at a time."""
    for word in action.view(np.uint32).reshape(len(action), -1).T:
        hash_ = (hash_ ^ word) * np.uint32(16777619)
    return hash_
