"""Experience of nobody, for measurements that need some of the right shape."""

from typing import Any

import numpy as np

from fps_jax.types import Discrete, EnvSpec, Trajectory


def trajectory(
    spec: EnvSpec, *, rollout_steps: int, num_envs: int, seed: int = 0
) -> Trajectory:
    """Random observations, actions and rewards, without the end of an episode.

    Args:
      spec: the environment; its observations are bytes or floats.
      rollout_steps: T.
      num_envs: E.
      seed: of all that is in it.
    """
    rng = np.random.default_rng(seed)
    shape = rollout_steps, num_envs
    seen = (rollout_steps + 1, num_envs, *spec.observation_shape)
    normal = lambda shape: rng.normal(size=shape).astype(np.float32)
    if np.issubdtype(spec.observation_dtype, np.integer):
        observation: Any = rng.integers(0, 256, seen, np.uint8)
    else:
        observation = normal(seen)
    if isinstance(spec.action, Discrete):
        action: Any = rng.integers(spec.action.num_actions, size=shape, dtype=np.int32)
    else:
        action = 0.2 * normal((*shape, spec.action.size))
    never: Any = np.zeros(shape, bool)
    log_prob: Any = -1.0 + 0.1 * normal(shape)
    version: Any = np.zeros(shape, np.int32)
    return Trajectory(
        observation=observation,
        action=action,
        reward=normal(shape),
        terminated=never,
        truncated=never,
        is_valid=~never,
        behaviour={"log_prob": log_prob},
        policy_version=version,
    )
