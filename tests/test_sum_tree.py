"""The sum-tree against a plain list of leaves, in float64, under random operations."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices import BACKENDS, over_devices
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fps_jax.replay.sum_tree import (
    draw_without_replacement,
    find,
    prefix,
    spread_targets,
    sum_tree,
)

FAN_OUT = 4
CAPACITIES = (1, 2, 3, 4, 5, 16, 17, 70)
BATCH = 6


class Compiled:
    """The functions of a tree, compiled."""

    def __init__(self, capacity, fan_out=FAN_OUT):
        self.capacity, self.of = capacity, sum_tree(capacity, fan_out=fan_out)
        self.update, self.write, self.build = map(
            jax.jit, (self.of.update, self.of.write, self.of.build)
        )
        self.root, self.get = jax.jit(self.of.root), jax.jit(self.of.get)
        self.find = jax.jit(functools.partial(find, self.of))

    def draw(self, tree, key, size, spread):
        """Leaves in proportion to their weights."""
        total = self.of.root(tree)
        return find(self.of, tree, *spread_targets(key, total, size, spread))

    def random(self, seed=0, zeros=0.0):
        """A tree of heavy-tailed weights, and those weights."""
        rng = np.random.default_rng(seed)
        weights = np.abs(rng.standard_cauchy(self.capacity)).astype(np.float32)
        weights[rng.random(self.capacity) < zeros] = 0
        return self.build(weights), weights


compiled_tree = functools.cache(Compiled)


def expect_sound(this, tree, leaves):
    """The leaves are these, and every node is bitwise the sum of its row."""
    below = np.asarray(leaves)
    levels = np.split(np.asarray(tree), this.of.starts[1:])
    for level in levels:
        padding = level.size - len(below)
        np.testing.assert_array_equal(level.reshape(-1), np.pad(below, (0, padding)))
        below = np.float32(0)
        for column in level.T:
            below = below + column
    np.testing.assert_array_equal(this.root(tree), below[0])
    assert len(levels[-1]) == 1


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.sampled_from(CAPACITIES), st.integers(0, 10**6))
def test_random_operations_do_what_they_do_to_a_list(capacity, seed):
    this, rng = compiled_tree(capacity), np.random.default_rng(seed)
    tree, leaves = this.of.init(), np.zeros(capacity, np.float32)
    for _ in range(6):
        value = np.abs(rng.standard_cauchy(BATCH)).astype(np.float32)
        value[rng.random(BATCH) < 0.3] = rng.choice([0, 2e-38, 1e30])
        if rng.random() < 0.5:
            index = rng.integers(-2, capacity + 2, BATCH).astype(np.int32)
            tree = this.update(tree, index, value)
            for i, v in zip(index, value):
                if 0 <= i < capacity:
                    leaves[i] = v
        else:
            value = value[: min(BATCH, capacity)]
            start = int(rng.integers(capacity))
            tree = this.write(tree, np.int32(start), value)
            leaves[(start + np.arange(len(value))) % capacity] = value
        expect_sound(this, tree, leaves)
        np.testing.assert_allclose(
            this.root(tree), leaves.sum(dtype=np.float64), rtol=1e-5
        )
    np.testing.assert_array_equal(this.of.leaves(tree), leaves)
    expect_sound(this, this.build(leaves), leaves)
    where = rng.integers(0, capacity, BATCH).astype(np.int32)
    np.testing.assert_array_equal(this.get(tree, where), leaves[where])


def test_a_million_updates_leave_no_drift():
    this = compiled_tree(4096, 16)

    def step(tree, key):
        key_index, key_value = jax.random.split(key)
        index = jax.random.randint(key_index, (1000,), 0, 4096)
        value = jnp.exp(5 * jax.random.normal(key_value, (1000,)))
        return this.of.update(tree, index, value), None

    keys = jax.random.split(jax.random.key(0), 1000)
    tree, _ = jax.jit(lambda tree: jax.lax.scan(step, tree, keys))(this.of.init())
    expect_sound(this, tree, np.asarray(this.of.leaves(tree)))


# --------------------------------------------------------------------------- searching


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_whole_numbers_are_found_exactly(capacity):
    this = compiled_tree(capacity)
    weights = np.random.default_rng(capacity).integers(0, 4, capacity)
    weights[-1] += 1
    ends = np.cumsum(weights)
    targets = np.arange(ends[-1]) + 0.0
    expected = np.searchsorted(ends, targets, side="right")
    tree = this.build(np.float32(weights))
    np.testing.assert_array_equal(this.find(tree, np.float32(targets)), expected)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.sampled_from(CAPACITIES), st.integers(0, 10**6))
def test_no_target_finds_an_empty_leaf(capacity, seed):
    this = compiled_tree(capacity)
    tree, weights = this.random(seed, zeros=0.6)
    ends = np.cumsum(weights)
    total = np.asarray(this.root(tree))
    edges = np.concatenate(
        [[0, total, 2 * total], ends, np.cumsum(np.float64(weights))]
    )
    edges = edges.astype(np.float32)
    targets = np.concatenate(
        [edges, np.nextafter(edges, np.float32(-1)), np.nextafter(edges, np.inf)]
    )
    found = np.asarray(this.find(tree, targets.astype(np.float32)))
    if not weights.any():
        np.testing.assert_array_equal(found, 0)
        return
    assert np.all(weights[found] > 0)
    # It is the leaf of a target that differs by no more than rounding.
    begin, end = (np.float64(x)[found] for x in (ends - weights, ends))
    slack = 1e-5 * total
    inside = (np.maximum(targets, 0) >= begin - slack) & (targets <= end + slack)
    assert np.all(inside | (targets >= total) & (found == np.flatnonzero(weights)[-1]))


def test_a_target_that_rounds_to_the_end_of_a_row_finds_no_empty_leaf():
    # In float32 8 less a little is 8, where a row begins that starts with zeros.
    this = compiled_tree(16)
    weights = np.float32([2, 2, 2, 2, 0, 0, 0, 5, 0, 1, 0, 0, 0, 0, 0, 0])
    tree = this.build(weights)
    targets = np.float32([8, 8, 13, 0, -1, 0])
    fine = np.float32([-1e-8, 1e-8, -1e-8, -1e-8, 0, -3])
    found = np.asarray(this.find(tree, targets, fine))
    assert np.all(weights[found] > 0)
    np.testing.assert_array_equal(found[3:], 0)
    # Leaves before the first that is above 0 are passed over by what is below 0.
    late = this.build(np.roll(weights, 4))
    np.testing.assert_array_equal(this.find(late, targets, fine)[3:], 4)


def test_leaves_that_may_be_flushed_to_0_lead_nobody_astray():
    this = compiled_tree(16)
    weights = np.zeros(16, np.float32)
    weights[[2, 3, 13]] = 1e-40
    targets = np.float32([0, 1e-40, 0.5, 1, 2, -1])
    found = np.asarray(this.find(this.build(weights), targets))
    assert np.all((found >= 0) & (found < 16))
    weights[9] = 1
    found = np.asarray(this.find(this.build(weights), targets))
    assert np.all(weights[found] > 0)
    np.testing.assert_array_equal(found[2:4], 9)


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_a_prefix_is_the_sum_of_the_first_leaves(capacity):
    this = compiled_tree(capacity)
    weights = np.random.default_rng(capacity).integers(0, 9, capacity)
    tree, sums = this.build(np.float32(weights)), np.cumsum(weights)
    first = jax.vmap(functools.partial(prefix, this.of, tree))
    first = jax.jit(first)(np.arange(capacity + 1))
    np.testing.assert_array_equal(first, np.append(0, sums))


# --------------------------------------------------------------------------- duplicates


def test_of_equal_indices_the_last_one_stays():
    this = compiled_tree(5)
    index = np.array([3, 1, 3, 3, 1, 0], np.int32)
    tree = this.update(this.of.init(), index, np.arange(1, 7, dtype=np.float32))
    np.testing.assert_array_equal(this.of.leaves(tree), [6, 5, 0, 4, 0])


def test_the_order_of_different_indices_does_not_matter():
    this, rng = compiled_tree(70), np.random.default_rng(0)
    tree, _ = this.random(1)
    index = rng.permutation(70)[:BATCH].astype(np.int32)
    value = rng.random(BATCH).astype(np.float32)
    expected = this.update(tree, index, value)
    order = rng.permutation(BATCH)
    jax.tree.map(
        np.testing.assert_array_equal,
        this.update(tree, index[order], value[order]),
        expected,
    )


def test_a_nan_is_gone_once_its_leaf_is_written_again():
    this = compiled_tree(17)
    tree, weights = this.random(2)
    index, value = np.full(BATCH, 7, np.int32), np.full(BATCH, np.nan, np.float32)
    poisoned = this.update(tree, index, value)
    assert np.isnan(this.of.root(poisoned))
    healed = this.update(poisoned, index, np.full(BATCH, weights[7]))
    jax.tree.map(np.testing.assert_array_equal, healed, tree)


# ------------------------------------------------------------------------------- draws

WEIGHTS = np.array([0.5, 0.0, 3.0, 1.0, 0.25, 2.25, 1.0], np.float32)
SHARES = np.float64(WEIGHTS) / WEIGHTS.sum()


def draws(spread, size, times):
    """``[times, size]`` indices of `WEIGHTS`."""
    this = compiled_tree(len(WEIGHTS))
    tree = this.build(WEIGHTS)
    one = lambda key: this.draw(tree, key, size, spread)
    keys = jax.random.split(jax.random.key(1), times)
    return np.asarray(jax.jit(jax.vmap(one))(keys))


def expect_shares(indices, shares):
    """A chi-square test at one in ten thousand; what has no share is never drawn."""
    counts = np.bincount(indices, minlength=len(shares))
    can = shares > 1e-12
    assert counts[~can].sum() == 0
    expected = len(indices) * shares[can] / shares[can].sum()
    assert stats.chisquare(counts[can], expected).pvalue > 1e-4


@pytest.mark.parametrize("spread", ["stratified", "systematic", "independent"])
def test_each_leaf_is_drawn_in_proportion_to_its_weight(spread):
    size = 1 if spread == "systematic" else 4  # Its draws depend on each other.
    found = draws(spread, size, 20_000)
    if spread == "stratified":  # Exactly: each stratum has its own shares.
        ends = np.cumsum(SHARES)
        for i in range(size):
            low, high = i / size, (i + 1) / size
            overlap = np.minimum(ends, high) - np.maximum(ends - SHARES, low)
            expect_shares(found[:, i], np.maximum(overlap, 0) * size)
    else:
        expect_shares(found.ravel(), SHARES)


def test_a_systematic_draw_takes_a_leaf_as_often_as_it_must_and_once_more_at_most():
    size = 9
    for indices in draws("systematic", size, 200):
        counts = np.bincount(indices, minlength=len(WEIGHTS))
        assert np.all(counts >= np.floor(size * SHARES - 1e-5))
        assert np.all(counts <= np.ceil(size * SHARES + 1e-5))


def test_ten_million_equal_leaves_are_equally_likely():
    # With 24 bits a leaf has one or two targets, and is so much the likelier.
    capacity, size = 10**7, 50_000
    this = compiled_tree(capacity, 16)
    tree = this.build(np.ones(capacity, np.float32))
    found = np.asarray(
        jax.jit(lambda key: this.draw(tree, key, size, "independent"))(
            jax.random.key(2)
        )
    ).astype(np.int64)
    quanta = -(-(found + 1) * 2**24 // capacity) - -(-found * 2**24 // capacity)
    share = 2 - 2**24 / capacity  # Of the leaves that have one.
    noise = np.sqrt(share * (1 - share) / size)
    np.testing.assert_allclose(np.mean(quanta == 1), share, atol=5 * noise)
    assert found.max() > capacity - 1500  # The total has 1664 beyond its first 12 bits.


def test_no_bit_of_a_target_is_always_zero():
    # One leaf a quantum of float32: random numbers of 23 bits would find the even ones.
    capacity, size = 2**24, 20_000
    this = compiled_tree(capacity, 16)
    tree = this.build(np.ones(capacity, np.float32))
    for spread in ("independent", "stratified"):
        one = lambda key, spread=spread: this.draw(tree, key, size, spread)
        found = np.asarray(jax.jit(one)(jax.random.key(5)))
        for bit in range(3):
            share = np.mean(found >> bit & 1)
            np.testing.assert_allclose(share, 0.5, atol=5 * 0.5 / np.sqrt(size))


def test_without_replacement_the_next_draw_is_from_what_is_left():
    this = compiled_tree(len(WEIGHTS))
    tree = this.build(WEIGHTS)
    one = lambda key: draw_without_replacement(this.of, tree, key, 2)
    keys = jax.random.split(jax.random.key(3), 20_000)
    indices, is_valid = jax.jit(jax.vmap(one))(keys)
    first, second = np.asarray(indices).T
    assert np.all(is_valid)
    assert np.all(first != second)
    expect_shares(first, SHARES)
    left = [
        sum(SHARES[i] * SHARES[j] / (1 - SHARES[i]) for i in range(7) if i != j)
        for j in range(7)
    ]
    expect_shares(second, np.array(left))


def test_without_replacement_no_more_is_valid_than_there_is():
    this = compiled_tree(len(WEIGHTS))
    tree = this.build(np.array([0, 0, 1, 0, 2, 0, 0], np.float32))
    indices, is_valid = draw_without_replacement(this.of, tree, jax.random.key(4), 4)
    np.testing.assert_array_equal(is_valid, [True, True, False, False])
    assert set(np.asarray(indices[:2]).tolist()) == {2, 4}


# ----------------------------------------------------------------------------- programs


def test_a_population_of_trees_is_updated_as_each_of_them_alone():
    this = compiled_tree(17)
    trees = [this.random(seed)[0] for seed in range(3)]
    rng = np.random.default_rng(0)
    index = rng.integers(0, 17, (3, BATCH)).astype(np.int32)
    value = rng.random((3, BATCH)).astype(np.float32)
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *trees)
    together = jax.jit(jax.vmap(this.of.update))(stacked, index, value)
    for i in range(3):
        alone = this.update(trees[i], index[i], value[i])
        mine = jax.tree.map(lambda x, i=i: x[i], together)
        jax.tree.map(np.testing.assert_array_equal, mine, alone)


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_device_has_a_tree_of_its_own(backend):
    this = compiled_tree(17)
    trees = [this.random(seed)[0] for seed in range(4)]
    stacked = jax.tree.map(lambda *xs: np.stack(xs), *trees)
    targets = np.random.default_rng(0).random((4, BATCH)).astype(np.float32)

    def search(tree, targets):
        return find(this.of, tree, targets * this.of.root(tree))

    found = over_devices(search, backend)(stacked, targets)
    for i in range(4):
        alone = search(trees[i], jnp.array(targets[i]))
        np.testing.assert_array_equal(found[i], alone)


SHAPE = re.compile(r"= f32\[([\d,]+)\]\S* ([\w-]+)\(")


@pytest.mark.parametrize("operation", ["update", "write"])
def test_a_change_touches_no_more_than_it_must(operation):
    capacity = 2**12
    this = compiled_tree(capacity, 16)
    tree = this.of.init()
    where = jnp.zeros((), jnp.int32) if operation == "write" else jnp.arange(32)
    change = jax.jit(getattr(this.of, operation), donate_argnums=0)
    compiled = change.lower(tree, where, jnp.ones(32)).compile()
    text = compiled.as_text()
    in_place = {"parameter", "bitcast", "get-tuple-element", "dynamic-update-slice"}
    in_place |= {"scatter", "fusion", "reshape", "while"}
    for shape, name in SHAPE.findall(text):
        size = np.prod([int(n) for n in shape.split(",")])
        assert size < capacity or name in in_place, (shape, name)
    assert "scatter(" not in text or "add(" not in _computations_of_scatters(text)
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < capacity  # A quarter of the leaves.
    assert memory.alias_size_in_bytes >= 4 * capacity


def _computations_of_scatters(text):
    """The bodies of what scatters combine with."""
    names = re.findall(r"scatter\(.*to_apply=(%[\w.-]+)", text)
    return "".join(
        re.search(rf"^{re.escape(name)} .*?^}}", text, re.M | re.S)[0] for name in names
    )


# ----------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacity": 0}, "capacity 0 must be at least 1"),
        ({"capacity": 2**31}, "capacity 2147483648 must have below"),
        ({"capacity": 4, "fan_out": 1}, "fan_out 1 must be at least 2"),
    ],
)
def test_an_impossible_tree_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        sum_tree(**options)


def test_an_impossible_draw_is_refused():
    this = compiled_tree(3)
    tree, key = this.of.init(), jax.random.key(0)
    with pytest.raises(ValueError, match="size 4 must be in"):
        draw_without_replacement(this.of, tree, key, 4)
    with pytest.raises(ValueError, match="size 0 must be at least 1"):
        this.draw(tree, key, 0, "stratified")
    with pytest.raises(ValueError, match="values 4 must be in"):
        this.of.write(tree, jnp.zeros((), jnp.int32), jnp.ones(4))
    with pytest.raises(ValueError, match="spread 'even' must be one of stratified"):
        this.draw(tree, key, 2, "even")
