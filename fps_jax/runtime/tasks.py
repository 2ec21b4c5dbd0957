"""EnvPool's tasks: which there are, which options they have, which spaces we take."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import envpool
import numpy as np

from fps_jax.types import Continuous, Discrete, EnvSpec

# Options of `envpool.make` that stand in no task's config.
_PIXEL_OPTIONS = {
    *("from_pixels", "render_mode", "render_width", "render_height"),
    "render_camera_id",
}
# Config fields that `make_env` sets, or that would break its contract.
_RESERVED_OPTIONS = {
    *("num_envs", "batch_size", "num_threads", "max_num_players", "max_episode_steps"),
    *("seed", "env_seed", "gym_reset_return_info", "base_path"),
}


class Task(NamedTuple):
    """A task of EnvPool, with its options chosen and checked.

    Attributes:
      spec: what an agent must know of it.
      action_dtype: the dtype in which it takes actions.
      options: the keywords that `envpool.make` needs for it.
    """

    spec: EnvSpec
    action_dtype: np.dtype
    options: dict[str, Any]


def read_task(
    env_id: str,
    max_episode_steps: int | None = None,
    env_options: Mapping[str, Any] | None = None,
) -> Task:
    """Reads what EnvPool says of a task, without making an environment.

    Args:
      env_id: an id of `envpool.list_all_envs()`.
      max_episode_steps: the time limit, in steps; None is the task's own.
      env_options: further options of the task, by EnvPool's names.

    Raises:
      ValueError: if the task or an option is unknown, or its spaces are not one array
        of observations and one discrete or bounded continuous action.
    """
    tasks = envpool.list_all_envs()
    if env_id not in tasks:
        raise ValueError(f"EnvPool has no env_id {env_id!r}.{_near(env_id, tasks)}")
    options = dict(env_options or {})
    config = envpool.make_spec(env_id).config._asdict()
    known = (config.keys() | _PIXEL_OPTIONS) - _RESERVED_OPTIONS
    for name in options:
        if name not in known:
            near = _near(name, known)
            raise ValueError(f"{env_id} has no env_options {name!r}.{near}")
    if max_episode_steps is not None:
        if max_episode_steps < 1:
            raise ValueError(f"max_episode_steps {max_episode_steps} must be >= 1.")
        options["max_episode_steps"] = max_episode_steps
    try:
        native: Any = envpool.make_spec(env_id, **options)
    except TypeError as error:
        raise ValueError(
            f"{env_id}: a value of env_options {options} has the wrong type."
        ) from error
    shape, dtype = _observation_space(env_id, native.state_array_spec)
    action, action_dtype = _action_space(env_id, native.action_array_spec)
    limit = native.config.max_episode_steps
    spec = EnvSpec(
        env_id=env_id,
        observation_shape=shape,
        observation_dtype=dtype,
        action=action,
        max_episode_steps=limit if limit < np.iinfo(np.int32).max else None,
    )
    return Task(spec, action_dtype, options)


def _observation_space(
    env_id: str, arrays: dict[str, Any]
) -> tuple[tuple[int, ...], np.dtype]:
    """Reads the shape of an observation, and its dtype as the agent sees it."""
    observations = {name: arrays[name] for name in arrays if name.startswith("obs")}
    observation, *others = observations.values()
    # A size of -1 stands for the players, or for a lone integer.
    if others or -1 in observation.shape:
        raise ValueError(
            f"{env_id}: observations {observations} are not supported; they must be "
            "one array of a fixed shape."
        )
    dtype = np.dtype(observation.dtype)
    seen_dtype = np.dtype(np.float32) if dtype == np.float64 else dtype
    return tuple(observation.shape), seen_dtype


def _action_space(
    env_id: str, arrays: dict[str, Any]
) -> tuple[Discrete | Continuous, np.dtype]:
    """Reads the action space, and the dtype of an action as EnvPool takes it."""
    *_, action = arrays.values()  # After the arrays that number the rows.
    dtype = np.dtype(action.dtype)
    shape = [size for size in action.shape if size != -1]
    if dtype.kind == "i" and not shape and action.minimum == 0:
        return Discrete(int(action.maximum) + 1), dtype
    if dtype.kind == "f" and len(shape) == 1:
        low = np.broadcast_to(action.minimum, shape)
        high = np.broadcast_to(action.maximum, shape)
        # EnvPool writes the largest number of a dtype for "no bound".
        if max(abs(low).max(), abs(high).max()) < np.finfo(np.float32).max:
            return Continuous(tuple(low.tolist()), tuple(high.tolist())), dtype
    raise ValueError(
        f"{env_id}: actions {action} are not supported; they must be one integer from "
        "0 or one vector with finite bounds."
    )


def _near(name: str, known: Iterable[str]) -> str:
    matches = difflib.get_close_matches(name, known)
    return f" Did you mean {', '.join(matches)}?" if matches else ""
