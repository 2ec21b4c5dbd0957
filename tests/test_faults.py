"""Real processes that go wrong: how soon they end, what they say, what they leave."""

import re
import subprocess
from pathlib import Path

import processes
import pytest
from scripted_env import ScriptedEnv
from tiny_agent import TinyConfig

from fps_jax.runtime.checkpoints import open_checkpoints
from fps_jax.runtime.leaves import read_arrays
from fps_jax.runtime.manifest import read_manifest
from fps_jax.runtime.metrics import read_jsonl
from fps_jax.runtime.options import TrainConfig
from fps_jax.runtime.training import Run

SOON_S = 10.0
STALL_LIMIT_S = 15.0
ROWS = 32
OPTIONS = {
    "--env": "Scripted-v0",
    "--num-envs": 4,
    "--rollout-steps": 8,
    "--total-env-steps": 50 * ROWS,
    "--max-lag": 1,
    "--eval-every": 0,
    "--eval-episodes": 2,
    "--checkpoint-every": 60,
    "--keep-checkpoints": 100,
    "--log-every": 100,
}


def words(agent, directory, **more):
    """The command line of a run of fifty updates."""
    more = {f"--{name.replace('_', '-')}": value for name, value in more.items()}
    given = OPTIONS | {"--directory": directory} | more
    return [agent, *(word for item in given.items() for word in item)]


def run_folder(directory: Path) -> Path:
    """The only run under a folder of runs."""
    (folder,) = directory.glob("*/*/*")
    return folder


def whole_checkpoints(directory: Path) -> list[int]:
    """The updates of all checkpoints of a run, each checked to the last byte."""
    checkpoints = open_checkpoints(run_folder(directory) / "checkpoints")
    return [checkpoints.meta(step)["update"] for step in checkpoints.steps()]


def resume(directory: Path) -> Run:
    """Goes on where a run that a fault ended left off."""
    config = TrainConfig(
        env="Scripted-v0",
        num_envs=4,
        rollout_steps=8,
        total_env_steps=50 * ROWS,
        learner_devices=1,
        eval_episodes=0,
        log_every=100,
        checkpoint_every=0,
        directory=str(directory),
        resume=True,
        tensorboard=False,
        show_progress=False,
    )
    make_env = lambda env_id, *, num_envs, **_: ScriptedEnv(num_envs, first=100)
    return Run(TinyConfig(), config, make_env=make_env)


# Steps 40 and 43 are in the sixth rollout.
FAILURES = {
    "an actor raises": (
        '{"env": {"fail_at_step": 40}}',
        {},
        r"RuntimeError: Scripted failure at step 40\.",
    ),
    "an environment returns NaN": (
        '{"env": {"nan_at_step": 43, "nan_field": "observation"}}',
        {},
        "NonFiniteError: environment 0 of Scripted-v0 returned a NaN",
    ),
    "the learner raises": (
        "{}",
        {"fail_at_trace": 1},
        "RuntimeError: The tiny agent fails as it was told to",
    ),
    "the loss is NaN": (
        "{}",
        {"nan_at_update": 5},
        "NonFiniteError: loss became NaN or infinite at update 6",
    ),
    "an environment hangs": (
        '{"env": {"hang_at_step": 43}}',
        {"stall_limit_s": STALL_LIMIT_S},
        r"StalledError: waited 15 s for a rollout .* \(the limit is stall_limit_s\)",
    ),
    "an evaluation hangs": (
        '{"eval_env": {"hang_at_step": 2}}',
        {"eval_every": 160, "stall_limit_s": STALL_LIMIT_S},
        "StalledError: an evaluation made no step in 15 s",
    ),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_ends_the_run_with_its_cause(name, tmp_path):
    faults, more, cause = FAILURES[name]
    ended = processes.run(processes.WORKER, faults, *words("tiny", tmp_path, **more))
    assert ended.code == 1, ended.stderr
    # It is the last word, but for a line or two that JAX adds to errors of its own.
    assert re.search(cause, "\n".join(ended.stderr.splitlines()[-3:])), ended.stderr
    if ended.seconds_after_fault is not None:
        waited = STALL_LIMIT_S if "Stalled" in cause else 0.0
        assert ended.seconds_after_fault < waited + SOON_S
    # What was saved before is whole, and what was learned before was saved.
    steps = whole_checkpoints(tmp_path)
    last = {"the learner raises": [], "the loss is NaN": [3, 5]}.get(name)
    assert steps == last if last is not None else steps[-1] >= 4


SIGNALS = {
    "Ctrl-C": ('{"env": {"signal_at_step": 43, "signal_name": "SIGINT"}}', {}, 130),
    "in a slow environment": (
        '{"env": {"signal_at_step": 43, "sleep_s": 0.2}}',
        {},
        143,
    ),
    "in one that hangs": (
        '{"env": {"signal_at_step": 43, "hang_at_step": 43}}',
        {},
        143,
    ),
    "in compilation": ("{}", {"signal_at_trace": 1}, 143),
    "in an evaluation": (
        '{"eval_env": {"signal_at_step": 2}}',
        {"eval_every": 160},
        143,
    ),
    "in one of those that hangs": (
        '{"eval_env": {"signal_at_step": 2, "hang_at_step": 2}}',
        {"eval_every": 160},
        143,
    ),
}


@pytest.mark.parametrize("name", SIGNALS)
def test_a_signal_ends_the_run_with_a_checkpoint_to_go_on_from(name, tmp_path):
    faults, more, code = SIGNALS[name]
    ended = processes.run(processes.WORKER, faults, *words("tiny", tmp_path, **more))
    assert ended.code == code, ended.stderr
    assert ended.seconds_after_fault < SOON_S
    last_line = ended.stderr.splitlines()[-1]
    assert "interrupted after" in last_line
    assert "--resume goes on" in last_line
    run = resume(tmp_path)
    assert run.update == whole_checkpoints(tmp_path)[-1] >= 1
    assert f"interrupted after {run.env_steps} env steps" in last_line
    assert len(run.journal.recent_returns) == episodes(run)
    history = run.train()
    assert history.state.learner.update == 50
    steps = [record["env_steps"] for record in history.records]
    assert steps == sorted(set(steps))
    assert read_jsonl(history.directory / "metrics.jsonl") == history.records


def episodes(run: Run) -> int:
    """The training episodes that a run's records count."""
    return sum(record.get("train/episodes", 0) for record in run.journal.records)


def test_a_second_process_goes_on_bit_for_bit(tmp_path):
    ppo = {
        "max_lag": 0,
        "total_env_steps": 10 * ROWS,
        "eval_every": 100,
        "hidden_sizes": 8,
        "minibatch_size": 16,
        "num_epochs": 2,
    }
    halves = words("ppo", tmp_path / "in two", **ppo)
    faults = '{"env": {"signal_at_step": 43}}'
    at_once, first = processes.run_together(
        [processes.WORKER, "{}", *words("ppo", tmp_path / "at once", **ppo)],
        [processes.WORKER, faults, *halves],
    )
    assert (at_once.code, first.code) == (0, 143), at_once.stderr + first.stderr
    before = whole_checkpoints(tmp_path / "in two")
    second = processes.run(processes.WORKER, "{}", *halves, "--resume")
    assert second.code == 0, second.stderr
    assert before[-1] == 5
    whole, resumed = (
        run_folder(tmp_path / name) / "checkpoints" / f"{10:010d}"
        for name in ("at once", "in two")
    )
    assert arrays(whole).keys() == arrays(resumed).keys()
    names = " ".join(arrays(whole))
    for part in ("params", "optimizer", "moments.mean", "key", "update", "env_state"):
        assert part in names
    for name, array in arrays(whole).items():
        assert array.tobytes() == arrays(resumed)[name].tobytes(), name
    one, other = (read_manifest(path)["meta"] for path in (whole, resumed))
    assert one | {"resumes": 1} == other
    records = [records_of(tmp_path / name) for name in ("at once", "in two")]
    # The second wrote one more, as it was interrupted; what is counted is the same.
    assert [r["env_steps"] for r in records[0] if "eval/return" in r] == [
        r["env_steps"] for r in records[1] if "eval/return" in r
    ]
    for name in ("eval/return", "eval/length"):
        one, other = ([r[name] for r in rs if name in r] for rs in records)
        assert one == other
    one, other = (sum(r.get("train/episodes", 0) for r in rs) for rs in records)
    assert one == other > 30


def arrays(checkpoint: Path) -> dict:
    """The arrays of a checkpoint by name."""
    return read_arrays(checkpoint / "arrays", read_manifest(checkpoint)["leaves"])


def records_of(directory: Path) -> list[dict]:
    """The records of the only run under a folder of runs."""
    return read_jsonl(run_folder(directory) / "metrics.jsonl")


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 400 kB, in memory; to mount one takes root."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(disk)]
    try:
        subprocess.run(mount, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", None) or str(error)
        pytest.skip(f"no disk can be mounted here: {reason}")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_a_full_disk_ends_the_run_and_spoils_no_checkpoint(small_disk):
    more = ("--no-tensorboard",)
    ended = processes.run(
        processes.WORKER, "{}", *words("tiny", small_disk, checkpoint_every=1), *more
    )
    assert ended.code == 1, ended.stderr
    last_line = ended.stderr.splitlines()[-1]
    assert "OSError: [Errno 28]" in last_line
    assert str(small_disk) in last_line
    steps = whole_checkpoints(small_disk)
    assert len(steps) >= 3
    assert f"{steps[-1] + 1:010d} was not written" in last_line
    leftovers = run_folder(small_disk) / "checkpoints"
    assert not list(leftovers.glob(".*"))


def test_a_refusal_and_a_help_are_all_that_their_process_says():
    module = ["-m", "experiments.train", "ppo"]
    refused, helped = processes.run_together(
        [*module, "--clip-epsilon", 2], [*module, "--help"]
    )
    assert (refused.code, refused.stdout) == (2, "")
    assert refused.stderr.count("\n") == 1
    assert "clip_epsilon 2.0" in refused.stderr
    assert (helped.code, helped.stderr) == (0, "")
    assert "--clip-epsilon" in helped.stdout
