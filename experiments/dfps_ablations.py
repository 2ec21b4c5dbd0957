"""Which parts of DFPS matter, and by how much?

``python -m experiments.dfps_ablations`` trains the presets of DFPS and variations of
``dfps_fast``, each of which changes one part, on two tasks, and the lags 1, 4 and 16
with and without equation 13. Without lag, as ``dfps_fast`` is, both are the same.

Every evaluation of an arm on a task goes to
``experiments/results/dfps_ablations/<arm>_<task>.csv`` once its seeds are done; what
has a file already is not run again. `experiments.figures` draws them.
"""

import dataclasses
import sys
from collections.abc import Sequence

from experiments import command_line, learning, results, train
from fps_jax import checks

PROG = "experiments.dfps_ablations"

PRESETS = (
    "dfps",
    "dfps_unbiased",
    "dfps_fast",
    "qprop",
    "ipg",
    "impala",
    "dppo_penalty",
)
CHANGES: dict[str, list[str]] = {
    "no_fusion": ["--dpg-coef", "0", "--critic-utd", "0"],
    "no_score": ["--ipg-nu", "1"],
    "lag_4_equation_12": ["--max-lag", "4", "--trace", "none"],
    "no_trust_region": ["--trust-region", "none"],
    "value_first": ["--value-first"],
    "value_on_replay": ["--value-data", "replay", "--value-target", "recomputed"],
    "parameter_noise": ["--noise", "parameters", "--noise-scale", "0.02"],
    "action_noise": ["--noise", "actions"],
    "prioritized": ["--priority-exponent", "0.6"],
    "one_step_critic": ["--critic-n-step", "1"],
    "corrected_critic": ["--critic-trace", "vtrace"],
}
"""What an arm changes of ``dfps_fast``."""
for _lag in (1, 4, 16):
    CHANGES[f"lag_{_lag}"] = ["--max-lag", str(_lag)]
    CHANGES[f"lag_{_lag}_uncorrected"] = [*CHANGES[f"lag_{_lag}"], "--no-corrects-lag"]
ARMS = (*PRESETS, *CHANGES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Trains DFPS without one part, or with another one.

    Attributes:
      arms: which of them.
      envs: EnvPool task ids.
      seeds: how many; they are 0, 1, ...
      total_env_steps: length of each run, in env steps.
      evaluations: of each run, evenly spread.
      eval_episodes: full episodes of each evaluation.
      jobs: runs at a time.
    """

    arms: tuple[str, ...] = ARMS
    envs: tuple[str, ...] = ("HalfCheetah-v4", "Hopper-v4")
    seeds: int = 3
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
        given = learning.Options(
            agent=arm if arm in PRESETS else "dfps_fast",
            env=env,
            seeds=self.seeds,
            total_env_steps=self.total_env_steps,
            evaluations=self.evaluations,
            eval_episodes=self.eval_episodes,
            jobs=self.jobs,
        )
        return given, CHANGES.get(arm, [])


def main(argv: Sequence[str] | None = None) -> int:
    """Runs every arm on every task; writes a CSV after each.

    Args:
      argv: the words after the program's name; None reads the process's own.
    """
    options = command_line.parse(
        Options, sys.argv[1:] if argv is None else argv, prog=PROG
    )
    arms = [(arm, env) for env in options.envs for arm in options.arms]
    given = {run: options.of_runs(*run) for run in arms}
    for of_learning, words in given.values():  # Refuses what no run could be given.
        train.read(of_learning.argv(0, words))
    return learning.run_arms(given, results.FOLDER / "dfps_ablations")


if __name__ == "__main__":
    sys.exit(main())
