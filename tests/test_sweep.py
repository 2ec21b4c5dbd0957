"""Sweeps: who takes part, and what becomes of them."""

import json
import math
import signal
import time

import numpy as np
import processes
import pytest
from scipy import stats

from experiments import results, sweep, sweep_members
from fps_jax.runtime.metrics import read_jsonl

RUN = [
    *("ppo", "--env", "CartPole-v1", "--preset", "none", "--num-envs", "2"),
    *("--rollout-steps", "16", "--minibatch-size", "None", "--num-epochs", "1"),
    *("--hidden-sizes", "4", "--eval-episodes", "1", "--eval-every", "512"),
    *("--max-episode-steps", "20", "--checkpoint-every", "512", "--no-show-progress"),
    *("--learner-devices", "1"),
]


# ------------------------------------------------------------------- who takes part


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0:3", [0, 1, 2]), ("7", [7]), ("3,1", [3, 1]), ("5:6", [5])],
)
def test_seeds_are_a_range_or_a_list(text, expected):
    assert sweep_members.seeds(text) == expected


@pytest.mark.parametrize("text", ["", "3:3", "4:0", "a", "1,1", "-1", "0:2:4", "1.5"])
def test_seeds_that_are_none_are_refused(text):
    with pytest.raises(ValueError, match=r"seeds .* must be FIRST:END"):
        sweep_members.seeds(text)


def test_a_grid_is_every_combination_in_order():
    settings = sweep_members.grid(["learning-rate=1e-4,3e-4", "gamma=0.9,0.99"])
    assert settings == [
        {"learning_rate": "1e-4", "gamma": "0.9"},
        {"learning_rate": "1e-4", "gamma": "0.99"},
        {"learning_rate": "3e-4", "gamma": "0.9"},
        {"learning_rate": "3e-4", "gamma": "0.99"},
    ]
    assert sweep_members.grid([]) == [{}]


@pytest.mark.parametrize("axis", ["gamma", "gamma=", "=1", "gamma=1,,2"])
def test_a_grid_that_is_none_is_refused(axis):
    with pytest.raises(ValueError, match="must be NAME=VALUES"):
        sweep_members.grid([axis])
    with pytest.raises(ValueError, match="gamma stands twice"):
        sweep_members.grid(["gamma=1", "gamma=2"])


def test_draws_are_log_uniform_uniform_and_of_the_choices():
    ranges = [
        "learning_rate=log:1e-5:1e-1",
        "gamma=0.5:1.0",
        "minibatch_size=32,64,128",
    ]
    settings = sweep_members.draw(ranges, 600, seed=3)
    assert settings == sweep_members.draw(ranges, 600, seed=3)
    assert settings != sweep_members.draw(ranges, 600, seed=4)
    column = lambda name: np.array([float(setting[name]) for setting in settings])
    log_rate = (np.log10(column("learning_rate")) + 5) / 4
    for uniform in (log_rate, (column("gamma") - 0.5) / 0.5):
        assert stats.kstest(uniform, "uniform").pvalue > 1e-4
    counts = np.unique(column("minibatch_size"), return_counts=True)[1]
    assert stats.chisquare(counts).pvalue > 1e-4


@pytest.mark.parametrize("text", ["log:0:1", "2:1", "1:1", "log:1", "a:b", "1:2:3"])
def test_a_range_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match=f"gamma={text} must be log:LOW:HIGH"):
        sweep_members.draw([f"gamma={text}"], 1, seed=0)


def test_members_that_share_a_program_make_a_group():
    settings = sweep_members.grid(
        [
            "learning_rate=1e-4,1e-3",
            "num_epochs=1,2",
            "normalize_observations=True,False",
        ]
    )
    groups = sweep_members.groups("ppo", settings, [0, 1], RUN[1:], largest=64)
    assert [len(group.members) for group in groups] == [4, 4, 4, 4]
    for group in groups:
        assert len({member.agent.num_epochs for member in group.members}) == 1
        assert {member.agent.learning_rate for member in group.members} == {1e-4, 1e-3}
    names = [member.name for group in groups for member in group.members]
    assert len(set(names)) == 16
    assert names[:4] == ["000_s0", "000_s1", "004_s0", "004_s1"]


def test_a_group_is_no_larger_than_it_may_be():
    groups = sweep_members.groups("ppo", [{}], range(5), RUN[1:], largest=2)
    assert [[m.seed for m in g.members] for g in groups] == [[0, 1], [2, 3], [4]]


def test_options_of_the_run_may_vary_and_make_groups():
    settings = sweep_members.grid(["rollout_steps=16,32"])
    groups = sweep_members.groups("ppo", settings, [0], RUN[1:], largest=64)
    assert [group.config.rollout_steps for group in groups] == [16, 32]


# ----------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the first word must be an agent"),
        (["ppo", "--seeds", "4:0"], "seeds '4:0'"),
        (["ppo", "--random", "3"], "random needs ranges"),
        (["ppo", "--address", "auto"], "address auto needs engine ray"),
        (["ppo", "--seed", "3"], "--seed is the sweep's to say"),
        (["ppo", "--grid", "learning_rat=1,2"], "--learning-rat"),
        (["ppo", "--grid", "gamma=0.9,2"], "gamma 2.0"),
        (["po"], "'po', is not an agent"),
        (
            ["ppo", "--env", "CartPol-v1", "--grid", "gamma"],
            "'gamma' must be NAME=VALUES",
        ),
    ],
)
def test_what_a_sweep_cannot_be_is_one_line(words, message, tmp_path, capsys):
    home = ["--directory", str(tmp_path)] if words else []
    with pytest.raises(SystemExit) as end:
        sweep.main([*words, *home])
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert said.startswith("experiments.sweep")


# ------------------------------------------------------------------------ whole sweeps


def folder_of(tmp_path):
    return tmp_path / "ppo_CartPole-v1"


def start(tmp_path, *more):
    return sweep.main([*RUN, "--directory", str(tmp_path), *more])


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """A sweep with one setting that becomes NaN, killed half-way, and gone on with."""
    home = tmp_path_factory.mktemp("sweeps")
    words = ["--grid", "learning_rate=1e-3,1e38,1e-2", "--seeds", "0:2"]
    words += ["--total-env-steps", "4096"]
    command = ["-m", "experiments.sweep", *RUN, *words, "--directory", home]
    process = processes.start(*command)
    members = folder_of(home) / "members"
    living = [
        members / f"{setting:03d}_s{seed}" for setting in (0, 2) for seed in (0, 1)
    ]
    deadline = time.monotonic() + processes.PATIENCE_S
    while not all(list(path.glob("checkpoints/0*")) for path in living):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    said = process.communicate()[1]
    before = {path.name: len(read_jsonl(path / "metrics.jsonl")) for path in living}
    code = start(home, *words)
    return home, words, said, before, code


def test_a_sweep_survives_a_member_that_is_nan_and_a_kill(swept):
    home, _, said, before, code = swept
    assert code == 0
    assert "member 001_s0 stops: " in said
    rows = results.read_csv(folder_of(home) / "sweep.csv")
    by_member = {row["member"]: row for row in rows}
    assert {name: row["status"] for name, row in by_member.items()} == {
        f"{setting:03d}_s{seed}": "failed" if setting == 1 else "done"
        for setting in range(3)
        for seed in (0, 1)
    }
    for name, records in before.items():
        path = folder_of(home) / "members" / name / "metrics.jsonl"
        steps = [record["env_steps"] for record in read_jsonl(path)]
        assert steps == sorted(set(steps))
        assert len(steps) == 4096 // 32 > records
        # It was gone on with, not begun anew.
        config = path.parent / "checkpoints"
        newest = max(config.iterdir()) / "manifest.json"
        assert json.loads(newest.read_text())["meta"]["resumes"] == 1


def test_the_csv_of_a_sweep_is_tidy(swept):
    home, *_ = swept
    rows = results.read_csv(folder_of(home) / "sweep.csv")
    assert list(rows[0]) == [
        *("member", "agent", "env", "seed", "learning_rate"),
        *("env_steps", "return", "return_std", "status"),
    ]
    for row in rows:
        path = folder_of(home) / "members" / row["member"] / "metrics.jsonl"
        if row["return"]:
            recorded = {
                r["env_steps"]: r["eval/return"]
                for r in read_jsonl(path)
                if "eval/return" in r
            }
            value = recorded[int(row["env_steps"])]
            assert math.isclose(float(row["return"]), value, abs_tol=1e-3)
    assert (folder_of(home) / "report.md").exists()


def test_a_second_start_skips_what_is_finished(swept, monkeypatch):
    home, words, *_ = swept
    before = (folder_of(home) / "sweep.csv").read_text()
    monkeypatch.setattr(sweep, "Population", None)  # Whoever trains, fails.
    assert start(home, *words) == 0
    values = lambda text: [x for x in text.splitlines() if not x.startswith("#")]
    assert values((folder_of(home) / "sweep.csv").read_text()) == values(before)


def test_another_sweep_of_the_same_name_is_refused(swept, capsys):
    home, *_ = swept
    with pytest.raises(SystemExit):
        start(home, "--seeds", "0:2")
    assert "holds a sweep with other options; another --name" in capsys.readouterr().err


def test_an_error_ends_its_group_alone_and_is_reported(tmp_path, monkeypatch, capsys):
    trained = []

    class Broken:
        def __init__(self, members, config, **_):
            self.members = members
            if members[0].agent.num_epochs == 2:
                raise RuntimeError("the second group breaks")

        def train(self):
            trained.append([member.name for member in self.members])
            return []

    monkeypatch.setattr(sweep, "Population", Broken)
    words = ["--grid", "num_epochs=1,2,3", "--seeds", "0:1", "--total-env-steps", "64"]
    assert start(tmp_path, *words) == 1
    assert trained == [["000_s0"], ["002_s0"]]
    said = capsys.readouterr().err
    assert "members 001_s0 were ended by an error" in said
    assert "RuntimeError: the second group breaks" in said
    error = folder_of(tmp_path) / "members" / "001_s0" / sweep.ERROR
    assert "RuntimeError: the second group breaks" in error.read_text()


@pytest.mark.parametrize(
    ("end", "code"),
    [(KeyboardInterrupt(), 130), (SystemExit(128 + signal.SIGTERM), 143)],
)
def test_a_signal_ends_a_sweep_with_what_there_is(
    tmp_path, monkeypatch, capsys, end, code
):
    class Interrupted:
        def __init__(self, members, config, **_):
            pass

        def train(self):
            raise end

    monkeypatch.setattr(sweep, "Population", Interrupted)
    assert start(tmp_path, "--seeds", "0:2", "--total-env-steps", "64") == code
    assert "interrupted; the same command goes on" in capsys.readouterr().err
    rows = results.read_csv(folder_of(tmp_path) / "sweep.csv")
    assert [row["status"] for row in rows] == ["running", "running"]


def test_what_an_engine_refuses_is_no_interruption(tmp_path, monkeypatch):
    def refuse(*_):
        raise SystemExit(2)

    monkeypatch.setattr(sweep, "run", refuse)
    with pytest.raises(SystemExit) as end:
        start(tmp_path, "--seeds", "0:2", "--total-env-steps", "64")
    assert end.value.code == 2
