"""How much sooner is a sweep done than its runs one by one?

``python -m experiments.bench_sweep`` trains the same seeds with the same options three
times, everything counted from the start of a process to its end: runs one after
another, runs two at a time, and one sweep, whose members share a program and a set of
environments. A repeat does so for each case in turn. It writes the seconds of each, and
the ratios of their medians, to ``experiments/results/bench_sweep.csv``.
"""

import concurrent.futures
import dataclasses
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments import command_line, results
from fps_jax import checks

PROG = "experiments.bench_sweep"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained.

    Attributes:
      agent: its name.
      env: EnvPool task id.
      seeds: how many.
      env_steps: length of each run.
    """

    agent: str
    env: str
    seeds: int
    env_steps: int

    def words(self) -> list[str]:
        """The options that a run and a sweep share."""
        given = {
            "env": self.env,
            "num-envs": 8,
            "total-env-steps": self.env_steps,
            "eval-every": 0,
        }
        words = [str(word) for name in given for word in (f"--{name}", given[name])]
        return [self.agent, *words, "--no-show-progress", "--no-tensorboard"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Measures sweeps against single runs.

    Attributes:
      repeats: of everything.
      seeds: of PPO; DFPS has half as many.
      env_steps: of each run of PPO; those of DFPS have half as many.
      cases: which of them: ppo_HalfCheetah, ppo_CartPole, dfps_HalfCheetah.
    """

    repeats: int = 1
    seeds: int = 16
    env_steps: int = 50_000
    cases: tuple[str, ...] = ("ppo_HalfCheetah", "ppo_CartPole", "dfps_HalfCheetah")

    def __post_init__(self):
        """Refuses options that are out of range."""
        checks.in_range(self, 1, math.inf, "repeats", "env_steps")
        checks.in_range(self, 2, math.inf, "seeds")
        for case in self.cases:
            checks.choice("cases", case, tuple(self.known()))

    def known(self) -> dict[str, Case]:
        """All cases by name."""
        ppo = {"agent": "ppo", "seeds": self.seeds, "env_steps": self.env_steps}
        half = {"seeds": self.seeds // 2, "env_steps": self.env_steps // 2}
        return {
            "ppo_HalfCheetah": Case(env="HalfCheetah-v4", **ppo),
            "ppo_CartPole": Case(env="CartPole-v1", **ppo),
            "dfps_HalfCheetah": Case(agent="dfps_fast", env="HalfCheetah-v4", **half),
        }


def call(module: str, words: Sequence[str]) -> None:
    """Runs a module in a process of its own, to its end.

    Args:
      module: its name.
      words: its command line.
    """
    subprocess.run(
        [sys.executable, "-m", module, *words], check=True, stdout=subprocess.DEVNULL
    )


def seconds(case: Case, way: str, folder: Path) -> float:
    """Wall-clock seconds of one way to train all seeds of a case.

    Args:
      case: what is trained.
      way: ``one after another``, ``two at a time`` or ``sweep``.
      folder: where the runs are written.
    """
    clock = time.perf_counter()
    if way == "sweep":
        home = ["--directory", str(folder), "--seeds", f"0:{case.seeds}"]
        call("experiments.sweep", [*case.words(), *home])
    else:
        jobs = 2 if way == "two at a time" else 1
        home = ["--directory", str(folder)]
        runs = [[*case.words(), *home, "--seed", str(i)] for i in range(case.seeds)]
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            list(pool.map(lambda words: call("experiments.train", words), runs))
    return time.perf_counter() - clock


WAYS = "sweep", "one after another", "two at a time"


def measure(options: Options) -> Iterator[dict[str, Any]]:
    """Measures every case in every way, in turn; yields a row of each.

    Args:
      options: what to measure.
    """
    for repeat in range(options.repeats):
        for name in options.cases:
            case = options.known()[name]
            for way in WAYS:
                with tempfile.TemporaryDirectory() as folder:
                    took = seconds(case, way, Path(folder))
                total = case.seeds * case.env_steps
                yield {
                    "case": name,
                    "way": way,
                    "repeat": repeat,
                    **dataclasses.asdict(case),
                    "seconds": round(took, 1),
                    "env_steps_per_s": round(total / took),
                }


def ratios(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """How many times a sweep's seconds the other ways take, by their medians.

    Args:
      rows: see `measure`.
    """
    found = {}
    for case in dict.fromkeys(row["case"] for row in rows):
        took: dict[str, list[float]] = {}
        for row in rows:
            if row["case"] == case:
                took.setdefault(row["way"], []).append(row["seconds"])
        median = {way: np.median(times) for way, times in took.items()}
        for way in [way for way in WAYS[1:] if way in median]:
            found[f"{case}, {way} / sweep"] = round(
                float(median[way] / median[WAYS[0]]), 2
            )
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, and writes the CSV.

    Args:
      argv: the words after the program's name; None reads the process's own.
    """
    words = sys.argv[1:] if argv is None else argv
    options = command_line.parse(Options, words, prog=PROG)
    path, rows = results.FOLDER / "bench_sweep.csv", []
    for row in measure(options):  # Kept at once: the next may take minutes.
        print(row, flush=True)
        rows.append(row)
        results.write_csv(path, rows, cores=os.cpu_count(), ratios=ratios(rows))
    print(ratios(rows))
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
