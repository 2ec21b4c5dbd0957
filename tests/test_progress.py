"""Progress: a bar for a person, lines for a file, a table at the end."""

import functools
import io
import math
import re
import types

import pytest
import rich.jupyter
from rich.console import Console

from fps_jax.runtime import progress as module
from fps_jax.runtime.progress import Status, progress, summary_table


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until it is told to go on."""
    now = [100.0]
    monkeypatch.setattr(module, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    return now


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    """Rich reads these to guess what it writes to."""
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")


def test_a_status_says_all_in_one_line():
    status = Status(250_000, 1_000_000, 1234.4, -56.78, 1.0)
    assert str(status) == (
        "250,000/1,000,000 (25%)  1,234 steps/s  return -56.8  lag 1.0  10:08 left"
    )


@pytest.mark.parametrize(
    ("seconds", "left"),
    [(0, "0:00"), (59.6, "1:00"), (3599, "59:59"), (7265, "2:01:05")],
)
def test_the_time_left_is_what_remains_at_the_speed_of_this_run(seconds, left):
    # A run resumed at 9 of 10 million steps: its past speed is not known here.
    speed = 1e6 / seconds if seconds else 1.0
    status = Status(9_000_000 if seconds else 10**7, 10**7, speed, 0.0, 0.0)
    assert str(status).endswith(f"  {left} left")


def test_what_is_not_known_yet_is_a_dash():
    line = str(Status(0, 10, 0.0, math.nan, math.nan))
    assert line == "0/10 (0%)  0 steps/s  return -  lag -  - left"


@pytest.mark.parametrize(("last", "said"), [(11, [1, 6, 11]), (12, [1, 6, 11, 12])])
def test_without_a_terminal_a_line_comes_every_few_seconds_and_at_the_end(
    clock, last, said
):
    stream = io.StringIO()
    with progress(1000, stream=stream, every_s=5.0) as reporter:
        for step in range(1, last + 1):
            reporter.update(step, 1.0, 0.0, 0.0)
            clock[0] += 1.0
    lines = stream.getvalue().splitlines()
    assert [int(line.split("/")[0]) for line in lines] == said


def test_a_line_does_not_wait_in_a_buffer():
    file = io.BytesIO()
    with progress(10, stream=io.TextIOWrapper(file)) as reporter:
        reporter.update(3, 1.0, 2.0, 0.0)
        assert file.getvalue().decode() == f"{Status(3, 10, 1.0, 2.0, 0.0)}\n"


def interrupted_run(stream):
    with progress(9, stream=stream) as reporter:
        reporter.update(1, 1.0, 0.0, 0.0)
        reporter.update(2, 1.0, 0.0, 0.0)
        raise RuntimeError


def test_the_last_line_comes_once_even_after_an_error(clock):
    stream = io.StringIO()
    with pytest.raises(RuntimeError):
        interrupted_run(stream)
    assert [line[0] for line in stream.getvalue().splitlines()] == ["1", "2"]
    stream = io.StringIO()
    with progress(9, stream=stream, every_s=0.0) as reporter:
        reporter.update(1, 1.0, 0.0, 0.0)
        reporter.update(2, 1.0, 0.0, 0.0)
    assert [line[0] for line in stream.getvalue().splitlines()] == ["1", "2"]


def test_lines_hold_no_control_codes_and_go_to_stderr_by_default(capsys):
    with progress(10) as reporter:
        reporter.update(3, 1.0, 2.0, 0.0)
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == f"{Status(3, 10, 1.0, 2.0, 0.0)}\n"


def test_a_terminal_gets_a_bar_that_ends_at_the_last_status(clock):
    stream = Terminal()
    with progress(1000, stream=stream) as reporter:
        for step in range(0, 1001, 100):
            reporter.update(step, 100.0, 1.5, 1.0)
            clock[0] += 0.03
    text = stream.getvalue()
    assert "\x1b[" in text
    assert "━" in text
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    frames = [f for f in re.split(r"[\r\n]+", plain) if "steps/s" in f]
    assert frames[-1].rstrip().endswith(str(Status(1000, 1000, 100.0, 1.5, 1.0)))
    assert len(frames) < 11  # Not every update is worth a redraw.
    # The bar moves, and fills what the text leaves of the width.
    assert "╸" in text
    assert "╸" not in frames[-1]
    assert frames[-1].count("━") == 100 - len(frames[-1].replace("━", ""))
    assert frames[-1].count("━") > 15
    assert text.endswith("\x1b[?25h")


def test_a_bar_in_a_notebook_ends_at_the_last_status(clock, monkeypatch):
    shown = []
    jupyter = functools.partial(Console, force_jupyter=True)
    monkeypatch.setattr(module, "Console", jupyter)
    monkeypatch.setattr(rich.jupyter, "display", lambda _, text: shown.append(text))
    with progress(1000) as reporter:
        for step in (0, 500, 1000):  # At one time: only the first is worth a redraw.
            reporter.update(step, 100.0, 1.5, 1.0)
    frames = [text for text in shown if "steps/s" in text]
    assert str(Status(1000, 1000, 100.0, 1.5, 1.0)) in frames[-1]
    with pytest.raises(RuntimeError):
        interrupted_run(None)
    frames = [text for text in shown if "steps/s" in text]
    assert str(Status(2, 9, 1.0, 0.0, 0.0)) in frames[-1]


def test_a_bar_gives_the_terminal_back_after_an_error():
    stream = Terminal()
    with pytest.raises(RuntimeError):
        interrupted_run(stream)
    assert stream.getvalue().endswith("\x1b[?25h")


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_switched_off_it_shows_nothing(stream):
    with progress(10, stream=stream, enabled=False) as reporter:
        reporter.update(1, 1.0, 0.0, 0.0)
    assert stream.getvalue() == ""


def test_nonsense_is_refused():
    with pytest.raises(ValueError, match="total_env_steps 0 must"), progress(0):
        pass
    with (
        pytest.raises(ValueError, match=r"every_s -1\.0 must"),
        progress(1, every_s=-1.0),
    ):
        pass


def rendered(table):
    stream = io.StringIO()
    Console(file=stream, width=100).print(table)
    return stream.getvalue()


def test_the_table_says_where_every_second_of_every_thread_went():
    text = rendered(
        summary_table(
            env_steps=500_000,
            wall_s=200.0,
            episode_return=12.34,
            threads={
                "actor 0": {"env": 100.0, "queue_wait": 40.0},
                "learner": {"queue_wait": 150.0, "learn": 51.0},
            },
        )
    )
    assert "return 12.3 | 2,500 steps/s | 500,000 steps in 3:20" in text
    rows = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in re.split("[│┃]", line)[1:-1]]
        if cells:
            rows[cells[0]] = [" ".join(cell.split()) for cell in cells[1:]]
    assert rows == {
        "where the time went": ["actor 0", "learner"],
        "env": ["100.0 s 50%", ""],
        "queue_wait": ["40.0 s 20%", "150.0 s 75%"],
        "learn": ["", "51.0 s 26%"],
        "other": ["60.0 s 30%", "0.0 s 0%"],
    }


def test_a_table_without_a_return_has_a_dash():
    table = summary_table(env_steps=1, wall_s=1.0, episode_return=math.nan, threads={})
    assert "return - |" in rendered(table)


def test_the_title_of_a_table_stays_in_one_line():
    table = summary_table(
        env_steps=30_481, wall_s=9.4, episode_return=500.0, threads={"learner": {}}
    )
    assert rendered(table).startswith(
        "return 500.0 | 3,243 steps/s | 30,481 steps in 0:09"
    )
