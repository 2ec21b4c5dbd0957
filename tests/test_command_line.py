"""What a user types, and the one line that answers a mistake."""

import dataclasses
import json
import math

import numpy as np
import pytest
import rliable.metrics
from scripted_env import ScriptedEnv

from experiments import (
    bench_ppo,
    bench_returns,
    dfps_ablations,
    figures,
    learning,
    ppo_variants,
    presets,
    results,
    train,
    turns,
)
from fps_jax.agents.ppo import PPOConfig
from fps_jax.runtime.metrics import read_jsonl
from fps_jax.runtime.options import TrainConfig

SHAPES = ["--num-envs", "4", "--rollout-steps", "16", "--minibatch-size", "32"]
SHAPES += ["--num-epochs", "1", "--hidden-sizes", "8"]
SMALL = ["ppo", "--env", "CartPole-v1", "--preset", "none", *SHAPES]
SMALL += ["--total-env-steps", "256", "--eval-episodes", "2", "--eval-every", "128"]


def refusal(capsys, words):
    """The one line on stderr with which a command line is refused."""
    with pytest.raises(SystemExit) as end:
        train.main(words)
    stdout, stderr = capsys.readouterr()
    assert (end.value.code, stdout) == (2, "")
    assert stderr.count("\n") == 1
    return stderr


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("ppo --lerning-rate 3", ["--lerning-rate", "--learning-rate"]),
        ("ppo --learning-rate fast", ["--learning-rate", "fast"]),
        ("ppo --mapping threads", ["--mapping", "threads", "pmap"]),
        ("ppo --clip-epsilon 2", ["clip_epsilon 2", "(0, 1)"]),
        ("ppo --num-envs 0", ["num_envs 0", "at least 1"]),
        ("ppo --gamma nan", ["gamma nan", "[0, 1]"]),
        ("ppo --activation cubic", ["activation 'cubic'", "tanh"]),
        ("ppo --env CartPol-v1", ["CartPol-v1", "CartPole-v1"]),
        ("ppo --preset Hoper-v4", ["'Hoper-v4'", "Hopper-v4"]),
        ("ppo --minibatch-size 48", ["minibatch_size 48", "2048 rows"]),
        ("ppo --learner-devices 99", ["learner_devices 99", "4"]),
        ("ppo --num-envs 3", ["num_envs 3", "4 learner_devices"]),
        ("ppo --env CartPole-v1 --env-options frame_skip 4", ["frame_skip"]),
        ("dqn --env CartPole-v1 --replay heap", ["replay", "heap", "rank_based"]),
        ("dqn --env HalfCheetah-v4", ["HalfCheetah-v4", "continuous"]),
        (
            "dqn --num-envs 1 --rollout-steps 3 --learner-devices 1 --env CartPole-v1",
            ["replay_period 2", "3 rows"],
        ),
        ("ppo --resume-step 3", ["resume_step 3", "resume"]),
        ("sarsa", ["'sarsa'", "ppo"]),
        ("", ["first word", "ppo"]),
    ],
)
def test_a_mistake_is_one_line_that_names_option_value_and_limit(
    capsys, tmp_path, monkeypatch, words, parts
):
    monkeypatch.chdir(tmp_path)
    line = refusal(capsys, words.split())
    for part in parts:
        assert part in line
    assert not list(tmp_path.iterdir())  # Nothing was written before it was refused.


def test_help_lists_every_option_with_its_default(capsys):
    with pytest.raises(SystemExit) as end:
        train.main(["ppo", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert end.value.code == 0
    for config in (PPOConfig, TrainConfig):
        for field in config.__dataclass_fields__:
            assert f"--{field.replace('_', '-').strip('-')}" in text, field
    assert "--rollout-steps INT" in text
    assert "(default: 0.2)" in text


@pytest.mark.parametrize("env", presets.PRESETS["ppo"])
def test_a_preset_is_the_default_and_the_command_line_overrides_it(env):
    for_agent, for_run = presets.PRESETS["ppo"][env]
    agent, run = train.read(["ppo", "--env", env, "--num-envs", "4"])
    plain = train.read(["ppo", "--env", env, "--preset", "none"])
    assert plain == (PPOConfig(), TrainConfig(env=env))
    assert run.num_envs == 4
    assert run.rollout_steps == for_run["rollout_steps"]
    for name, value in for_agent.items():
        assert getattr(agent, name) == value


@pytest.mark.parametrize("variant", presets.VARIANTS)
def test_a_variant_overrides_the_task_s_row_and_the_command_line_overrides_it(variant):
    of, (for_agent, for_run) = presets.VARIANTS[variant]
    env = "HalfCheetah-v4"
    row, _ = presets.PRESETS.get(of, {}).get(env, ({}, {}))
    agent, run = train.read([variant, "--env", env])
    assert agent.name == variant
    for name, value in (row | for_agent).items():
        assert getattr(agent, name) == value
    for name, value in for_run.items():
        assert getattr(run, name) == value
    changed, _ = train.read([variant, "--env", env, "--learning-rate", "0.5"])
    assert changed == dataclasses.replace(agent, learning_rate=0.5)
    plain, _ = train.read([variant, "--env", env, "--preset", "none"])
    assert plain == train.AGENTS[of](name=variant, **for_agent)


def test_an_option_of_both_is_the_variant_s(monkeypatch):
    variant = "ppo", ({"gamma": 0.5}, {"num_envs": 2})
    monkeypatch.setitem(presets.VARIANTS, "ppo_other", variant)
    for_agent, for_run = presets.PRESETS["ppo"]["HalfCheetah-v4"]
    assert presets.find("ppo_other", "HalfCheetah-v4", "auto") == (
        for_agent | {"gamma": 0.5, "name": "ppo_other"},
        for_run | {"num_envs": 2},
    )


def test_every_ablation_is_one_of_its_own():
    ablations = dfps_ablations.Options()
    seen = []
    for arm in dfps_ablations.ARMS:
        given, words = ablations.of_runs(arm, "Hopper-v4")
        agent, run = train.read(given.argv(0, words))
        settings = dataclasses.replace(agent, name="any"), run
        assert settings not in seen, arm
        seen.append(settings)


def test_at_four_times_the_batch_the_average_is_as_old_in_env_steps():
    options = ppo_variants.Options(seeds=1)
    given, words = options.of_runs("ppo_ewma_x4", "Hopper-v4")
    agent, run = train.read(given.argv(0, words))
    small_agent, small_run = train.read(
        options.of_runs("ppo_ewma", "Hopper-v4")[0].argv(0, [])
    )
    assert agent.minibatch_size == 4 * small_agent.minibatch_size
    assert run.num_envs == 4 * small_run.num_envs
    assert agent.learning_rate == 2 * small_agent.learning_rate
    age = lambda of: of.minibatch_size * of.ewma_decay / (1 - of.ewma_decay)
    np.testing.assert_allclose(age(agent), age(small_agent))


@pytest.mark.parametrize(
    ("options", "given", "message"),
    [
        (ppo_variants.Options, {"arms": ("ppo_x5",)}, "arms 'ppo_x5' must be one of"),
        (learning.Options, {"seeds": 0}, "seeds 0 must be at least 1"),
        (learning.Options, {"jobs": 0}, "jobs 0 must be at least 1"),
        (bench_returns.Options, {"repeats": 0}, "repeats 0 must be at least 1"),
        (bench_returns.Options, {"lengths": (8, 0)}, "lengths 0 must be at least 1"),
        (bench_returns.Options, {"seconds": 0.0}, "seconds 0.0 must be above 0"),
    ],
)
def test_an_experiment_that_could_measure_nothing_is_refused(options, given, message):
    with pytest.raises(ValueError, match=message):
        options(**given)


def test_the_variants_become_a_csv_and_a_figure(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    for_agent = {"minibatch_size": 32, "num_epochs": 1, "hidden_sizes": (8,)}
    small_row = {"CartPole-v1": (for_agent, {"num_envs": 4, "rollout_steps": 16})}
    monkeypatch.setitem(presets.PRESETS, "ppo", small_row)
    # The seeds' own processes would read the presets anew.
    monkeypatch.setattr(
        learning,
        "run_seeds",
        lambda options, more, seeds: (
            learning.run_seed(options, more, seed) for seed in seeds
        ),
    )
    words = "--arms ppo ppo_ewma_x4 --envs CartPole-v1 --seeds 1 --evaluations 2 "
    words += "--total-env-steps 512 --eval-episodes 1"
    assert ppo_variants.main(words.split()) == 0
    paths = sorted((tmp_path / "ppo_variants").iterdir())
    assert [p.stem for p in paths] == ["ppo_CartPole-v1", "ppo_ewma_x4_CartPole-v1"]
    for path in paths:
        assert "final_iqm" in path.read_text()
        assert {row["seed"] for row in results.read_csv(path)} == {"0"}
    written = [path.stat().st_mtime_ns for path in paths]
    assert ppo_variants.main(words.split()) == 0  # They are there already.
    assert [path.stat().st_mtime_ns for path in paths] == written
    figures.draw_variants(paths, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 1000


def test_a_run_leaves_its_folder_and_a_table_and_goes_on_when_asked(capsys, tmp_path):
    words = [*SMALL, "--directory", str(tmp_path)]
    assert train.main(words) == 0
    stdout, stderr = capsys.readouterr()
    (folder,) = (tmp_path / "CartPole-v1" / "ppo").iterdir()
    assert folder.name.endswith("_s0")
    assert "where the time went" in stdout
    assert "inference" in stdout
    assert str(folder / "learning_curve.png") in stdout
    assert "steps/s" in stderr  # Lines, as stderr is no terminal.
    names = {path.name.split(".")[0] for path in folder.iterdir()}
    assert {"config", "metrics", "checkpoints", "learning_curve", "events"} <= names
    config = json.loads((folder / "config.json").read_text())
    assert config["config"]["agent"]["minibatch_size"] == 32
    assert config["versions"]["jax"]
    assert config["device_kind"]
    first = read_jsonl(folder / "metrics.jsonl")

    assert train.main([*words, "--resume", "--total-env-steps", "512"]) == 0
    both = read_jsonl(folder / "metrics.jsonl")
    assert both[: len(first)] == first
    assert both[-1]["env_steps"] > first[-1]["env_steps"]
    assert len(list((tmp_path / "CartPole-v1" / "ppo").iterdir())) == 1


def test_several_seeds_become_a_csv_that_says_how_and_a_figure(
    capsys, tmp_path, monkeypatch
):
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    words = "--env CartPole-v1 --preset none --seeds 1 --total-env-steps 256 "
    words += f"--evaluations 2 --eval-episodes 2 --jobs 1 {' '.join(SHAPES)}"
    assert learning.main(words.split()) == 0
    assert "IQM" in capsys.readouterr().out
    path = tmp_path / "ppo_CartPole-v1.csv"
    assert path.read_text().startswith("# command: ")
    rows = results.read_csv(path)
    assert {row["env"] for row in rows} == {"CartPole-v1"}
    assert all(math.isfinite(float(row["return"])) for row in rows)
    figures.draw_learning([path], tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 1000


@pytest.mark.parametrize("runs", [4, 5, 10])
def test_the_summary_prints_what_rliable_measures(runs):
    values = np.random.default_rng(runs).normal(size=runs)
    printed, low, high = results.interquartile_mean(values.tolist())
    np.testing.assert_allclose(rliable.metrics.aggregate_iqm(values[:, None]), printed)
    assert low <= printed <= high
    measure = lambda scores: np.array([rliable.metrics.aggregate_iqm(scores)])
    ends = results.interval(values[:, None], measure)[:, 0]
    np.testing.assert_allclose(ends, [low, high])
    again = results.interquartile_mean(values.tolist())
    assert again == (printed, low, high)


def test_the_benchmark_compares_only_what_was_measured():
    medians = {"ours, lag 1": 12.0, "sb3, dummy": 2.0, "sb3, subproc": 3.0}
    assert turns.ratios_of(medians, bench_ppo.RATIOS) == {
        "ours lag 1 / fastest sb3": 4.0
    }
    assert turns.rate([(1, 9.0), (10, 10.0), (40, 12.0)]) == {
        "steps_per_s": 15.0,
        "start_s": 10.0,
    }


def test_another_environment_trains_through_the_same_command(capsys, tmp_path):
    make_env = lambda env_id, *, num_envs, seeds, **_: ScriptedEnv(
        num_envs, first=seeds[0] % 1000
    )
    words = [*SMALL, "--env", "Scripted-v0", "--directory", str(tmp_path)]
    assert train.main(words, make_env=make_env) == 0
    assert (tmp_path / "Scripted-v0").is_dir()
