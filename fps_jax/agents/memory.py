"""What an agent remembers: a replay of its steps, which knows where streams go on."""

from collections.abc import Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped

from fps_jax.replay import ring
from fps_jax.replay.replay import Replay
from fps_jax.replay.states import ReplayState
from fps_jax.types import Discrete, EnvSpec, Step, Trajectory


class Memory(NamedTuple):
    """What a device remembers.

    Attributes:
      replay: its steps.
      following: ``[E, ...]``, the observations after the newest ones: a stream that
        goes on with another was cut, as when a run was resumed.
    """

    replay: ReplayState
    following: Shaped[Array, " E *observation"]


def init(
    of: Replay, spec: EnvSpec, *, num_envs: int, behaviour: dict[str, Any]
) -> Memory:
    """Nothing is remembered yet.

    Args:
      of: the replay.
      spec: the environment.
      num_envs: E.
      behaviour: shape and dtype of what is kept of a row's behaviour, by name.
    """
    typed: Any = jax.ShapeDtypeStruct
    flag = typed((), np.bool_)
    if isinstance(spec.action, Discrete):
        action = typed((), np.int32)
    else:
        action = typed((spec.action.size,), np.float32)
    step = Step(
        observation=typed(spec.observation_shape, spec.observation_dtype),
        action=action,
        reward=typed((), np.float32),
        terminated=flag,
        truncated=flag,
        is_valid=flag,
        behaviour=behaviour,
    )
    shape = num_envs, *spec.observation_shape
    return Memory(of.init(step), jnp.zeros(shape, spec.observation_dtype))


def remember(
    of: Replay,
    memory: Memory,
    trajectory: Trajectory,
    *,
    kept: Collection[str],
    axis_name: str | None = None,
) -> Memory:
    """Adds the rows of a trajectory.

    Args:
      of: the replay.
      memory: before it.
      trajectory: ``[T, E]``.
      kept: names of what is kept of a row's behaviour, if it is there.
      axis_name: the axis of the devices that share the replay, if any.
    """
    axes = tuple(range(1, memory.following.ndim))
    goes_on = jnp.all(trajectory.observation[0] == memory.following, axis=axes)
    rows = ring.steps(trajectory)
    behaviour = {name: x for name, x in rows.behaviour.items() if name in kept}
    state = of.cut(memory.replay, ~goes_on)
    state = of.add(state, rows._replace(behaviour=behaviour), axis_name=axis_name)
    return Memory(state, trajectory.observation[-1])
