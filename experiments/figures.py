"""Draws figures from what runs and experiments wrote.

``python -m experiments.figures`` draws ``experiments/figures/<name>.png`` for every
group of ``experiments/results/<name>_<task>.csv`` that `experiments.learning` wrote.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.stats import trim_mean  # By 0.25 an end: rliable's interquartile mean.

from experiments import results
from fps_jax.runtime.metrics import read_jsonl

FOLDER = Path(__file__).parent / "figures"

# Okabe and Ito's colours, which the colour-blind can tell apart.
BLUE, ORANGE = "#0072B2", "#E69F00"


def draw_run(directory: Path) -> None:
    """Draws the learning curve of one run from its metrics, if there is any.

    Args:
      directory: of the run; ``learning_curve.png`` is written there.
    """
    records = read_jsonl(directory / "metrics.jsonl")
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.subplots()
    for name, label, colour in (
        ("train/return", "training episodes", ORANGE),
        ("eval/return", "evaluation, deterministic", BLUE),
    ):
        rows = [(r["env_steps"], r[name]) for r in records if r.get(name) is not None]
        if rows:
            width = 0.8 if name.startswith("train") else 2.0
            axes.plot(*zip(*rows), color=colour, linewidth=width, label=label)
    if not axes.lines:
        return
    axes.set_xlabel("env steps")
    axes.set_ylabel("return of an episode")
    axes.set_title(" / ".join(directory.parts[-3:]), fontsize="medium")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(directory / "learning_curve.png", dpi=150)


def draw_task(axes: Axes, path: Path, *, points: int = 100) -> None:
    """Draws the learning curves of one task: the IQM of its seeds, and their range.

    Args:
      axes: where.
      path: a CSV that `experiments.learning` wrote.
      points: at which the seeds' curves, straight between evaluations, are compared.
    """
    rows = results.read_csv(path)
    curves = []
    for seed in sorted({row["seed"] for row in rows}):
        mine = [r for r in rows if r["seed"] == seed]
        curves.append(np.array([[r["env_steps"], r["return"]] for r in mine], float))
    first = max(curve[0, 0] for curve in curves)
    last = min(curve[-1, 0] for curve in curves)
    steps = np.linspace(first, last, points)
    returns = np.stack([np.interp(steps, *curve.T) for curve in curves])
    low, high = returns.min(axis=0), returns.max(axis=0)
    axes.fill_between(steps / 1e3, low, high, color=BLUE, alpha=0.2, linewidth=0)
    axes.plot(steps / 1e3, trim_mean(returns, 0.25), color=BLUE, linewidth=2)
    axes.set_title(f"{rows[0]['env']}, {len(curves)} seeds", fontsize="medium")
    axes.spines[["top", "right"]].set_visible(False)


def draw_learning(paths: Sequence[Path], to: Path) -> None:
    """Draws one panel a task.

    Args:
      paths: CSVs that `experiments.learning` wrote.
      to: the PNG.
    """
    columns = min(3, len(paths))
    rows = -(-len(paths) // columns)
    figure = Figure(figsize=(3.6 * columns, 2.7 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False)
    for axes in panels.flat[len(paths) :]:
        axes.set_visible(False)
    for axes, path in zip(panels.flat, paths, strict=False):
        draw_task(axes, path)
    figure.supxlabel("thousand env steps", fontsize="medium")
    figure.supylabel("deterministic return: IQM and range of seeds", fontsize="medium")
    to.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(to, dpi=150)


def main() -> int:
    """Draws every figure whose results are there."""
    names = ("ppo",)
    for name in names:
        paths = sorted(results.FOLDER.glob(f"{name}_*.csv"))
        if paths:
            draw_learning(paths, FOLDER / f"{name}.png")
            print(FOLDER / f"{name}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
