"""Measurements that take turns, each in a process of its own.

A benchmark has variants by name, each a function of its `Options` that measures once.
"""

import dataclasses
import importlib.metadata
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiments import command_line, results
from fps_jax import checks

Variants = Mapping[str, Callable[[Any], dict[str, float]]]
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What all benchmarks ask.

    Attributes:
      repeats: of each variant; they take turns.
      variants: which of them, by name; by default all.
      child: measure this variant once, in this process, and print it as JSON.
    """

    repeats: int = 5
    variants: tuple[str, ...] = ()
    child: str | None = None

    def __post_init__(self):
        """Refuses options that are out of range."""
        checks.in_range(self, 1, math.inf, "repeats")


def run(
    prog: str,
    of_options: Any,
    variants: Variants,
    argv: Sequence[str] | None,
    *,
    ratios: Mapping[str, tuple[str, Sequence[str]]],
    peers: Sequence[str] = (),
    more: Callable[[Any, list[Row]], dict[str, Any]] = lambda options, rows: {},
) -> int:
    """Measures every variant and writes ``experiments/results/<program>.csv``.

    Args:
      prog: the module.
      of_options: the class of its options.
      variants: by name, what measures once; each gives ``steps_per_s``.
      argv: the words after the program's name; None reads the process's own.
      ratios: see `ratios_of`.
      peers: packages that were measured.
      more: ``more(options, rows)``, what else the header says; it may add rows.

    Returns:
      The exit code, 0.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    options = command_line.parse(of_options, words, prog=prog)
    rows = measure(prog, words, options, variants)
    if rows is None:
        return 0
    versions = {name: importlib.metadata.version(name) for name in peers}
    about: dict[str, Any] = {"peers": versions} if peers else {}
    about |= {"cores": os.cpu_count(), **more(options, rows)}
    median = medians(rows, "steps_per_s")
    found = ratios_of(median, ratios)
    path = results.FOLDER / f"{prog.rpartition('.')[2]}.csv"
    results.write_csv(path, rows, **about, median_steps_per_s=median, ratios=found)
    print(json.dumps({"median_steps_per_s": median, "ratios": found}, indent=2))
    print(path)
    return 0


def measure(
    prog: str, words: Sequence[str], options: Options, variants: Variants
) -> list[Row] | None:
    """Measures every variant in turn, as often as asked.

    Args:
      prog: the module, for the processes.
      words: its command line.
      options: of the benchmark.
      variants: by name, what measures once.

    Returns:
      A row for each measurement; None if this process was itself one of them.
    """
    chosen = options.variants or tuple(variants)
    for name in (*chosen, *([options.child] if options.child else [])):
        if name not in variants:
            command_line.refuse(f"variant {name!r} is not in {[*variants]}.", prog=prog)
    if options.child is not None:
        print(json.dumps(variants[options.child](options)))
        return None
    rows: list[Row] = []
    for repeat in range(options.repeats):
        for name in chosen:
            command = [sys.executable, "-m", prog, *words, "--child", name]
            done = subprocess.run(
                command, check=True, stdout=subprocess.PIPE, text=True
            )
            measured = json.loads(done.stdout.splitlines()[-1])
            measured = {key: round(value, 2) for key, value in measured.items()}
            rows.append({"variant": name, "repeat": repeat, **measured})
            print(rows[-1], flush=True)
    return rows


def rate(marks: Sequence[tuple[int, float]], *, after: int = 0) -> dict[str, float]:
    """Env steps per second from the second of some marks to the last.

    Args:
      marks: env steps and seconds at the end of each update.
      after: only marks count that have as many env steps.
    """
    (steps, start), (end_steps, end) = [m for m in marks if m[0] >= after][1], marks[-1]
    return {"steps_per_s": (end_steps - steps) / (end - start), "start_s": start}


def ours(agent: Any, *, after: int = 0, **run: Any) -> dict[str, float]:
    """Rate of a run of ours, which evaluates, writes and shows nothing.

    Args:
      agent: its options.
      after: see `rate`.
      **run: options of the run, see `TrainConfig`.
    """
    from fps_jax import TrainConfig, train  # Of the process that measures.

    began = time.perf_counter()
    quiet = {"eval_episodes": 0, "directory": None, "show_progress": False}
    records = train(agent, TrainConfig(**quiet, **run)).records
    lead = time.perf_counter() - began - records[-1]["wall_s"]
    return rate([(r["env_steps"], lead + r["wall_s"]) for r in records], after=after)


def sb3(
    make_model: Callable[[], Any], env_steps: int, *, after: int = 0
) -> dict[str, float]:
    """Rate of a run of Stable-Baselines3.

    Args:
      make_model: makes its environments and its model.
      env_steps: length of the run.
      after: see `rate`.
    """
    # Of the extra `bench` alone.
    from stable_baselines3.common.callbacks import BaseCallback  # pyright: ignore

    began = time.perf_counter()
    marks = []

    class Mark(BaseCallback):
        def _on_step(self) -> bool:
            return True

        def _on_rollout_start(self) -> None:
            if self.num_timesteps:  # The update before this rollout has ended.
                marks.append((self.num_timesteps, time.perf_counter() - began))

    model = make_model()
    model.learn(env_steps, callback=Mark())
    marks.append((model.num_timesteps, time.perf_counter() - began))
    model.get_env().close()
    return rate(marks, after=after)


def medians(rows: Sequence[Row], name: str) -> dict[str, float]:
    """The median of a figure, for each variant that was measured.

    Args:
      rows: see `measure`.
      name: of the figure.
    """
    variants = dict.fromkeys(row["variant"] for row in rows)
    return {
        variant: statistics.median(r[name] for r in rows if r["variant"] == variant)
        for variant in variants
    }


def ratios_of(
    median: Mapping[str, float], pairs: Mapping[str, tuple[str, Sequence[str]]]
) -> dict[str, float]:
    """Ratios of variants, each to the largest of some others, if all were measured.

    Args:
      median: see `medians`.
      pairs: by name of the ratio: a variant, and the others.
    """
    return {
        name: round(median[one] / max(median[other] for other in others), 2)
        for name, (one, others) in pairs.items()
        if {one, *others} <= set(median)
    }
