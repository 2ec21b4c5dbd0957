"""Draws what `experiments.cliffwalk` wrote: figures 1 and 2, and the variants."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from experiments import results

# The paper's colours, of Okabe and Ito's.
COLOURS = {
    "uniform": "#000000",
    "oracle": "#56B4E9",
    "oracle_or_greedy": "#CC79A7",
    "greedy": "#009E73",
    "rank_based": "#D55E00",
    "proportional": "#0072B2",
}
INITIAL = {"maximal": "maximal at first", "td_error": r"$|\delta|$ at first"}
RESAMPLES = 2000
Rows = Sequence[dict[str, str]]


def draw_all(results_folder: Path, figures_folder: Path) -> list[Path]:
    """Draws every figure whose results are there.

    Args:
      results_folder: where the CSVs are.
      figures_folder: where the PNGs go.

    Returns:
      The PNGs.
    """
    drawn = []
    path = results_folder / "cliffwalk.csv"
    if path.exists():
        rows = results.read_csv(path)
        for name, draw in (("cliffwalk_1", draw_oracle), ("cliffwalk_2", draw_methods)):
            drawn.append(figures_folder / f"{name}.png")
            draw(rows, drawn[-1])
    path = results_folder / "cliffwalk_variants.csv"
    if path.exists():
        drawn.append(figures_folder / "cliffwalk_variants.png")
        draw_variants(results.read_csv(path), drawn[-1])
    return drawn


def draw_oracle(rows: Rows, to: Path) -> None:
    """Draws figure 1: uniform replay beside that of an oracle, tabular.

    Args:
      rows: of ``cliffwalk.csv``.
      to: the PNG.
    """
    figure = Figure(figsize=(5.0, 3.6), layout="constrained")
    axes = figure.subplots()
    _curves(axes, [r for r in rows if r["representation"] == "tabular"], "none")
    axes.set_title("Blind Cliffwalk, tabular", fontsize="medium")
    axes.set_ylabel("updates until convergence")
    _finish(figure, to)


def draw_methods(rows: Rows, to: Path) -> None:
    """Draws figure 2: greedy replay, tabular; both stochastic ones, linear.

    The latter have a panel for each priority that transitions have at first.

    Args:
      rows: of ``cliffwalk.csv``.
      to: the PNG.
    """
    figure = Figure(figsize=(12.0, 4.2), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    kinds = ("tabular", *INITIAL), ("linear", "maximal"), ("linear", "td_error")
    for axes, (representation, *initial) in zip(panels, kinds, strict=True):
        mine = [r for r in rows if r["representation"] == representation]
        _curves(axes, mine, "none", *initial)
        told = "" if len(initial) > 1 else f", priorities {INITIAL[initial[0]]}"
        axes.set_title(f"{representation}{told}", fontsize="medium")
    panels[0].set_ylabel("updates until convergence")
    _finish(figure, to)


def _curves(axes: Axes, rows: Rows, *initial: str) -> None:
    """Draws the arms that start from these priorities."""
    names = ("method", "beta", "initial_priority")
    arms = dict.fromkeys(tuple(row[name] for name in names) for row in rows)
    for arm in arms:
        method, beta, first = arm
        if first not in initial:
            continue
        words = [method.replace("_", " ").replace("rank b", "rank-b")]
        # The latter lies on the oracle's curve where there are no dead ends.
        is_dashed = float(beta) > 0.0 or method == "oracle_or_greedy"
        if method in ("rank_based", "proportional"):
            words.append(rf"$\beta$ = {float(beta):g}")
        if first != "none" and len(initial) > 2:
            words.append(INITIAL[first])
            is_dashed = first == "td_error"
        mine = [row for row in rows if tuple(row[name] for name in names) == arm]
        style = "--" if is_dashed else "-"
        _curve(axes, mine, color=COLOURS[method], linestyle=style, words=words)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend(frameon=False, fontsize="small")
    axes.spines[["top", "right"]].set_visible(False)


def _curve(
    axes: Axes, rows: Rows, *, color: str, linestyle: str, words: list[str]
) -> None:
    """Draws an arm: the median, and the range of seeds.

    A triangle stands where half of the runs did not converge: the median is above.
    """
    sizes = sorted({int(row["transitions"]) for row in rows})
    runs = [[row for row in rows if row["transitions"] == str(n)] for n in sizes]
    given = [[int(row["updates"]) for row in of_size] for of_size in runs]
    low, high = (np.array([end(x) for x in given]) for end in (min, max))
    middle = np.array([np.median(_updates(of_size)) for of_size in runs])
    axes.fill_between(sizes, low, high, color=color, alpha=0.12, linewidth=0)
    axes.plot(
        sizes,
        np.where(np.isfinite(middle), middle, np.nan),
        linestyle,
        color=color,
        marker=".",
        linewidth=1.8,
        label=", ".join(words),
    )
    unknown = np.flatnonzero(np.isinf(middle))
    if unknown.size:
        label = f"{words[0]}: half did not converge"
        places = np.array(sizes)[unknown], high[unknown]
        axes.plot(*places, "^", color=color, markersize=7, label=label)


def draw_variants(rows: Rows, to: Path) -> None:
    """Draws the updates of each variant as a multiple of plain proportional replay's.

    That is the ratio of medians and its 95 % bootstrap interval, in which both vary. An
    arrow is where an end is not known since too many runs did not converge.

    Args:
      rows: of ``cliffwalk_variants.csv``.
      to: the PNG.
    """
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    kinds = list(dict.fromkeys(row["representation"] for row in rows))
    size = (4.2 * len(kinds) + 2.0, 0.3 * len(variants) + 1.3)
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(1, len(kinds), sharey=True, squeeze=False)[0]
    for axes, kind in zip(panels, kinds, strict=True):
        of_kind = [row for row in rows if row["representation"] == kind]
        runs = {v: _updates(r for r in of_kind if r["variant"] == v) for v in variants}
        plain = runs.get("proportional", runs[variants[0]])
        limit = max(int(row["updates"]) for row in of_kind) / np.median(plain)
        for place, variant in enumerate(reversed(variants)):
            _interval(axes, place, ratio_of_medians(runs[variant], plain), limit)
            done, all_runs = np.isfinite(runs[variant]).sum(), runs[variant].size
            if done < all_runs:
                told = f"{done} of {all_runs} converged"
                axes.text(limit, place + 0.2, told, ha="right", fontsize="x-small")
        axes.axvline(1.0, color="#000000", linewidth=0.8, linestyle=":")
        labels = [name.replace("_", " ") for name in reversed(variants)]
        axes.set_yticks(range(len(variants)), labels, fontsize="small")
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
        title = f"{kind}, n = {of_kind[0]['n']}, {plain.size} seeds"
        axes.set_title(title, fontsize="medium")
        axes.grid(axis="x", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    label = "updates until convergence / those of proportional replay: ratio of medians"
    figure.supxlabel(f"{label}, 95 % interval", fontsize="medium")
    to.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(to, dpi=150)


def ratio_of_medians(
    runs: np.ndarray, others: np.ndarray
) -> tuple[float, float, float]:
    """``median(runs) / median(others)``, and its 95 % bootstrap interval.

    Args:
      runs: a number each; infinite if it is only known to be large.
      others: as well, but at least half of them finite.

    Returns:
      The ratio, and the interval's two ends.
    """
    rng = np.random.default_rng(0)
    drawn = [rng.choice(x, (RESAMPLES, x.size)) for x in (runs, others)]
    medians = [np.median(x, axis=1) for x in drawn]
    # Of both infinite nothing is known: as large as can be.
    ratios = np.where(np.isfinite(medians[1]), medians[0] / medians[1], np.inf)
    low, high = np.quantile(ratios, (0.025, 0.975), method="nearest")
    return float(np.median(runs) / np.median(others)), float(low), float(high)


def _interval(
    axes: Axes, place: int, found: tuple[float, float, float], limit: float
) -> None:
    """Draws a ratio and its interval; an arrow where the limit of updates was met."""
    middle, low, high = (min(x, limit) for x in found)
    axes.plot([low, high], [place, place], color=COLOURS["proportional"], linewidth=2)
    for end in (middle, high):
        marker = ">" if end == limit else "o" if end == middle else ""
        axes.plot(end, place, marker=marker, color=COLOURS["proportional"])


def _updates(rows: Iterable[dict[str, str]]) -> np.ndarray:
    """Updates of runs; infinite for those that did not converge."""
    return np.array(
        [float(r["updates"]) if r["is_converged"] == "True" else np.inf for r in rows]
    )


def _finish(figure: Figure, to: Path) -> None:
    """Labels a figure of curves and writes it."""
    figure.supxlabel("transitions in the replay memory", fontsize="medium")
    to.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(to, dpi=150)
