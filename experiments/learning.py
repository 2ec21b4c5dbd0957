"""How well does an agent learn a task, over several seeds?

``python -m experiments.learning --agent ppo --env CartPole-v1 --seeds 10`` trains each
seed in a process of its own with the task's preset, evaluates the deterministic policy
on episodes of its own along the way, and writes every evaluation, as soon as a seed is
done, to ``experiments/results/<agent>_<env>.csv``. Options that it does not know are
those of `experiments.train`, for every seed. It prints the interquartile mean of the
last evaluation with a 95 % stratified bootstrap interval.
"""

import concurrent.futures
import dataclasses
import functools
import math
import multiprocessing
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from experiments import command_line, results, train
from fps_jax import checks

PROG = "experiments.learning"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Trains several seeds of an agent on a task.

    Attributes:
      agent: its name.
      env: EnvPool task id.
      seeds: how many; they follow each other.
      first_seed: the first of them.
      total_env_steps: length of each run, in env steps.
      evaluations: of each run, evenly spread.
      eval_episodes: full episodes of each evaluation.
      jobs: runs at a time.
      preset: see experiments/presets.py.
      name: of the CSV; by default that of the agent.
    """

    agent: str = "ppo"
    env: str = "CartPole-v1"
    seeds: int = 10
    first_seed: int = 0
    total_env_steps: int = 100_000
    evaluations: int = 20
    eval_episodes: int = 10
    jobs: int = 2
    preset: str = "auto"
    name: str | None = None

    def __post_init__(self):
        """Refuses options that are out of range."""
        counts = "seeds", "total_env_steps", "evaluations", "eval_episodes", "jobs"
        checks.in_range(self, 1, math.inf, *counts)
        checks.in_range(self, 0, math.inf, "first_seed")

    @property
    def all_seeds(self) -> range:
        """The seeds."""
        return range(self.first_seed, self.first_seed + self.seeds)

    def argv(self, seed: int, more: Sequence[str]) -> list[str]:
        """The words that experiments.train would be given for one seed.

        Args:
          seed: the seed.
          more: further options of every run.
        """
        given = {
            "env": self.env,
            "preset": self.preset,
            "seed": seed,
            "total-env-steps": self.total_env_steps,
            "eval-every": self.total_env_steps // self.evaluations,
            "eval-episodes": self.eval_episodes,
            "env-threads": 1,
            "directory": None,
        }
        words = [str(word) for name in given for word in (f"--{name}", given[name])]
        return [self.agent, *words, "--no-show-progress", *more]


def run_seed(options: Options, more: Sequence[str], seed: int) -> list[dict[str, Any]]:
    """Trains one seed; its evaluations, one row each.

    Args:
      options: of all seeds.
      more: further options of every run, as experiments.train takes them.
      seed: this one.
    """
    agent, config = train.read(options.argv(seed, more))
    history = train.Run(agent, config).train()
    return [
        {
            "agent": options.agent,
            "env": options.env,
            "seed": seed,
            "env_steps": record["env_steps"],
            "return": round(record["eval/return"], 3),
            "return_std": round(record["eval/return_std"], 3),
            "steps_per_s": round(record["steps_per_s"]),
        }
        for record in history.records
        if "eval/return" in record
    ]


def run_seeds(
    options: Options, more: Sequence[str], seeds: Sequence[int]
) -> Iterator[list[dict[str, Any]]]:
    """Trains seeds, each in a process of its own; yields the evaluations of each.

    Args:
      options: of all seeds.
      more: further options of every run, as experiments.train takes them.
      seeds: which of them.
    """
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(
        options.jobs, mp_context=context, max_tasks_per_child=1
    ) as pool:
        runs = pool.map(functools.partial(run_seed, options, more), seeds)
        for seed, run in zip(seeds, runs, strict=True):
            print(f"seed {seed}: {run[-1]['return']}", flush=True)
            yield run


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArmOptions:
    """Trains several arms on several tasks, several seeds of each.

    Attributes:
      arms: which of them.
      envs: EnvPool task ids.
      seeds: how many; they are 0, 1, ...
      total_env_steps: length of each run, in env steps.
      evaluations: of each run, evenly spread.
      eval_episodes: full episodes of each evaluation.
      jobs: runs at a time.
    """

    arms: tuple[str, ...] = ()
    envs: tuple[str, ...] = ("HalfCheetah-v4", "Hopper-v4")
    seeds: int = 5
    total_env_steps: int = 500_000
    evaluations: int = 10
    eval_episodes: int = 10
    jobs: int = 2

    KNOWN: ClassVar[tuple[str, ...]] = ()
    """All arms that there are."""

    def __post_init__(self):
        """Refuses arms that there are not."""
        for arm in self.arms:
            checks.choice("arms", arm, self.KNOWN)

    def of_runs(self, arm: str, env: str) -> tuple[Options, list[str]]:
        """The options of an arm's runs on a task; here, an arm is an agent.

        Args:
          arm: its name.
          env: the task id.

        Returns:
          Those of all seeds, and further words of each run's command line.
        """
        given = Options(
            agent=arm,
            env=env,
            seeds=self.seeds,
            total_env_steps=self.total_env_steps,
            evaluations=self.evaluations,
            eval_episodes=self.eval_episodes,
            jobs=self.jobs,
        )
        return given, []


def run_arms(
    prog: str, of_options: type[ArmOptions], argv: Sequence[str] | None
) -> Path:
    """Trains every arm on every task; a CSV each, which grows with every seed.

    Seeds that it has already are not run again.

    Args:
      prog: the module.
      of_options: the class of its options.
      argv: the words after the program's name; None reads the process's own.

    Returns:
      The folder of the files, ``experiments/results/<program>/<arm>_<task>.csv``.
    """
    words = sys.argv[1:] if argv is None else argv
    options = command_line.parse(of_options, words, prog=prog)
    runs = [(arm, env) for env in options.envs for arm in options.arms]
    try:
        given = {run: options.of_runs(*run) for run in runs}
    except ValueError as error:
        command_line.refuse(error, prog=prog)
    for of_seeds, more in given.values():  # Refuses what no run could be given.
        train.read(of_seeds.argv(0, more))
    folder = results.FOLDER / prog.rpartition(".")[2]
    for (arm, env), (of_seeds, more) in given.items():
        path = folder / f"{arm}_{env}.csv"
        rows: list[dict[str, Any]] = []
        if path.exists():
            rows += results.read_csv(path)
        there = {int(row["seed"]) for row in rows}
        seeds = [seed for seed in of_seeds.all_seeds if seed not in there]
        for run in run_seeds(of_seeds, more, seeds) if seeds else ():
            rows += [{"arm": arm, **row} for row in run]
            results.write_csv(path, rows, final_iqm=summary(rows))
        print(f"{env}, {arm}: IQM {summary(rows)}; {path}", flush=True)
    return folder


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """What was reached: IQM and interval of the seeds' last evaluations.

    Args:
      rows: see `run_seeds`.
    """
    last = {row["seed"]: float(row["return"]) for row in rows}  # In order of steps.
    iqm, low, high = results.interquartile_mean(list(last.values()))
    return f"{iqm:.1f} [{low:.1f}, {high:.1f}] over {len(last)} seeds"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs all seeds, writes the CSV and prints what was reached.

    Args:
      argv: the words after the program's name; None reads the process's own.
    """
    words = sys.argv[1:] if argv is None else argv
    options, more = command_line.parse(
        Options, words, prog=PROG, return_unknown_args=True
    )
    train.read(options.argv(0, more))  # Refuses what no run could be given.
    path = results.FOLDER / f"{options.name or options.agent}_{options.env}.csv"
    rows: list[dict[str, Any]] = []
    for run in run_seeds(options, more, options.all_seeds):
        rows += run
        results.write_csv(path, rows, final_iqm=summary(rows))
    print(f"{options.env}: IQM {summary(rows)}; {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
