"""Two hosts, as two processes on this machine that talk through gloo."""

import json
import shlex
import socket

import numpy as np
import processes
import pytest

from fps_jax.runtime.checkpoints import open_checkpoints
from fps_jax.runtime.leaves import read_arrays
from fps_jax.runtime.manifest import read_manifest

PPO = shlex.split(
    "ppo --env Scripted-v0 --num-envs 4 --rollout-steps 8 --minibatch-size 32 "
    "--num-epochs 1 --hidden-sizes 8 --optimizer sgd --learning-rate 0.05 "
    "--total-env-steps 256 --max-lag 1 --eval-every 0 --eval-episodes 2 "
    "--no-tensorboard --no-show-progress"
)
TINY = shlex.split(
    "tiny --env Scripted-v0 --num-envs 4 --rollout-steps 8 --total-env-steps 6400 "
    "--checkpoint-every 200 --eval-every 0 --eval-episodes 0 "
    "--no-tensorboard --no-show-progress"
)


@pytest.fixture
def two_hosts():
    """The words with which each of two hosts joins the other, through a free port."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    joined = f"--distributed --coordinator-address localhost:{port} --num-processes 2"
    return [[*joined.split(), "--process-id", host] for host in (0, 1)]


def newest_checkpoint(directory):
    """The newest checkpoint of the only run in a folder."""
    return max(directory.glob("*/*/*/checkpoints/0*"))


def learner_of(checkpoint):
    """The learner's arrays of a checkpoint by name."""
    arrays = read_arrays(checkpoint / "arrays", read_manifest(checkpoint)["leaves"])
    return {name: x for name, x in arrays.items() if ".learner." in name}


def test_two_hosts_train_as_one_with_two_devices(tmp_path, two_hosts):
    programs = [[*PPO, "--num-actors", 2, "--directory", tmp_path / "one"]]
    for i, host in enumerate(two_hosts):
        programs.append([*PPO, *host, "--directory", tmp_path / f"host {i}"])
    all_ended = processes.run_together(
        *([processes.WORKER, "{}", *words] for words in programs),
        num_devices=[2, 1, 1],
    )
    for ended in all_ended:
        assert ended.code == 0, ended.stderr
    one, two = (newest_checkpoint(tmp_path / name) for name in ("one", "host 0"))
    assert one.name == two.name == f"{4:010d}"
    ours, theirs = learner_of(one), learner_of(two)
    assert ours.keys() == theirs.keys()
    assert sum("params" in name for name in ours) >= 8
    for name, array in ours.items():
        np.testing.assert_allclose(array, theirs[name], rtol=1e-6, err_msg=name)
    one, two = (read_manifest(path)["meta"] for path in (one, two))
    assert one["env_steps"] == two["env_steps"] > 200
    # Only the first host writes.
    assert not (tmp_path / "host 1").exists()


@pytest.mark.parametrize("fault", ["fail_at_step", "signal_at_step"])
def test_no_host_outlives_one_that_fails(fault, tmp_path, two_hosts):
    faults = [{}, {"env": {fault: 75}}]
    hosts = processes.run_together(
        *(
            [processes.WORKER, json.dumps(f), *TINY, *host, "--directory", tmp_path]
            for f, host in zip(faults, two_hosts)
        )
    )
    assert all(host.code != 0 for host in hosts)
    cause = "Scripted failure" if fault == "fail_at_step" else "interrupted after"
    assert cause in hosts[1].stderr
    # Until both have ended, of which five seconds are a wait for each other.
    assert hosts[1].seconds_after_fault < 20.0
    (checkpoints,) = tmp_path.glob("*/*/*/checkpoints")
    for step in open_checkpoints(checkpoints).steps():
        assert open_checkpoints(checkpoints).meta(step)["update"] == step >= 3
