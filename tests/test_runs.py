"""Run folders: one each, found again, and told apart by what they ran with."""

import datetime
import itertools
import json
import subprocess

import jax
import numpy as np
import pytest

from fps_jax.runtime import runs
from fps_jax.runtime.runs import (
    find_latest_run,
    provenance,
    run_directory,
    write_config,
)

NOON = datetime.datetime(2026, 1, 2, 12, 0, 0)


def test_a_run_has_a_new_folder_of_its_own(tmp_path):
    first = run_directory(tmp_path, "CartPole-v1", "dfps", 3, NOON)
    assert first == tmp_path / "CartPole-v1" / "dfps" / "20260102-120000_s3"
    others = [
        run_directory(tmp_path, "CartPole-v1", "dfps", 3, NOON) for _ in range(11)
    ]
    assert others[0].name == "20260102-120000_s3_2"
    assert len({first, *others}) == 12
    assert find_latest_run(tmp_path, "CartPole-v1", "dfps", 3) == others[-1]
    assert all(path.is_dir() and not list(path.iterdir()) for path in [first, *others])


def test_no_two_environments_or_agents_share_a_folder(tmp_path):
    env_ids = ["ALE/Pong-v5", "ALE%2FPong-v5", "ALE_Pong-v5", "ALE", "a b", "ä:b", ".a"]
    agents = ["ppo", "Pong-v5/ppo", "p%po"]
    paths = [
        run_directory(tmp_path, env_id, agent, 0, NOON)
        for env_id, agent in itertools.product(env_ids, agents)
    ]
    assert len(set(paths)) == len(env_ids) * len(agents)
    assert {path.parents[2] for path in paths} == {tmp_path}


@pytest.mark.parametrize("name", ["", ".", ".."])
def test_a_name_that_cannot_be_a_folder_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match="env_id"):
        run_directory(tmp_path, name, "dfps", 0, NOON)
    with pytest.raises(ValueError, match="agent"):
        find_latest_run(tmp_path, "CartPole-v1", name, 0)


def test_the_latest_run_is_the_one_that_started_last(tmp_path):
    rng = np.random.default_rng(0)
    started = {}
    for _ in range(60):
        seed, minutes = int(rng.integers(1, 12)), int(rng.integers(0, 20))
        time = NOON + datetime.timedelta(minutes=minutes)
        path = run_directory(tmp_path, "ALE/Pong-v5", "dqn", seed, time)
        count = sum(s == seed and m == minutes for s, m, _ in started)
        started[seed, minutes, count] = path
    run_directory(tmp_path, "ALE/Pong-v5", "ppo", 1, NOON + datetime.timedelta(days=9))
    for other in ("zzz_s1", "20270101-000000_s1x", "x20270101-000000_s1"):
        (tmp_path / "ALE%2FPong-v5" / "dqn" / other).mkdir()
    for seed in range(1, 13):
        of_seed = [key for key in started if key[0] == seed]
        expected = started[max(of_seed)] if of_seed else None
        assert find_latest_run(tmp_path, "ALE/Pong-v5", "dqn", seed) == expected


def test_without_a_run_there_is_no_latest(tmp_path):
    assert find_latest_run(tmp_path / "none", "CartPole-v1", "dfps", 0) is None


def test_a_config_is_written_with_what_it_ran_on(tmp_path):
    path = tmp_path / "config.json"
    write_config(path, {"gamma": 0.99, "rho_bar": float("inf"), "sizes": [64, 64]})
    written = json.loads(path.read_text())
    assert written["config"] == {
        "gamma": 0.99,
        "rho_bar": float("inf"),
        "sizes": [64, 64],
    }
    assert written["versions"]["jax"] == jax.__version__
    assert written["versions"]["numpy"] == np.__version__
    assert set(written["versions"]) >= {"python", "fps_jax", "flax", "optax", "envpool"}
    assert written["device_count"] == jax.device_count()
    assert written["device_kind"] == jax.devices()[0].device_kind
    assert [entry.name for entry in tmp_path.iterdir()] == ["config.json"]


def test_a_config_that_is_not_json_leaves_the_old_one(tmp_path):
    path = tmp_path / "config.json"
    write_config(path, {"a": 1})
    with pytest.raises(TypeError):
        write_config(path, {"a": object()})
    assert json.loads(path.read_text())["config"] == {"a": 1}


def git(folder, *arguments):
    identity = ["-c", "user.name=n", "-c", "user.email=e"]
    command = ["git", "-C", folder, *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_the_commit_is_that_of_the_repository_that_holds_the_package(
    tmp_path, monkeypatch
):
    package = tmp_path / "fps_jax"
    package.mkdir()
    (package / "runs.py").write_text("a")
    monkeypatch.setattr(runs, "__file__", str(package / "runs.py"))
    assert provenance()["git_commit"] is None  # no repository
    git(tmp_path, "init", "-q")
    (tmp_path / "other").write_text("b")
    git(tmp_path, "add", "other")
    git(tmp_path, "commit", "-qm", "one")
    assert provenance()["git_commit"] is None  # somebody else's repository
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "two")
    git(tmp_path, "tag", "-am", "a tag is not what is asked for", "v1")
    commit = git(tmp_path, "rev-parse", "HEAD").strip()
    assert provenance()["git_commit"] == commit
    (package / "runs.py").write_text("c")
    assert provenance()["git_commit"] == f"{commit}-dirty"


def test_without_git_or_a_package_there_is_none(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(runs, "_PACKAGES", ("jax", "no_such_package"))
    assert provenance()["git_commit"] is None
    assert provenance()["versions"]["no_such_package"] is None
