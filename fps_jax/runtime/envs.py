"""Environments: what the acting loop asks of them, and EnvPool behind that contract.

An episode ends in a step that carries its true final observation. The next step of
that environment ignores the action, returns reward 0 and the first observation of a
new episode, and says so in `EnvStep.is_reset` (NEXT_STEP auto-reset).

EnvPool's `xla()` is never used: it is Linux only, knows no TPU, and corrupts memory
in float64 tasks unless JAX has x64 enabled. Nor can a pool's `recv` time out: whoever
steps an environment must watch for stalls.
"""

import functools
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import envpool
import numpy as np
from jaxtyping import Bool, Float32, Shaped, UInt8

from fps_jax.runtime import rendering
from fps_jax.runtime.tasks import read_task
from fps_jax.types import Continuous, Discrete, EnvSpec

MAX_STREAMS = 2**11
MAX_ENVS_PER_STREAM = 2**20

_INT32_MAX = 2**31 - 1


class EnvStep(NamedTuple):
    """What one step of E environments returned.

    Attributes:
      observation: ``[E, ...]``; at the end of an episode, its true final observation.
      reward: ``[E]``; 0 where `is_reset`.
      terminated: ``[E]``, the episode ended in a state worth nothing.
      truncated: ``[E]``, the episode was cut; never together with `terminated`.
      is_reset: ``[E]``, this step only reset the environment and ignored its action:
        True exactly in the step after a terminated or truncated one.
    """

    observation: Shaped[np.ndarray, " E *observation"]
    reward: Float32[np.ndarray, " E"]
    terminated: Bool[np.ndarray, " E"]
    truncated: Bool[np.ndarray, " E"]
    is_reset: Bool[np.ndarray, " E"]


@runtime_checkable
class VectorEnv(Protocol):
    """E environments of one kind, stepped together, by one thread at a time.

    Attributes:
      spec: what an agent must know of each of them.
      num_envs: how many they are, E.
    """

    spec: EnvSpec
    num_envs: int

    def reset(self) -> Shaped[np.ndarray, " E *observation"]:
        """Starts a new episode everywhere; returns the first observations."""
        ...

    def step(self, action: Shaped[np.ndarray, " E *action"]) -> EnvStep:
        """Steps every environment once.

        Args:
          action: as the policy drew it, integers or floats meant for ``[-1, 1]``; it
            is not changed in place.

        Raises:
          ValueError: if an action is not finite, or is none of the task's.
        """
        ...

    def close(self) -> None:
        """Frees the environments, which cannot be used afterwards."""
        ...


@runtime_checkable
class RestorableEnv(VectorEnv, Protocol):
    """Environments whose state can be saved, so that a run resumes exactly.

    EnvPool's cannot: there a resumed run starts new episodes.
    """

    def get_state(self) -> Any:
        """Returns the complete state: numpy arrays that later steps leave alone."""
        ...

    def set_state(self, state: Any) -> Shaped[np.ndarray, " E *observation"]:
        """Continues from a state that `get_state` gave; returns its observations."""
        ...


@runtime_checkable
class RenderableEnv(VectorEnv, Protocol):
    """Environments that can be drawn.

    EnvPool's can if `make_env` was given the `env_options` of `rendering.drawing`.
    """

    def render(self, envs: Sequence[int]) -> UInt8[np.ndarray, "N H W 3"]:
        """Draws some of the environments as they are now.

        Args:
          envs: which, N of them; at least one.

        Raises:
          RenderError: if the task, or this machine, cannot draw them.
        """
        ...


def env_seeds(seed: int, *, stream: int, first: int, count: int) -> list[int]:
    """Returns the seeds of environments ``first .. first + count - 1`` of a stream.

    The seed of environment i is ``pi(stream * 2**20 + i)``, where `pi` is a permutation
    of the 31-bit integers keyed by `seed`. So no two environments of a run share a
    seed, in one stream or in two, however they are split over actors and hosts.

    Args:
      seed: the run's seed, at least 0.
      stream: one purpose that needs episodes of its own (training, evaluation,
        training after a resume), in ``[0, 2**11)``.
      first: index of the first environment among all of the stream's, at least 0.
      count: number of seeds, at least 1; ``first + count`` is at most ``2**20``.

    Raises:
      ValueError: if an argument is out of its range.
    """
    if seed < 0:
        raise ValueError(f"seed {seed} must be at least 0.")
    if not 0 <= stream < MAX_STREAMS:
        raise ValueError(f"stream {stream} must be in [0, {MAX_STREAMS}).")
    _check_at_least_one("count", count)
    if not 0 <= first <= MAX_ENVS_PER_STREAM - count:
        raise ValueError(
            f"first {first} must be at least 0, and first + count = {first + count} "
            f"at most {MAX_ENVS_PER_STREAM}."
        )
    start = stream * MAX_ENVS_PER_STREAM + first
    mixed = np.arange(start, start + count, dtype=np.uint64)
    # Each of the three steps can be undone modulo 2**31, so no two integers meet.
    for key in np.random.SeedSequence(seed).generate_state(4, np.uint64):
        mixed = (mixed + key) & _INT32_MAX
        mixed = (mixed * (key | 1)) & _INT32_MAX
        mixed = mixed ^ (mixed >> 16)
    return mixed.tolist()


def to_env_action(
    action: Shaped[np.ndarray, " E *action"],
    spec: EnvSpec,
    *,
    num_envs: int,
    dtype: np.dtype,
) -> Shaped[np.ndarray, " E *action"]:
    """Turns a policy's actions into the environment's; EnvPool checks none of this.

        env_action = (high + low) / 2 + clip(action, -1, 1) * (high - low) / 2

    for a continuous space; a discrete action stays what it is.

    Args:
      action: ``[E]`` integers in ``[0, num_actions)``, or ``[E, A]`` finite floats.
      spec: the environment's.
      num_envs: E.
      dtype: of the result, which is a new array.

    Raises:
      ValueError: if the shape is wrong, or an action is not finite, or not an integer
        in range; the message names the environment.
    """
    space = spec.action
    is_discrete = isinstance(space, Discrete)
    shape = (num_envs,) if is_discrete else (num_envs, space.size)
    if action.shape != shape:
        raise ValueError(f"{spec.env_id}: actions {action.shape} must be {shape}.")
    if is_discrete:
        if action.dtype.kind not in "iu":
            raise ValueError(f"{spec.env_id}: {action.dtype} actions must be integers.")
        is_good = (action >= 0) & (action < space.num_actions)
        demand = f"in [0, {space.num_actions})"
    else:
        is_good = np.isfinite(action).all(axis=1)
        demand = "finite"
    if not is_good.all():
        i = int(np.argmin(is_good))
        raise ValueError(
            f"{spec.env_id}: action {action[i]} of environment {i} must be {demand}."
        )
    if is_discrete:
        return action.astype(dtype)
    centre, half_width = _centre_and_half_width(space)
    unit = np.clip(action.astype(np.float64), -1.0, 1.0)
    return (centre + unit * half_width).astype(dtype)


@functools.lru_cache
def _centre_and_half_width(space: Continuous) -> tuple[np.ndarray, np.ndarray]:
    """Of a box, as arrays; remembered, since every step asks for them."""
    low, high = np.array(space.low), np.array(space.high)
    return (high + low) / 2, (high - low) / 2


class EnvPoolEnv:
    """An EnvPool behind the `VectorEnv` contract; made by `make_env`.

    EnvPool calls a real end on the last step that the time limit allows truncated, not
    terminated, so its final observation is bootstrapped. That is left as it is.
    """

    def __init__(self, pool: Any, spec: EnvSpec, action_dtype: np.dtype):
        """Wraps a pool in sync mode; see `make_env`."""
        self.spec = spec
        self.num_envs = len(pool)
        self._pool: Any = pool
        self._action_dtype = action_dtype
        # A pool that was never reset spends its first step on that.
        self._is_done = np.ones(self.num_envs, bool)

    def reset(self) -> Shaped[np.ndarray, " E *observation"]:
        """Starts a new episode everywhere; returns the first observations."""
        observation, _ = self._pool.reset()
        self._is_done = np.zeros(self.num_envs, bool)
        return _as_seen(observation)

    def step(self, action: Shaped[np.ndarray, " E *action"]) -> EnvStep:
        """Steps every environment once; see `VectorEnv.step`."""
        env_action = to_env_action(
            action, self.spec, num_envs=self.num_envs, dtype=self._action_dtype
        )
        observation, reward, terminated, truncated, _ = self._pool.step(env_action)
        # Not `elapsed_step == 0`: a lost life (Atari's `episodic_life`) ends an episode
        # and leaves that count running.
        is_reset, self._is_done = self._is_done, terminated | truncated
        return EnvStep(
            observation=_as_seen(observation),
            reward=np.asarray(reward, np.float32),
            terminated=terminated,
            truncated=truncated & ~terminated,
            is_reset=is_reset,
        )

    def render(self, envs: Sequence[int]) -> UInt8[np.ndarray, "N H W 3"]:
        """Draws some of the environments; see `RenderableEnv`."""
        return rendering.draw(self._pool, self.spec.env_id, envs)

    def close(self) -> None:
        """Drops the pool: EnvPool ends its threads when the last reference goes."""
        self._pool = None


def make_env(
    env_id: str,
    *,
    num_envs: int,
    seeds: Sequence[int],
    num_threads: int | None = None,
    max_episode_steps: int | None = None,
    env_options: Mapping[str, Any] | None = None,
) -> EnvPoolEnv:
    """Makes `num_envs` environments of one EnvPool task.

    Args:
      env_id: an id of `envpool.list_all_envs()`.
      num_envs: E, at least 1.
      seeds: one int32 for each environment. Those of one run differ, see `env_seeds`;
        members of a population with the same seed have the same.
      num_threads: threads that step them; None is one each, as far as cores go.
      max_episode_steps: the time limit, in steps; None is the task's own.
      env_options: further options of the task, by EnvPool's names, such as Atari's
        ``frame_skip``, ``stack_num``, ``episodic_life``, ``noop_max``, ``reward_clip``
        and ``repeat_action_probability``.

    Raises:
      ValueError: if the task or an option is unknown, or its spaces are not one array
        of observations and one discrete or bounded continuous action, or a number is
        out of its range.
    """
    if num_threads is None:
        num_threads = min(num_envs, os.cpu_count() or 1)
    _check_at_least_one("num_envs", num_envs)
    _check_at_least_one("num_threads", num_threads)
    _check_seeds(seeds, num_envs)
    task = read_task(env_id, max_episode_steps, env_options)
    pool: Any = envpool.make(
        env_id,
        env_type="gymnasium",
        num_envs=num_envs,
        num_threads=num_threads,
        seed=list(seeds),  # One int would seed environment i with seed + i.
        **task.options,
    )
    if {"from_pixels", "render_mode"} & task.options.keys():
        rendering.share_egl()
    with warnings.catch_warnings():
        # EnvPool builds this space on first use, a float32 box from float64 bounds.
        warnings.filterwarnings("ignore", message=".*precision lowered by casting")
        _ = pool.observation_space
    return EnvPoolEnv(pool, task.spec, task.action_dtype)


def env_spec(
    env_id: str,
    *,
    max_episode_steps: int | None = None,
    env_options: Mapping[str, Any] | None = None,
) -> EnvSpec:
    """Describes an EnvPool task without making one; arguments as in `make_env`."""
    return read_task(env_id, max_episode_steps, env_options).spec


def _as_seen(observation: np.ndarray) -> np.ndarray:
    """Casts float64 observations to float32, on the host; leaves the others."""
    if observation.dtype != np.float64:
        return observation
    with np.errstate(over="ignore"):  # Too large is infinite, which the runtime counts.
        return observation.astype(np.float32)


def _check_seeds(seeds: Sequence[int], num_envs: int) -> None:
    if len(seeds) != num_envs:
        raise ValueError(f"{len(seeds)} seeds were given for num_envs {num_envs}.")
    for seed in seeds:
        if not -(2**31) <= seed <= _INT32_MAX:
            raise ValueError(f"seeds: {seed} must be an int32.")


def _check_at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} {value} must be at least 1.")
