"""The limiter against exact fractions: what it counts, and that it never deadlocks."""

import functools
import itertools
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fps_jax.replay import replay, ring
from fps_jax.replay.limiter import limiter

FULL = 9  # The size stays here, as in a ring.


class Twin:
    """What the limiter should do, in numbers that are not rounded."""

    def __init__(self, samples_per_insert, min_size, tolerance):
        self.ratio, self.min_size = Fraction(samples_per_insert), min_size
        self.slack = Fraction(tolerance)

    def added(self, balance, size, count):
        paying = [i for i in range(size, size + count) if i >= self.min_size]
        return balance + self.ratio * len(paying)

    def may_sample(self, balance, size, count):
        return size >= self.min_size and balance - count >= -self.slack

    def may_add(self, balance, size):
        return size < self.min_size or balance <= self.slack

    def reachable(self, add, count):
        """All balances and sizes that a loop can come to, whatever it does first."""
        seen, new = set(), {(Fraction(0), 0)}
        while new:
            seen |= new
            after = set()
            for balance, size in new:
                if self.may_add(balance, size):
                    more = self.added(balance, size, add)
                    after.add((more, min(size + add, FULL)))
                if self.may_sample(balance, size, count):
                    after.add((balance - count, size))
            new = after - seen
        return sorted(seen)

    def blocks(self, add, count):
        """Whether such a loop can come to where it may do neither."""
        return any(
            not self.may_add(*where) and not self.may_sample(*where, count)
            for where in self.reachable(add, count)
        )


RATIOS = (Fraction(1, 4), Fraction(1, 2), Fraction(1), Fraction(3, 2), Fraction(5))
CASES = list(itertools.product(RATIOS, (1, 3), (1, 2, 3), (1, 2, 5)))
"""Samples for each item, the items needed first, those of an add and of a draw."""


def test_no_loop_blocks_itself_with_half_a_batch_of_tolerance():
    for ratio, min_size, add, count in CASES:
        for more in (Fraction(0), Fraction(1, 4), Fraction(7)):
            twin = Twin(ratio, min_size, Fraction(count, 2) + more)
            assert not twin.blocks(add, count)


def test_a_little_less_than_half_a_batch_may_block():
    # A balance of half a batch less an eighth: too much to add, too little to draw.
    for count in (1, 2, 5):
        twin = Twin(Fraction(1, 8), 1, Fraction(count, 2) - Fraction(1, 8))
        assert twin.blocks(1, count)


@functools.cache
def told(add, count):
    """What limiters say in the states that they are in, one of each for each row."""

    def one(ratio, min_size, tolerance, balance, size):
        this = limiter(ratio, min_size=min_size, tolerance=tolerance)
        return (
            this.added(balance, size, add),
            this.sampled(balance, count),
            this.may_sample(balance, size, count),
            this.may_add(balance, size),
        )

    return jax.jit(jax.vmap(one))


@pytest.mark.parametrize(("add", "count"), [(1, 1), (2, 5), (3, 2)])
def test_everywhere_a_loop_can_come_to_it_does_what_exact_fractions_do(add, count):
    rows, exact = [], []
    for ratio, min_size, more in itertools.product(RATIOS, (1, 3), (0, 2)):
        slack = Fraction(count, 2) + more
        twin = Twin(ratio, min_size, slack)
        for balance, size in twin.reachable(add, count):
            rows.append((ratio, min_size, slack, balance, size))
            exact.append(
                (
                    twin.added(balance, size, add),
                    balance - count,
                    twin.may_sample(balance, size, count),
                    twin.may_add(balance, size),
                )
            )
    types = np.float32, np.int32, np.float32, np.float32, np.int32
    given_rows = [np.array(x, t) for x, t in zip(zip(*rows), types)]
    for mine, expected in zip(told(add, count)(*given_rows), zip(*exact)):
        np.testing.assert_array_equal(mine, np.array(expected, np.float64))


def test_the_items_needed_first_pay_for_nothing():
    this = limiter(4.0, min_size=10)
    balance, size = this.init(), 0
    for count, paid in ((7, 0), (2, 0), (3, 2), (5, 5)):
        after = this.added(balance, jnp.int32(size), count)
        assert after - balance == 4 * paid
        balance, size = after, size + count


def test_nothing_is_drawn_before_there_is_enough_and_adding_is_free_until_then():
    this = limiter(0.5, min_size=8, tolerance=100.0)
    for size in (0, 7, 8):
        is_enough = size >= 8
        assert this.may_sample(this.init(), jnp.int32(size), 1) == is_enough
        assert this.may_add(jnp.float32(1e6), jnp.int32(size)) == (not is_enough)


@functools.cache
def random_loops(add, count):
    """Loops that toss a coin where they may both add and draw, one for each row."""

    def loop(ratio, min_size, tolerance, coins):
        this = limiter(ratio, min_size=min_size, tolerance=tolerance)

        def step(state, coin):
            balance, size, added, drawn = state
            may_add = this.may_add(balance, size)
            may_sample = this.may_sample(balance, size, count)
            adds = jnp.where(may_sample & may_add, coin, may_add)
            more = this.added(balance, size, add)
            paying = jnp.clip(size + add - min_size, 0, add)
            both = jnp.stack([balance, this.sampled(balance, count)])
            balance = jnp.where(may_sample, both[1], balance)
            balance = jnp.where(adds, more, balance)
            counts = jnp.where(adds, paying, 0), jnp.where(adds, 0, count)
            size = jnp.where(adds, jnp.minimum(size + add, 10_000), size)
            state = balance, size, added + counts[0], drawn + counts[1]
            return state, (may_add | may_sample, balance)

        start = this.init(), jnp.int32(0), jnp.int32(0), jnp.int32(0)
        (balance, _, added, drawn), seen = jax.lax.scan(step, start, coins)
        return balance, added, drawn, *seen

    return jax.jit(jax.vmap(loop))


@pytest.mark.parametrize(("add", "count"), [(1, 1), (4, 7), (3, 32)])
@settings(max_examples=15, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6))
def test_random_loops_go_on_and_their_ratio_becomes_the_one_asked_for(add, count, seed):
    rng, members = np.random.default_rng(seed), 16
    ratio = (count / add * np.exp(rng.uniform(-1.5, 1.5, members))).astype(np.float32)
    min_size = rng.integers(1, 30, members).astype(np.int32)
    slack = (count / 2 * (1 + rng.exponential(2, members))).astype(np.float32)
    slack[0] = count / 2
    coins = rng.random((members, 400)) < rng.random((members, 1))
    outcome = random_loops(add, count)(ratio, min_size, slack, coins)
    balance, added, drawn, goes_on, seen = map(np.asarray, outcome)
    assert np.all(goes_on)
    # The balance is what it says, and neither side gets further ahead than it may.
    exact = np.float64(ratio) * added - drawn
    np.testing.assert_allclose(balance, exact, atol=1e-4 * (drawn.max() + 1))
    ahead = slack + ratio * add
    assert np.all(seen >= -slack[:, None] - 1e-3)
    assert np.all(seen <= ahead[:, None] * (1 + 1e-5))
    drawn_of_each = drawn / np.maximum(added, 1)
    assert np.all(np.abs(drawn_of_each - ratio) <= ahead / np.maximum(added, 1) + 1e-3)


def test_a_replay_is_limited_as_its_limiter_says():
    limit = limiter(2.0, min_size=3, tolerance=4.0)
    of = replay.uniform(ring.items(8), limiter=limit)
    add = jax.jit(of.add)
    draw = jax.jit(lambda state, key: of.sample(state, key, batch_size=3)[0])
    twin, balance, size = Twin(2, 3, 4), Fraction(0), 0
    state, rng = of.init(jnp.float32(0)), np.random.default_rng(0)
    counts = {"add": 0, "draw": 0}
    for _ in range(60):
        may_add, may_draw = of.can_add(state), of.can_sample(state, 3)
        assert may_add == twin.may_add(balance, size)
        assert may_draw == twin.may_sample(balance, size, 3)
        if may_add and (rng.random() < 0.5 or not may_draw):
            balance = twin.added(balance, size, 1)
            state, size = add(state, jnp.ones(1)), min(size + 1, 8)
            counts["add"] += 1
        else:
            assert may_draw
            state, balance = draw(state, jax.random.key(0)), balance - 3
            counts["draw"] += 1
        assert state.balance == float(balance)
    assert abs(3 * counts["draw"] - 2 * (counts["add"] - 3)) <= 4 + 2


def test_without_a_limiter_anything_goes_once_there_is_an_item():
    of = replay.uniform(ring.items(4))
    state = of.init(jnp.float32(0))
    assert of.can_add(state)
    assert not of.can_sample(state, 1000)
    state = jax.jit(of.add)(state, jnp.ones(1))
    assert of.can_sample(state, 1000)
    assert of.can_add(state)


def test_by_default_either_side_may_be_ten_items_ahead():
    this = limiter(8.0)
    assert this.may_add(jnp.float32(80.0), jnp.int32(5))
    assert not this.may_add(jnp.float32(80.5), jnp.int32(5))
    assert this.may_sample(jnp.float32(-48.0), jnp.int32(5), 32)
    assert not this.may_sample(jnp.float32(-48.5), jnp.int32(5), 32)


# ----------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samples_per_insert": 0.0}, "samples_per_insert 0.0 must be above 0"),
        ({"min_size": 0}, "min_size 0 must be at least 1"),
        ({"tolerance": 0.0}, "tolerance 0.0 must be above 0"),
        ({"tolerance": float("nan")}, "tolerance nan must be above 0"),
    ],
)
def test_an_impossible_limit_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        limiter(**{"samples_per_insert": 1.0, **options})


def test_a_batch_that_could_block_both_sides_is_refused():
    # An item pays for one sample; by default ten may be drawn ahead, and ten added.
    this = limiter(1.0)
    where = this.init(), jnp.int32(50)
    assert this.may_sample(this.init() + 10.0, jnp.int32(50), 20)
    with pytest.raises(ValueError, match=r"tolerance 10.0 must be at least 16"):
        this.may_sample(*where, 32)
