"""Does prioritized replay make DQN learn faster?

``python -m experiments.dqn_replays`` trains Double DQN with uniform, proportional and
rank-based replay on three tasks, ten seeds each, with the settings of
`experiments/presets.py`: one for all, and for the prioritized ones the exponents of
table 3 (Schaul et al., 2016, arXiv:1511.05952). Arms that end in ``_quarter`` have the
paper's quarter of the step size as well.

Every evaluation goes to ``experiments/results/dqn_replays/<arm>_<task>.csv``; seeds
that are there already are not run again. ``experiments/results/dqn_replays.csv`` says
of each: the interquartile mean of the last evaluations (``final``), that of the mean
over all evaluations of a run (``run``, the area under the curve), how probably a run's
mean is above that of one with uniform replay (``better``; its rows of all tasks have
nothing else), and the paper's measure of learning speed (its figure 4): the env steps
after which the mean curve is as high as uniform's ever is, over those that uniform
takes. Intervals are of 95 %, over resampled seeds.
"""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from experiments import learning, results
from experiments.sweep_results import improvement

PROG = "experiments.dqn_replays"
BASELINE = "dqn"
REPLAYS = (BASELINE, "dqn_proportional", "dqn_rank_based")
QUARTER = "_quarter"
ARMS = (*REPLAYS, *(f"{name}{QUARTER}" for name in REPLAYS[1:]))
STEPS = {"CartPole-v1": 50_000, "Acrobot-v1": 50_000, "LunarLander-v3": 100_000}
"""Env steps of a run, by task; 100,000 for any other."""
RESAMPLES = 2_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(learning.ArmOptions):
    """Trains DQN with several replays; the length of runs is the task's, unless given.

    Attributes:
      total_env_steps: length of each run, in env steps; by default the task's.
    """

    arms: tuple[str, ...] = REPLAYS
    envs: tuple[str, ...] = tuple(STEPS)
    seeds: int = 10
    total_env_steps: int = 0
    evaluations: int = 25

    KNOWN: ClassVar[tuple[str, ...]] = ARMS

    def of_runs(self, arm: str, env: str) -> tuple[learning.Options, list[str]]:
        """The options of an arm's runs; see `learning.ArmOptions.of_runs`.

        Args:
          arm: one of `ARMS`.
          env: the task id.
        """
        steps = self.total_env_steps or STEPS.get(env, 100_000)
        mine = dataclasses.replace(self, total_env_steps=steps)
        given, words = super(Options, mine).of_runs(arm.removesuffix(QUARTER), env)
        if arm.endswith(QUARTER):
            words = ["--prioritized-learning-rate-fraction", "0.25"]
        return given, words


def curves(rows: Sequence[dict[str, str]]) -> tuple[np.ndarray, np.ndarray]:
    """The returns of the seeds' evaluations, ``[seeds, evaluations]``, and when.

    Args:
      rows: of one arm on one task.
    """
    seeds = sorted({row["seed"] for row in rows}, key=int)
    every = [[r for r in rows if r["seed"] == seed] for seed in seeds]
    steps = np.array([float(r["env_steps"]) for r in every[0]])
    returns = np.array([[float(r["return"]) for r in mine] for mine in every])
    return steps, returns


def steps_to(level: float, steps: np.ndarray, curve: np.ndarray) -> float:
    """Env steps after which a curve is as high as a level; the last, if it never is.

    Args:
      level: the return to be reached.
      steps: of the evaluations.
      curve: return at each of them.
    """
    reached = np.flatnonzero(curve >= level)
    return float(steps[reached[0]] if reached.size else steps[-1])


def speed(
    baseline: tuple[np.ndarray, np.ndarray], arm: tuple[np.ndarray, np.ndarray]
) -> tuple[float, float, float]:
    """Env steps to the baseline's best, over those of the baseline, with an interval.

    Args:
      baseline: see `curves`.
      arm: likewise.

    Returns:
      The ratio, below 1 if the arm is faster, and the ends of its 95 % interval over
      resampled seeds of both.
    """

    def ratio(of_baseline: np.ndarray, of_arm: np.ndarray) -> float:
        mean = of_baseline.mean(axis=0)
        level = mean.max()
        first = steps_to(level, baseline[0], mean)
        return steps_to(level, arm[0], of_arm.mean(axis=0)) / first

    rng = np.random.default_rng(0)
    again = lambda x: x[rng.integers(len(x), size=len(x))]
    drawn = [ratio(again(baseline[1]), again(arm[1])) for _ in range(RESAMPLES)]
    low, high = np.quantile(drawn, [0.025, 0.975])
    return ratio(baseline[1], arm[1]), float(low), float(high)


def summary(folder: Path) -> list[dict[str, Any]]:
    """What each arm reached on each task, how soon, and whether it beats uniform.

    Args:
      folder: of the arms' CSVs.
    """
    found = [results.read_csv(path) for path in sorted(folder.glob("*.csv"))]
    by_run = {(rows[0]["env"], rows[0]["arm"]): rows for rows in found}
    returns = {run: curves(rows)[1] for run, rows in by_run.items()}
    told = []
    for (env, arm), rows in sorted(by_run.items()):
        own, baseline = (env, arm), (env, BASELINE)
        final, mean = returns[own][:, -1], returns[own].mean(axis=1)
        row = {
            "env": env,
            "arm": arm,
            "seeds": len(final),
            "env_steps": rows[-1]["env_steps"],
            **_with_ends("final_iqm", results.interquartile_mean(list(final)), 1),
            **_with_ends("run_iqm", results.interquartile_mean(list(mean)), 1),
            **_with_ends("speed", (None,) * 3),
            **_with_ends("better", (None,) * 3),
        }
        if baseline in by_run:
            row |= _with_ends("speed", speed(curves(by_run[baseline]), curves(rows)))
        if baseline in by_run and arm != BASELINE:
            row |= _better(mean[:, None], returns[baseline].mean(axis=1)[:, None])
        told.append(row)
    return told + _of_all_tasks(returns)


def _of_all_tasks(
    returns: Mapping[tuple[str, str], np.ndarray],
) -> list[dict[str, Any]]:
    """Whether an arm beats uniform over all tasks, if those have as many seeds."""
    envs = sorted({env for env, _ in returns})
    rows = []
    for arm in sorted({arm for _, arm in returns} - {BASELINE}):
        runs = [(env, name) for name in (arm, BASELINE) for env in envs]
        if not all(run in returns for run in runs):
            continue
        means = [returns[run].mean(axis=1) for run in runs]
        if len({len(mean) for mean in means}) > 1:
            continue
        both = np.split(np.stack(means, axis=1), 2, axis=1)
        rows.append({"env": "all", "arm": arm, "seeds": len(both[0])} | _better(*both))
    return rows


def _better(means: np.ndarray, of_baseline: np.ndarray) -> dict[str, float | None]:
    return _with_ends("better", improvement(means, of_baseline) or (None,) * 3)


def _with_ends(
    name: str, values: Sequence[float | None], digits: int = 3
) -> dict[str, float | None]:
    prefix = name.removesuffix("_iqm")
    names = name, f"{prefix}_low", f"{prefix}_high"
    rounded = (None if x is None else round(float(x), digits) for x in values)
    return dict(zip(names, rounded, strict=True))


def main(argv: Sequence[str] | None = None) -> int:
    """Trains what is not there yet, and writes what was reached.

    Args:
      argv: the words after the program's name; None reads the process's own.
    """
    told = summary(learning.run_arms(PROG, Options, argv))
    results.write_csv(results.FOLDER / "dqn_replays.csv", told)
    for row in told:
        print(*row.values())
    return 0


if __name__ == "__main__":
    sys.exit(main())
