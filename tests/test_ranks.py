"""Draws by rank against a list that is sorted when it should be, and stale until then.

Frequencies are tested at one in ten thousand, with fixed keys.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices import AXIS, over_devices
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fps_jax.replay import ranks, replay, ring, sharding
from fps_jax.replay.samplers import Pool
from fps_jax.replay.sum_tree import prefix, sum_tree
from fps_jax.types import Step

BATCH, PERIOD = 8, 3
KINDS = {
    "items": ring.items(10, largest_add=4),
    "transitions": ring.transitions(12, num_streams=2, n_step=2, largest_add=4),
    "windows": ring.windows(9, length=3, largest_add=4),
}


def keys_of(times, seed=1):
    """Keys whose programs are compiled in half the time of the usual ones."""
    return jax.random.split(jax.random.key(seed, impl="unsafe_rbg"), times)


def expect_shares(found, shares):
    """A chi-square test; what has no share is never found."""
    counts = np.bincount(found, minlength=len(shares))
    can = shares > 0
    assert counts[~can].sum() == 0
    expected = counts.sum() * shares[can] / shares[can].sum()
    assert stats.chisquare(counts[can], expected).pvalue > 1e-4


class Twin:
    """A ring of priorities, and the order in which its slots are drawn, as lists."""

    def __init__(self, storage, exponent, period):
        self.capacity, self.period = storage.capacity, period
        self.waiting = storage.lookahead * storage.num_streams
        self.exponent = exponent
        self.added, self.updates = 0, 0
        self.priority, self.is_valid = {}, {}  # By serial number.
        self.order, self.fresh = [], []  # Slots.

    def drawable(self):
        """Serial numbers of what is there and no longer waits."""
        first = max(0, self.added - self.capacity)
        return list(range(first, max(first, self.added - self.waiting)))

    def usable(self):
        """The slots that can be drawn, and their items."""
        there = [serial for serial in self.drawable() if self.is_valid[serial]]
        return {serial % self.capacity: serial for serial in there}

    def add(self, priorities, are_valid):
        before = self.added - self.waiting
        for priority, is_valid in zip(priorities, are_valid):
            self.priority[self.added], self.is_valid[self.added] = priority, is_valid
            self.added += 1
        for serial in range(max(0, before), max(0, self.added - self.waiting)):
            self.fresh.insert(0, serial % self.capacity)
        self.fresh = self.fresh[: len(self.drawable())]

    def update(self, slots, priorities):
        usable = self.usable()
        for slot, priority in zip(slots, priorities):
            if slot >= 0:
                self.priority[usable[slot]] = priority
        self.updates += 1

    def sort(self):
        usable = self.usable()
        by_priority = lambda slot: (-self.priority[usable[slot]], slot)
        self.order = sorted(usable, key=by_priority)
        self.fresh, self.updates = [], 0

    def before_a_draw(self):
        if (self.period and self.updates >= self.period) or self.period == 1:
            self.sort()

    def ranks(self):
        """Slots by rank; one may be there twice."""
        return self.fresh + self.order

    def of_ranks(self):
        weight = np.arange(1.0, len(self.ranks()) + 1) ** -self.exponent
        return weight / weight.sum()

    def shares(self):
        """The probability that a draw finds a slot."""
        return np.bincount(
            np.array(self.ranks(), int), self.of_ranks(), minlength=self.capacity
        )


def rows(storage, serial, are_valid):
    """Items with serial numbers from this one on."""
    value = np.float32(serial + np.arange(len(are_valid)))
    if storage.put is not None:
        return value
    no = np.zeros(value.shape, bool)
    return Step(value, value, value, no, no, np.array(are_valid), {})


class World:
    """A replay by rank, compiled."""

    def __init__(self, kind, period, exponent=0.7):
        self.storage = KINDS[kind]
        self.period, self.exponent = period, exponent
        self.of = of = replay.rank_based(
            self.storage, exponent=exponent, sort_period=period
        )
        reading = {"discount": 0.9} if kind == "transitions" else {}

        def draw(state, seed):
            key = jax.random.key(seed, impl="unsafe_rbg")
            state, sample = of.sample(state, key, batch_size=BATCH, **reading)
            return state, sample._replace(items=())

        self.add, self.draw, self.update = map(jax.jit, (of.add, draw, of.update))
        self.draws = jax.jit(jax.vmap(lambda *x: draw(*x)[1], (None, 0)))
        example = jax.tree.map(lambda x: x[0], rows(self.storage, 0, [True]))
        self.empty = of.init(example)
        self.anew = jax.jit(lambda state: of.reprioritize(state, lambda p, age, _: -p))

    def start(self):
        return self.empty, Twin(self.storage, self.exponent, self.period)

    def added(self, state, twin, rng):
        count = 2 if self.storage.put else self.storage.num_streams
        are_valid = rng.random(count) < (1 if self.storage.put else 0.7)
        priorities = rng.standard_normal(count).astype(np.float32).round(1)
        items = rows(self.storage, twin.added, are_valid)
        twin.add(priorities, are_valid)
        return self.add(state, items, priorities)


world = functools.cache(World)


def expect_draws(twin, sample):
    """Every draw is from its part of the total, and told as probable as it is."""
    slot, told, is_valid = map(
        np.asarray, (sample.ticket.slot, sample.probability, sample.is_valid)
    )
    assert np.all(np.isfinite(told) & np.isfinite(sample.importance_weights))
    there = twin.ranks()
    if not there:
        assert not np.any(is_valid)
        return
    shares, usable = twin.shares(), twin.usable()
    np.testing.assert_allclose(told, shares[slot], rtol=1e-5)
    np.testing.assert_array_equal(is_valid, [s in usable for s in slot])
    ends = np.cumsum(twin.of_ranks())
    begins = np.append(0, ends[:-1])
    for i, s in enumerate(slot):
        low, high = i / len(slot) - 1e-6, (i + 1) / len(slot) + 1e-6
        mine = np.array(there) == s
        assert np.any(mine & (begins < high) & (ends > low))


OPERATIONS = ("add", "draw", "update", "anew")


@pytest.mark.parametrize(
    ("kind", "period"), [("items", PERIOD), ("transitions", PERIOD), ("windows", 0)]
)
@settings(max_examples=14, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6))
def test_random_operations_leave_the_order_that_a_list_would_have(kind, period, seed):
    this, rng = world(kind, period), np.random.default_rng(seed)
    state, twin = this.start()
    sample = None
    for step in range(14):
        what = rng.choice(OPERATIONS, p=[0.4, 0.3, 0.25, 0.05])
        if what == "add":
            for _ in range(rng.choice([1, 1, 2, 7])):
                state = this.added(state, twin, rng)
            sample = None
        elif what == "draw":
            twin.before_a_draw()
            state, sample = this.draw(state, seed + step)
            expect_draws(twin, sample)
        elif what == "update" and sample is not None:
            new = rng.standard_normal(BATCH).astype(np.float32).round(1)
            state = this.update(state, sample.ticket, new)
            is_valid = np.asarray(sample.is_valid)
            twin.update(np.where(is_valid, sample.ticket.slot, -1), new)
        elif what == "anew":
            state = this.anew(state)
            for serial in twin.drawable():  # What waits keeps what it was given.
                twin.priority[serial] *= -1
            twin.sort()
    twin.before_a_draw()
    state, sample = this.draw(state, seed)
    expect_draws(twin, sample)
    assert state.num_usable == len(twin.usable())


# -------------------------------------------------------------------------- frequencies


def stale(kind):
    """A state with items added and updated since the order was made, and its twin."""
    this, rng = world(kind, PERIOD), np.random.default_rng(6)
    state, twin = this.start()
    for _ in range(9):
        state = this.added(state, twin, rng)
    for seed in range(PERIOD):
        twin.before_a_draw()
        state, sample = this.draw(state, seed)
        new = rng.standard_normal(BATCH).astype(np.float32)
        state = this.update(state, sample.ticket, new)
        twin.update(np.where(sample.is_valid, sample.ticket.slot, -1), new)
    twin.before_a_draw()
    state, sample = this.draw(state, 9)
    new = rng.standard_normal(BATCH).astype(np.float32)
    state = this.update(state, sample.ticket, new)
    twin.update(np.where(sample.is_valid, sample.ticket.slot, -1), new)
    for _ in range(4):
        state = this.added(state, twin, rng)
    return this, state, twin


@pytest.mark.parametrize("kind", ["items", "transitions"])
def test_in_a_stale_order_slots_are_drawn_as_often_as_is_told(kind):
    this, state, twin = stale(kind)
    assert len(twin.ranks()) > len(set(twin.ranks()))  # Some slots have two ranks.
    sample = this.draws(state, np.arange(2000))
    slot, is_valid = map(np.asarray, (sample.ticket.slot, sample.is_valid))
    shares, usable = twin.shares(), np.isin(np.arange(twin.capacity), [*twin.usable()])
    np.testing.assert_array_equal(is_valid, usable[slot])
    np.testing.assert_allclose(sample.probability, shares[slot], rtol=1e-5)
    expect_shares(slot.ravel(), shares)
    # What is on top is newest first, and then comes the order as it was.
    fresh = [(twin.added - 1 - twin.waiting - i) % twin.capacity for i in range(9)]
    assert twin.ranks()[: len(twin.fresh)] == fresh[: len(twin.fresh)]


def test_the_order_is_made_when_so_many_updates_were_made_and_not_before():
    this, rng = world("items", PERIOD), np.random.default_rng(0)
    state, twin = this.start()
    for _ in range(3):
        state = this.added(state, twin, rng)
    sorted_at = []
    for i in range(12):
        state, sample = this.draw(state, i)
        if state.sampler.num_updates == 0 and i:
            sorted_at.append(i)
        state = this.update(state, sample.ticket, jnp.arange(float(BATCH)))
    assert sorted_at == [3, 6, 9]


def test_at_first_the_newest_item_has_the_first_rank():
    this, rng = world("items", PERIOD), np.random.default_rng(0)
    state, twin = this.start()
    for _ in range(7):
        state = this.added(state, twin, rng)
    sample = this.draw(state, 0)[1]
    assert twin.ranks() == [3, 2, 1, 0, 9, 8, 7, 6, 5, 4]
    expect_draws(twin, sample)


# ---------------------------------------------------------------------- the exact order

N = 10


@functools.cache
def of_exponents():
    """Draws of populations of N items in the exact order, with traced exponents."""

    def draw(exponent, priority, keys):
        of = replay.rank_based(ring.items(N), exponent=exponent, sort_period=1)
        state = of.add(of.init(jnp.float32(0)), jnp.zeros(N), priority)
        sample = lambda key: of.sample(state, key, batch_size=SEGMENTS)
        after, drawn = jax.vmap(sample)(keys)
        return state.sampler, after.sampler, drawn

    return jax.jit(jax.vmap(draw))


EXPONENTS, SEGMENTS = (0.0, 0.7, 1.0, 8.0), 16


@functools.cache
def population():
    """Their states before and after draws, the draws, and the slots by rank."""
    priority = np.random.default_rng(3).standard_normal(N).round(0).astype(np.float32)
    keys = keys_of(len(EXPONENTS) * 1000).reshape(len(EXPONENTS), 1000)
    tiled = np.tile(priority, (len(EXPONENTS), 1))
    out = of_exponents()(np.float32(EXPONENTS), tiled, keys)
    assert len(set(priority)) < N
    return *out, sorted(range(N), key=lambda i: (-priority[i], i))


@pytest.mark.parametrize("exponent", EXPONENTS)
def test_the_ith_draw_is_from_the_ith_of_equally_probable_segments(exponent):
    # Their bounds are no whole ranks: with exponent 8 most hold a part of the first.
    *_, sample, order = population()
    member = EXPONENTS.index(exponent)
    slot, told, is_valid = (
        np.asarray(x[member])
        for x in (sample.ticket.slot, sample.probability, sample.is_valid)
    )
    assert np.all(is_valid)
    share_of_rank = np.arange(1.0, N + 1) ** -exponent
    share_of_rank /= share_of_rank.sum()
    rank_of = np.argsort(order)
    rank = rank_of[slot]
    np.testing.assert_allclose(told, share_of_rank[rank], rtol=1e-5)
    ends = np.cumsum(share_of_rank)
    for i in range(SEGMENTS):
        low, high = i / SEGMENTS, (i + 1) / SEGMENTS
        overlap = np.minimum(ends, high) - np.maximum(ends - share_of_rank, low)
        overlap = np.where(overlap > 1e-6, overlap, 0)
        inside = overlap[rank[:, i]] > 0
        assert np.sum(~inside) <= 1
        if np.sum(overlap > 0) > 1:
            expect_shares(rank[inside, i], overlap)
    # All together, a rank is drawn as often as its share says.
    frequency = np.bincount(rank.ravel(), minlength=N) / rank.size
    noise = np.sqrt(share_of_rank / rank.size)
    assert np.all(np.abs(frequency - share_of_rank) < 5 * noise + 1 / rank.size)


def test_draws_leave_the_probabilities_of_the_ranks_as_they_were():
    before, after, *_ = population()
    expected = np.broadcast_to(before.by_rank[:, None], after.by_rank.shape)
    np.testing.assert_array_equal(after.by_rank, expected)


@pytest.mark.parametrize("exponent", [0.5, 0.7, 1.0])
def test_the_last_of_many_ranks_are_as_probable_as_they_should_be(exponent):
    most = 2**16
    weight = ranks.of_ranks(2 * most, jnp.float32(exponent))
    exact = np.arange(1.0, 2 * most + 1) ** -exponent
    np.testing.assert_allclose(weight, exact, rtol=1e-5)
    of = sum_tree(2 * most)
    tree = jax.jit(of.build)(weight)
    ends = np.cumsum(exact)
    # One table for every number of ranks.
    first = jax.jit(jax.vmap(functools.partial(prefix, of), (None, 0)))
    counts = np.array([1, 2, 17, 1000, most - 1, most, 2 * most - 1], np.int32)
    totals = np.asarray(first(tree, counts))
    np.testing.assert_allclose(totals, ends[counts - 1], rtol=1e-5)
    last = np.asarray(weight)[counts - 1] / totals
    np.testing.assert_allclose(last, exact[counts - 1] / ends[counts - 1], rtol=1e-4)


def test_a_large_buffer_is_drawn_to_its_last_ranks():
    capacity, size = 2**16, 4096
    of = ranks.rank_based(capacity, exponent=0.7, largest_write=capacity, sort_period=1)
    is_there = jnp.ones(capacity, bool)
    start = of.init()
    pool = Pool(
        head=jnp.int32(0),
        added=jnp.uint32(capacity),
        skipped=0,
        span=jnp.int32(capacity),
        is_usable=lambda slots: slots >= 0,
        num_usable=jnp.int32(capacity),
    )

    @jax.jit
    def draw(start, priority, key):
        state = of.write(start, jnp.int32(0), priority, is_there)
        return of.draw(state, pool, key, size, None)[1]

    draws = draw(start, -np.arange(capacity, dtype=np.float32), keys_of(1)[0])
    slot = np.asarray(draws.slot)  # Its rank, here.
    exact = np.arange(1.0, capacity + 1) ** -0.7
    ends = np.cumsum(exact) / exact.sum()
    share = exact / exact.sum()
    np.testing.assert_allclose(draws.probability, share[slot], rtol=1e-4)
    segment = np.arange(size) / size
    assert np.all(ends[slot] > segment - 1e-6)
    assert np.all(ends[slot] - share[slot] < segment + 1 / size + 1e-6)
    assert slot[-1] > capacity - 60  # Of the 2^16, 53 are in the last segment.


# ------------------------------------------------------------------------- other states


@functools.cache
def exponent_changed():
    """Draws after `set_exponent`, of an order that is never made by itself."""
    of = replay.rank_based(
        ring.items(N), exponent=0.7, sort_period=0, normalize="buffer"
    )

    @jax.jit
    def draw(priority, keys):
        state = of.add(of.init(jnp.float32(0)), jnp.zeros(N), priority)
        state = of.set_exponent(state, 2.0)
        sample = lambda key: of.sample(state, key, batch_size=BATCH)[1]
        return state.sampler.num_ordered, jax.vmap(sample)(keys)

    return draw


def test_another_exponent_sorts_and_the_weights_are_relative_to_the_last_rank():
    priority = np.random.default_rng(8).standard_normal(N).astype(np.float32)
    num_ordered, sample = exponent_changed()(priority, keys_of(300))
    assert num_ordered == N
    shares = np.empty(N)
    shares[np.argsort(-priority)] = np.arange(1.0, N + 1) ** -2
    shares /= shares.sum()
    slot = np.asarray(sample.ticket.slot)
    np.testing.assert_allclose(sample.probability, shares[slot], rtol=1e-5)
    np.testing.assert_allclose(
        sample.importance_weights, shares.min() / shares[slot], rtol=1e-4
    )


def test_priorities_below_0_are_kept_and_told():
    of = ranks.rank_based(5, exponent=1.0, largest_write=5)

    @jax.jit
    def told(priority, is_usable):
        state = of.write(of.init(), jnp.int32(3), priority, is_usable)
        state = of.update(state, jnp.array([0, -1, 3, 3]), jnp.array([-7.0, 9, 1, -2]))
        some = of.priority(state, jnp.array([3, 0]))
        return of.priority(state, None), some, of.largest(state)

    usable = jnp.array([True, False, True])
    every, some, largest = told(jnp.array([-3.0, 2, -1]), usable)
    assert of.only_orders
    np.testing.assert_array_equal(every, [-7, -np.inf, -np.inf, -2, -np.inf])
    np.testing.assert_array_equal(some, [-2, -7])
    assert largest == -2


def test_a_compiled_loop_does_what_its_steps_do_one_by_one():
    this, rng = world("items", PERIOD), np.random.default_rng(2)
    start = this.added(*this.start(), rng)
    new = rng.standard_normal((7, 2 + BATCH)).astype(np.float32)

    def step(state, given):
        seed, new = given
        state, sample = this.draw(state, seed)
        state = this.update(state, sample.ticket, new[2:])
        return this.add(state, new[:2], new[:2]), sample.probability

    last, told = jax.jit(lambda state: jax.lax.scan(step, state, (np.arange(7), new)))(
        start
    )
    state = start
    for i in range(7):
        state, probability = step(state, (i, new[i]))
        np.testing.assert_allclose(probability, told[i], rtol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, state, last)


# ------------------------------------------------------------------------------ devices

SHARD, SHARDS, TIMES = 6, 4, 2000


def drawn_together(priority, usable, newer, keys):
    """Draws from four shards: in the exact order, and with two more items on each."""
    of = ranks.rank_based(
        SHARD, exponent=0.7, largest_write=SHARD, sort_period=PERIOD, num_shards=SHARDS
    )

    def draws(state, usable, added, keys):
        pool = Pool(
            head=jnp.int32(added % SHARD),
            added=jnp.uint32(added),
            skipped=0,
            span=jnp.int32(SHARD),
            is_usable=lambda slots: usable[slots],
            num_usable=sharding.add_up(jnp.sum(usable, dtype=jnp.int32), AXIS),
        )
        drawn, _ = of.draw(state, pool, keys[0], BATCH, AXIS)
        one = lambda key: of.draw(drawn, pool, key, BATCH, AXIS)[1]
        return drawn, jax.vmap(one)(keys[1:])

    state = of.write(of.init(), jnp.int32(0), priority, usable)
    for _ in range(PERIOD):
        state = of.update(state, jnp.full(1, -1), jnp.zeros(1))
    state, exact = draws(state, usable, SHARD, keys[0])
    state = of.write(state, jnp.int32(0), newer, jnp.ones(2, bool))
    return exact, draws(state, usable.at[:2].set(True), SHARD + 2, keys[1])[1]


@functools.cache
def on_devices(backend):
    rng = np.random.default_rng(4)
    priority = rng.standard_normal((SHARDS, SHARD)).astype(np.float32)
    usable = rng.random((SHARDS, SHARD)) < 0.7
    usable[1] = False  # A shard of which nothing can be drawn.
    newer = rng.standard_normal((SHARDS, 2)).astype(np.float32)
    keys = jnp.broadcast_to(
        keys_of(2 * (TIMES + 1)).reshape(2, -1), (SHARDS, 2, TIMES + 1)
    )
    drawn = over_devices(drawn_together, backend)(priority, usable, newer, keys)
    return priority, usable, jax.tree.map(np.asarray, drawn)


@pytest.mark.parametrize("is_stale", [False, True])
@pytest.mark.parametrize("backend", ["pmap"])
def test_devices_draw_from_their_shards_as_from_one_replay(backend, is_stale):
    priority, usable, drawn = on_devices(backend)
    draws = drawn[int(is_stale)]
    for device in range(1, SHARDS):
        jax.tree.map(
            lambda x, d=device: np.testing.assert_array_equal(x[d], x[0]), draws
        )
    shard, slot, told, is_valid = jax.tree.map(lambda x: x[0], tuple(draws))
    items = [(d, s) for d in range(SHARDS) for s in range(SHARD) if usable[d, s]]
    items.sort(key=lambda x: (-priority[x], x))
    if is_stale:  # The newest step of every shard, then the one before.
        items = [(d, s) for s in (1, 0) for d in range(SHARDS)] + items
    shares = np.zeros((SHARDS, SHARD))
    for rank, item in enumerate(items):
        shares[item] += (1.0 + rank) ** -0.7
    shares /= shares.sum()
    np.testing.assert_allclose(told, shares[shard, slot], rtol=1e-5)
    assert np.all(is_valid)
    expect_shares((shard * SHARD + slot).ravel(), shares.ravel())


# ----------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exponent": -0.1}, "exponent -0.1 must be at least 0"),
        ({"sort_period": -1}, "sort_period -1 must be at least 0"),
        ({"num_shards": 0}, "num_shards 0 must be at least 1"),
        ({"spread": "even"}, "spread 'even' must be one of stratified"),
        (
            {"eviction": lambda priority, age: -priority, "sort_period": 2},
            "sort_period 2 must be 1",
        ),
    ],
)
def test_an_impossible_replay_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        replay.rank_based(ring.items(4), **options)


def test_another_number_of_devices_is_refused():
    of = replay.rank_based(ring.items(4), num_shards=2)
    with pytest.raises(ValueError, match="num_shards 2 must be that of the devices, 1"):
        of.sample(of.init(jnp.float32(0)), jax.random.key(0), batch_size=1)
