"""What a sweep left: runs by setting, in order, and how sure their numbers are.

A sweep writes one CSV, a row an evaluation: ``member, agent, env, seed``, a column for
each setting that varies, ``env_steps, return, return_std, status``. Runs that differ in
their seed alone are one setting. Settings of one task are compared by the interquartile
mean (IQM) of their runs' final returns, with intervals from rliable's stratified
bootstrap (Agarwal et al., 2021, arXiv:2108.13264). Numbers are of runs that are done:
where a failed run would have ended nobody knows.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments import results

STATUSES = "done", "failed", "stopped", "running"
BEFORE, AFTER = ("member", "agent", "env", "seed"), ("env_steps", "return", "status")


class Estimate(NamedTuple):
    """A number of several runs, or one for each of ``K`` points.

    Attributes:
      value: of the runs.
      low: lower end of its 95 % interval; None if there is one run, which has none.
      high: upper end.
    """

    value: Any
    low: Any = None
    high: Any = None


@dataclasses.dataclass(frozen=True)
class Run:
    """One member of a sweep.

    Attributes:
      member: its name.
      seed: as the CSV has it.
      status: "done", "failed", "stopped" before its end as others were better, or
        "running".
      env_steps: of its evaluations, ascending; whatever was evaluated is finite.
      returns: of its evaluations, means over episodes.
      last_env_step: the last that it reached; 0 if it reached no evaluation.
    """

    member: str
    seed: str
    status: str
    env_steps: np.ndarray
    returns: np.ndarray
    last_env_step: int

    @property
    def final(self) -> float:
        """The return of the last evaluation."""
        return float(self.returns[-1])

    @property
    def area(self) -> float:
        """Area under the curve over its width: the mean return while it learned."""
        width = self.env_steps[-1] - self.env_steps[0]
        if not width:
            return self.final
        return float(np.trapezoid(self.returns, self.env_steps) / width)


@dataclasses.dataclass(frozen=True)
class Setting:
    """Runs that differ in nothing but their seed.

    Attributes:
      env: the task.
      values: of the agent's name and of each setting, as the CSV has them.
      runs: in the CSV's order.
    """

    env: str
    values: Mapping[str, str]
    runs: tuple[Run, ...]

    def that_are(self, status: str) -> list[Run]:
        """The runs of one status.

        Args:
          status: see `Run`.
        """
        return [run for run in self.runs if run.status == status]

    @property
    def final_returns(self) -> np.ndarray:
        """Final returns ``[runs]`` of the runs that are done."""
        return np.array([run.final for run in self.that_are("done")])

    @functools.cached_property
    def final(self) -> Estimate | None:
        """IQM of the final returns; None while no run is done."""
        return estimate(self.final_returns)

    @functools.cached_property
    def area(self) -> Estimate | None:
        """IQM of the areas under the curves; None while no run is done."""
        return estimate(np.array([run.area for run in self.that_are("done")]))

    @functools.cached_property
    def curve(self) -> tuple[np.ndarray, Estimate] | None:
        """Env steps ``[K]`` that all runs have reached, and the IQM at each.

        Of the runs that are done, and while none is, of those that are running; of
        those that were stopped if there are no others.
        """
        evaluated = [run for run in self.runs if run.returns.size]
        by_status = (
            [run for run in evaluated if run.status == status]
            for status in ("done", "running", "stopped")
        )
        runs = next(filter(None, by_status), [])
        if not runs:
            return None
        first = max(run.env_steps[0] for run in runs)
        last = min(run.env_steps[-1] for run in runs)
        steps = np.unique(np.concatenate([run.env_steps for run in runs]))
        steps = steps[(first <= steps) & (steps <= last)]
        if steps.size > 200:
            steps = np.linspace(first, last, 200)
        elif not steps.size:  # Each was evaluated once, at about the same step.
            steps = np.array([first])
        returns = [np.interp(steps, run.env_steps, run.returns) for run in runs]
        iqm = estimate(np.stack(returns))
        return None if iqm is None else (steps, iqm)


@dataclasses.dataclass(frozen=True)
class Task:
    """What a sweep found on one task.

    Attributes:
      env: its name.
      settings: the best by IQM of the final returns first; of equals, what failed less,
        then what has the larger area under the curve. Those without a run that is done
        come last, in the CSV's order.
    """

    env: str
    settings: tuple[Setting, ...]

    @functools.cached_property
    def varied(self) -> list[str]:
        """What takes several values here: "agent", or names of settings."""
        names = list(self.settings[0].values)
        return [n for n in names if len({s.values[n] for s in self.settings}) > 1]

    @functools.cached_property
    def numeric(self) -> list[str]:
        """Those of them with at least two values that are numbers, and no words."""
        kept = []
        for name in self.varied:
            told = {setting.values[name] for setting in self.settings} - {""}
            numbers = {as_number(text) for text in told}
            if None not in numbers and len(numbers) > 1:
                kept.append(name)
        return kept

    @functools.cached_property
    def improvements(self) -> list[Estimate | None]:
        """How probably a run of the first setting beats one of each; None of itself."""
        first, *others = [setting.final_returns for setting in self.settings]
        return [None, *(improvement(first, other) for other in others)]


class Sweep(NamedTuple):
    """A sweep.

    Attributes:
      about: the header of the CSV: command, date, versions, ...
      tasks: in the CSV's order.
    """

    about: dict[str, str]
    tasks: list[Task]

    @property
    def settings(self) -> list[Setting]:
        """Those of all tasks."""
        return [setting for task in self.tasks for setting in task.settings]


def as_number(text: str) -> float | None:
    """The finite number that a text is, or None.

    Args:
      text: of a value.
    """
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def estimate(runs: np.ndarray) -> Estimate | None:
    """IQM of runs with its interval.

    Args:
      runs: ``[runs]``, or ``[runs, K]`` for ``K`` points, each by itself.

    Returns:
      Of numbers, or of ``[K]``; None if there is no run.
    """
    if not len(runs):
        return None
    iqm = results.iqm(runs)
    if len(runs) == 1:
        return Estimate(iqm)
    points = runs.reshape(len(runs), 1, -1)
    ends = results.interval(points, lambda scores: results.iqm(scores[:, 0]))
    return Estimate(iqm, *ends.reshape(2, *iqm.shape))


def profile(returns: np.ndarray, thresholds: np.ndarray) -> Estimate:
    """Performance profile: the share of runs above each threshold.

    Args:
      returns: ``[runs]``, at least one.
      thresholds: ``[K]``, in the unit of returns.
    """
    above = lambda scores: (scores > thresholds).mean(axis=0)
    runs = returns[:, None]
    if len(runs) == 1:
        return Estimate(above(runs))
    return Estimate(above(runs), *results.interval(runs, above))


def improvement(returns: np.ndarray, others: np.ndarray) -> Estimate | None:
    """Probability of improvement: that a run is better than another setting's.

    A tie counts half: the Mann-Whitney statistic over the number of pairs. Of several
    tasks it is the mean over them.

    Args:
      returns: ``[runs]`` or ``[runs, tasks]``.
      others: of the other setting, of the same tasks, not always as many runs.

    Returns:
      None unless both have two runs: of one alone nobody knows how much runs differ.
    """
    if min(len(returns), len(others)) < 2:
        return None
    sign = lambda x, y: np.sign(x[:, None] - y)
    pairs = lambda x, y: np.array([(1 + sign(x, y).mean()) / 2])
    runs = [x.reshape(len(x), -1) for x in (returns, others)]
    return Estimate(pairs(*runs)[0], *results.interval(runs, pairs)[:, 0])


def read(path: Path) -> Sweep:
    """Reads what a sweep wrote.

    Args:
      path: its CSV.

    Raises:
      ValueError: if there is none, or it is not that of a sweep: in one line.
    """
    if not path.is_file():
        raise ValueError(f"{path} is not there; a sweep writes it.")
    rows = results.read_csv(path)
    if not rows:
        raise ValueError(f"{path} has no rows; no member has been evaluated yet.")
    columns = list(rows[0])
    missing = [name for name in (*BEFORE, *AFTER) if name not in columns]
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)}; it is not of a sweep.")
    of_members: dict[str, list[dict[str, str]]] = {}
    for place, row in enumerate(rows, 1):
        _check(path, place, row)
        of_members.setdefault(row["member"], []).append(row)
    names = columns[columns.index("seed") + 1 : columns.index("env_steps")]
    of_settings: dict[tuple[str, ...], list[Run]] = {}
    for mine in of_members.values():
        key = tuple(mine[0][name] for name in ("env", "agent", *names))
        of_settings.setdefault(key, []).append(_run(mine))
    settings = [
        Setting(env, dict(zip(("agent", *names), values)), tuple(runs))
        for (env, *values), runs in of_settings.items()
    ]
    envs = dict.fromkeys(setting.env for setting in settings)
    in_order = lambda env: sorted((s for s in settings if s.env == env), key=_rank)
    return Sweep(_about(path), [Task(env, tuple(in_order(env))) for env in envs])


def _rank(setting: Setting) -> tuple[float, ...]:
    """Smaller for what is better, see `Task`."""
    if setting.final is None or setting.area is None:
        return (math.inf,)
    failures = len(setting.that_are("failed"))
    return -setting.final.value, failures, -setting.area.value


def _about(path: Path) -> dict[str, str]:
    """The header of comments."""
    about = {}
    with path.open(encoding="utf-8") as file:
        for line in file:
            if not line.startswith("# "):
                break
            name, _, value = line[2:].strip().partition(": ")
            about[name] = value
    return about


def _check(path: Path, place: int, row: Mapping[Any, Any]) -> None:
    """Refuses a row that nobody can understand."""
    where = f"{path}, row {place}:"
    if None in row or None in row.values():
        raise ValueError(f"{where} it has not as many fields as the header.")
    if row["status"] not in STATUSES:
        one_of = ", ".join(STATUSES)
        raise ValueError(f"{where} status {row['status']!r} must be one of {one_of}.")
    steps = row["env_steps"]  # Empty, as the return, if it was not evaluated at all.
    if steps and (as_number(steps) is None or float(steps) < 0):
        raise ValueError(f"{where} env_steps {steps!r} must be a number, at least 0.")
    try:
        float(row["return"] or "nan")
    except ValueError as error:
        raise ValueError(
            f"{where} return {row['return']!r} must be a number."
        ) from error


def _run(rows: Sequence[Mapping[str, str]]) -> Run:
    """One member. A return that is no number is no evaluation, and no good end."""
    reached = [int(float(row["env_steps"])) for row in rows if row["env_steps"]]
    # Of two evaluations at one step, one before and one after a resume, the later.
    curve = {
        int(float(row["env_steps"])): float(row["return"])
        for row in rows
        if row["env_steps"] and as_number(row["return"]) is not None
    }
    steps = sorted(curve)
    status = rows[-1]["status"]
    if status == "done" and (not steps or steps[-1] < max(reached)):
        status = "failed"
    return Run(
        member=rows[0]["member"],
        seed=rows[0]["seed"],
        status=status,
        env_steps=np.array(steps, float),
        returns=np.array([curve[step] for step in steps]),
        last_env_step=max(reached, default=0),
    )
