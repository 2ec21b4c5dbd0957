"""Each variant of priorities, on the Blind Cliffwalk, against its rule in numpy."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cliffwalk_twin import thetas

from experiments import cliffwalk_figures, cliffwalk_learning, cliffwalk_methods
from experiments import cliffwalk_problem as problem

N = 3
NUMBERS = cliffwalk_methods.Numbers(epsilon=0.01)


def seen(error, last=np.nan, ratio=2.0, returns=0.0, priority=0.3, times=4, updates=0):
    """A transition with this TD error."""
    one = lambda x: jnp.full(1, x, jnp.float32)
    return cliffwalk_learning.Seen(
        td_error=one(error),
        change=jnp.full((1, 2, 2), 0.25 * error, jnp.float32),
        ratio=one(ratio),
        episode_return=one(returns),
        priority=one(priority),
        notes={"last_td_error": one(last), "times_replayed": jnp.full(1, times)},
        updates=jnp.int32(updates),
    )


@pytest.mark.parametrize(
    ("variant", "given", "expected"),
    [
        ("proportional", {"error": -0.4}, 0.41),
        ("derivative", {"error": -0.4, "last": 0.1}, 0.31),
        ("derivative", {"error": -0.4}, 0.41),
        ("sign_consistent", {"error": 0.4, "last": 0.1}, 0.36),
        ("sign_consistent", {"error": 0.4, "last": -0.1}, 0.15),
        ("sign_consistent", {"error": 0.4, "last": 1.0, "priority": 0.9}, 1.0),
        ("weight_change_norm", {"error": -0.4}, 0.21),
        ("signed", {"error": -0.4}, 0.21),
        ("signed", {"error": 0.4}, 0.41),
        ("return_boost", {"error": 0.4, "returns": 1.0}, 2.05),
        ("return_boost", {"error": 0.4}, 0.41),
        ("novelty", {"error": 0.4, "times": 2}, 0.41 * 1.5),
        ("uniform_mixture", {"error": 0.4}, 0.41),
        ("staleness_bonus", {"error": 0.4}, 0.41),
        ("predecessor_boost", {"error": 0.4}, 0.41),
        ("off_policy", {"error": -0.4}, 0.81),
        ("off_policy", {"error": -0.4, "ratio": 0.0}, 0.01),
        ("rejection", {"error": 0.4}, 1.0),
        ("rejection", {"error": 0.4, "ratio": 0.0}, 0.0),
        ("rank_based", {"error": -0.4, "updates": 50}, 0.41),
        ("rank_based_staleness_offset", {"error": 0.4, "updates": 50}, 0.31),
        ("greedy", {"error": -0.4, "updates": 50}, 0.4),
        ("greedy_staleness_offset", {"error": 0.4, "updates": 50}, 0.3),
    ],
)
def test_a_variant_gives_the_priority_that_its_rule_says(variant, given, expected):
    # N = 50: staleness takes a tenth in as many updates.
    method = cliffwalk_methods.of_variant(variant, 50, numbers=NUMBERS)
    np.testing.assert_allclose(method.priority(seen(**given)), expected, rtol=1e-5)


def test_what_was_not_replayed_yet_is_given_what_a_variant_knows_of_it():
    memory = jax.tree.map(jnp.asarray, problem.memory(N, 0))
    make = functools.partial(cliffwalk_methods.of_variant, numbers=NUMBERS)
    ones = jnp.ones(memory.reward.size)
    boosted = make("return_boost", ones.size).of_new(ones, memory)
    np.testing.assert_allclose(boosted, 1 + 4 * memory.behaviour["return"])
    np.testing.assert_allclose(make("novelty", ones.size).of_new(ones, memory), 2.0)
    assert make("proportional", ones.size).of_new(ones, memory) is ones


def test_priorities_are_raised_before_an_error_and_by_age_now_and_then():
    memory, of = problem.memory(N, 0), problem.problem(N, "tabular")
    size = memory.reward.size
    make = functools.partial(cliffwalk_methods.of_variant, numbers=NUMBERS)
    assert make("predecessor_boost", size).boosts_predecessors
    method = make("staleness_bonus", size)._replace(boosts_predecessors=True)
    priorities = lambda learner: method.sampler.priority(learner.replay.sampler, None)

    def one(learner, key):
        before = priorities(learner)
        learner, (sample, seen) = cliffwalk_learning.update(
            method, of, learner, key, beta=jnp.float32(0.0)
        )
        told = sample.ticket.slot[0], seen.td_error[0], before, priorities(learner)
        return learner, told

    def run(theta, memory, keys):
        first = cliffwalk_learning.start(
            method, of, theta, memory, knows_errors=jnp.bool_(False)
        )
        return jax.lax.scan(one, first, keys)[1]

    keys = jax.random.split(jax.random.key(3), 2 * size)
    told = [np.asarray(x) for x in jax.jit(run)(thetas(1, N)[0], memory, keys)]
    every, last, boosted = math.ceil(size / cliffwalk_methods.PASSES), {}, 0
    for update, (slot, error, before, after) in enumerate(zip(*told), start=1):
        expected = before.copy()
        expected[slot] = abs(error) + NUMBERS.epsilon
        last[int(slot)] = update, expected[slot]
        if memory.observation[slot] > 0:  # The step before is of the same episode.
            expected[slot - 1] += abs(error)
            boosted += 1
        if update % every == 0:
            for place in range(size):
                replayed_at, known = last.get(place, (0, 1.0))
                age = update - replayed_at
                expected[place] = known + cliffwalk_methods.STALENESS_RATE * age / size
        np.testing.assert_allclose(after, expected, rtol=1e-4)
    assert boosted > 3


def test_the_interval_of_a_ratio_is_that_of_both_medians():
    runs, same = np.array([20.0, 40.0, 60.0]), np.array([10.0, 10.0, 10.0])
    assert cliffwalk_figures.ratio_of_medians(runs, same) == (4.0, 2.0, 6.0)
    middle, low, high = cliffwalk_figures.ratio_of_medians(runs, runs)
    assert (middle, low, high) == (1.0, 1 / 3, 3.0)
    runs[1:] = np.inf
    middle, low, high = cliffwalk_figures.ratio_of_medians(runs, same)
    assert (middle, low, high) == (math.inf, 2.0, math.inf)
