"""What did a sweep find?

``python -m experiments.report SWEEP_DIR`` reads ``SWEEP_DIR/sweep.csv`` and writes one
page, ``report.md``, with its figures beside it: what was run, which runs failed, the
settings in order, and which of them can be told apart.
"""

import dataclasses
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import tyro

from experiments import command_line, sweep_figures, sweep_results
from experiments.sweep_results import Setting, Sweep, Task
from experiments.sweep_verdict import digits, told, verdict, words

PROG = "experiments.report"


class Reading(NamedTuple):
    """How the page speaks of a figure.

    Attributes:
      title: of its part.
      sentence: on how to read it.
      missing: why it is not there, if it is not.
    """

    title: str
    sentence: str
    missing: str


READINGS = {
    "curves": Reading(
        "Learning curves",
        "A line is the interquartile mean of a setting's runs, the band around it a "
        "95 % bootstrap interval at each point by itself.",
        "no run has been evaluated yet",
    ),
    "final": Reading(
        "Final return",
        "A dot is the interquartile mean of the runs' last evaluations, the bar its "
        "95 % interval, a stroke one run; a hollow dot is one run, which has no "
        "interval.",
        "no run is done yet",
    ),
    "profiles": Reading(
        "Performance profiles",
        "A curve is the share of a setting's runs that ended above the return on the "
        "horizontal axis: higher is better, and where two curves cross, which setting "
        "is better depends on the return that one wants.",
        "no setting has two runs that are done",
    ),
    "improvement": Reading(
        "Probability of improvement",
        "How probably a run of setting 1 ends above one of the setting in the row, "
        "ties counted half: an interval that includes 1/2 leaves open which of the two "
        "is better.",
        "setting 1 and another do not both have two runs that are done",
    ),
    "effects": Reading(
        "Return by setting",
        "A dot is one run at its value of a setting, whatever the other settings were, "
        "so that a difference along the axis may be theirs; crosses at the bottom, "
        "whatever their height, are runs that failed.",
        "no run is done yet, or no setting has two values that are numbers",
    ),
}
"""By the names of `sweep_figures.DRAWINGS`."""


@dataclasses.dataclass(frozen=True)
class Options:
    """Writes the report of a sweep.

    Attributes:
      directory: of the sweep; it holds sweep.csv.
    """

    directory: tyro.conf.Positional[Path]


def write(directory: Path) -> Path:
    """Writes the report of a sweep, as far as it has got.

    Args:
      directory: holds ``sweep.csv``; ``report.md`` and its PNGs are written there.

    Returns:
      The report.

    Raises:
      ValueError: if the CSV is not there, is empty, or is not that of a sweep.
    """
    sweep = sweep_results.read(directory / "sweep.csv")
    parts = [_what_ran(sweep), _failures(sweep)]
    for task in sweep.tasks:
        drawn = sweep_figures.draw_all(task, directory)
        parts += [f"## {task.env}", verdict(task), table(task), *_figures(task, drawn)]
    path = directory / "report.md"
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text("\n\n".join(p for p in parts if p) + "\n", encoding="utf-8")
    return temporary.replace(path)


def table(task: Task) -> str:
    """Settings in order: IQM of the final return, area under the curve, with intervals.

    Args:
      task: of a sweep.

    Returns:
      Markdown.
    """
    sizes = [abs(s.final.value) for s in task.settings if s.final is not None]
    places = digits(max(sizes, default=0.0))
    is_compared = len(task.settings) > 1
    head = ["setting", *task.varied, "runs", "final return", "area under the curve"]
    rows = [[*head, "beaten by 1"] if is_compared else head]
    shown = task.settings[: sweep_figures.MOST_ROWS]
    for number, setting in enumerate(shown, 1):
        values = [sweep_figures.short(setting.values[name]) for name in task.varied]
        numbers = [told(setting.final, places), told(setting.area, places)]
        if is_compared:
            numbers.append(told(task.improvements[number - 1], 2))
        rows.append([str(number), *values, _counts(setting), *numbers])
    notes = [
        "Interquartile means of the runs that are done, with 95 % stratified bootstrap "
        "intervals; one run has none. The area is over the width of the curve: the "
        "mean return while it learned. Values of settings are told to three digits."
    ]
    if is_compared:
        notes.append("`beaten by 1`: how probably a run of setting 1 ends above one.")
    if len(shown) < len(task.settings):
        notes.append(f"The CSV has {len(task.settings) - len(shown)} more settings.")
    return f"{_markdown(rows)}\n\n{' '.join(notes)}"


def _what_ran(sweep: Sweep) -> str:
    """Command, versions, and what varied."""
    about = sweep.about
    envs = ", ".join(task.env for task in sweep.tasks)
    known = "unknown: the CSV has no such line"
    commit = about.get("git_commit", known)
    if commit.endswith("-dirty"):
        commit += " (with changes that are not committed)"
    device = f"{about.get('device_count', '?')} x {about.get('device_kind', 'unknown')}"
    lines = [
        f"- commit: {commit}",
        f"- date: {about.get('date', known)}",
        f"- versions: {_versions(about.get('versions', known))}",
        f"- devices: {device}",
        *_varied(sweep),
    ]
    command = f"```bash\n{about.get('command', '# ' + known)}\n```"
    return "\n\n".join([f"# A sweep on {envs}", command, "\n".join(lines)])


def _varied(sweep: Sweep) -> list[str]:
    """What varied, as items of a list, and how many members there are."""
    settings = sweep.settings
    runs = [run for setting in settings for run in setting.runs]
    lines = []
    for name in settings[0].values:
        values = list(dict.fromkeys(setting.values[name] for setting in settings))
        if len(values) > 1:
            lines.append(f"- `{name}`: {_some(values)}")
    seeds = list(dict.fromkeys(run.seed for run in runs))
    lines.append(f"- seeds: {_some(seeds)}")
    counts = [
        f"{sum(run.status == status for run in runs)} {status}"
        for status in sweep_results.STATUSES
    ]
    members = f"{len(runs)} ({', '.join(counts)})"
    return [*lines, f"- members: {members}", f"- settings: {len(settings)}"]


def _failures(sweep: Sweep) -> str:
    """A table of the runs that failed, if any did."""
    rows = [["member", "task", "setting", "seed", "last evaluation"]]
    for task in sweep.tasks:
        for number, setting in enumerate(task.settings, 1):
            for run in setting.that_are("failed"):
                reached = f"{run.last_env_step:,} env steps"
                last = reached if run.last_env_step else "none"
                what = f"{number}: {words(task, setting)}"
                rows.append([run.member, task.env, what, run.seed, last])
    if len(rows) == 1:
        return ""
    return f"## Runs that failed\n\n{_markdown(rows)}"


def _figures(task: Task, drawn: dict[str, Path]) -> Iterable[str]:
    """The figures of a task, each with how to read it, or why it is not there."""
    for name, (title, sentence, missing) in READINGS.items():
        if name in drawn:
            image = f"![{title}, {task.env}]({drawn[name].name})"
            yield f"### {title}\n\n{sentence}\n\n{image}"
        else:
            yield f"{title}: not drawn, as {missing}."


def _versions(text: str) -> str:
    """The versions of what is installed."""
    try:
        versions = json.loads(text)
    except ValueError:
        return text
    return ", ".join(
        f"{name} {version}" for name, version in versions.items() if version
    )


def _counts(setting: Setting) -> str:
    """How many runs are done, and what became of the others."""
    counts = [str(len(setting.that_are("done")))]
    for status in sweep_results.STATUSES[1:]:
        if setting.that_are(status):
            counts.append(f"{len(setting.that_are(status))} {status}")
    return ", ".join(counts)


def _some(values: Sequence[str]) -> str:
    """Values in order, or, if they are many, how many and between what."""
    numbers = [sweep_results.as_number(value) for value in values]
    known = sorted((n, value) for n, value in zip(numbers, values) if n is not None)
    if len(known) == len(values) > 8:
        return f"{len(values)} values from {known[0][0]:g} to {known[-1][0]:g}"
    words = [value or "none" for n, value in zip(numbers, values) if n is None]
    told = [*(value for _, value in known), *words]
    more = f" and {len(told) - 8} more" if len(told) > 8 else ""
    return ", ".join(told[:8]) + more


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table, the first row its head."""
    head, *body = [[cell.replace("|", r"\|") for cell in row] for row in rows]
    lines = [head, ["---"] * len(head), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the report and prints where it is.

    Args:
      argv: the words after the program's name; None reads the process's own.
    """
    words = sys.argv[1:] if argv is None else argv
    options = command_line.parse(Options, words, prog=PROG)
    try:
        path = write(options.directory)
    except ValueError as error:
        command_line.refuse(error, prog=PROG)
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
