"""What is told between two records, over the run, and of the run before it resumed."""

import gc
import math
import time
import weakref

import numpy as np
import pytest
from rich.table import Table

from fps_jax.runtime.exchange import Episode, Segment
from fps_jax.runtime.journal import History, Journal
from fps_jax.runtime.metrics import Sink
from fps_jax.types import AgentState


class Written:
    """A sink that remembers."""

    def __init__(self):
        self.records, self.closed = [], 0
        self.sink = Sink(self._write, self._close)

    def _write(self, step, record):
        self.records.append((step, dict(record)))

    def _close(self):
        self.closed += 1


def segment(*episodes, nonfinite=0, trajectory=None, **seconds):
    episodes = [Episode(*e, env=0) for e in episodes]
    bad = np.array([nonfinite, 0])
    return Segment(trajectory, episodes, 0, 0, bad, None, seconds)


def open_journal(past=(), num_actors=2):
    written = Written()
    return Journal(written.sink, past, num_actors), written


def update(loss, env_steps=10):
    return {"loss": loss, "env_steps": env_steps}


def test_a_record_holds_the_means_since_the_one_before():
    journal, written = open_journal()
    for loss, lag in ((1.0, 0), (2.0, 1), (6.0, 1)):
        journal.add(update(loss), [segment(), segment()], lag=lag)
    journal.write(30, {"eval/return": 7.0})
    journal.add(update(100.0), [segment(), segment()], lag=3)
    journal.write(40, {})
    (step, first), (next_step, second) = written.records
    assert (step, next_step) == (30, 40)
    assert first["learn/loss"] == 3.0
    assert first["learn/lag"] == pytest.approx(2 / 3)
    assert first["eval/return"] == 7.0
    assert (second["learn/loss"], second["learn/lag"]) == (100.0, 3.0)
    assert "eval/return" not in second
    assert "learn/env_steps" not in first


def test_episodes_are_averaged_one_by_one_over_all_actors():
    journal, written = open_journal()
    journal.add(update(0.0), [segment((1.0, 10), (2.0, 20)), segment((6.0, 60))], lag=0)
    journal.add(update(0.0), [segment(), segment((11.0, 10))], lag=0)
    journal.write(20, {})
    journal.add(update(0.0), [segment(), segment()], lag=0)
    journal.write(30, {})
    journal.add(update(0.0), [segment((5.0, 3)), segment()], lag=0)
    journal.write(40, {})
    first, none, last = (record for _, record in written.records)
    assert first["train/return"] == 5.0
    assert first["train/length"] == 25.0
    assert first["train/episodes"] == 4
    assert not any(name.startswith("train/") for name in none)
    assert (last["train/return"], last["train/episodes"]) == (5.0, 1)


def test_a_record_without_an_update_says_what_it_can():
    journal, written = open_journal()
    journal.write(0, {"eval/return": 1.0})
    ((_, record),) = written.records
    assert record["eval/return"] == 1.0
    assert not any(name.startswith("learn/") for name in record)


def test_seconds_rows_and_speed_add_up_over_the_run():
    journal, written = open_journal()
    journal.timers.add("learn", 1.5)
    segments = [segment(env=1.0, nonfinite=2), segment(env=10.0)]
    journal.add(update(0.0), segments, lag=0)
    journal.write(10, {})
    journal.timers.add("learn", 1.0)
    segments = [segment(env=2.0, nonfinite=3), segment(inference=4.0, nonfinite=1)]
    journal.add(update(0.0, env_steps=30), segments, lag=0)
    time.sleep(0.01)
    journal.write(40, {})
    first, second = (record for _, record in written.records)
    assert first["seconds/actor 0/env"] == 1.0
    assert second["seconds/actor 0/env"] == 3.0
    assert second["seconds/actor 1/env"] == 10.0
    assert second["seconds/actor 1/inference"] == 4.0
    assert second["seconds/learner/learn"] == 2.5
    assert (first["nonfinite_rows"], second["nonfinite_rows"]) == (2, 6)
    assert journal.env_steps() == 40
    assert journal.seconds()["learner"] == {"learn": 2.5}
    assert 0.01 < journal.wall_s() < 60
    assert journal.steps_per_s() == pytest.approx(40 / journal.wall_s(), rel=0.1)


def test_the_last_recorded_value_of_a_metric_is_found():
    journal, _ = open_journal()
    assert math.isnan(journal.latest("eval/return"))
    for step, extra in ((1, {"eval/return": 3.0}), (2, {"eval/return": 4.0}), (3, {})):
        journal.write(step, extra)
    assert journal.latest("eval/return") == 4.0
    assert journal.latest("env_steps") == 3


def test_recent_returns_are_of_the_last_hundred_episodes():
    journal, _ = open_journal(num_actors=1)
    assert math.isnan(journal.recent_return())
    journal.add(update(0.0), [segment(*[(1000.0, 1)] * 50)], lag=0)
    assert journal.recent_return() == 1000.0
    journal.add(update(0.0), [segment(*[(float(i), 1) for i in range(100)])], lag=0)
    assert journal.recent_return() == np.mean(range(100))


def test_a_resumed_run_goes_on_with_its_past_records():
    past = [{"env_steps": 10, "eval/return": 1.0}, {"env_steps": 20, "learn/loss": 2.0}]
    journal, written = open_journal(past)
    assert journal.latest("eval/return") == 1.0
    assert journal.env_steps() == 0
    journal.add(update(3.0), [segment(), segment()], lag=0)
    journal.write(30, {})
    assert [record["env_steps"] for record in journal.records] == [10, 20, 30]
    assert [step for step, _ in written.records] == [30]
    assert len(past) == 2


def test_the_sink_and_the_records_are_told_the_same():
    journal, written = open_journal()
    journal.add(update(1.0), [segment((1.0, 2)), segment(env=1.0)], lag=0)
    journal.write(10, {"eval/return": 5.0})
    ((step, record),) = written.records
    assert journal.records == [{"env_steps": step, **record}]
    journal.close()
    assert written.closed == 1


def test_no_experience_is_kept():
    journal, _ = open_journal(num_actors=1)
    trajectory = np.zeros(3)
    kept = weakref.ref(trajectory)
    journal.add(update(1.0), [segment((1.0, 2), trajectory=trajectory)], lag=0)
    del trajectory
    gc.collect()
    assert kept() is None


def test_a_column_of_the_history_is_where_it_was_recorded():
    records = [
        {"env_steps": 1, "a": 1.0},
        {"env_steps": 2},
        {"env_steps": 3, "a": 5.0, "b": 0.0},
    ]
    history = History(records, AgentState(()), None, Table())
    steps, values = history.column("a")
    np.testing.assert_array_equal(steps, [1, 3])
    np.testing.assert_array_equal(values, [1.0, 5.0])
    with pytest.raises(KeyError, match=r"no record has 'c'; there are .*'a', 'b'"):
        history.column("c")
