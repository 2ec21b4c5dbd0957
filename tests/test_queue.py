"""The priority queue against a sorted list."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fps_jax.replay import queue
from fps_jax.replay.samplers import Pool
from fps_jax.replay.tree import array_tree

N = 11


@pytest.mark.parametrize(
    ("capacity", "size"), [(1, 3), (3, 2), (5, 5), (17, 6), (17, 40), (70, 9)]
)
def test_the_largest_leaves_are_those_of_a_sorted_list(capacity, size):
    most = array_tree(capacity, fan_out=4, combine=jnp.maximum, neutral=-jnp.inf)
    find = jax.jit(lambda leaves: queue.largest(most, most.build(leaves), size))
    rng = np.random.default_rng(capacity)
    for how in ("different", "ties", "some"):
        leaves = rng.standard_normal(capacity).astype(np.float32)
        if how == "ties":
            leaves = np.round(leaves)
        if how == "some":
            leaves[rng.random(capacity) < 0.5] = -np.inf
        value, index = map(np.asarray, find(leaves))
        expected = np.sort(leaves)[::-1][:size]
        missing = np.full(size - len(expected), -np.inf)
        np.testing.assert_array_equal(value, np.append(expected, missing))
        there = value > -np.inf
        np.testing.assert_array_equal(leaves[index[there]], value[there])
        assert len(set(index[there].tolist())) == there.sum()
        np.testing.assert_array_equal(find(leaves)[1], index)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6))
def test_after_random_updates_the_largest_priorities_are_drawn_in_order(seed):
    of, write, update, draw = compiled_greedy()
    rng = np.random.default_rng(seed)
    priority, usable = np.zeros(N, np.float32), np.zeros(N, bool)
    state = of.init()
    for _ in range(5):
        new = rng.standard_normal(3).astype(np.float32).round(1)  # Negative ones, ties.
        start, flags = int(rng.integers(N)), rng.random(3) < 0.7
        state = write(state, np.int32(start), new, flags)
        place = (start + np.arange(3)) % N
        priority[place], usable[place] = new, flags
        if usable.any():
            slots = rng.choice(np.append(np.flatnonzero(usable), -1), 3)
            state = update(state, slots.astype(np.int32), -new)
            for slot, value in zip(slots, -new):
                if slot >= 0:
                    priority[slot] = value
    draws = jax.tree.map(np.asarray, draw(state, usable))
    best = np.sort(priority[usable])[::-1]
    np.testing.assert_array_equal(draws.is_valid, np.arange(2 * N) < len(best))
    slot = draws.slot[draws.is_valid]
    np.testing.assert_array_equal(priority[slot], best)
    assert set(slot.tolist()) == set(np.flatnonzero(usable).tolist())
    assert np.all(np.isfinite(draws.probability))


@functools.cache
def compiled_greedy():
    """A greedy sampler; it is asked for twice as many as there can be."""
    of = queue.greedy(N, fan_out=4)

    def draw(state, usable):
        pool = Pool(
            head=jnp.int32(2),
            added=jnp.uint32(N),
            skipped=0,
            span=jnp.int32(N),
            is_usable=lambda slots: usable[slots],
            num_usable=jnp.sum(usable, dtype=jnp.int32),
        )
        return of.draw(state, pool, jax.random.key(0), 2 * N, None)[1]

    return of, *map(jax.jit, (of.write, of.update, draw))
