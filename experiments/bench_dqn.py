"""How fast does DQN run, beside Stable-Baselines3?

``python -m experiments.bench_dqn`` measures, in turn and each in a process of its own,
env steps per second of DQN on CartPole-v1 with the same hyper-parameters, which are the
defaults of Stable-Baselines3: minibatches of 32, one for every 4 env steps, two layers
of 64, a target network copied every 10,000 env steps, Adam, errors clipped, without
Double Q-learning, which it does not have; but for a replay of 50,000 and learning that
starts after 1,000 steps.

* ``ours, lag 1`` and ``ours, lag 0``: `fps_jax.train`, 8 environments, 8 steps each
  between updates of 16 gradient steps;
* ``ours, proportional`` and ``ours, rank-based``: the same with lag 1 and priorities;
* ``sb3, 1 env``: Stable-Baselines3's DQN, a gradient step every 4 steps;
* ``sb3, 8 envs``: the same with 8 environments in turn, 2 gradient steps every 8 steps;
  ``sb3, 8 envs, 1 thread``: and PyTorch on one thread.

The rate is of everything from twice the steps on with which learning starts. Four env
steps are one gradient step. Medians and ratios are in the header of
``experiments/results/bench_dqn.csv``.
"""

import dataclasses
import math
import sys
from collections.abc import Sequence
from typing import Any

from experiments import turns
from fps_jax import checks

PROG = "experiments.bench_dqn"
TASK = "CartPole-v1"
STARTS, PERIOD, BATCH, CAPACITY, TARGET = 1_000, 4, 32, 50_000, 10_000
SIZES, ENVS, STEPS = (64, 64), 8, 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(turns.Options):
    """Measures env steps per second.

    Attributes:
      learn_steps: env steps of each run of ours.
      sb3_steps: env steps of each run of Stable-Baselines3.
    """

    learn_steps: int = 60_000
    sb3_steps: int = 8_000

    def __post_init__(self):
        """Refuses runs that end before there is something to time."""
        super().__post_init__()
        checks.in_range(self, 3 * STARTS, math.inf, "learn_steps", "sb3_steps")


def ours(options: Options, max_lag: int, **replay: Any) -> dict[str, float]:
    """Our DQN."""
    import fps_jax

    agent = fps_jax.DQNConfig(
        double=False,
        batch_size=BATCH,
        replay_period=PERIOD,
        target_period=TARGET,
        learning_starts=STARTS,
        replay_capacity=CAPACITY,
        hidden_sizes=SIZES,
        **replay,
    )
    return turns.ours(
        agent,
        after=2 * STARTS,
        env=TASK,
        num_envs=ENVS,
        rollout_steps=STEPS,
        total_env_steps=options.learn_steps,
        max_lag=max_lag,
    )


def sb3(options: Options, envs: int, threads: int | None = None) -> dict[str, float]:
    """Stable-Baselines3's DQN."""
    # Of the extra `bench` alone.
    import torch  # pyright: ignore
    from stable_baselines3 import DQN  # pyright: ignore
    from stable_baselines3.common.env_util import make_vec_env  # pyright: ignore

    if threads is not None:
        torch.set_num_threads(threads)
    rows = max(PERIOD, envs)
    make_model = lambda: DQN(
        "MlpPolicy",
        make_vec_env(TASK, envs),
        batch_size=BATCH,
        train_freq=rows // envs,
        gradient_steps=rows // PERIOD,
        target_update_interval=TARGET,
        learning_starts=STARTS,
        buffer_size=CAPACITY,
        policy_kwargs={"net_arch": list(SIZES)},
        device="cpu",
    )
    return turns.sb3(make_model, options.sb3_steps, after=2 * STARTS)


VARIANTS: turns.Variants = {
    "ours, lag 1": lambda options: ours(options, 1),
    "ours, lag 0": lambda options: ours(options, 0),
    "ours, proportional": lambda options: ours(options, 1, replay="proportional"),
    "ours, rank-based": lambda options: ours(options, 1, replay="rank_based"),
    "sb3, 1 env": lambda options: sb3(options, 1),
    "sb3, 8 envs": lambda options: sb3(options, 8),
    "sb3, 8 envs, 1 thread": lambda options: sb3(options, 8, 1),
}
SB3 = ("sb3, 1 env", "sb3, 8 envs", "sb3, 8 envs, 1 thread")
RATIOS = {
    "ours lag 1 / fastest sb3": ("ours, lag 1", SB3),
    "lag 1 / lag 0": ("ours, lag 1", ("ours, lag 0",)),
    "proportional / uniform": ("ours, proportional", ("ours, lag 1",)),
    "rank-based / uniform": ("ours, rank-based", ("ours, lag 1",)),
}
"""What the claims are about."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measures every variant in turn, as often as asked, and writes the CSV.

    Args:
      argv: the words after the program's name; None reads the process's own.
    """
    return turns.run(
        PROG,
        Options,
        VARIANTS,
        argv,
        ratios=RATIOS,
        peers=("stable-baselines3", "torch", "gymnasium"),
    )


if __name__ == "__main__":
    sys.exit(main())
