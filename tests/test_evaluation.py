"""Evaluation counts full episodes, as many of each environment, and nothing else."""

import jax
import numpy as np
import pytest
from scripted_env import LONGEST, ScriptedEnv, episode_length

from fps_jax.runtime.evaluation import Evaluation, evaluate

ENVS = 6


class Constant:
    """A policy of one action, which remembers what it was asked."""

    def __init__(self, action=1):
        self.action, self.counts, self.calls = action, [], []

    def __call__(self, params, observation, key, count):
        self.counts.append(int(count))
        self.calls.append((params, key))
        return np.full(len(observation), self.action, np.int32), {}


def run(act=None, env=None, **options):
    env = env or ScriptedEnv(ENVS)
    return evaluate(act or Constant(), "params", env, jax.random.key(0), **options)


def foretold(env: int, episode: int, action: int) -> tuple[float, int]:
    """Return and length of a scripted episode: it pays where ``step % 3 == action``."""
    length = int(episode_length(np.array(env), np.array(episode)))
    return float(sum(step % 3 == action for step in range(length))), length


@pytest.mark.parametrize("episodes", [1, 2, 5])
@pytest.mark.parametrize("action", [0, 1, 2])
def test_each_environment_runs_the_same_number_of_full_episodes(action, episodes):
    evaluation = run(Constant(action), episodes_per_env=episodes)
    expected = [
        [foretold(env, episode, action) for env in range(ENVS)]
        for episode in range(episodes)
    ]
    np.testing.assert_array_equal(evaluation.returns, np.array(expected)[..., 0])
    np.testing.assert_array_equal(evaluation.lengths, np.array(expected)[..., 1])


def test_short_episodes_weigh_no_more_than_long_ones():
    evaluation = run(episodes_per_env=1)
    lengths = [foretold(env, 0, 1)[1] for env in range(ENVS)]
    assert (min(lengths), max(lengths)) == (3, LONGEST)
    assert evaluation.metrics()["eval/length"] == np.mean(lengths)


def test_the_metrics_are_over_all_episodes():
    evaluation = Evaluation(
        np.array([[1.0, 2.0], [3.0, 6.0]]), np.array([[4, 5], [6, 7]])
    )
    assert evaluation.metrics() == {
        "eval/return": 3.0,
        "eval/return_std": np.sqrt(3.5),
        "eval/length": 5.5,
    }


def test_it_starts_anew_on_used_environments():
    env = ScriptedEnv(ENVS)
    first = run(env=env)
    np.testing.assert_array_equal(run(env=env).returns, first.returns)


def test_it_ends_with_the_last_episode_and_names_every_act():
    act = Constant()
    run(act)
    assert act.counts == list(range(LONGEST))
    assert all(call == ("params", jax.random.key(0)) for call in act.calls)


@pytest.mark.parametrize("after", [0, 1, 4])
def test_an_interruption_ends_it_at_once(after):
    act = Constant()
    questions = iter([False] * after)
    evaluation = run(act, is_interrupted=lambda: next(questions, True))
    assert len(act.counts) == after
    expected = [min(after, foretold(env, 0, 1)[1]) for env in range(ENVS)]
    np.testing.assert_array_equal(evaluation.lengths[0], expected)


@pytest.mark.parametrize("max_steps", [1, 4, LONGEST, 100])
def test_a_limit_cuts_what_is_longer(max_steps):
    act = Constant()
    evaluation = run(act, max_steps=max_steps)
    assert len(act.counts) == min(max_steps, LONGEST)
    expected = [min(max_steps, foretold(env, 0, 1)[1]) for env in range(ENVS)]
    np.testing.assert_array_equal(evaluation.lengths[0], expected)
