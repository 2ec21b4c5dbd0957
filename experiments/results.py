"""Results as CSV files that say how they were made."""

import csv
import datetime
import json
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fps_jax.runtime.runs import provenance

FOLDER = Path(__file__).parent / "results"
RESAMPLES = 2000


def command() -> str:
    """The command line of this process, as a reader would type it."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    program = ["-m", spec.name] if spec is not None else [Path(sys.argv[0]).name]
    return shlex.join(["python", *program, *sys.argv[1:]])


def write_csv(path: Path, rows: Iterable[Mapping[str, Any]], **more: Any) -> None:
    """Writes rows under a header of comments: command, date, versions and device.

    Args:
      path: the file; it appears whole or not at all.
      rows: all with the same keys.
      **more: what else the header says.
    """
    rows = list(rows)
    about = {
        "command": command(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        **provenance(),
        **more,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", newline="", encoding="utf-8") as file:
        for name, value in about.items():
            text = value if isinstance(value, str) else json.dumps(value)
            file.write(f"# {name}: {text}\n")
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    temporary.replace(path)


def read_csv(path: Path) -> list[dict[str, str]]:
    """Reads rows back, without the header of comments.

    Args:
      path: a file that `write_csv` wrote.
    """
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def iqm(runs: np.ndarray) -> np.ndarray:
    """The mean without a quarter of the runs at each end; of fewer than 4, the mean.

    `scipy.stats.trim_mean` says the same and takes longer, which 2000 resamples notice,
    and its import more than all else that a run needs to draw its own curve.

    Args:
      runs: ``[runs, ...]``.
    """
    cut = len(runs) // 4
    return np.sort(runs, axis=0)[cut : len(runs) - cut].mean(axis=0)


def interval(
    scores: np.ndarray | list[np.ndarray], measure: Callable[..., np.ndarray]
) -> np.ndarray:
    """The 95 % stratified bootstrap interval of a measure, the same at each call.

    Agarwal et al. (2021), arXiv:2108.13264.

    Args:
      scores: ``[runs, 1, ...]``, or several such, each resampled by itself.
      measure: of them: ``[K]``.

    Returns:
      The lower and the upper ends, ``[2, K]``.
    """
    from rliable import library  # Slow to import.

    # rliable draws from numpy's global generator, whatever it is given.
    before = np.random.get_state()  # noqa: NPY002
    np.random.seed(0)  # noqa: NPY002
    try:
        of_runs: dict[str, Any] = {"runs": scores}
        _, intervals = library.get_interval_estimates(of_runs, measure, reps=RESAMPLES)
    finally:
        np.random.set_state(before)  # noqa: NPY002
    return intervals["runs"]


def interquartile_mean(returns: Sequence[float]) -> tuple[float, float, float]:
    """Interquartile mean of runs, with its 95 % stratified bootstrap interval.

    Args:
      returns: one a run.

    Returns:
      The mean, and the interval's two ends.
    """
    runs = np.asarray(returns)
    low, high = interval(runs[:, None], lambda scores: np.array([iqm(scores[:, 0])]))
    return float(iqm(runs)), float(low[0]), float(high[0])
