"""A sweep on a local Ray: tasks, their errors, and settings that Ray Tune judges."""

import csv
import json
import os
import subprocess
import sys

import pytest
import ray
from processes import ROOT, finish

from experiments import sweep

TINY = """
    ppo --env CartPole-v1 --preset none --num-envs 4 --rollout-steps 32
    --minibatch-size 64 --num-epochs 1 --total-env-steps 1024 --eval-every 256
    --eval-episodes 2 --checkpoint-every 512 --name tiny --engine ray
"""


def words_of(tmp_path, *words):
    return [*TINY.split(), "--directory", str(tmp_path), *words]


def start(tmp_path, *words):
    """Runs the program; its workers compile as the tests do, without optimising."""
    flags = "--xla_backend_optimization_level=0"
    settings = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-m", "experiments.sweep", *words_of(tmp_path, *words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | settings,
    )
    return finish(process), tmp_path / "tiny"


def refusal(capsys, words):
    """The line that the program ends with, in this process."""
    with pytest.raises(SystemExit) as ended:
        sweep.main(words)
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    return told


def statuses(folder):
    with (folder / "sweep.csv").open() as file:
        rows = csv.DictReader(line for line in file if not line.startswith("#"))
        return {row["member"]: row["status"] for row in rows}


@pytest.mark.ray
def test_an_error_ends_its_group_alone_and_a_second_start_trains_only_that(tmp_path):
    options = "--seeds", "0:1", "--grid", "minibatch_size=64,32"
    obstacle = tmp_path / "tiny/members/001_s0/config.json"
    obstacle.mkdir(parents=True)
    ended, folder = start(tmp_path, *options)
    assert ended.code == 1
    assert "experiments.sweep: done 000_s0" in ended.stdout
    assert "members 001_s0 were ended by an error" in ended.stderr
    error = (folder / "members/001_s0/error.txt").read_text()
    assert "in run_group" in error
    assert "IsADirectoryError" in error
    assert "\x1b" not in error
    assert statuses(folder) == {"000_s0": "done", "001_s0": "failed"}

    obstacle.rmdir()
    finished = folder / "members/000_s0/metrics.jsonl"
    written_at = finished.stat().st_mtime_ns
    ended, folder = start(tmp_path, *options)
    assert ended.code == 0, ended.stderr
    assert "1 of them finished" in ended.stdout
    assert finished.stat().st_mtime_ns == written_at
    assert statuses(folder) == {"000_s0": "done", "001_s0": "done"}
    assert (folder / "report.md").exists()


@pytest.mark.ray
def test_what_optuna_proposes_is_stopped_if_it_is_behind_what_an_earlier_start_left(
    tmp_path,
):
    first = {"learning_rate": 0.005}
    done = tmp_path / "tiny/members/000_s0"
    done.mkdir(parents=True)
    (done / "done.json").write_text('{"env_steps": 1024}')
    records = [
        {"env_steps": steps, "eval/return": 1e6, "eval/return_std": 0.0}
        for steps in (256, 512, 768, 1024)
    ]
    (done / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    (tmp_path / "tiny/proposals.jsonl").write_text(json.dumps(first) + "\n")

    ranges = "--ranges", "learning_rate=log:1e-4:1e-2"
    options = "--seeds", "0:1", "--random", "2", "--search", "optuna", "--asha"
    ended, folder = start(tmp_path, *options, *ranges)
    assert ended.code == 0, ended.stderr
    assert statuses(folder) == {"000_s0": "done", "001_s0": "stopped"}
    lines = (folder / "proposals.jsonl").read_text().splitlines()
    proposed = [json.loads(line)["learning_rate"] for line in lines]
    assert len(proposed) == 2
    assert proposed[0] == 0.005 != proposed[1]
    assert 1e-4 <= proposed[1] <= 1e-2
    stopped_at = json.loads((folder / "members/001_s0/stopped.json").read_text())
    assert 200 < stopped_at["env_steps"] < 900
    assert f"{proposed[1]:.6g}" in (folder / "members/001_s0/config.json").read_text()
    assert "1 done, 0 failed, 1 stopped" in (folder / "report.md").read_text()
    assert not list(folder.glob("tune-*"))


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--engine local --asha", "asha True needs engine ray"),
        ("--engine local --gpus 0.5", "gpus 0.5 needs engine ray"),
        ("--search optuna", "search optuna needs random, ranges and engine ray"),
        ("--asha --members 1 --seeds 0:2", "members 1 must be at least 2"),
        ("--asha --asha-factor 1", "asha_factor 1"),
        ("--asha --asha-grace 1024", "asha_grace 1024 must be below"),
        ("--asha --eval-every 0", "eval_every 0 must be above 0"),
        ("--asha --eval-every 1024", "below total_env_steps 1024"),
        ("--asha --eval-episodes 0", "eval_episodes 0"),
    ],
)
def test_what_cannot_be_judged_is_refused_before_anything_is_written(
    words, reason, tmp_path, capsys
):
    assert reason in refusal(capsys, words_of(tmp_path, *words.split()))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("package", ["ray", "optuna"])
def test_one_line_says_what_to_install(package, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    told = refusal(capsys, words_of(tmp_path))
    assert 'pip install "fps_jax[sweep]"' in told


@pytest.mark.parametrize("words", ["", "--seeds 0:1 --asha"])
def test_a_cluster_where_nobody_answers_is_one_line(words, tmp_path, capsys):
    address = "--address", "127.0.0.1:1"
    told = refusal(capsys, words_of(tmp_path, *address, *words.split()))
    assert told.startswith("experiments.sweep: address 127.0.0.1:1: [Errno 111]")


def test_a_task_that_no_node_has_room_for_does_not_wait_for_ever(
    tmp_path, capsys, monkeypatch
):
    has = [{"CPU": 8.0}, {"CPU": 2.0, "GPU": 1.0}]
    nodes = [{"Alive": True, "Resources": one} for one in has]
    monkeypatch.setattr(ray, "init", lambda **options: None)
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    told = refusal(capsys, words_of(tmp_path, "--cpus", "4", "--gpus", "0.5"))
    assert "a task needs 4 CPU, 0.5 GPU" in told
