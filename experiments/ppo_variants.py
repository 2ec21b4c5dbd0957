"""What do the variants of PPO change, and does PPO-EWMA not care for the batch size?

``python -m experiments.ppo_variants`` trains every variant of PPO on two tasks, and PPO
and PPO-EWMA once more at four times the batch (``_x4``): four times the environments,
rows of a minibatch, and thereby env steps of a gradient step, at twice Adam's step size
(its square root). PPO-EWMA's average then has a quarter of its centre of mass in
gradient steps, so that it is as old in env steps (Hilton et al., 2021,
arXiv:2110.00641, section 5); what PPO stays close to is four times as old.

Every evaluation of a variant on a task goes to
``experiments/results/ppo_variants/<variant>_<task>.csv`` as soon as a seed is done;
seeds that are there already are not run again. `experiments.figures` draws them.
"""

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any, ClassVar

from experiments import learning, presets, train

PROG = "experiments.ppo_variants"
VARIANTS = [name for name in presets.VARIANTS if presets.base(name) == "ppo"]
ARMS = ("ppo", *VARIANTS, "ppo_x4", "ppo_ewma_x4")
TIMES = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(learning.ArmOptions):
    """Trains the variants of PPO; ``_x4`` is at four times the batch."""

    arms: tuple[str, ...] = ARMS

    KNOWN: ClassVar[tuple[str, ...]] = ARMS

    def of_runs(self, arm: str, env: str) -> tuple[learning.Options, list[str]]:
        """The options of an arm's runs; see `learning.ArmOptions.of_runs`.

        Args:
          arm: one of `ARMS`.
          env: the task id.
        """
        given, words = super().of_runs(arm.removesuffix("_x4"), env)
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
    learning.run_arms(PROG, Options, argv)
    return 0


if __name__ == "__main__":
    sys.exit(main())
