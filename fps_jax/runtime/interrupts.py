"""Signals that ask a run to end: it finishes its update, saves, and says why."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from fps_jax.runtime.exchange import StalledError


class Interrupt:
    """Whether a signal has asked the run to end.

    Attributes:
      signal: its number; None if there was none.
    """

    def __init__(self) -> None:
        """Starts without one."""
        self.signal: int | None = None

    def is_requested(self) -> bool:
        """True once a signal has come."""
        return self.signal is not None

    def error(self) -> BaseException:
        """What the run raises once it has saved: as Python would, but later."""
        if self.signal == signal.SIGINT:
            return KeyboardInterrupt("interrupted")
        return SystemExit(128 + (self.signal or 0))


@contextlib.contextmanager
def interrupts() -> Iterator[Interrupt]:
    """Turns SIGINT and SIGTERM into a request; a second SIGINT interrupts at once.

    Outside the main thread signals cannot be caught, and nothing changes.
    """
    interrupt = Interrupt()

    def handle(number: int, frame) -> None:
        del frame
        if number == signal.SIGINT and interrupt.is_requested():
            raise KeyboardInterrupt
        interrupt.signal = number

    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return
    numbers = signal.SIGINT, signal.SIGTERM
    previous = [signal.signal(number, handle) for number in numbers]
    try:
        yield interrupt
    finally:
        for number, handler in zip(numbers, previous, strict=True):
            signal.signal(number, handler)


def watched(
    work: Callable[..., Any],
    interrupt: Interrupt,
    *,
    name: str,
    stall_limit_s: float,
    grace_s: float = 2.0,
) -> Any:
    """Does work that may hang, in a thread that can be given up.

    Args:
      work: ``work(is_interrupted=...)``; it asks often, which shows that it goes on,
        and ends soon once it is told True.
      interrupt: what interrupts it.
      name: what it is called in an error.
      stall_limit_s: longest time between two of its questions, in seconds.
      grace_s: longest wait for its end once it is interrupted, in seconds.

    Returns:
      What it returned; None if it was interrupted.

    Raises:
      StalledError: if it hangs.
      Exception: what it raised.
    """
    asked_at = time.monotonic()
    results: list[Any] = []
    errors: list[BaseException] = []

    def is_interrupted() -> bool:
        nonlocal asked_at
        asked_at = time.monotonic()
        return interrupt.is_requested()

    def run() -> None:
        try:
            results.append(work(is_interrupted=is_interrupted))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.1)
        silent_s = time.monotonic() - asked_at
        if interrupt.is_requested() and silent_s > grace_s:
            return None
        if silent_s > stall_limit_s:
            raise StalledError(
                f"{name} made no step in {stall_limit_s:g} s "
                "(the limit is stall_limit_s)."
            )
    if errors:
        raise errors[0]
    return None if interrupt.is_requested() else results[0]
