"""Signals that ask a run to end: it finishes its update, saves, and says why."""

import contextlib
import signal
import threading
from collections.abc import Iterator


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
