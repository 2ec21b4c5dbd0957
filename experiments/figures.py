"""Draws figures from what runs and experiments wrote.

``python -m experiments.figures`` draws ``experiments/figures/<name>.png`` for every
group of ``experiments/results/<name>_<task>.csv`` that `experiments.learning` wrote,
``ppo_variants.png`` from what `experiments.ppo_variants` wrote,
``dfps_ablations.png`` from what `experiments.dfps_ablations` wrote,
``dqn_replays.png`` from what `experiments.dqn_replays` wrote, ``imbalanced_mnist.png``
from what `experiments.imbalanced_mnist` wrote, and ``cliffwalk_*.png`` from what
`experiments.cliffwalk` wrote.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments import cliffwalk_figures, results
from fps_jax.runtime.metrics import read_jsonl

FOLDER = Path(__file__).parent / "figures"

# Okabe and Ito's colours, which the colour-blind can tell apart.
BLUE, ORANGE = "#0072B2", "#E69F00"
COLOURS = (BLUE, ORANGE, "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000")


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


def draw_curve(
    axes: Axes,
    rows: Sequence[dict[str, str]],
    *,
    colour: str = BLUE,
    label: str | None = None,
    style: str = "-",
    points: int = 100,
) -> int:
    """Draws learning curves as one: the IQM of the seeds, and their range.

    Args:
      axes: where.
      rows: that `experiments.learning` wrote, of one agent on one task.
      colour: of the curve.
      label: of the curve, if there are several.
      style: of its line.
      points: at which the seeds' curves, straight between evaluations, are compared.

    Returns:
      How many seeds there are.
    """
    curves = []
    for seed in sorted({row["seed"] for row in rows}):
        mine = [r for r in rows if r["seed"] == seed]
        curves.append(np.array([[r["env_steps"], r["return"]] for r in mine], float))
    first = max(curve[0, 0] for curve in curves)
    last = min(curve[-1, 0] for curve in curves)
    steps = np.linspace(first, last, points)
    returns = np.stack([np.interp(steps, *curve.T) for curve in curves])
    low, high = returns.min(axis=0), returns.max(axis=0)
    opacity = 0.2 if label is None else 0.1
    axes.fill_between(steps / 1e3, low, high, color=colour, alpha=opacity, linewidth=0)
    axes.plot(
        steps / 1e3,
        results.iqm(returns),
        style,
        color=colour,
        linewidth=2,
        label=label,
    )
    axes.spines[["top", "right"]].set_visible(False)
    return len(curves)


def draw_task(axes: Axes, path: Path) -> None:
    """Draws the learning curves of one task.

    Args:
      axes: where.
      path: a CSV that `experiments.learning` wrote.
    """
    rows = results.read_csv(path)
    seeds = draw_curve(axes, rows)
    axes.set_title(f"{rows[0]['env']}, {seeds} seeds", fontsize="medium")


def draw_variants(paths: Sequence[Path], to: Path) -> None:
    """Draws the variants of an agent, and below them what four times the batch does.

    Args:
      paths: CSVs that `experiments.ppo_variants` wrote.
      to: the PNG.
    """
    rows = [row for path in paths for row in results.read_csv(path)]
    envs = list(dict.fromkeys(row["env"] for row in rows))
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    larger = [arm for arm in arms if arm.endswith("_x4")]
    compared = [
        [arm for arm in arms if arm not in larger],
        [arm for arm in arms if f"{arm}_x4" in larger or arm in larger],
    ]
    colours = dict(zip(compared[0], COLOURS))  # An arm's own in every panel.
    size = (4.8 * len(envs), 6.4)
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(2, len(envs), squeeze=False)
    for column, env in zip(panels.T, envs, strict=True):
        for axes, group in zip(column, compared, strict=True):
            _draw_arms_of(axes, rows, env, group, colours)
    _finish(figure, to)


def draw_compared(paths: Sequence[Path], to: Path) -> None:
    """Draws the learning curves of several arms, one panel a task.

    Args:
      paths: CSVs that `learning.run_arms` wrote.
      to: the PNG.
    """
    rows = [row for path in paths for row in results.read_csv(path)]
    envs = list(dict.fromkeys(row["env"] for row in rows))
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    figure = Figure(figsize=(4.2 * len(envs), 3.2), layout="constrained")
    panels = figure.subplots(1, len(envs), squeeze=False)[0]
    for axes, env in zip(panels, envs, strict=True):
        _draw_arms_of(axes, rows, env, arms, dict(zip(arms, COLOURS)))
    _finish(figure, to)


def _draw_arms_of(
    axes: Axes,
    rows: Sequence[dict[str, str]],
    env: str,
    arms: Sequence[str],
    colours: Mapping[str, str],
) -> None:
    """Draws the curves of arms on one task, those at four times the batch dashed."""
    for arm in arms:
        mine = [r for r in rows if r["arm"] == arm and r["env"] == env]
        if not mine:
            continue
        seeds = draw_curve(
            axes,
            mine,
            colour=colours.get(arm.removesuffix("_x4"), BLUE),
            label=arm.replace("_x4", ", 4 x the batch"),
            style="--" if arm.endswith("_x4") else "-",
        )
        axes.set_title(f"{env}, {seeds} seeds", fontsize="medium")
    if arms:
        axes.legend(frameon=False, fontsize="small")


def draw_arms(paths: Sequence[Path], to: Path) -> None:
    """Draws where each arm of a comparison ends: IQM and 95 % interval of the seeds.

    Args:
      paths: CSVs that `learning.run_arms` wrote.
      to: the PNG.
    """
    rows = [row for path in paths for row in results.read_csv(path)]
    envs = list(dict.fromkeys(row["env"] for row in rows))
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    size = (3.6 * len(envs) + 1.5, 0.26 * len(arms) + 1.2)
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(1, len(envs), sharey=True, squeeze=False)[0]
    for axes, env in zip(panels, envs, strict=True):
        for place, arm in enumerate(reversed(arms)):
            mine = [r for r in rows if r["arm"] == arm and r["env"] == env]
            last = {row["seed"]: float(row["return"]) for row in mine}
            if last:
                iqm, low, high = results.interquartile_mean(list(last.values()))
                axes.plot([low, high], [place, place], color=BLUE, linewidth=2)
                axes.plot([iqm], [place], "o", color=BLUE)
        axes.set_yticks(range(len(arms)), list(reversed(arms)), fontsize="small")
        axes.set_title(env, fontsize="medium")
        axes.grid(axis="x", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("deterministic return at the end: IQM and 95 % interval")
    to.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(to, dpi=150)


def draw_imbalanced(path: Path, to: Path) -> None:
    """Draws test errors and test loss by updates: median and range of the seeds.

    Args:
      path: the CSV that `experiments.imbalanced_mnist` wrote; of each arm the selected
        step-size is drawn.
      to: the PNG.
    """
    rows = [r for r in results.read_csv(path) if r["is_selected"] == "True"]
    figure = Figure(figsize=(9.0, 3.4), layout="constrained")
    titles = {
        "test_errors": "misclassified of the balanced test set",
        "test_loss": "negative log-likelihood of the test set",
    }
    panels = figure.subplots(1, 2)
    for axes, (column, title) in zip(panels, titles.items(), strict=True):
        for arm, colour in zip(dict.fromkeys(r["arm"] for r in rows), COLOURS):
            of_seeds: dict[str, list[dict[str, str]]] = {}
            for row in rows:
                if row["arm"] == arm:
                    of_seeds.setdefault(row["seed"], []).append(row)
            curves = list(of_seeds.values())
            updates = np.array([int(r["updates"]) for r in curves[0]]) / 1e3
            values = np.array([[float(r[column]) for r in rs] for rs in curves])
            low, high = values.min(axis=0), values.max(axis=0)
            axes.fill_between(updates, low, high, color=colour, alpha=0.2, linewidth=0)
            label = f"{arm}, step-size {float(curves[0][0]['step_size']):g}"
            median = np.median(values, axis=0)
            axes.plot(updates, median, color=colour, linewidth=2, label=label)
        axes.set_title(title, fontsize="medium")
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_ylim(bottom=0)
    panels[0].legend(frameon=False)
    figure.supxlabel("thousand updates: median and range of seeds", fontsize="medium")
    to.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(to, dpi=150)


def _finish(figure: Figure, to: Path) -> None:
    """Labels a figure of learning curves and writes it."""
    figure.supxlabel("thousand env steps", fontsize="medium")
    figure.supylabel("return: IQM and range of seeds", fontsize="medium")
    to.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(to, dpi=150)


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
    _finish(figure, to)


def main() -> int:
    """Draws every figure whose results are there."""
    names = ("ppo", "dfps_fast_1M")
    for name in names:
        paths = sorted(results.FOLDER.glob(f"{name}_*-v*.csv"))
        paths = [p for p in paths if "_" not in p.stem.removeprefix(f"{name}_")]
        if paths:
            draw_learning(paths, FOLDER / f"{name}.png")
            print(FOLDER / f"{name}.png")
    variants = sorted((results.FOLDER / "ppo_variants").glob("*.csv"))
    if variants:
        draw_variants(variants, FOLDER / "ppo_variants.png")
        print(FOLDER / "ppo_variants.png")
    ablations = sorted((results.FOLDER / "dfps_ablations").glob("*.csv"))
    if ablations:
        draw_arms(ablations, FOLDER / "dfps_ablations.png")
        print(FOLDER / "dfps_ablations.png")
    replays = sorted((results.FOLDER / "dqn_replays").glob("*.csv"))
    if replays:
        draw_compared(replays, FOLDER / "dqn_replays.png")
        print(FOLDER / "dqn_replays.png")
    imbalanced = results.FOLDER / "imbalanced_mnist.csv"
    if imbalanced.exists():
        draw_imbalanced(imbalanced, FOLDER / "imbalanced_mnist.png")
        print(FOLDER / "imbalanced_mnist.png")
    for path in cliffwalk_figures.draw_all(results.FOLDER, FOLDER):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
