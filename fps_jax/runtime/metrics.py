"""Where the numbers of a run go, and the stopwatches that some of them come from.

A sink takes one record of scalars at a time, stamped with environment steps. JSON
lines are always written; TensorBoard and W&B are imported only when asked for. Records
hold numbers alone, Python's or the 0-d arrays of numpy and JAX.
"""

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, SupportsInt

PathLike = str | os.PathLike[str]


class Sink(NamedTuple):
    """Takes records until it is closed.

    Attributes:
      write: ``write(step, record)``, `step` in environment steps.
      close: ``close()``, once, when nothing more comes.
    """

    write: Callable[[SupportsInt, Mapping[str, Any]], None]
    close: Callable[[], None]


def jsonl_sink(path: PathLike, *, resume_at: int | None = None) -> Sink:
    """Writes one JSON object a line, ``env_steps`` first, each flushed at once.

    JSON has no NaN and no infinity: they are written as null, and `read_jsonl` reads
    NaN.

    Args:
      path: the file; its folder must exist.
      resume_at: the environment steps that a resumed run starts from. Lines beyond
        them and the half-written last line of a crash are cut off, and the rest
        stays. None starts a new file.

    Raises:
      FileExistsError: if there is such a file and `resume_at` is None.
    """
    path = Path(path)
    if resume_at is None:
        file = path.open("x", encoding="utf-8")
    else:
        rows = _rows(path) if path.exists() else []
        kept = [row for row in rows if row["env_steps"] <= resume_at]
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text("".join(json.dumps(row) + "\n" for row in kept))
        os.replace(temporary, path)
        file = path.open("a", encoding="utf-8")

    def write(step: SupportsInt, record: Mapping[str, Any]) -> None:
        row = {"env_steps": int(step)}
        row |= {name: _strict(value) for name, value in record.items()}
        row["env_steps"] = int(step)
        file.write(json.dumps(row, allow_nan=False) + "\n")
        file.flush()

    return Sink(write, file.close)


def read_jsonl(path: PathLike) -> list[dict[str, Any]]:
    """Reads what `jsonl_sink` wrote, null as NaN, without a half-written last line.

    Raises:
      ValueError: if another line than the last is damaged, naming it.
    """
    return [
        {name: math.nan if x is None else x for name, x in row.items()}
        for row in _rows(Path(path))
    ]


def tensorboard_sink(directory: PathLike, *, resume_at: int | None = None) -> Sink:
    """Writes event files for TensorBoard; NaN and infinity leave a gap in a curve.

    Args:
      directory: the folder of the run's event files.
      resume_at: as in `jsonl_sink`; TensorBoard hides what lies beyond.

    Raises:
      ImportError: if tensorboardX is not installed.
    """
    try:
        import tensorboardX
    except ImportError as error:
        raise _missing("tensorboardX", extra="experiments") from error
    writer = tensorboardX.SummaryWriter(
        os.fspath(directory),
        purge_step=None if resume_at is None else resume_at + 1,
    )

    def write(step: SupportsInt, record: Mapping[str, Any]) -> None:
        for name, value in record.items():
            if math.isfinite(value):
                writer.add_scalar(name, float(value), int(step))

    return Sink(write, writer.close)


def wandb_sink(
    *, project: str, run_id: str, config: Mapping[str, Any], directory: PathLike
) -> Sink:
    """Sends records to Weights & Biases, with environment steps as the x axis.

    Args:
      project: where the run appears.
      run_id: names the run; the same one again continues it.
      config: shown beside the run.
      directory: where W&B keeps its own files.

    Raises:
      ImportError: if wandb is not installed.
    """
    try:
        import wandb  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise _missing("wandb", extra="wandb") from error
    run = wandb.init(
        project=project,
        id=run_id,
        resume="allow",
        config=dict(config),
        dir=os.fspath(directory),
    )
    # W&B's own step may not decrease, and a resumed run steps back.
    run.define_metric("*", step_metric="env_steps")

    def write(step: SupportsInt, record: Mapping[str, Any]) -> None:
        numbers = {name: _number(value) for name, value in record.items()}
        run.log(numbers | {"env_steps": int(step)})

    return Sink(write, run.finish)


def fan_out(sinks: Iterable[Sink]) -> Sink:
    """Makes one sink of several; closing it closes all, even if one of them fails."""
    sinks = tuple(sinks)

    def write(step: SupportsInt, record: Mapping[str, Any]) -> None:
        for sink in sinks:
            sink.write(step, record)

    def close() -> None:
        with contextlib.ExitStack() as stack:
            for sink in sinks:
                stack.callback(sink.close)

    return Sink(write, close)


def open_sinks(
    directory: Path,
    *,
    resume_at: int,
    tensorboard: bool,
    wandb_project: str | None,
    options: Mapping[str, Any],
) -> tuple[Sink, list[dict[str, Any]]]:
    """Opens the sinks of a run: JSON lines always, others when asked.

    Args:
      directory: the run's folder.
      resume_at: env steps that it goes on from; 0 at its start.
      tensorboard: write TensorBoard events.
      wandb_project: Weights & Biases project; None sends nothing.
      options: of the run, to show beside it.

    Returns:
      One sink for all, and the records from before the run was resumed.
    """
    path = directory / "metrics.jsonl"
    sinks = [jsonl_sink(path, resume_at=resume_at)]
    if tensorboard:
        sinks.append(tensorboard_sink(directory, resume_at=resume_at))
    if wandb_project:
        wandb = wandb_sink(
            project=wandb_project,
            run_id=directory.name,
            config=options,
            directory=directory,
        )
        sinks.append(wandb)
    return fan_out(sinks), read_jsonl(path)


class Timers:
    """Adds up wall-clock seconds by name; cheap enough for a loop of actions.

    One thread adds to one `Timers`; any thread may read it. Time within a nested
    ``with`` counts for both names.
    """

    def __init__(self) -> None:
        """Starts with no names."""
        self._totals: dict[str, float] = {}

    def __call__(self, name: str) -> "_Timing":
        """Returns a context manager: ``with timers("env"): ...``."""
        return _Timing(self._totals, name)

    def add(self, name: str, seconds: float) -> None:
        """Adds seconds that were measured elsewhere."""
        self._totals[name] = self._totals.get(name, 0.0) + seconds

    def merge(self, other: "Timers") -> None:
        """Adds all of another's seconds."""
        for name, seconds in other.totals().items():
            self.add(name, seconds)

    def totals(self) -> dict[str, float]:
        """Returns the seconds by name, a copy."""
        return dict(self._totals)


class _Timing:
    __slots__ = ("_name", "_start", "_totals")

    def __init__(self, totals: dict[str, float], name: str) -> None:
        self._totals = totals
        self._name = name

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        seconds = time.perf_counter() - self._start
        self._totals[self._name] = self._totals.get(self._name, 0.0) + seconds


def _number(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


def _strict(value: Any) -> Any:
    number = _number(value)
    return number if math.isfinite(number) else None


def _rows(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except ValueError:
            if number < len(lines):
                raise ValueError(
                    f"line {number} of {path} is damaged: {line}"
                ) from None
    return rows


def _missing(package: str, *, extra: str) -> ImportError:
    return ImportError(
        f'{package} is not installed; `pip install "fps_jax[{extra}]"` brings it.'
    )
