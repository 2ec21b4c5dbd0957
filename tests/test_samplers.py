"""Every sampler through the same laws, and what each of them promises beyond those.

The laws are those of a list of priorities in float64; frequencies are tested at one in
ten thousand, with fixed keys.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices import AXIS, over_devices
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fps_jax.replay import queue, replay, ring, samplers, sharding
from fps_jax.replay.samplers import LARGEST, SMALLEST, Pool, to_weight
from fps_jax.replay.states import Ticket
from fps_jax.types import Step

BATCH, TIMES = 4, 2000


def keys_of(times=TIMES, seed=1):
    """Keys whose programs are compiled in half the time of the usual ones."""
    return jax.random.split(jax.random.key(seed, impl="unsafe_rbg"), times)


def expect_shares(slots, shares):
    """A chi-square test; what has no share is never drawn."""
    counts = np.bincount(slots, minlength=len(shares))
    can = shares > 0
    assert counts[~can].sum() == 0
    expected = counts.sum() * shares[can] / shares[can].sum()
    if np.sum(can) > 1:
        assert stats.chisquare(counts[can], expected).pvalue > 1e-4


# -------------------------------------------------------------- laws of all samplers


def alike(priority, usable):
    return usable / usable.sum()


def by_weight(priority, usable):
    weight = np.where(usable, np.float64(priority) ** 0.7, 0)
    return weight / weight.sum()


def by_rank(priority, usable):
    weight = np.zeros(len(priority))
    order = sorted(np.flatnonzero(usable), key=lambda i: (-priority[i], i))
    weight[order] = np.arange(1.0, len(order) + 1) ** -0.7
    return weight / weight.sum()


WEIGHTED = functools.partial(replay.proportional, exponent=0.7, fan_out=4)
MEMBERS = {
    "uniform": (replay.uniform, alike),
    "stratified": (WEIGHTED, by_weight),
    "systematic": (functools.partial(WEIGHTED, spread="systematic"), by_weight),
    "independent": (functools.partial(WEIGHTED, spread="independent"), by_weight),
    "different": (functools.partial(WEIGHTED, spread="without_replacement"), by_weight),
    "mixed": (functools.partial(WEIGHTED, uniform_fraction=0.3), None),
    "ranked": (
        functools.partial(replay.rank_based, exponent=0.7, sort_period=1),
        by_rank,
    ),
    "greedy": (functools.partial(replay.greedy, fan_out=4), alike),
}


class Kind(NamedTuple):
    """A storage, which of its rows are valid, and after how many it is looked at."""

    storage: ring.Storage
    is_valid: Callable | None
    rows: tuple[int, ...]


KINDS = {
    # Empty, a single item, partly filled, exactly full, wrapped.
    "items": Kind(ring.items(11), None, (0, 1, 5, 11, 17)),
    # The newest two wait; one in four can't be used: nothing, one, some, full, wrapped.
    "transitions": Kind(
        ring.transitions(12, num_streams=2),
        lambda serial: serial % 4 != 1,
        (0, 2, 4, 8, 12, 18),
    ),
}
SIMILAR = ("systematic", "independent", "different")
"""They differ from stratified draws in how they search: one kind of storage will do."""
CASES = [
    (member, kind, rows)
    for member in MEMBERS
    for kind, this in KINDS.items()
    for rows in this.rows
    if kind == "items" or member not in SIMILAR
]


as_numpy = functools.partial(jax.tree.map, np.asarray)


class World:
    """A replay, compiled, and beside it what it holds as lists."""

    def __init__(self, member, kind):
        make, self.law = MEMBERS[member]
        self.kind, self.storage = KINDS[kind], KINDS[kind].storage
        self.of = of = make(self.storage)
        self.reading = {"discount": 0.9} if kind == "transitions" else {}
        self.add, self.update = jax.jit(of.add), jax.jit(of.update)

        def draw(state, key):
            _, sample = of.sample(state, key, batch_size=BATCH, **self.reading)
            return sample._replace(items=())

        draws = jax.jit(jax.vmap(draw, (None, 0)))
        self.draws = lambda state, keys: as_numpy(draws(state, keys))
        self.init = lambda: of.init(jax.tree.map(lambda x: x[0], self.row(0)))

    def row(self, serial):
        """The items with these serial numbers, those of one step."""
        serial = serial + np.arange(self.storage.num_streams)
        if self.kind.is_valid is None:
            return np.float32(serial)
        no = np.zeros(serial.shape, bool)
        value = np.float32(serial)
        return Step(value, value, value, no, no, self.kind.is_valid(serial), {})

    @functools.cache  # noqa: B019
    def after(self, rows):
        """The state after so many rows and updates; priorities, and which may be."""
        rng = np.random.default_rng(rows)
        capacity, streams = self.storage.capacity, self.storage.num_streams
        before = max((x for x in self.kind.rows if x < rows), default=0)
        state, priority = self.after(before)[:2] if rows else (self.init(), None)
        priority = np.zeros(capacity) if priority is None else priority.copy()
        usable = np.zeros(capacity, bool)
        for serial in range(before, rows, streams):
            new = rng.uniform(0.2, 3, streams).astype(np.float32)
            state = self.add(state, self.row(serial), new)
            priority[(serial + np.arange(streams)) % capacity] = new
        waiting = self.storage.lookahead * streams
        for serial in range(max(0, rows - capacity), rows):
            is_valid = self.kind.is_valid is None or self.kind.is_valid(serial)
            usable[serial % capacity] = is_valid and serial < rows - waiting
        new = rng.uniform(0.2, 3, BATCH).astype(np.float32)
        tickets = self.draws(state, keys_of(seed=2)).ticket
        ticket = jax.tree.map(lambda x: x[rows], tickets)
        state = self.update(state, ticket, new)
        for slot, is_valid, value in zip(ticket.slot, ticket.is_valid, new):
            if is_valid:
                priority[slot] = value
        return state, priority, usable

    def shares(self, rows):
        """The probability of every slot."""
        _, priority, usable = self.after(rows)
        if self.law is not None:
            return self.law(priority, usable)
        there = min(rows, self.storage.capacity) - self.storage.lookahead * (
            self.storage.num_streams
        )
        share = 0.3 * chance(usable.sum() / there)
        weighted = by_weight(priority, usable)
        return share * alike(priority, usable) + (1 - share) * weighted


def chance(share):
    """That one of the slots looked at for a uniform draw can be used."""
    return 1 - (1 - share) ** samplers.ATTEMPTS


world = functools.cache(World)


@pytest.mark.parametrize(("member", "kind", "rows"), CASES)
def test_the_probability_told_is_how_often_a_slot_is_drawn(member, kind, rows):
    this = world(member, kind)
    state, priority, usable = this.after(rows)
    sample = this.draws(state, keys_of())
    slot, told, is_valid = sample.ticket.slot, sample.probability, sample.is_valid
    assert np.all(np.isfinite(told) & np.isfinite(sample.importance_weights))
    assert np.all(sample.importance_weights[~is_valid] == 0)
    np.testing.assert_array_equal(sample.ticket.is_valid, is_valid)
    assert state.num_usable == usable.sum()
    if not usable.any():
        assert not np.any(is_valid)
        return
    assert np.all(usable[slot[is_valid]])
    shares = this.shares(rows)
    np.testing.assert_allclose(shares.sum(), 1)
    np.testing.assert_allclose(told[is_valid], shares[slot[is_valid]], rtol=2e-5)
    # The weights are those of the probabilities told.
    size = usable.sum() * np.where(is_valid, told, np.inf)
    weight = (1 / size) / np.max(1 / size, axis=1, initial=1e-30, keepdims=True)
    np.testing.assert_allclose(sample.importance_weights, weight, rtol=1e-4)
    if member in ("greedy", "different"):
        expected = np.arange(BATCH) < usable.sum()
        np.testing.assert_array_equal(is_valid, np.tile(expected, (TIMES, 1)))
        for slots in slot[:, expected]:
            assert len(set(slots)) == expected.sum()
    if member == "greedy":
        best = np.sort(priority[usable])[::-1][:BATCH]
        np.testing.assert_array_equal(
            priority[slot[:, : len(best)]], np.tile(np.float32(best), (TIMES, 1))
        )
        return
    if member == "uniform":
        there = min(rows, len(usable)) - this.storage.lookahead * 2
        found = chance(usable.sum() / there)
        noise = np.sqrt(found * (1 - found) / is_valid.size)
        np.testing.assert_allclose(is_valid.mean(), found, atol=4 * noise + 1e-9)
    elif member != "different":
        assert np.all(is_valid)
    # A draw after the first is from what is left, if all are different.
    first = slice(0, 1) if member == "different" else slice(None)
    expect_shares(slot[:, first][is_valid[:, first]], shares)
    drawn = np.unique(slot[is_valid])
    if len(drawn) == usable.sum():
        each = np.zeros(len(usable))
        each[slot[is_valid]] = told[is_valid]
        np.testing.assert_allclose(each.sum(), 1, rtol=1e-5)


@pytest.mark.parametrize("member", [x for x in MEMBERS if x not in SIMILAR])
def test_a_replay_of_one_slot_draws_it(member):
    of = MEMBERS[member][0](ring.items(1))
    first, all_there = jnp.zeros(1, jnp.int32), jnp.ones(1, bool)

    @jax.jit
    def live(key):
        state = of.add(of.init(jnp.float32(0)), jnp.array([5.0]))
        state = of.add(state, jnp.array([7.0]))
        ticket = Ticket(first, first, jnp.ones(1, jnp.uint32), all_there)
        state = of.update(state, ticket, jnp.array([0.3]))
        return of.sample(state, key, batch_size=1)[1]

    sample = live(keys_of(1)[0])
    assert sample.is_valid[0]
    assert sample.items[0] == 7
    np.testing.assert_allclose(sample.probability, 1, rtol=1e-6)
    np.testing.assert_allclose(sample.importance_weights, 1, rtol=1e-6)


@pytest.mark.parametrize(("kind", "rows"), [("items", 17), ("transitions", 18)])
def test_the_ith_of_stratified_draws_is_from_the_ith_part_of_the_total(kind, rows):
    this = world("stratified", kind)
    slot = this.draws(this.after(rows)[0], keys_of()).ticket.slot
    shares = this.shares(rows)
    ends = np.cumsum(shares)
    for i in range(BATCH):
        overlap = np.minimum(ends, (i + 1) / BATCH) - np.maximum(
            ends - shares, i / BATCH
        )
        # What only rounding puts into a part is left out of the test.
        overlap = np.where(overlap > 1e-5, overlap, 0)
        inside = overlap[slot[:, i]] > 0
        assert np.sum(~inside) <= 1
        expect_shares(slot[inside, i], overlap * BATCH)


def test_systematic_draws_take_a_slot_as_often_as_they_must_or_once_more():
    this = world("systematic", "items")
    shares = BATCH * this.shares(17)
    for slots in this.draws(this.after(17)[0], keys_of()).ticket.slot[:300]:
        counts = np.bincount(slots, minlength=len(shares))
        assert np.all(counts >= np.floor(shares - 1e-5))
        assert np.all(counts <= np.ceil(shares + 1e-5))


# ------------------------------------------------------------------------- proportional

N = 11


@functools.cache
def of_exponents():
    """A function of traced exponents: weights and draws of populations of N items."""

    def draw(exponent, priority, keys):
        of = replay.proportional(ring.items(N), exponent=exponent)
        state = of.add(of.init(jnp.float32(0)), jnp.zeros(N), priority)
        sample = lambda key: of.sample(state, key, batch_size=BATCH)[1]
        return state.sampler.weights.reshape(-1)[:N], jax.vmap(sample)(keys)

    return jax.jit(jax.vmap(draw))


EXPONENTS = (0.0, 0.5, 1.0, 2.0)


def population(priority):
    """The weights and the draws of replays with these priorities and `EXPONENTS`."""
    keys = keys_of(len(EXPONENTS) * TIMES).reshape(len(EXPONENTS), TIMES)
    priority = np.tile(priority.astype(np.float32), (len(EXPONENTS), 1))
    return as_numpy(of_exponents()(np.float32(EXPONENTS), priority, keys))


def test_a_population_of_exponents_draws_in_proportion_to_powers_of_the_priority():
    priority = np.float32(np.random.default_rng(2).uniform(0.3, 2, N))
    weights, samples = population(priority)
    for i, exponent in enumerate(EXPONENTS):
        shares = np.float64(priority) ** exponent
        np.testing.assert_allclose(weights[i], shares, rtol=1e-5)
        shares /= shares.sum()
        slot = samples.ticket.slot[i].ravel()
        told = samples.probability[i].ravel()
        np.testing.assert_allclose(told, shares[slot], rtol=1e-5)
        expect_shares(slot, shares)


def test_of_the_largest_and_smallest_priorities_no_weight_is_0_or_infinite():
    priority = np.logspace(-37.9, 38, N)
    weights, samples = population(priority)
    for i, exponent in enumerate(EXPONENTS):
        exact = np.float64(np.float32(priority)) ** exponent
        expected = np.clip(exact, SMALLEST, LARGEST)
        np.testing.assert_allclose(weights[i], expected, rtol=1e-4)
        assert np.all(samples.is_valid[i])
        assert np.all(np.isfinite(samples.importance_weights[i]))
        assert np.all(samples.importance_weights[i] > 0)
        shares = (expected / expected.sum())[samples.ticket.slot[i]]
        np.testing.assert_allclose(samples.probability[i], shares, rtol=1e-4)


def test_ten_million_largest_weights_have_a_finite_sum():
    assert np.isfinite(np.float32(1e7) * np.float32(LARGEST))
    of = samplers.proportional(5000, exponent=2.0)
    state = jax.jit(of.write)(
        of.init(), jnp.int32(17), jnp.full(5000, 3e38), jnp.ones(5000, bool)
    )
    np.testing.assert_allclose(state.weights[-1].sum(), 5000 * LARGEST, rtol=1e-5)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.floats(2.0**-125, 2.0**127, width=32),
    st.sampled_from([0.25, 0.5, 1.0, 2.0, 3.0]),
)
def test_a_priority_is_given_back_as_it_was_stored(priority, exponent):
    of = stored()
    back = np.asarray(of(np.float32(priority), np.float32(exponent)))
    exact = np.clip(np.float64(np.float32(priority)) ** exponent, SMALLEST, LARGEST)
    np.testing.assert_allclose(back[0], exact ** (1 / exponent), rtol=1e-4)
    assert back[1] == 0


@functools.cache
def stored():
    def one(priority, exponent):
        of = samplers.proportional(2, exponent=exponent)
        both = jnp.append(priority, 0.0)
        state = of.write(of.init(), jnp.int32(0), both, jnp.ones(2, bool))
        return of.priority(state, None)

    return jax.jit(one)


def test_an_exponent_of_0_makes_even_a_priority_of_0_a_weight_of_1():
    weight = to_weight(jnp.array([0.0, 1e-30, 3.0]), jnp.float32(0.0))
    np.testing.assert_array_equal(weight, 1)
    weight = to_weight(jnp.array([0.0, 1e-30, 3.0]), jnp.float32(1.0))
    np.testing.assert_array_equal(weight, np.float32([0, 1e-30, 3]))


@functools.cache
def of_rows(uniform_fraction):
    """Draws from eight rows of which the slots 0 and 3 can't be used."""
    of = replay.proportional(
        ring.transitions(9),
        exponent=1.0,
        uniform_fraction=uniform_fraction,
        normalize="buffer",
    )
    usable = np.arange(9) % 3 != 0
    usable[8] = False  # Waits for the step after it.

    def draw(priority, keys):
        no, zero = jnp.zeros(9, bool), jnp.zeros(9)
        steps = Step(zero, zero, zero, no, no, jnp.array(usable), {})
        state = of.init(jax.tree.map(lambda x: x[0], steps))
        for part in (slice(0, 8), slice(8, 9)):
            rows = jax.tree.map(lambda x, part=part: x[part], steps)
            state = of.add(state, rows, priority[part])
        sample = lambda key: of.sample(state, key, batch_size=BATCH, discount=1.0)[1]
        return jax.vmap(sample)(keys)

    return jax.jit(draw), usable


def test_without_any_priority_above_0_a_share_of_uniform_draws_makes_all_uniform():
    draw, usable = of_rows(0.2)
    sample = as_numpy(draw(jnp.zeros(9), keys_of()))
    is_valid = sample.is_valid
    found = chance(usable.sum() / 8)
    noise = np.sqrt(found * (1 - found) / is_valid.size)
    np.testing.assert_allclose(is_valid.mean(), found, atol=4 * noise)
    np.testing.assert_allclose(sample.probability[is_valid], 1 / usable.sum())
    np.testing.assert_allclose(sample.importance_weights[is_valid], 1, rtol=1e-6)
    expect_shares(sample.ticket.slot[is_valid], alike(None, usable))


def test_without_any_priority_above_0_there_is_else_nothing_to_draw():
    draw, _ = of_rows(0.0)
    sample = draw(jnp.zeros(9), keys_of(10))
    assert not np.any(sample.is_valid)
    np.testing.assert_array_equal(sample.importance_weights, 0)
    assert np.all(np.isfinite(sample.probability))


@pytest.mark.parametrize("uniform_fraction", [0.0, 0.2])
def test_over_the_buffer_the_largest_weight_is_that_of_the_least_likely_item(
    uniform_fraction,
):
    # With a share of uniform draws the least likely item is one of priority 0.
    draw, usable = of_rows(uniform_fraction)
    priority = np.float32([9, 0, 2, 9, 0.5, 3, 9, 1, 9])
    weight = np.where(usable, np.float64(priority), 0)
    share = uniform_fraction * chance(usable.sum() / 8)
    shares = share * alike(None, usable) + (1 - share) * weight / weight.sum()
    sample = draw(priority, keys_of())
    slot = np.asarray(sample.ticket.slot)
    assert np.all(sample.is_valid)
    np.testing.assert_allclose(sample.probability, shares[slot], rtol=1e-5)
    expected = shares[shares > 0].min() / shares[slot]
    np.testing.assert_allclose(sample.importance_weights, expected, rtol=1e-4)
    expect_shares(slot.ravel(), shares)


@functools.cache
def keeper(uniform_fraction):
    """A sampler that keeps its extremes, compiled."""
    of = samplers.proportional(
        N,
        exponent=1.5,
        fan_out=4,
        uniform_fraction=uniform_fraction,
        keeps_lowest=True,
        keeps_highest=True,
    )
    told = lambda state, pool: (
        of.lowest_probability(state, pool, None),
        of.largest(state),
    )

    def rebuild(state, priority, usable):
        return of.rebuild(state, None, priority, usable, None)

    return (
        of,
        *map(jax.jit, (of.write, of.update, rebuild)),
        jax.jit(lambda state, usable: told(state, pool_of(usable))),
    )


def pool_of(usable, axis_name=None):
    """A full ring, of which some slots can be used."""
    return Pool(
        head=jnp.int32(2),
        added=jnp.uint32(usable.size),
        skipped=0,
        span=jnp.int32(usable.size),
        is_usable=lambda slots: usable[slots],
        num_usable=sharding.add_up(jnp.sum(usable, dtype=jnp.int32), axis_name),
    )


@pytest.mark.parametrize("uniform_fraction", [0.0, 0.25])
@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6))
def test_the_extremes_are_those_of_a_list_after_random_changes(uniform_fraction, seed):
    of, write, update, rebuild, told = keeper(uniform_fraction)
    rng = np.random.default_rng(seed)
    priority, usable = np.zeros(N, np.float32), np.zeros(N, bool)
    state = of.init()
    for _ in range(6):
        new = np.abs(rng.standard_cauchy(3)).astype(np.float32) + 1e-3
        new[rng.random(3) < 0.2] = 0
        if rng.random() < 0.6 or not usable.any():
            start, flags = int(rng.integers(N)), rng.random(3) < 0.8
            state = write(state, np.int32(start), new, flags)
            place = (start + np.arange(3)) % N
            priority[place], usable[place] = new, flags
        else:
            slots = rng.choice(np.append(np.flatnonzero(usable), -1), 3)
            state = update(state, slots.astype(np.int32), new)
            for slot, value in zip(slots, new):
                if slot >= 0:
                    priority[slot] = value
        weight = np.where(usable, np.float64(priority) ** 1.5, 0)
        total, shares = weight.sum(), np.zeros(N)
        if total > 0:
            shares = weight / total
        if uniform_fraction and usable.any():
            share = uniform_fraction * chance(usable.mean()) if total > 0 else 1
            shares = (1 - share) * shares + share * alike(priority, usable)
        lowest, largest = told(state, usable)
        if usable.any():
            least = shares[shares > 0].min() if np.any(shares > 0) else 0
            np.testing.assert_allclose(lowest, least, rtol=1e-4)
        highest = np.where(usable, priority, 0).max()
        np.testing.assert_allclose(largest, highest, rtol=1e-4)
    # Built anew, it is bitwise what it was made of piece by piece.
    built = rebuild(of.init(), priority, usable)
    jax.tree.map(np.testing.assert_array_equal, built, state)


def test_of_equal_slots_in_an_update_the_last_one_counts():
    of = samplers.proportional(5, exponent=1.0)

    @jax.jit
    def told(slots, priority):
        state = of.update(of.init(), slots, priority)
        return of.priority(state, None), of.priority(state, jnp.array([3, 0]))

    every, some = told(jnp.array([3, 1, 3, -1]), jnp.array([5.0, 2, 7, 9]))
    np.testing.assert_array_equal(every, [0, 2, 0, 7, 0])
    np.testing.assert_array_equal(some, [7, 0])


@pytest.mark.parametrize("before", [0.7, 0.0])
def test_with_another_exponent_it_draws_as_if_it_had_always_had_that(before):
    # From 0 there is no way back: all priorities are 1.
    storage, priority = ring.items(N), jnp.linspace(0.5, 3, N)

    @jax.jit
    def states(exponent):
        of = replay.proportional(storage, exponent=exponent)
        state = of.add(of.init(jnp.float32(0)), jnp.zeros(N), priority)
        kept = priority if before else jnp.ones(N)
        other = replay.proportional(storage, exponent=2.0)
        fresh = other.add(other.init(jnp.float32(0)), jnp.zeros(N), kept)
        return of.set_exponent(state, 2.0).sampler, fresh.sampler

    changed, fresh = states(jnp.float32(before))
    for mine, expected in zip(jax.tree.leaves(changed), jax.tree.leaves(fresh)):
        np.testing.assert_allclose(mine, expected, rtol=1e-5)


def test_a_compiled_loop_does_what_its_steps_do_one_by_one():
    this = world("stratified", "transitions")
    start = this.after(8)[0]
    rng = np.random.default_rng(9)
    new = rng.uniform(0.2, 3, (5, 2 + BATCH)).astype(np.float32)

    def step(state, given):
        key, items, new = given
        state = this.of.add(state, items, new[:2])
        state, sample = this.of.sample(state, key, batch_size=BATCH, discount=0.9)
        return this.of.update(state, sample.ticket, new[2:]), sample.probability

    rows = [this.row(8 + 2 * i) for i in range(5)]
    stacked = jax.tree.map(lambda *x: np.stack(x), *rows)
    given_rows = keys_of(5), stacked, new
    last, told = jax.jit(lambda state: jax.lax.scan(step, state, given_rows))(start)
    state, one = start, jax.jit(step)
    for i in range(5):
        state, probability = one(state, (keys_of(5)[i], rows[i], new[i]))
        np.testing.assert_array_equal(probability, told[i])
    jax.tree.map(np.testing.assert_array_equal, state, last)


# ------------------------------------------------------------------------------ devices

SHARD, UNIFORM_FRACTION = 6, {"uniform": 1.0, "stratified": 0.0, "mixed": 0.3}
# Mixed draws are of both kinds: with the other map they speak for each.
TOGETHER = {
    "pmap": ("uniform", "stratified", "mixed", "greedy"),
    "shard_map": ("mixed", "greedy"),
}


def drawn_together(priority, usable, keys):
    """Draws of every sampler from four shards as from one, on one device of them."""
    out = {}
    for name, own_keys in keys.items():
        if name == "uniform":
            of = samplers.uniform(SHARD)
        elif name == "greedy":
            of = queue.greedy(SHARD, fan_out=4)
        else:
            fraction = UNIFORM_FRACTION[name]
            of = samplers.proportional(
                SHARD, exponent=0.7, uniform_fraction=fraction, fan_out=4
            )
        state = of.write(of.init(), jnp.int32(2), priority, usable)
        order = (jnp.arange(SHARD) - 2) % SHARD
        pool = pool_of(usable[order], AXIS)
        draw = lambda key, of=of, state=state, pool=pool: of.draw(
            state, pool, key, BATCH, AXIS
        )
        out[name] = jax.vmap(lambda key, draw=draw: draw(key)[1])(own_keys)
    return out


@functools.cache
def on_devices(backend):
    rng = np.random.default_rng(4)
    priority = rng.uniform(0.2, 3, (4, SHARD)).astype(np.float32)
    usable = rng.random((4, SHARD)) < 0.7
    usable[1] = False  # A shard of which nothing can be drawn.
    keys = {
        name: jnp.broadcast_to(keys_of(seed=i), (4, TIMES))
        for i, name in enumerate(TOGETHER[backend])
    }
    drawn = over_devices(drawn_together, backend)(priority, usable, keys)
    # The rows were written from slot 2 on.
    turned = lambda x: np.roll(x, 2, axis=1).reshape(-1)
    return turned(priority), turned(usable), jax.tree.map(np.asarray, drawn)


# Whole replays are drawn under both maps in test_sharded_replay.
@pytest.mark.parametrize(("backend", "name"), [("pmap", x) for x in TOGETHER["pmap"]])
def test_devices_draw_from_their_shards_as_from_one_replay(backend, name):
    priority, usable, drawn = on_devices(backend)
    draws = drawn[name]
    for device in range(1, 4):
        jax.tree.map(
            lambda x, d=device: np.testing.assert_array_equal(x[d], x[0]), draws
        )
    shard, slot, told, is_valid = jax.tree.map(lambda x: x[0], tuple(draws))
    item = shard * SHARD + slot
    assert np.all(usable[item[is_valid]])
    if name == "greedy":
        best = np.sort(priority[usable])[::-1][:BATCH]
        np.testing.assert_array_equal(priority[item], np.tile(best, (TIMES, 1)))
        np.testing.assert_allclose(told, 1 / usable.sum(), rtol=1e-6)
        return
    share = UNIFORM_FRACTION[name] * chance(usable.mean()) if name != "uniform" else 1
    shares = share * alike(priority, usable) + (1 - share) * by_weight(priority, usable)
    np.testing.assert_allclose(told[is_valid], shares[item[is_valid]], rtol=2e-5)
    expect_shares(item[is_valid], shares)
    if name == "uniform":
        found = chance(usable.mean())
        noise = np.sqrt(found * (1 - found) / is_valid.size)
        np.testing.assert_allclose(is_valid.mean(), found, atol=4 * noise)
    else:
        assert np.all(is_valid)


# ----------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exponent": -0.1}, "exponent -0.1 must be at least 0"),
        ({"uniform_fraction": 1.5}, r"uniform_fraction 1.5 must be in \[0, 1\]"),
        ({"spread": "even"}, "spread 'even' must be one of stratified"),
        (
            {"spread": "without_replacement", "uniform_fraction": 0.1},
            "uniform_fraction 0.1 must be 0 without replacement",
        ),
        ({"fan_out": 1}, "fan_out 1 must be at least 2"),
    ],
)
def test_an_impossible_sampler_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        samplers.proportional(4, **{"exponent": 0.6, **options})


def test_what_is_not_kept_is_not_told():
    of = samplers.proportional(4, exponent=0.6)
    with pytest.raises(ValueError, match="keeps_lowest False must be True"):
        of.lowest_probability(of.init(), pool_of(jnp.ones(4, bool)), None)
    with pytest.raises(ValueError, match="keeps_highest False must be True"):
        of.largest(of.init())


def test_more_different_items_than_there_are_slots_are_refused():
    of = samplers.proportional(4, exponent=0.6, spread="without_replacement")
    pool, key = pool_of(jnp.ones(4, bool)), jax.random.key(0)
    with pytest.raises(ValueError, match=r"size 5 must be in \[1, 4\]"):
        of.draw(of.init(), pool, key, 5, None)
    with pytest.raises(ValueError, match="without_replacement must be on one device"):
        of.draw(of.init(), pool, key, 2, "devices")
