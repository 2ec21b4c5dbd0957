"""Measurements that take turns, each in a process of its own.

A benchmark has variants by name, each a function of its options that measures once. Its
options have ``repeats``, ``variants`` (those asked for; by default all) and ``child``
(the one that this process is to measure).
"""

import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments import command_line, results

Variants = Mapping[str, Callable[[Any], dict[str, float]]]


def measure(
    prog: str, words: Sequence[str], options: Any, variants: Variants
) -> list[dict[str, Any]] | None:
    """Measures every variant in turn, as often as asked.

    Args:
      prog: the module, for the processes.
      words: its command line.
      options: see above.
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
    rows: list[dict[str, Any]] = []
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


def medians(rows: Sequence[dict[str, Any]], name: str) -> dict[str, float]:
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


def ratios(
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


def write(
    path: Path,
    rows: Sequence[dict[str, Any]],
    *,
    peers: Sequence[str] = (),
    **more: Any,
) -> None:
    """Writes the rows, with the versions of other packages and the number of cores.

    Args:
      path: the CSV.
      rows: see `measure`.
      peers: packages that were measured.
      **more: what else the header says.
    """
    versions = {name: importlib.metadata.version(name) for name in peers}
    about = {"peers": versions} if peers else {}
    results.write_csv(path, rows, **about, cores=os.cpu_count(), **more)
