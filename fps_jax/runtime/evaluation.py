"""How good a policy is: full episodes on environments of their own."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from fps_jax.runtime.envs import VectorEnv

LONGEST = 100_000
"""Steps after which an evaluation of a task without a time limit is cut."""


class Evaluation(NamedTuple):
    """Undiscounted returns and lengths of full episodes.

    Attributes:
      returns: ``[episodes, E]``.
      lengths: ``[episodes, E]``, in env steps.
    """

    returns: np.ndarray
    lengths: np.ndarray

    def metrics(self) -> dict[str, float]:
        """Means over all episodes, and the deviation of the returns."""
        return {
            "eval/return": float(self.returns.mean()),
            "eval/return_std": float(self.returns.std()),
            "eval/length": float(self.lengths.mean()),
        }


def evaluate(
    act: Callable[..., Any],
    params: Any,
    env: VectorEnv,
    key: jax.Array,
    *,
    episodes_per_env: int = 1,
    max_steps: int | None = None,
    is_interrupted: Callable[[], bool] = lambda: False,
) -> Evaluation:
    """Runs the same number of full episodes on every environment.

    Taking the first episodes to finish instead would prefer short ones.

    Args:
      act: ``act(params, observation, key, count)``, compiled.
      params: what `Agent.actor_params` made.
      env: environments that nothing else uses; they are reset first.
      key: of this evaluation alone; folded with the count of its acts.
      episodes_per_env: full episodes of each environment, at least 1.
      max_steps: steps after which every running episode is cut and counted as it
        stands; None is no limit, or `LONGEST` if the task has none of its own.
      is_interrupted: asked at every step; True ends every running episode there.

    Returns:
      Returns and lengths, in each environment's own order.
    """
    if max_steps is None and env.spec.max_episode_steps is None:
        max_steps = LONGEST
    observation = env.reset()
    shape = episodes_per_env, env.num_envs
    returns, lengths = np.zeros(shape), np.zeros(shape, np.int64)
    episode = np.zeros(env.num_envs, np.int64)
    count = 0
    while (episode < episodes_per_env).any() and not is_interrupted():
        with jax.transfer_guard("allow"):  # As in acting: part of the call.
            action = np.asarray(act(params, observation, key, np.uint32(count))[0])
        step = env.step(action)
        observation, count = step.observation, count + 1
        running = np.flatnonzero(episode < episodes_per_env)
        returns[episode[running], running] += step.reward[running]
        lengths[episode[running], running] += ~step.is_reset[running]
        ended = step.terminated | step.truncated
        if max_steps is not None:
            episode = np.where(count >= max_steps, episodes_per_env, episode)
        episode += ended
    return Evaluation(returns, lengths)
