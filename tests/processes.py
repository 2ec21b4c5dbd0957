"""Whole programs as a user starts them: their words, exit codes and streams."""

import contextlib
import dataclasses
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
WORKER = str(Path(__file__).parent / "worker.py")
PATIENCE_S = 300.0  # For a machine that is busy with other tests.


@dataclasses.dataclass(frozen=True)
class Ended:
    """A program that has ended.

    Attributes:
      code: its exit code.
      stdout: what it said.
      stderr: what it complained of.
      seconds_after_fault: from the last ``FAULT`` that it announced to its end; None if
        it announced none.
    """

    code: int
    stdout: str
    stderr: str
    seconds_after_fault: float | None


def start(*words: object, num_devices: int = 1) -> subprocess.Popen:
    """Starts Python in the repository with as many CPU devices as asked for.

    Args:
      *words: what follows ``python``.
      num_devices: CPU devices that JAX sees.
    """
    flags = (
        f"--xla_force_host_platform_device_count={num_devices}"
        " --xla_backend_optimization_level=0"  # As in the tests' own process.
    )
    settings = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | settings,
    )


def finish(process: subprocess.Popen) -> Ended:
    """Waits for the end of a program; one that hangs is killed and fails the test."""
    try:
        stdout, stderr = process.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        stdout, stderr = process.communicate()
        raise AssertionError(f"{process.args} hangs:\n{stdout}\n{stderr}") from None
    ended_at = time.time()
    faults = re.findall(r"FAULT ([\d.]+)", stdout)
    since = ended_at - float(faults[-1]) if faults else None
    return Ended(process.returncode, stdout, stderr, since)


def run(*words: object, num_devices: int = 1) -> Ended:
    """Runs Python to its end; see `start`."""
    return finish(start(*words, num_devices=num_devices))


def run_together(
    *programs: list[object], num_devices: Sequence[int] = ()
) -> list[Ended]:
    """Runs several programs at once to the end of all.

    Args:
      *programs: each by its words.
      num_devices: CPU devices of each; none is one each.
    """
    started = [
        start(*words, num_devices=number)
        for words, number in zip(programs, num_devices or [1] * len(programs))
    ]
    with contextlib.ExitStack() as stack:
        for process in started:
            stack.callback(process.kill)
        return [finish(process) for process in started]
