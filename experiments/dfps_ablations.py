"""Which parts of DFPS matter, and by how much?

``python -m experiments.dfps_ablations`` trains the presets of DFPS and variations of
``dfps_fast``, each of which changes one part, on two tasks, and the lags 1, 4 and 16
with and without equation 13. Without lag, as ``dfps_fast`` is, both are the same.

Every evaluation of an arm on a task goes to
``experiments/results/dfps_ablations/<arm>_<task>.csv`` as soon as a seed is done; seeds
that are there already are not run again. `experiments.figures` draws them.
"""

import dataclasses
import sys
from collections.abc import Sequence
from typing import ClassVar

from experiments import learning

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
class Options(learning.ArmOptions):
    """Trains DFPS without one part, or with another one."""

    arms: tuple[str, ...] = ARMS
    seeds: int = 3

    KNOWN: ClassVar[tuple[str, ...]] = ARMS

    def of_runs(self, arm: str, env: str) -> tuple[learning.Options, list[str]]:
        """The options of an arm's runs; see `learning.ArmOptions.of_runs`.

        Args:
          arm: one of `ARMS`.
          env: the task id.
        """
        agent = arm if arm in PRESETS else "dfps_fast"
        return super().of_runs(agent, env)[0], CHANGES.get(arm, [])


def main(argv: Sequence[str] | None = None) -> int:
    """Runs every arm on every task; writes a CSV after each.

    Args:
      argv: the words after the program's name; None reads the process's own.
    """
    learning.run_arms(PROG, Options, argv)
    return 0


if __name__ == "__main__":
    sys.exit(main())
