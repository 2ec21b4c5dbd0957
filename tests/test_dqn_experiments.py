"""What the experiments with DQN compute from what they measured."""

import numpy as np
import pytest

from experiments import (
    atari,
    bench_dfps,
    bench_dqn,
    dqn_replays,
    learning,
    ppo_variants,
    presets,
    results,
    train,
    turns,
)
from fps_jax.runtime.envs import env_spec


def test_scores_are_normalised_by_the_size_of_the_difference(monkeypatch):
    assert len(presets.atari_scores()) == 57
    for env, (random, human) in presets.atari_scores().items():
        assert atari.normalized(env, random) == 0.0
        np.testing.assert_allclose(atari.normalized(env, human), 1.0)
    # Where a human plays worse than chance, a better score still is a larger one.
    monkeypatch.setattr(presets, "atari_scores", lambda: {"Odd-v5": (20.0, 10.0)})
    assert atari.normalized("Odd-v5", 30.0) == 1.0


def test_every_game_that_has_scores_is_one_of_envpool_and_has_the_atari_preset():
    for env in presets.atari_scores():
        agent, _ = presets.find("dqn_proportional", env, "auto")
        assert agent["optimizer"] == "rmsprop"
    assert presets.find("dqn", "CartPole-v1", "auto")[1] == {
        "num_envs": 8,
        "rollout_steps": 8,
    }
    agent, run = train.read(["dqn", "--env", "Pong-v5"])
    spec = env_spec("Pong-v5", env_options=run.env_options)
    assert spec.observation_shape == (4, 84, 84)
    assert spec.max_episode_steps == 108_000 // 4
    assert (agent.reward_clip, agent.eval_epsilon) == (1.0, 0.001)


def curve(*levels):
    """Two seeds whose mean is what is given, at 10, 20, ... steps."""
    mean = np.array(levels, float)
    return 10.0 * (1 + np.arange(len(levels))), np.stack([mean - 1.0, mean + 1.0])


def test_speed_is_the_steps_to_the_best_of_the_baseline_over_its_own():
    baseline = curve(0, 5, 8, 7)
    ratio, low, high = dqn_replays.speed(baseline, curve(0, 8, 3, 3))
    assert ratio == pytest.approx(20 / 30)
    assert low <= ratio <= high
    assert dqn_replays.speed(baseline, baseline)[0] == 1.0
    # An arm that never gets there counts as if it did at its end.
    assert dqn_replays.speed(baseline, curve(0, 1, 2, 3))[0] == pytest.approx(40 / 30)


def test_arms_become_a_summary(tmp_path):
    for arm, last in (("dqn", 5.0), ("dqn_proportional", 7.0)):
        rows = [
            {"arm": arm, "env": "A-v1", "seed": s, "env_steps": t, "return": r}
            for s in range(4)
            for t, r in ((10, 0.0), (20, last))
        ]
        results.write_csv(tmp_path / f"{arm}_A-v1.csv", rows)
    of_task = dqn_replays.summary(tmp_path)[:2]
    assert [(r["arm"], r["final_iqm"], r["speed"], r["better"]) for r in of_task] == [
        ("dqn", 5.0, 1.0, None),
        ("dqn_proportional", 7.0, 1.0, 1.0),
    ]


def test_an_arm_is_better_in_the_mean_over_tasks(tmp_path):
    # On A every run beats every run of uniform replay; on B three of four pairs are
    # lost, and one is tied.
    finals = {("A-v1", "dqn"): (1, 2), ("A-v1", "dqn_proportional"): (3, 4)}
    finals |= {("B-v1", "dqn"): (5, 6), ("B-v1", "dqn_proportional"): (4, 5)}
    for (env, arm), runs in finals.items():
        rows = [
            {"arm": arm, "env": env, "seed": s, "env_steps": 10, "return": float(r)}
            for s, r in enumerate(runs)
        ]
        results.write_csv(tmp_path / f"{arm}_{env}.csv", rows)
    rows = {(r["env"], r["arm"]): r for r in dqn_replays.summary(tmp_path)}
    better = {env: rows[env, "dqn_proportional"]["better"] for env in ("A-v1", "B-v1")}
    assert better == {"A-v1": 1.0, "B-v1": 0.125}
    of_all = rows["all", "dqn_proportional"]
    assert of_all["better"] == pytest.approx((1 + 0.125) / 2, abs=1e-3)
    assert of_all["better_low"] <= of_all["better"] <= of_all["better_high"]
    # A task that lacks an arm, or has other seeds, leaves no number for all.
    (tmp_path / "dqn_B-v1.csv").unlink()
    assert "all" not in {row["env"] for row in dqn_replays.summary(tmp_path)}


@pytest.mark.parametrize(
    ("program", "words", "part"),
    [
        (dqn_replays, "--seeds 0", "seeds 0 must be at least 1"),
        (dqn_replays, "--arms dqn_greedy", "arms 'dqn_greedy' must be one of"),
        (atari, "--total-env-steps 5500", "total_env_steps 5500 must be at least 7000"),
        (atari, "--env CartPole-v1", "env 'CartPole-v1' must be one of"),
        (bench_dqn, "--sb3-steps 500", "sb3_steps 500 must be at least 3000"),
        (bench_dfps, "--learn-steps 600", "learn_steps 600 must be at least 5120"),
        (bench_dqn, "--variants theirs", "variant 'theirs' is not in"),
    ],
)
def test_a_mistake_is_one_line(capsys, program, words, part):
    with pytest.raises(SystemExit) as end:
        program.main(words.split())
    stdout, stderr = capsys.readouterr()
    assert (end.value.code, stdout, stderr.count("\n")) == (2, "", 1)
    assert part in stderr


def test_what_training_raises_is_no_mistake_of_the_user(monkeypatch, tmp_path):
    def fails(*given):
        raise ValueError("from within a run")

    monkeypatch.setattr(learning, "run_seeds", fails)
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    with pytest.raises(ValueError, match="from within a run"):
        ppo_variants.main(["--arms", "ppo"])


def test_seeds_that_are_done_outlive_one_that_fails(monkeypatch, tmp_path):
    asked, fails = [], True

    def train(options, more, seeds):
        for seed in seeds:
            if fails and seed == 2:
                raise RuntimeError("seed 2")
            asked.append(seed)
            row = {"env": options.env, "seed": seed, "env_steps": 10, "return": 1.0}
            yield [row]

    monkeypatch.setattr(learning, "run_seeds", train)
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    words = ["--arms", "ppo", "--envs", "Hopper-v4", "--seeds", "4"]
    with pytest.raises(RuntimeError, match="seed 2"):
        ppo_variants.main(words)
    with pytest.raises(RuntimeError, match="seed 2"):
        learning.main(["--env", "Hopper-v4", "--seeds", "4"])
    arm = tmp_path / "ppo_variants" / "ppo_Hopper-v4.csv"
    for path in arm, tmp_path / "ppo_Hopper-v4.csv":
        assert [row["seed"] for row in results.read_csv(path)] == ["0", "1"]
    asked, fails = [], False
    assert ppo_variants.main(words) == 0
    assert asked == [2, 3]
    assert [row["seed"] for row in results.read_csv(arm)] == ["0", "1", "2", "3"]
    assert "over 4 seeds" in arm.read_text()


def test_rates_start_where_learning_has():
    marks = [(10, 1.0), (20, 2.0), (30, 3.0), (50, 4.0)]
    assert turns.rate(marks, after=20)["steps_per_s"] == 20.0
