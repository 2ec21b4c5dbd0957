"""What do the variants of PPO change, and does PPO-EWMA not care for the batch size?

``python -m experiments.ppo_variants`` trains every variant of PPO on two tasks, and PPO
and PPO-EWMA once more at four times the batch (``_x4``): four times the environments,
rows of a minibatch, and thereby env steps of a gradient step, at twice Adam's step size
(its square root). PPO-EWMA's average then has a quarter of its centre of mass in
gradient steps, so that it is as old in env steps (Hilton et al., 2021,
arXiv:2110.00641, section 5); what PPO stays close to is four times as old.

Every evaluation of a variant on a task goes to
``experiments/results/ppo_variants/<variant>_<task>.csv`` once its seeds are done; what
has a file already is not run again. `experiments.figures` draws them.
"""

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

from experiments import command_line, learning, presets, results, train
from fps_jax import checks

PROG = "experiments.ppo_variants"
ARMS = ("ppo", *presets.VARIANTS, "ppo_x4", "ppo_ewma_x4")
TIMES = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Trains the variants of PPO.

    Attributes:
      arms: which of them; ``_x4`` is at four times the batch.
      envs: EnvPool task ids.
      seeds: how many; they are 0, 1, ...
      total_env_steps: length of each run, in env steps.
      evaluations: of each run, evenly spread.
      eval_episodes: full episodes of each evaluation.
      jobs: runs at a time.
    """

    arms: tuple[str, ...] = ARMS
    envs: tuple[str, ...] = ("HalfCheetah-v4", "Hopper-v4")
    seeds: int = 5
    total_env_steps: int = 500_000
    evaluations: int = 10
    eval_episodes: int = 10
    jobs: int = 2

    def __post_init__(self):
        """Refuses arms that there are not."""
        for arm in self.arms:
            checks.choice("arms", arm, ARMS)

    def of_runs(self, arm: str, env: str) -> tuple[learning.Options, list[str]]:
        """The options of an arm's runs on a task.

        Args:
          arm: one of `ARMS`.
          env: the task id.
        """
        agent, words = arm.removesuffix("_x4"), []
        given = learning.Options(
            agent=agent,
            env=env,
            seeds=self.seeds,
            total_env_steps=self.total_env_steps,
            evaluations=self.evaluations,
            eval_episodes=self.eval_episodes,
            jobs=self.jobs,
        )
        if arm.endswith("_x4"):
            of_agent: Any
            of_agent, of_run = train.read(given.argv(0, []))
            larger: dict[str, Any] = {
                "num-envs": TIMES * of_run.num_envs,
                "minibatch-size": TIMES * of_agent.minibatch_size,
                "learning-rate": TIMES**0.5 * of_agent.learning_rate,
            }
            decay = of_agent.ewma_decay
            if decay is not None:
                mass = decay / (1.0 - decay) / TIMES
                larger["ewma-decay"] = mass / (1.0 + mass)
            words = [w for name, x in larger.items() for w in (f"--{name}", str(x))]
        return given, words


def main(argv: Sequence[str] | None = None) -> int:
    """Runs every arm on every task; writes a CSV after each.

    Args:
      argv: the words after the program's name; None reads the process's own.
    """
    options = command_line.parse(
        Options, sys.argv[1:] if argv is None else argv, prog=PROG
    )
    runs = [(arm, env) for env in options.envs for arm in options.arms]
    try:
        given = [options.of_runs(*run) for run in runs]
    except ValueError as error:
        command_line.refuse(error, prog=PROG)
    for of_learning, words in given:  # Refuses what no run could be given.
        train.read(of_learning.argv(0, words))
    arms = dict(zip(runs, given, strict=True))
    return learning.run_arms(arms, results.FOLDER / "ppo_variants")


if __name__ == "__main__":
    sys.exit(main())
