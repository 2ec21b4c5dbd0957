"""Draws figures from what runs and experiments wrote."""

from pathlib import Path

from matplotlib.figure import Figure

from fps_jax.runtime.metrics import read_jsonl

# Okabe and Ito's colours, which the colour-blind can tell apart.
BLUE, ORANGE, GREEN = "#0072B2", "#E69F00", "#009E73"


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
