"""Says in words which settings of a sweep can be told apart, and which cannot.

No sentence says more than the intervals do, and where runs are too few for their
intervals to be believed, it says that.
"""

import itertools
import math
from collections.abc import Sequence

from experiments import sweep_figures
from experiments.sweep_results import Estimate, Setting, Task

ENOUGH_RUNS = 6
"""The range of as many covers the median of what they are drawn from 95 times of 100:
``1 - 2**(1 - n)``. An interval by bootstrap never leaves the range."""

KINDS = {
    "both": "Told apart from setting 1, as the intervals do not overlap and that of "
    "the probability of improvement lies above 1/2: {}.",
    "interval": "The intervals do not overlap, but that of the probability of "
    "improvement does not lie above 1/2: {}.",
    "probability": "The probability of improvement's interval lies above 1/2, but the "
    "intervals of the returns overlap: {}.",
    "few": "Intervals lie apart, but those of so few runs do by chance alone in more "
    "than 5 of 100 sweeps, so that nothing is told apart: {}.",
    "neither": "Not told apart from setting 1, as the intervals overlap and that of "
    "the probability of improvement does not lie above 1/2: {}.",
    "single": "Nothing can be said of how these compare with setting 1, as one of the "
    "two has a single run and so no interval: {}.",
    "undone": "Without a run that is done: {}.",
}
"""How a setting compares with the first."""


def verdict(task: Task) -> str:
    """What can be told apart on a task, and what cannot.

    Args:
      task: of a sweep.

    Returns:
      A sentence on the best, and below it a list of further ones.
    """
    best = task.settings[0]
    if best.final is None:
        return "No run is done yet: nothing can be compared."
    reached = told(best.final, digits(abs(best.final.value)))
    count = len(best.final_returns)
    runs = f"{count} runs" if count > 1 else "1 run, which has no interval"
    if len(task.settings) == 1:
        sentences = [f"One setting, with {runs}: {reached}."]
    else:
        first = f"Setting 1 ({words(task, best)}) ends highest, with {runs}: {reached}"
        equal = [
            number
            for number, setting in enumerate(task.settings[1:], 2)
            if setting.final is not None and setting.final.value == best.final.value
        ]
        if equal:
            do = "do" if len(equal) > 1 else "does"
            first += (
                f", as {do} {_settings(equal)}; of equals, what failed less and then "
                "what has the larger area under the curve comes first"
            )
        kinds = [compare(task, number) for number in range(2, len(task.settings) + 1)]
        of_kind = lambda kind: [n for n, k in enumerate(kinds, 2) if k == kind]
        found = {kind: of_kind(kind) for kind in KINDS if kind in kinds}
        said = [KINDS[kind].format(_settings(found[kind])) for kind in found]
        sentences = [f"{first}.", *said]
    lost = [
        n for n, s in enumerate(task.settings, 1) if s.that_are("failed") and s.final
    ]
    if lost:
        sentences.append(
            f"Of {_settings(lost)}, runs failed: the numbers are of those that did "
            "not, and flatter."
        )
    told_of, *more = [*sentences, *_cautions(task)]
    return "\n".join([told_of, "", *(f"- {sentence}" for sentence in more)]).rstrip()


def compare(task: Task, number: int) -> str:
    """How a setting compares with the first of its task.

    Two sets of runs that lie apart are told apart only if there are enough of them:
    were all alike, m and n runs would lie apart in ``2 / binomial(m + n, n)`` of all
    sweeps, which must be at most 5 of 100 (4 and 4 are enough, 3 and 4 are not).

    Args:
      task: of a sweep.
      number: of the setting, from 2.

    Returns:
      One of `KINDS`.
    """
    first, other = task.settings[0], task.settings[number - 1]
    probability = task.improvements[number - 1]
    if first.final is None or other.final is None:
        return "undone"
    if probability is None:
        return "single"
    is_below, is_likely = other.final.high < first.final.low, probability.low > 0.5
    if not (is_below or is_likely):
        return "neither"
    m, n = len(first.final_returns), len(other.final_returns)
    if 2 / math.comb(m + n, n) > 0.05:
        return "few"
    return (
        "both" if is_below and is_likely else "interval" if is_below else "probability"
    )


def _cautions(task: Task) -> list[str]:
    """Says what the intervals themselves do not."""
    counts = [len(s.final_returns) for s in task.settings if s.final is not None]
    cautions = []
    if any(1 < count < ENOUGH_RUNS for count in counts):
        cautions.append(
            f"With fewer than {ENOUGH_RUNS} runs an interval, which never leaves their "
            "range, is too narrow for its 95 %; with fewer than 4 the IQM is the mean."
        )
    if len(counts) > 1:
        cautions.append(
            f"The highest of {len(counts)} is that partly by luck: run it again with "
            "new seeds before its number is quoted."
        )
    if len(counts) > 2 and max(counts) > 1:
        cautions.append(
            "An interval allows for one comparison, not for all of them together."
        )
    ends = [run.env_steps[-1] for s in task.settings for run in s.that_are("done")]
    if min(ends) < 0.95 * max(ends):
        cautions.append(
            f"Runs that are done end between {min(ends):,.0f} and {max(ends):,.0f} env "
            "steps: their final returns are not at the same step."
        )
    return cautions


def words(task: Task, setting: Setting) -> str:
    """What is a setting's own on its task.

    Args:
      task: of a sweep.
      setting: one of its settings.
    """
    own = [f"{n}={sweep_figures.short(setting.values[n])}" for n in task.varied]
    return ", ".join(own) or setting.values["agent"]


def digits(size: float) -> int:
    """Digits after the point that returns of this size are told with.

    Args:
      size: absolute, in the unit of returns.
    """
    return 0 if size >= 1000 else 1 if size >= 10 else 3


def told(estimate: Estimate | None, digits: int) -> str:
    """A number and its interval, if it has one, as they are printed.

    Args:
      estimate: of one number; None prints nothing.
      digits: after the point.
    """
    if estimate is None:
        return ""
    number = f"{estimate.value:,.{digits}f}"
    if estimate.low is None:
        return number
    return f"{number} [{estimate.low:,.{digits}f}, {estimate.high:,.{digits}f}]"


def _settings(numbers: Sequence[int]) -> str:
    """Names settings by ascending numbers, those that follow each other as one."""
    groups = itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    spans = [[number for _, number in group] for _, group in groups]
    parts = [
        part
        for span in spans
        for part in ([f"{span[0]} to {span[-1]}"] if len(span) > 2 else map(str, span))
    ]
    told = " and ".join([", ".join(parts[:-1]), parts[-1]] if parts[1:] else parts)
    return f"setting{'s' if len(numbers) > 1 else ''} {told}"
