"""Tiny problems with known answers, and random experience to compute with."""

import jax
import jax.numpy as jnp
import numpy as np

from fps_jax.runtime.envs import EnvStep
from fps_jax.types import AgentState, Continuous, Discrete, EnvSpec, Trajectory

DISCRETE = EnvSpec("Probe-v0", (3,), np.dtype(np.float32), Discrete(3))
CONTINUOUS = EnvSpec(
    "Probe-v0", (3,), np.dtype(np.float32), Continuous((-1.0, -1.0), (1.0, 1.0))
)


def random_trajectory(
    seed: int, spec: EnvSpec, length: int, envs: int, *, log_prob: float = -1.0
) -> Trajectory:
    """Experience of nobody: short episodes, each followed by a row that resets.

    Args:
      seed: of all that is in it.
      spec: gives shapes and dtypes.
      length: T.
      envs: E.
      log_prob: mean of the behaviour's log-probabilities, whose deviation is 0.3.
    """
    rng = np.random.default_rng(seed)
    ends = rng.random((length, envs)) < 0.25
    is_valid = np.ones((length, envs), bool)
    for t in range(1, length):
        is_valid[t] = ~(ends[t - 1] & is_valid[t - 1])
    ends &= is_valid
    is_terminal = rng.random((length, envs)) < 0.5
    observation = rng.normal(1.0, 2.0, (length + 1, envs, *spec.observation_shape))
    if np.issubdtype(spec.observation_dtype, np.integer):
        observation = np.clip(50 + 40 * observation, 0, 255)
    real = lambda *shape: rng.normal(size=shape).astype(np.float32)
    if isinstance(spec.action, Discrete):
        action = rng.integers(spec.action.num_actions, size=(length, envs))
        action = action.astype(np.int32)
    else:
        action = real(length, envs, spec.action.size)
    return Trajectory(
        observation=observation.astype(spec.observation_dtype),
        action=action,
        reward=np.where(is_valid, real(length, envs), 0),
        terminated=ends & is_terminal,
        truncated=ends & ~is_terminal,
        is_valid=is_valid,
        behaviour={"log_prob": log_prob + np.float32(0.3) * real(length, envs)},
        policy_version=np.zeros((length, envs), np.int32),
    )


def acted(agent, state: AgentState, trajectory: Trajectory) -> Trajectory:
    """Lets the agent itself say how likely the trajectory's actions were.

    Args:
      agent: its `act` is asked at the trajectory's observations.
      state: of the agent.
      trajectory: its actions and log-probabilities are replaced.
    """
    shape = trajectory.reward.shape
    observation = jnp.asarray(trajectory.observation[:-1])
    rows = observation.reshape(-1, *observation.shape[2:])
    params = agent.actor_params(state.learner, None)
    outcome = agent.act(params, rows, jax.random.key(5), explore=True)
    unflatten = lambda x: np.asarray(x).reshape(*shape, *x.shape[1:])
    action, behaviour = jax.tree.map(unflatten, outcome)
    return trajectory._replace(action=action, behaviour=behaviour)


class TwoStepEnv:
    """Episodes of two steps, in which it pays to wait.

    In the first state action 0 pays 0.4 and leads to a state where nothing pays;
    action 1 pays nothing and leads to a state where action 1 pays 1. Observations are
    one-hot: the first state, the poor one, the rich one.
    """

    first, poor, rich = np.eye(3, dtype=np.float32)

    def __init__(self, num_envs: int):
        self.spec = EnvSpec("TwoStep-v0", (3,), np.dtype(np.float32), Discrete(2))
        self.num_envs = num_envs
        self.reset()

    def reset(self) -> np.ndarray:
        self._observation = np.tile(self.first, (self.num_envs, 1))
        self._step = np.zeros(self.num_envs, int)
        return self._observation

    def step(self, action: np.ndarray) -> EnvStep:
        is_reset = self._step == 2
        second = self._step == 1
        pays = self._observation @ np.array([[0.4, 0], [0, 0], [0, 1]], np.float32)
        reward = np.take_along_axis(pays, action[:, None], axis=1)[:, 0]
        went = np.where(action[:, None] == 1, self.rich, self.poor)
        went = np.where(second[:, None], self._observation, went)
        self._observation = np.where(is_reset[:, None], self.first, went)
        self._step = np.where(is_reset, 0, self._step + 1)
        return EnvStep(
            observation=self._observation,
            reward=np.where(is_reset, 0, reward),
            terminated=second,
            truncated=np.zeros(self.num_envs, bool),
            is_reset=is_reset,
        )

    def close(self) -> None:
        pass


class EndlessEnv:
    """One state without an end, cut every third step; the nearer to 0.5 the better.

    The reward is ``1 - (action - 0.5)^2``, so the best policy is worth
    ``1 / (1 - gamma)``, and less to whoever takes the cut for an end.
    """

    def __init__(self, num_envs: int):
        self.spec = EnvSpec(
            "Endless-v0", (1,), np.dtype(np.float32), Continuous((-1.0,), (1.0,)), 3
        )
        self.num_envs = num_envs
        self.reset()

    def reset(self) -> np.ndarray:
        self._step = np.arange(self.num_envs) % 3
        return np.ones((self.num_envs, 1), np.float32)

    def step(self, action: np.ndarray) -> EnvStep:
        is_reset = self._step == 3
        self._step = np.where(is_reset, 0, self._step + 1)
        reward = 1 - np.square(action[:, 0] - np.float32(0.5))
        return EnvStep(
            observation=np.ones((self.num_envs, 1), np.float32),
            reward=np.where(is_reset, np.float32(0), reward),
            terminated=np.zeros(self.num_envs, bool),
            truncated=self._step == 3,
            is_reset=is_reset,
        )

    def close(self) -> None:
        pass
