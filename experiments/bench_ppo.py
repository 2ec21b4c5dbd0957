"""How fast does PPO run, beside Stable-Baselines3 and beside EnvPool alone?

``make bench`` (or ``python -m experiments.bench_ppo``) measures, in turn and each in a
process of its own, env steps per second of

* ``ours, lag 1`` and ``ours, lag 0``: `fps_jax.train` on HalfCheetah-v4;
* ``sb3, dummy`` and ``sb3, subproc``: Stable-Baselines3's PPO on the same task through
  Gymnasium, its environments in turn in one process or each in its own;
* ``acting, E`` and ``raw, E``: our acting loop alone, and EnvPool stepped with random
  actions drawn beforehand, with E environments and as many threads as cores.

All four learners use 8 environments, 256 steps, minibatches of 64, 10 epochs, and two
tanh layers of 64 for each of policy and value. Ours also standardises observations
and scales returns; SB3 is spared that. The rate is of everything between the end of
the second update and the end of the run; ``start_s`` is what came before. Medians of
the repeats and their ratios are in the header of ``experiments/results/bench_ppo.csv``.
"""

import dataclasses
import os
import sys
import time
from collections.abc import Sequence

import numpy as np

from experiments import turns

PROG = "experiments.bench_ppo"
TASK = "HalfCheetah-v4"
NUM_ENVS, ROLLOUT_STEPS, MINIBATCH, EPOCHS = 8, 256, 64, 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(turns.Options):
    """Measures env steps per second.

    Attributes:
      learn_steps: env steps of each learner's run.
      act_steps: env steps of each acting loop.
    """

    learn_steps: int = 60_000
    act_steps: int = 64_000


def ours(options: Options, max_lag: int) -> dict[str, float]:
    """Our PPO."""
    import fps_jax

    agent = fps_jax.PPOConfig(
        minibatch_size=MINIBATCH, num_epochs=EPOCHS, hidden_sizes=(64, 64)
    )
    return turns.ours(
        agent,
        env=TASK,
        num_envs=NUM_ENVS,
        rollout_steps=ROLLOUT_STEPS,
        total_env_steps=options.learn_steps,
        max_lag=max_lag,
    )


def sb3(options: Options, vec_env: str) -> dict[str, float]:
    """Stable-Baselines3's PPO."""
    # Of the extra `bench` alone.
    from stable_baselines3 import PPO  # pyright: ignore
    from stable_baselines3.common import vec_env as vec_envs  # pyright: ignore
    from stable_baselines3.common.env_util import make_vec_env  # pyright: ignore

    cls = {"dummy": vec_envs.DummyVecEnv, "subproc": vec_envs.SubprocVecEnv}[vec_env]
    make_model = lambda: PPO(
        "MlpPolicy",
        make_vec_env(TASK, NUM_ENVS, vec_env_cls=cls),
        n_steps=ROLLOUT_STEPS,
        batch_size=MINIBATCH,
        n_epochs=EPOCHS,
        device="cpu",
    )
    return turns.sb3(make_model, options.learn_steps)


def acting(options: Options, num_envs: int) -> dict[str, float]:
    """Our acting loop alone."""
    import fps_jax
    from fps_jax.runtime.training import Run

    steps = 64
    config = fps_jax.TrainConfig(
        env=TASK,
        num_envs=num_envs,
        rollout_steps=steps,
        env_threads=os.cpu_count(),
        eval_episodes=0,
        directory=None,
        show_progress=False,
    )
    run = Run(fps_jax.PPOConfig(minibatch_size=steps * num_envs), config)
    actor, params = run.actors[0], run.params_of_actors()[0]
    actor.rollout(params, rollout=0, version=0)
    rollouts = options.act_steps // (steps * num_envs)
    start = time.perf_counter()
    for k in range(1, rollouts + 1):
        actor.rollout(params, rollout=k, version=0)
    seconds = time.perf_counter() - start
    return {"steps_per_s": rollouts * steps * num_envs / seconds, "start_s": 0.0}


def raw(options: Options, num_envs: int) -> dict[str, float]:
    """EnvPool alone, with random actions."""
    import envpool

    env = envpool.make(
        TASK,
        env_type="gymnasium",
        num_envs=num_envs,
        num_threads=min(num_envs, os.cpu_count() or 1),
        seed=0,
    )
    env.reset()
    actions = np.random.default_rng(0).uniform(-1.0, 1.0, (64, num_envs, 6))
    steps = options.act_steps // num_envs
    env.step(actions[0])
    start = time.perf_counter()
    for t in range(steps):
        env.step(actions[t % 64])
    seconds = time.perf_counter() - start
    return {"steps_per_s": steps * num_envs / seconds, "start_s": 0.0}


VARIANTS: turns.Variants = {
    "ours, lag 1": lambda options: ours(options, 1),
    "ours, lag 0": lambda options: ours(options, 0),
    "sb3, dummy": lambda options: sb3(options, "dummy"),
    "sb3, subproc": lambda options: sb3(options, "subproc"),
    "acting, 8": lambda options: acting(options, 8),
    "raw, 8": lambda options: raw(options, 8),
    "acting, 64": lambda options: acting(options, 64),
    "raw, 64": lambda options: raw(options, 64),
}


RATIOS = {
    "ours lag 1 / fastest sb3": ("ours, lag 1", ("sb3, dummy", "sb3, subproc")),
    "lag 1 / lag 0": ("ours, lag 1", ("ours, lag 0",)),
    "acting / raw, 8 envs": ("acting, 8", ("raw, 8",)),
    "acting / raw, 64 envs": ("acting, 64", ("raw, 64",)),
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
        peers=("stable-baselines3", "torch", "gymnasium", "mujoco"),
    )


if __name__ == "__main__":
    sys.exit(main())
