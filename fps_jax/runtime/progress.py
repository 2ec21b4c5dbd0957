"""What a run tells whoever waits for it: a line or a bar, and a table at the end."""

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

_REDRAW_S = 0.1


class Status(NamedTuple):
    """How far a run is.

    Attributes:
      env_steps: environment steps done, those before a resume included.
      total_env_steps: environment steps to do in all.
      steps_per_s: environment steps per second of this run, not of its past.
      episode_return: of late episodes; NaN before the first has ended.
      policy_lag: versions between the acting and the learning policy.
    """

    env_steps: int
    total_env_steps: int
    steps_per_s: float
    episode_return: float
    policy_lag: float

    def __str__(self) -> str:
        """Says it in one line."""
        share = self.env_steps / self.total_env_steps
        left = self.total_env_steps - self.env_steps
        seconds_left = left / self.steps_per_s if self.steps_per_s > 0 else math.nan
        return (
            f"{self.env_steps:,}/{self.total_env_steps:,} ({share:.0%})"
            f"  {self.steps_per_s:,.0f} steps/s"
            f"  return {_or_dash(self.episode_return, '.1f')}"
            f"  lag {_or_dash(self.policy_lag, '.1f')}"
            f"  {_clock(seconds_left)} left"
        )


class Reporter(NamedTuple):
    """What `progress` yields.

    Attributes:
      update: ``update(env_steps, steps_per_s, episode_return, policy_lag)``, as often
        as one likes, from one thread.
    """

    update: Callable[[int, float, float, float], None]


@contextlib.contextmanager
def progress(
    total_env_steps: int,
    *,
    stream: Any = None,
    every_s: float = 5.0,
    enabled: bool = True,
) -> Iterator[Reporter]:
    """Shows the progress of a run: a bar on a terminal or in a notebook, else lines.

    Args:
      total_env_steps: environment steps to do in all, at least 1.
      stream: the text stream to write to; None is `sys.stderr`.
      every_s: seconds between two lines, at least 0. The first and the last status
        always appear.
      enabled: False shows nothing.

    Raises:
      ValueError: if an option is out of range.
    """
    if total_env_steps < 1:
        raise ValueError(f"total_env_steps {total_env_steps} must be at least 1.")
    if every_s < 0:
        raise ValueError(f"every_s {every_s} must be at least 0.")
    stream = sys.stderr if stream is None else stream
    console = Console(file=stream)
    if not enabled:
        shown = contextlib.nullcontext(lambda status: None)
    elif console.is_interactive or console.is_jupyter:
        shown = _bar(console, total_env_steps)
    else:
        shown = _lines(stream, every_s)
    with shown as show:
        yield Reporter(
            lambda env_steps, steps_per_s, episode_return, policy_lag: show(
                Status(
                    env_steps, total_env_steps, steps_per_s, episode_return, policy_lag
                )
            )
        )


@contextlib.contextmanager
def _bar(console: Console, total: int) -> Iterator[Callable[[Status], None]]:
    # Redrawn by `update`, so that no thread of Rich's competes with the actors'.
    bar = Progress(
        BarColumn(bar_width=None),
        TextColumn("{task.description}"),
        console=console,
        auto_refresh=False,
    )
    task = bar.add_task("", total=total)
    drawn_at = -math.inf

    def show(status: Status) -> None:
        nonlocal drawn_at
        now = time.monotonic()
        is_due = now - drawn_at >= _REDRAW_S
        drawn_at = now if is_due else drawn_at
        bar.update(
            task,
            completed=status.env_steps,
            description=str(status),
            refresh=is_due,
        )

    with bar:
        try:
            yield show
        finally:
            bar.refresh()  # Rich does so itself at the end, but not in Jupyter.


@contextlib.contextmanager
def _lines(stream: Any, every_s: float) -> Iterator[Callable[[Status], None]]:
    written_at = -math.inf
    unwritten: Status | None = None

    def write(status: Status) -> None:
        stream.write(f"{status}\n")
        stream.flush()

    def show(status: Status) -> None:
        nonlocal written_at, unwritten
        now = time.monotonic()
        if now - written_at < every_s:
            unwritten = status
            return
        written_at, unwritten = now, None
        write(status)

    try:
        yield show
    finally:
        if unwritten is not None:
            write(unwritten)


def summary_table(
    *,
    env_steps: int,
    wall_s: float,
    episode_return: float,
    threads: Mapping[str, Mapping[str, float]],
) -> Table:
    """Makes the table that ends a run: its return, its speed, where its time went.

    Args:
      env_steps: environment steps done since it started or resumed.
      wall_s: the seconds that they took, above 0.
      episode_return: of the last evaluation or of late episodes; NaN if none.
      threads: seconds by timer by thread, such as
        ``{"actor 0": timers.totals(), "learner": ...}``, without nested timers.

    Returns:
      A Rich table, one row a timer and one column a thread: seconds and per cent of
      `wall_s`. What no timer saw is ``other``.
    """
    title = (
        f"return {_or_dash(episode_return, '.1f')}"
        f" | {env_steps / wall_s:,.0f} steps/s"
        f" | {env_steps:,} steps in {_clock(wall_s)}"
    )
    table = Table(title=title, min_width=len(title))
    table.add_column("where the time went")
    for thread in threads:
        table.add_column(thread, justify="right")

    def cell(seconds: float | None) -> str:
        return "" if seconds is None else f"{seconds:.1f} s {seconds / wall_s:4.0%}"

    names = dict.fromkeys(name for totals in threads.values() for name in totals)
    for name in names:
        table.add_row(name, *(cell(totals.get(name)) for totals in threads.values()))
    table.add_row(
        "other",
        *(cell(max(0.0, wall_s - sum(t.values()))) for t in threads.values()),
    )
    return table


def _or_dash(value: float, spec: str) -> str:
    return f"{value:{spec}}" if math.isfinite(value) else "-"


def _clock(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "-"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
