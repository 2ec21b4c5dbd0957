"""Draws what a sweep found on a task; `experiments.report` writes them into a page.

Each of `DRAWINGS` is a figure of one `sweep_results.Task`. A setting has one number and
one colour in all of them; its number is its rank, as in the report's table.
"""

import math
import re
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from experiments import results, sweep_results
from experiments.figures import BLUE, COLOURS
from experiments.sweep_results import Estimate, Setting, Task

# Eight settings can be told apart: the eighth has the first's colour, dashed.
STYLES = (*((colour, "-") for colour in COLOURS), (BLUE, "--"))
GREY = "#B0B0B0"
VERMILION = "#D55E00"
A_RUN, OF_VALUE, FAILED = "a run", "IQM of a value's runs", "a run that failed"
PROFILES = 4
MOST_ROWS = 40
_WIDTH = 44
"""Letters of a line of a name."""


def draw_all(task: Task, directory: Path) -> dict[str, Path]:
    """Draws every figure of a task that can be drawn.

    Args:
      task: of a sweep.
      directory: where the PNGs go.

    Returns:
      The PNG of each drawing's name.
    """
    drawn = {}
    for name, draw in DRAWINGS.items():
        figure = draw(task)
        if figure is not None:
            safe = re.sub(r"[^\w.-]", "_", task.env)
            drawn[name] = directory / f"{name}_{safe}.png"
            figure.savefig(drawn[name], dpi=150)
    return drawn


def short(text: str) -> str:
    """A value as a figure says it: three digits of a fraction, none for nothing.

    Args:
      text: as the CSV has it.
    """
    number = sweep_results.as_number(text)
    if number is None or re.fullmatch(r"[+-]?\d+", text):
        return text or "none"
    return f"{number:.3g}"


def names(task: Task) -> list[str]:
    """What figures call the settings of a task: their numbers, and what is theirs.

    Args:
      task: of a sweep.

    Returns:
      One a setting, of two lines at most, or one if there are many; "setting 7" where
      that is too little.
    """
    if len(task.settings) == 1:
        return [task.settings[0].values["agent"]]
    told = []
    for number, setting in enumerate(task.settings, 1):
        values = [setting.values[name] for name in task.varied]
        words = [
            short(value) if name == "agent" else f"{name}={short(value)}"
            for name, value in zip(task.varied, values, strict=True)
        ]
        told.append(textwrap.fill(f"{number}: {', '.join(words)}", _WIDTH))
    lines = 2 if len(told) <= 12 else 1
    if any(name.count("\n") >= lines for name in told):
        return [f"setting {number}" for number in range(1, len(told) + 1)]
    return told


def draw_curves(task: Task) -> Figure | None:
    """Draws learning curves: the IQM of a setting's runs, and its 95 % interval.

    The eight best are named; of more, the rest is grey. A failed run is dotted, with a
    cross where it ended.

    Args:
      task: of a sweep.
    """
    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    axes = figure.subplots()
    # The better lies above the worse.
    for rank, row in enumerate(zip(task.settings, names(task), STYLES)):
        setting, name, style = row
        _draw_curve(axes, setting, style, width=2.0, height=20 - rank, label=name)
    rest = task.settings[len(STYLES) :]
    for setting in rest:
        _draw_curve(axes, setting, (GREY, "-"), width=0.7, height=2)
    if not axes.lines:
        return None
    if rest:
        axes.plot([], color=GREY, linewidth=0.7, label=f"the other {len(rest)}")
    if any(setting.that_are("failed") for setting in task.settings):
        axes.plot([], ":x", color="black", linewidth=1, label=FAILED)
    axes.set_xlabel("thousand env steps")
    axes.set_ylabel(_of("return", task))
    axes.set_title(f"{task.env}, {_runs(task)}", fontsize="medium")
    _finish(axes)
    _legend(figure, *axes.get_legend_handles_labels())
    return figure


def draw_final(task: Task) -> Figure | None:
    """Draws the final return of each setting: IQM, 95 % interval, and every run.

    Args:
      task: of a sweep.
    """
    if task.settings[0].final is None:
        return None
    shown = task.settings[:MOST_ROWS]
    figure, axes = _rows_of(names(task)[:MOST_ROWS])
    for place, setting in enumerate(shown):
        runs = setting.final_returns
        axes.plot(runs, np.full(len(runs), place), "|", color="#707070", markersize=7)
        if setting.final is not None:
            _draw_estimate(axes, setting.final, place)
            continue
        at_left = axes.get_yaxis_transform()
        note = {"va": "center", "fontsize": "small", "transform": at_left}
        axes.text(0.01, place, "no run is done", **note)
    axes.set_xlabel(_of("final return", task))
    axes.set_title(f"{task.env}, {_runs(task)}", fontsize="medium")
    return figure


def draw_profiles(task: Task) -> Figure | None:
    """Draws performance profiles of the best settings: the share of runs above tau.

    Args:
      task: of a sweep.
    """
    told = [*zip(task.settings, names(task), STYLES)]
    shown = [row for row in told if len(row[0].final_returns) > 1][:PROFILES]
    if not shown:
        return None
    returns = np.concatenate([setting.final_returns for setting, *_ in shown])
    margin = 0.05 * (np.ptp(returns) or abs(returns[0]) or 1.0)
    thresholds = np.linspace(returns.min() - margin, returns.max() + margin, 200)
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    for setting, name, (colour, style) in shown:
        share = sweep_results.profile(setting.final_returns, thresholds)
        axes.plot(thresholds, share.value, style, color=colour, label=name)
        axes.fill_between(
            thresholds, share.low, share.high, color=colour, alpha=0.15, linewidth=0
        )
    axes.set_xlabel(r"final return $\tau$")
    axes.set_ylabel(r"share of runs above $\tau$, 95 % interval")
    axes.set_title(f"{task.env}, {_runs(task)}", fontsize="medium")
    _finish(axes)
    _legend(figure, *axes.get_legend_handles_labels())
    return figure


def draw_improvement(task: Task) -> Figure | None:
    """Draws how probably a run of the first setting beats one of each other.

    Args:
      task: of a sweep.
    """
    compared = [
        (name, probability)
        for name, probability in zip(names(task), task.improvements, strict=True)
        if probability is not None
    ][:MOST_ROWS]
    if not compared:
        return None
    figure, axes = _rows_of([name for name, _ in compared])
    for place, (_, probability) in enumerate(compared):
        _draw_estimate(axes, probability, place)
    axes.axvline(0.5, color="black", linewidth=1, linestyle="--")
    axes.set_xlim(-0.02, 1.02)
    axes.set_xlabel("probability of improvement, 95 % interval")
    title = f"{task.env}: how probably a run of setting 1 ends higher"
    figure.suptitle(title, fontsize="medium")
    return figure


def draw_effects(task: Task) -> Figure | None:
    """Draws the final return against each setting that is a number.

    Args:
      task: of a sweep.
    """
    if not task.numeric or task.settings[0].final is None:
        return None
    columns = min(3, len(task.numeric))
    rows = -(-len(task.numeric) // columns)
    size = (max(4.2, 3.4 * columns), 3.0 * rows + 0.4)
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, sharey=True)
    for axes in panels.flat[len(task.numeric) :]:
        axes.set_visible(False)
    entries = {}
    for axes, name in zip(panels.flat, task.numeric, strict=False):
        _draw_effect(axes, task, name)
        handles, labels = axes.get_legend_handles_labels()
        entries.update(zip(labels, handles, strict=True))
    if FAILED in entries:  # Crosses have the lowest twelfth to themselves.
        low, high = panels[0, 0].get_ylim()
        panels[0, 0].set_ylim(low - (high - low) / 11, high)
    for axes in panels[:, 0]:
        axes.set_ylabel("final return")
    figure.suptitle(task.env, fontsize="medium")
    told = [label for label in (A_RUN, OF_VALUE, FAILED) if label in entries]
    _legend(figure, [entries[label] for label in told], told)
    return figure


def _draw_effect(axes: Axes, task: Task, name: str) -> None:
    """Draws runs by one setting's value, and the IQM of each value that has several."""
    of_values: dict[float, list[float]] = {}
    failed = []
    unset = 0
    for setting in task.settings:
        value = sweep_results.as_number(setting.values[name])
        if value is None:
            unset += len(setting.final_returns)
            continue
        of_values.setdefault(value, []).extend(setting.final_returns)
        failed += [value] * len(setting.that_are("failed"))
    values = sorted(of_values)
    dots = [(value, run) for value in values for run in of_values[value]]
    if dots:
        axes.plot(*zip(*dots), "o", color=BLUE, alpha=0.6, markersize=4, label=A_RUN)
    several = [value for value in values if len(of_values[value]) > 1]
    if len(several) > 1:
        iqm = [results.iqm(np.array(of_values[v])) for v in several]
        axes.plot(several, iqm, "-D", color="black", markersize=4, label=OF_VALUE)
    if failed:
        axes.plot(
            failed,
            np.full(len(failed), 0.04),
            "x",
            color=VERMILION,
            transform=axes.get_xaxis_transform(),
            label=FAILED,
        )
    _scale(axes, values)
    note = f"\n(runs that have none, not shown: {unset})" if unset else ""
    axes.set_xlabel(f"{name}{note}")
    _finish(axes)


def _scale(axes: Axes, values: Sequence[float]) -> None:
    """A logarithmic axis beyond a decade; a tick at each value if there are few."""
    is_log = values[0] > 0 and values[-1] > 10 * values[0]
    if is_log:
        axes.set_xscale("log")
    places = [math.log10(value) if is_log else value for value in values]
    gaps = np.diff(places) / (places[-1] - places[0])
    if gaps.min() >= 0.16:
        axes.set_xticks(values, [f"{value:g}" for value in values])
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(labelsize="small")


def _draw_curve(
    axes: Axes,
    setting: Setting,
    style: tuple[str, str],
    *,
    width: float,
    height: int,
    label: str | None = None,
) -> None:
    """Draws a setting's curve, its interval if it has a name, and its failed runs."""
    colour, line = style
    common: dict[str, Any] = {"color": colour, "zorder": height}
    for run in setting.that_are("failed"):
        if not run.returns.size:
            continue
        steps = run.env_steps / 1e3
        axes.plot(steps, run.returns, ":", linewidth=1, **common)
        axes.plot(steps[-1:], run.returns[-1:], "x", markersize=5, **common)
    if setting.curve is None:
        return
    steps, iqm = setting.curve
    if label is not None and iqm.low is not None:
        band = steps / 1e3, iqm.low, iqm.high
        axes.fill_between(*band, alpha=0.15, linewidth=0, **common)
    marker = "o" if len(steps) == 1 else None
    axes.plot(
        steps / 1e3,
        iqm.value,
        line,
        linewidth=width,
        marker=marker,
        label=label,
        **common,
    )


def _draw_estimate(axes: Axes, estimate: Estimate, place: int) -> None:
    """Draws a dot and its interval; a hollow dot if it has none."""
    if estimate.low is not None:
        ends = [estimate.low, estimate.high]
        axes.plot(ends, [place, place], color=BLUE, linewidth=2.5)
    face = "white" if estimate.low is None else BLUE
    axes.plot([estimate.value], [place], "o", color=BLUE, markerfacecolor=face)


def _rows_of(labels: Sequence[str]) -> tuple[Figure, Axes]:
    """A figure with one row a label, the first at the top."""
    lines = max(label.count("\n") + 1 for label in labels)
    height = (0.12 + 0.14 * lines) * len(labels) + 1.2
    figure = Figure(figsize=(6.4, height), layout="constrained")
    axes = figure.subplots()
    axes.set_yticks(range(len(labels)), labels, fontsize="small")
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.grid(axis="x", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _runs(task: Task) -> str:
    """How many runs the numbers of a setting are of."""
    counts = {len(setting.that_are("done")) for setting in task.settings} - {0}
    if not counts:
        return "no run done yet"
    low, high = min(counts), max(counts)
    told = f"{high} runs" if low == high > 1 else f"{low} to {high} runs"
    if high == 1:
        return "1 run a setting: no intervals"
    return told if len(task.settings) == 1 else f"{told} a setting"


def _of(what: str, task: Task) -> str:
    """Names an axis of numbers of several runs, or of one."""
    if any(len(setting.final_returns) > 1 for setting in task.settings):
        return f"{what}: IQM, 95 % interval"
    return what


def _legend(figure: Figure, handles: Sequence[Any], labels: Sequence[str]) -> None:
    """A legend below the panels, for which the figure grows."""
    longest = max(len(line) for label in labels for line in label.split("\n"))
    lines = max(label.count("\n") + 1 for label in labels)
    width, height = figure.get_size_inches()
    columns = max(1, min(4, int(width / 0.06) // (longest + 9)))
    rows = -(-len(labels) // columns)
    figure.set_size_inches(width, height + 0.19 * lines * rows)
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        fontsize="small",
    )


def _finish(axes: Axes) -> None:
    """What curves have in common."""
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


DRAWINGS: dict[str, Callable[[Task], Figure | None]] = {
    "curves": draw_curves,
    "final": draw_final,
    "profiles": draw_profiles,
    "improvement": draw_improvement,
    "effects": draw_effects,
}
"""Each kind of figure, by the name of its file: None if nothing can be drawn."""
