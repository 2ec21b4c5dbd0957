"""The Blind Cliffwalk against loops in numpy: its memory, its values, whole runs."""

import functools
import itertools
import math
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cliffwalk_twin import Twin, rows_of, thetas

from experiments import (
    cliffwalk,
    cliffwalk_learning,
    cliffwalk_methods,
    figures,
    results,
)
from experiments import cliffwalk_problem as problem
from fps_jax.replay import replay, ring

N, UPDATES, SEEDS = 3, 150, 2
NUMBERS = cliffwalk_methods.Numbers(epsilon=0.01)
REPRESENTATIONS = tuple(problem.BIAS)
ORACLE = jax.jit(jax.vmap(cliffwalk_learning.oracle, (None, 0, None)))
LEARN_BY_ORACLE = jax.jit(cliffwalk_learning.learn_by_oracle)


def executed(n):
    """Every sequence of actions until its episode ends, as tuples of transitions."""
    for actions in itertools.product((0, 1), repeat=n):
        episode = []
        for s, action in enumerate(actions):
            is_right, is_last = action == s % 2, s == n - 1
            episode.append((s, action, float(is_right and is_last)))
            if not is_right:
                break
        yield tuple(episode)


@pytest.mark.parametrize("n", [2, 3, 7])
def test_the_memory_holds_every_sequence_executed_to_its_end(n):
    rows = problem.memory(n, 0)
    columns = rows.observation, rows.action, rows.reward
    steps = list(zip(*(column.tolist() for column in columns)))
    ends = np.flatnonzero(rows.terminated) + 1
    episodes = [tuple(steps[i:j]) for i, j in zip((0, *ends), ends)]
    assert Counter(episodes) == Counter(executed(n))
    assert len(steps) == 2 ** (n + 1) - 2
    assert rows.reward.sum() == 1
    for s in range(n):
        for action in (0, 1):
            assert sum(step[:2] == (s, action) for step in steps) == 2 ** (n - 1 - s)
    goes_on = ~rows.terminated
    following = rows.behaviour["next_state"]
    assert following[goes_on].tolist() == rows.observation[1:][goes_on[:-1]].tolist()
    returns = np.repeat([episode[-1][2] for episode in episodes], np.diff((0, *ends)))
    np.testing.assert_array_equal(rows.behaviour["return"], returns)


def test_episodes_come_in_another_order_with_another_seed():
    first, second = (problem.memory(5, seed).observation for seed in (0, 1))
    assert (first != second).any()
    np.testing.assert_array_equal(problem.memory(5, 0).observation, first)


def test_the_largest_memory_has_each_transition_as_often_as_it_should():
    rows = problem.memory(16, 3)
    counts = np.bincount(2 * rows.observation + rows.action, minlength=32)
    np.testing.assert_array_equal(counts, np.repeat(2 ** np.arange(15, -1, -1), 2))
    assert rows.reward.sum() == 1


@pytest.mark.parametrize("n", [2, 5, 16])
def test_true_values_are_those_of_value_iteration(n):
    q = np.zeros((n, 2))
    for _ in range(n):
        for s in range(n):
            following = q[s + 1].max() if s < n - 1 else 0.0
            q[s, s % 2] = float(s == n - 1) + (1 - 1 / n) * following
    np.testing.assert_allclose(problem.true_values(n), q, rtol=1e-12)


@pytest.mark.parametrize("representation", REPRESENTATIONS)
def test_the_oracle_picks_the_best_of_all_transitions_by_brute_force(representation):
    of = problem.problem(N, representation)
    memory = rows_of(problem.memory(N, 0))
    different = rows_of(problem.distinct(N))
    assert Counter(different) == Counter(set(memory))
    many = thetas(20, N) * 5.0
    after, best = ORACLE(of, many, jnp.bool_(False))
    for theta, found, chosen in zip(*map(np.asarray, (many, after, best))):
        losses = []
        for row in memory:
            twin = Twin(N, representation, theta)
            twin.update(row)
            losses.append(twin.loss())
        assert different[int(chosen)] == memory[np.argmin(losses)]
        twin = Twin(N, representation, found)
        np.testing.assert_allclose(twin.loss(), min(losses), rtol=1e-4)


@pytest.mark.parametrize("representation", REPRESENTATIONS)
def test_a_run_by_the_oracle_takes_as_many_updates_as_its_twin(representation):
    of, start = problem.problem(N, representation), thetas(SEEDS, N)
    updates, is_converged = LEARN_BY_ORACLE(
        of, start, never_rests=jnp.bool_(False), max_updates=jnp.int32(10_000)
    )
    assert is_converged.all()
    for theta, count in zip(start, updates):
        twin = Twin(N, representation, theta)
        for _ in range(int(count)):
            assert twin.loss() >= 1e-3
            before, losses = twin.theta, []
            for row in rows_of(problem.distinct(N)):
                twin.theta = before.copy()
                twin.update(row)
                losses.append((twin.loss(), twin.theta))
            twin.theta = min(losses, key=lambda found: found[0])[1]
        assert twin.loss() < 1e-3


def test_a_uniform_run_takes_as_many_updates_as_its_twin(monkeypatch):
    block = 128
    monkeypatch.setattr(cliffwalk_learning, "BLOCK", block)
    of, start, memory = (
        problem.problem(N, "linear"),
        thetas(SEEDS, N),
        problem.memory(N, 0),
    )
    key, size = jax.random.key(2), memory.reward.size
    learn = jax.jit(cliffwalk_learning.learn_uniformly)
    updates, is_converged = learn(of, start, memory, key, max_updates=jnp.int32(9999))
    assert is_converged.all()
    assert updates.max() > block
    uniform = replay.uniform(ring.windows(size, length=1, largest_add=size))
    state = uniform.init(jax.tree.map(lambda x: x[0], memory))
    state = jax.jit(uniform.add)(state, memory)
    draw = jax.jit(
        lambda key: uniform.sample(state, key, batch_size=block * SEEDS)[1].items.items
    )
    draws = []
    for first in range(0, int(updates.max()), block):
        steps = draw(jax.random.fold_in(jax.random.key(2), first))
        draws += list(zip(steps.observation[0].tolist(), steps.action[0].tolist()))
    for seed, (theta, count) in enumerate(zip(start, updates)):
        twin = Twin(N, "linear", theta)
        for row in draws[seed::SEEDS][: int(count)]:
            assert twin.loss() > 0.999e-3
            twin.update(row)
        assert twin.loss() < 1.001e-3


def traced(method, of, theta, memory, *, beta, knows_errors):
    """What each update drew, and what it came to."""

    def one(learner, key):
        learner, (sample, seen) = cliffwalk_learning.update(
            method, of, learner, key, beta=beta
        )
        told = (
            sample.ticket.slot[0],
            sample.probability[0],
            sample.importance_weights[0],
            seen.td_error[0],
            learner.theta,
            learner.is_converged,
        )
        return learner, told

    first = cliffwalk_learning.start(
        method, of, theta, memory, knows_errors=knows_errors
    )
    keys = jax.random.split(jax.random.key(7), UPDATES)
    return jax.lax.scan(one, first, keys)[1]


def expect_greedy(priority, slot, probability, lowest):
    assert priority[slot] >= max(priority) - 1e-6
    return probability


def expect_proportional(priority, slot, probability, lowest):
    weight = priority**NUMBERS.proportional
    np.testing.assert_allclose(probability, weight[slot] / weight.sum(), rtol=1e-4)
    lowest.append(weight.min() / weight.sum())


def expect_rank_based(priority, slot, probability, lowest):
    by_rank = np.arange(1, priority.size + 1) ** -NUMBERS.rank_based
    by_rank /= by_rank.sum()
    above = np.sum(priority > priority[slot] + 1e-6)
    below = np.sum(priority < priority[slot] - 1e-6)
    its = by_rank[above : priority.size - below]  # Equal ones in any order.
    assert np.isclose(its, probability, rtol=1e-4).any()
    lowest.append(by_rank[-1])


EXPECT = {
    "greedy": expect_greedy,
    "rank_based": expect_rank_based,
    "proportional": expect_proportional,
}


@functools.cache
def compiled_trace(name):
    make = cliffwalk_methods.of_figures
    method = make(name, 2 ** (N + 1) - 2, numbers=NUMBERS)
    return jax.jit(functools.partial(traced, method))


@pytest.mark.parametrize(
    ("representation", "beta", "knows_errors"),
    [("tabular", 0.0, False), ("linear", 1.0, True), ("linear", 0.5, False)],
)
@pytest.mark.parametrize("name", EXPECT)
def test_a_prioritized_run_is_that_of_its_twin(
    name, representation, beta, knows_errors
):
    memory, theta = problem.memory(N, 1), thetas(1, N)[0]
    of, rows = problem.problem(N, representation), rows_of(memory)
    twin, epsilon = Twin(N, representation, theta), NUMBERS.epsilon * (name != "greedy")
    priority = np.ones(len(rows))
    if knows_errors:
        priority = np.array([abs(twin.td_error(row)) for row in rows])
    found = compiled_trace(name)(
        of, theta, memory, beta=jnp.float32(beta), knows_errors=jnp.bool_(knows_errors)
    )
    for slot, probability, weight, error, after, is_converged in zip(
        *map(np.asarray, found)
    ):
        lowest = []
        EXPECT[name](priority, int(slot), float(probability), lowest)
        expected = (lowest[0] / float(probability)) ** beta if lowest else 1.0
        np.testing.assert_allclose(weight, expected, rtol=1e-3)
        np.testing.assert_allclose(
            error, twin.update(rows[slot], expected), rtol=1e-3, atol=1e-5
        )
        priority[slot] = abs(float(error)) + epsilon
        np.testing.assert_allclose(after, twin.theta, rtol=1e-3, atol=1e-5)
        assert bool(is_converged) == (twin.loss() < 1e-3)
    assert any(priority != priority[0])


def test_a_run_ends_with_the_first_update_after_which_it_has_converged():
    memory, theta = problem.memory(N, 1), thetas(1, N)[0]
    size = memory.reward.size
    method = cliffwalk_methods.of_figures("greedy", size, numbers=NUMBERS)
    of, never = problem.problem(N, "tabular"), jnp.bool_(False)
    given = {"beta": jnp.float32(0.0), "knows_errors": never}
    trace = compiled_trace("greedy")(of, theta, memory, **given)
    first = int(np.argmax(trace[-1])) + 1
    assert size < first < UPDATES
    learn = jax.jit(functools.partial(cliffwalk_learning.learn, method))
    for limit, expected in ((1000, (first, True)), (first - 1, (first - 1, False))):
        found = learn(
            of, theta, memory, jax.random.key(7), max_updates=jnp.int32(limit), **given
        )
        assert (int(found[0]), bool(found[1])) == expected


def test_slopes_are_those_of_medians_that_are_known():
    rows = []
    for n in (2, 4, 6, 8):
        for seed in range(3):
            size = 2 ** (n + 1) - 2
            row = dict(cliffwalk.ARMS[0]._asdict(), n=n, transitions=size, seed=seed)
            of_seed = (1.0, 2.0, 50.0)[seed] * size**1.5 * (1 if n > 2 else 99)
            rows.append(dict(row, updates=of_seed, is_converged=n < 8 or seed == 0))
    assert cliffwalk.slopes(rows) == {"tabular uniform": 1.5}
    assert cliffwalk.slopes(rows[:6]) == {"tabular uniform": None}


def test_a_median_is_infinite_if_half_of_the_runs_did_not_converge():
    assert cliffwalk.median([(1, True), (2, True), (9, False)]) == 2.0
    assert cliffwalk.median([(1, True), (9, False)]) == math.inf


def test_the_command_writes_results_and_figures(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    monkeypatch.setattr(figures, "FOLDER", tmp_path / "figures")
    words = "--sizes 2 3 --seeds 2 --methods oracle greedy --largest-prioritized 2 "
    words += "--variants greedy --variants-size 2 --variants-seeds 2"
    assert cliffwalk.main(words.split()) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("n = 2, tabular oracle: median ")
    rows = results.read_csv(tmp_path / "cliffwalk.csv")
    assert {(r["method"], r["n"]) for r in rows} == {
        ("oracle", "2"),
        ("greedy", "2"),
        ("oracle", "3"),
    }
    assert len(rows) == 2 * (2 + 2 + 2)
    assert all(int(row["updates"]) > 0 for row in rows)
    assert {row["is_converged"] for row in rows} == {"True"}
    rows = results.read_csv(tmp_path / "cliffwalk_variants.csv")
    assert len(rows) == 2 * 2
    names = {path.name for path in (tmp_path / "figures").iterdir()}
    assert names == {"cliffwalk_1.png", "cliffwalk_2.png", "cliffwalk_variants.png"}


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("--sizes 2 17", ["sizes 17", "[2, 16]"]),
        ("--methods fastest", ["methods 'fastest'", "oracle"]),
        ("--variants best", ["variants 'best'", "novelty"]),
        ("--parts figures", ["parts 'figures'", "curves"]),
        ("--seeds 0", ["seeds 0", "at least 1"]),
        ("--epsilon 0", ["epsilon 0", "(0, 1]"]),
        ("--variants-size 1", ["variants_size 1", "[2, 16]"]),
        ("--alpha-rank-based -1", ["alpha_rank_based -1", "[0, 10]"]),
    ],
)
def test_a_bad_option_is_one_line(capsys, words, parts):
    with pytest.raises(SystemExit) as end:
        cliffwalk.main(words.split())
    stdout, stderr = capsys.readouterr()
    assert (end.value.code, stdout, stderr.count("\n")) == (2, "", 1)
    for part in parts:
        assert part in stderr
