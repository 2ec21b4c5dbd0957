"""Sinks and timers: every record arrives, and a crash costs at most half a line."""

import builtins
import json
import math
import sys
import threading
import types

import jax.numpy as jnp
import numpy as np
import pytest

from fps_jax.runtime import metrics
from fps_jax.runtime.metrics import (
    Sink,
    Timers,
    fan_out,
    jsonl_sink,
    read_jsonl,
    tensorboard_sink,
    wandb_sink,
)


def write_steps(path, steps, **options):
    sink = jsonl_sink(path, **options)
    for step in steps:
        sink.write(step, {"loss": step / 10})
    sink.close()


def steps_in(path):
    return [row["env_steps"] for row in read_jsonl(path)]


def test_records_come_back_as_numbers_of_their_kind(tmp_path):
    path = tmp_path / "metrics.jsonl"
    sink = jsonl_sink(path)
    sink.write(
        np.int64(2**40),
        {"a": jnp.float32(0.5), "b": np.int32(3), "c": 7, "d": True, "e": 1e-300},
    )
    sink.close()
    row = {"env_steps": 2**40, "a": 0.5, "b": 3, "c": 7, "d": True, "e": 1e-300}
    (read,) = read_jsonl(path)
    assert read == row
    assert next(iter(read)) == "env_steps"
    assert [type(x) for x in read.values()] == [int, float, int, int, bool, float]


def test_the_step_of_a_line_is_the_sinks_whatever_the_record_says(tmp_path):
    path = tmp_path / "metrics.jsonl"
    sink = jsonl_sink(path)
    sink.write(5, {"loss": 1.0, "env_steps": 4})
    sink.close()
    assert path.read_text() == '{"env_steps": 5, "loss": 1.0}\n'


def test_numbers_that_json_lacks_are_null_on_disk_and_nan_when_read(tmp_path):
    path = tmp_path / "metrics.jsonl"
    sink = jsonl_sink(path)
    sink.write(1, {"a": math.nan, "b": -math.inf, "c": jnp.float32(jnp.inf)})
    sink.close()

    def refuse(name):
        raise AssertionError(name)

    strict = json.loads(path.read_text(), parse_constant=refuse)
    assert strict == {"env_steps": 1, "a": None, "b": None, "c": None}
    (row,) = read_jsonl(path)
    assert all(math.isnan(row[name]) for name in "abc")


def test_every_line_is_on_its_way_at_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    sink = jsonl_sink(path)
    for step in range(3):
        sink.write(step, {"loss": 0.0})
        assert steps_in(path) == list(range(step + 1))
    sink.close()


@pytest.mark.parametrize("resume_at", [0, 19, 20, 10**9])
@pytest.mark.parametrize(
    "tail", ["", '{"env_steps": 40, "lo', "\0\0\0", '{"env_steps": 40, "loss": 4.0}']
)
def test_a_resumed_file_goes_on_from_the_resumed_step(tmp_path, resume_at, tail):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, [0, 10, 20, 30])
    before = path.read_text()
    path.write_text(before + tail)
    whole = [0, 10, 20, 30, *([40] if tail.endswith("}") else [])]
    assert steps_in(path) == whole
    write_steps(path, [50, 60], resume_at=resume_at)
    assert steps_in(path) == [s for s in whole if s <= resume_at] + [50, 60]
    assert path.read_text().startswith(before[: before.index("\n") + 1])
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_resume_keeps_what_was_null(tmp_path):
    path = tmp_path / "metrics.jsonl"
    sink = jsonl_sink(path)
    sink.write(1, {"loss": math.nan})
    sink.close()
    before = path.read_text()
    jsonl_sink(path, resume_at=1).close()
    assert path.read_text() == before


def test_a_resume_without_a_file_starts_one(tmp_path):
    write_steps(tmp_path / "metrics.jsonl", [7], resume_at=5)
    assert steps_in(tmp_path / "metrics.jsonl") == [7]


def test_a_new_run_does_not_write_into_another_ones_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, [1])
    with pytest.raises(FileExistsError):
        jsonl_sink(path)
    assert steps_in(path) == [1]


def test_damage_before_the_last_line_is_named_and_nothing_is_cut(tmp_path):
    path = tmp_path / "metrics.jsonl"
    text = '{"env_steps": 1}\n{"env_st\n{"env_steps": 3}\n'
    path.write_text(text)
    with pytest.raises(ValueError, match=r"line 2 of .*metrics\.jsonl is damaged"):
        read_jsonl(path)
    with pytest.raises(ValueError, match="line 2 of"):
        jsonl_sink(path, resume_at=9)
    assert path.read_text() == text


def scalars(directory):
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import masked_crc32c

    found = []
    for file in sorted(directory.glob("events.out.tfevents.*")):
        content = file.read_bytes()
        while content:  # length, its checksum, event, its checksum
            size = int.from_bytes(content[:8], "little")
            event, content = content[12 : 12 + size], content[16 + size :]
            assert masked_crc32c(event)
            parsed = Event.FromString(event)
            found += [
                (parsed.step, v.tag, v.simple_value) for v in parsed.summary.value
            ]
    return found


def test_tensorboard_gets_every_finite_number_at_its_step(tmp_path):
    sink = tensorboard_sink(tmp_path)
    sink.write(10, {"train/loss": 0.5, "train/return": math.nan})
    sink.write(np.int64(20), {"train/loss": jnp.float32(0.25)})
    sink.close()
    assert scalars(tmp_path) == [(10, "train/loss", 0.5), (20, "train/loss", 0.25)]


def test_tensorboard_is_told_where_a_resumed_run_starts(tmp_path, monkeypatch):
    import tensorboardX

    asked = {}
    writer = types.SimpleNamespace(close=None)
    monkeypatch.setattr(
        tensorboardX,
        "SummaryWriter",
        lambda *a, **options: asked.update(options) or writer,
    )
    tensorboard_sink(tmp_path)
    assert asked == {"purge_step": None}
    tensorboard_sink(tmp_path, resume_at=40)
    assert asked == {"purge_step": 41}


def test_wandb_plots_over_environment_steps_and_continues_a_run(tmp_path, monkeypatch):
    calls = []
    run = types.SimpleNamespace(
        define_metric=lambda *a, **k: calls.append(("define", a, k)),
        log=lambda record: calls.append(("log", record)),
        finish=lambda: calls.append(("finish",)),
    )
    fake = types.SimpleNamespace(init=lambda **k: calls.append(("init", k)) or run)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    sink = wandb_sink(project="p", run_id="r", config={"a": 1}, directory=tmp_path)
    sink.write(30, {"loss": jnp.float32(0.5)})
    sink.close()
    options = {"project": "p", "id": "r", "resume": "allow", "config": {"a": 1}}
    assert calls == [
        ("init", options | {"dir": str(tmp_path)}),
        ("define", ("*",), {"step_metric": "env_steps"}),
        ("log", {"loss": 0.5, "env_steps": 30}),
        ("finish",),
    ]


@pytest.mark.parametrize(
    ("package", "extra", "make"),
    [
        ("tensorboardX", "experiments", tensorboard_sink),
        (
            "wandb",
            "wandb",
            lambda path: wandb_sink(project="p", run_id="r", config={}, directory=path),
        ),
    ],
)
def test_a_missing_package_is_named_with_the_extra_that_brings_it(
    tmp_path, monkeypatch, package, extra, make
):
    imported = builtins.__import__

    def without(name, *arguments):
        if name == package:
            raise ImportError(name)
        return imported(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=rf'{package} .*"fps_jax\[{extra}\]"'):
        make(tmp_path)


def test_fan_out_writes_to_all_and_closes_all_even_if_one_fails():
    seen, closed = [], []

    def recorder(name, close_fails=False):
        def close():
            closed.append(name)
            if close_fails:
                raise OSError(name)

        return Sink(lambda step, record: seen.append((name, step, record)), close)

    sink = fan_out(recorder(name, close_fails=name == "b") for name in ("a", "b", "c"))
    sink.write(3, {"loss": 1.0})
    sink.write(4, {})
    assert seen == [
        (name, *written)
        for written in ((3, {"loss": 1.0}), (4, {}))
        for name in ("a", "b", "c")
    ]
    with pytest.raises(OSError, match="b"):
        sink.close()
    assert sorted(closed) == ["a", "b", "c"]
    nowhere = fan_out([])
    nowhere.write(1, {})
    nowhere.close()


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until it is told to go on."""
    now = [100.0]
    monkeypatch.setattr(
        metrics, "time", types.SimpleNamespace(perf_counter=lambda: now[0])
    )
    return now


def test_timers_add_up_by_name(clock):
    timers = Timers()
    for seconds in (1.0, 2.0):
        with timers("env"):
            clock[0] += seconds
        clock[0] += 50.0
    with timers("inference"):
        clock[0] += 4.0
    timers.add("transfer", 0.5)
    timers.add("env", 0.25)
    assert timers.totals() == {"env": 3.25, "inference": 4.0, "transfer": 0.5}


def test_a_timer_counts_what_is_nested_and_what_raises(clock):
    timers = Timers()

    def learn():
        with timers("learn"):
            clock[0] += 1.0
            with timers("learn"), timers("transfer"):
                clock[0] += 2.0
            raise RuntimeError

    with pytest.raises(RuntimeError):
        learn()
    assert timers.totals() == {"learn": 5.0, "transfer": 2.0}


def test_merged_timers_are_the_sum_and_totals_a_copy():
    first, second = Timers(), Timers()
    first.add("env", 1.0)
    second.add("env", 2.0)
    second.add("learn", 3.0)
    first.merge(second)
    first.totals()["env"] = 99.0
    assert first.totals() == {"env": 3.0, "learn": 3.0}
    assert second.totals() == {"env": 2.0, "learn": 3.0}


def test_timers_may_be_read_while_another_thread_adds():
    timers = Timers()
    stop = threading.Event()

    def work():
        count = 0
        while not stop.is_set():
            timers.add(f"name {count % 5000}", 1.0)
            count += 1

    thread = threading.Thread(target=work)
    thread.start()
    try:
        sizes = [len(timers.totals()) for _ in range(2000)]
    finally:
        stop.set()
        thread.join()
    assert sizes == sorted(sizes)
    assert sizes[-1] > 0
