"""Whole replays under random operations, against a twin that keeps plain lists."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fps_jax.replay import limiter, priorities, ranks, replay, ring
from fps_jax.types import Step

CAPACITY, STREAMS, N_STEP, BATCH, DECAY = 12, 2, 2, 6, 0.9
NOTES = ("last_td_error", "times_replayed", "last_replayed")


class Compiled:
    """The functions of a replay, compiled."""

    def __init__(self, of):
        self.of = of
        self.add, self.update = jax.jit(of.add), jax.jit(of.update)
        self.set_exponent = jax.jit(of.set_exponent)
        self.reprioritize = jax.jit(of.reprioritize, static_argnums=1)
        self.sample = jax.jit(of.sample, static_argnames="batch_size")


def steps(rng, count, first=0):
    """Steps that say which ones they are; some end, some can't be used."""
    number = np.arange(first, first + count)
    return Step(
        observation=np.float32(number),
        action=np.int32(number),
        reward=np.ones(count, np.float32),
        terminated=rng.random(count) < 0.15,
        truncated=rng.random(count) < 0.15,
        is_valid=rng.random(count) < 0.8,
        behaviour={},
    )


EXAMPLE = jax.tree.map(lambda x: x[0], steps(np.random.default_rng(0), 1))


@functools.cache
def of_steps():
    storage = ring.transitions(CAPACITY, num_streams=STREAMS, n_step=N_STEP)
    return Compiled(
        replay.proportional(storage, exponent=0.7, notes=NOTES, decay=DECAY)
    )


@functools.cache
def of_items(name, capacity=8, **options):
    return Compiled(getattr(replay, name)(ring.items(capacity), **options))


class Twin:
    """What `of_steps` should be, an item a dict."""

    def __init__(self):
        self.slots, self.head, self.added = [None] * CAPACITY, 0, 0
        self.exponent, self.maximum, self.updates, self.rejected = 0.7, 1.0, 0, 0

    def add(self, batch, given):
        is_good = lambda priority: np.isfinite(priority) and priority >= 0
        seen = [] if given is None else [float(p) for p in given if is_good(p)]
        before, self.maximum = self.maximum, max([self.maximum, *seen])
        for i, number in enumerate(batch.action):
            priority = before
            if given is not None and is_good(given[i]):
                priority = float(given[i])
            elif given is not None:
                self.rejected += 1
            self.slots[self.head] = {
                "number": number,
                "serial": self.added,
                "priority": priority,
                "is_valid": batch.is_valid[i],
                "ends": batch.terminated[i] or batch.truncated[i],
                "last_td_error": np.nan,
                "times_replayed": 0,
                "last_replayed": self.updates,
            }
            self.head, self.added = (self.head + 1) % CAPACITY, self.added + 1

    def is_usable(self, slot):
        item = self.slots[slot]
        if item is None or not item["is_valid"]:
            return False
        return self.added - item["serial"] > N_STEP * STREAMS

    def update(self, ticket, priority, td_error, boost):
        self.updates += 1
        self.maximum *= DECAY
        there = []
        for i, slot in enumerate(np.asarray(ticket.slot)):
            is_good = np.isfinite(priority[i]) and priority[i] >= 0
            if ticket.is_valid[i] and is_good:
                self.maximum = max(self.maximum, float(priority[i]))
            item = self.slots[slot]
            if not ticket.is_valid[i] or item["serial"] != ticket.serial[i]:
                continue
            there.append((i, slot))
            item["times_replayed"] += 1
            item["last_td_error"] = td_error[i]
            item["last_replayed"] = self.updates
            if is_good:
                item["priority"] = float(priority[i])
            else:
                self.rejected += 1
        if boost is not None:
            self.boost(there, boost)

    def boost(self, there, boost):
        changed = {}
        for i, slot in there:
            before = (slot - STREAMS) % CAPACITY
            item = self.slots[before]
            if item is None or not self.is_usable(before) or item["ends"]:
                continue
            if item["serial"] == self.slots[slot]["serial"] - STREAMS:
                changed[before] = item["priority"] + float(boost[i])
        for slot, priority in changed.items():
            self.slots[slot]["priority"] = priority

    def expect(self, state):
        state = jax.device_get(state)
        margin = (len(state.is_usable) - CAPACITY) // 2
        rows = lambda x: np.asarray(x[margin : margin + CAPACITY])
        usable = [self.is_usable(slot) for slot in range(CAPACITY)]
        np.testing.assert_array_equal(rows(state.is_usable), usable)
        assert state.num_usable == sum(usable)
        assert state.num_rejected == self.rejected
        assert state.num_updates == self.updates
        weights = np.asarray(state.sampler.weights).reshape(-1)[:CAPACITY]
        expected = [
            self.slots[slot]["priority"] ** self.exponent if usable[slot] else 0.0
            for slot in range(CAPACITY)
        ]
        np.testing.assert_allclose(weights, expected, rtol=2e-4)
        filled = [s for s in range(CAPACITY) if self.slots[s] is not None]
        for name in NOTES:
            noted = [self.slots[s][name] for s in filled]
            np.testing.assert_allclose(rows(state.notes[name])[filled], noted)
        return expected


def random_priorities(rng):
    priority = np.abs(rng.standard_cauchy(BATCH)).astype(np.float32)
    bad = rng.random(BATCH) < 0.2
    priority[bad] = rng.choice(np.float32([np.nan, np.inf, -1, -np.inf]), bad.sum())
    return priority


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.integers(0, 10**6))
def test_random_operations_do_what_they_do_to_lists(seed):
    this, twin, rng = of_steps(), Twin(), np.random.default_rng(seed)
    state, tickets = this.of.init(EXAMPLE), []
    for number in range(18):
        operation = rng.choice(["add", "add", "sample", "update", "update", "other"])
        if operation == "add" or not tickets:
            batch = steps(rng, STREAMS * int(rng.integers(1, 3)), twin.added)
            given = random_priorities(rng)[: len(batch.reward)]
            given = given if rng.random() < 0.5 else None
            state = this.add(state, batch, given)
            twin.add(batch, given)
        if operation == "sample" or not tickets:
            key = jax.random.key(seed * 100 + number)
            state, sample = this.sample(state, key, batch_size=BATCH, discount=0.9)
            expect_sample(twin, state, sample)
            tickets.append(sample.ticket)
        elif operation == "update":
            ticket = tickets[rng.integers(len(tickets))]
            priority = random_priorities(rng)
            td_error = rng.standard_normal(BATCH).astype(np.float32)
            boost = np.abs(td_error) if rng.random() < 0.5 else None
            state = this.update(
                state, ticket, priority, td_error=td_error, predecessor_boost=boost
            )
            twin.update(ticket, priority, td_error, boost)
            np.testing.assert_allclose(state.maximum, twin.maximum, rtol=1e-5)
        elif operation == "other" and rng.random() < 0.5:
            twin.exponent = float(rng.choice([0.4, 0.7, 1.0]))
            state = this.set_exponent(state, np.float32(twin.exponent))
        elif operation == "other":
            state = this.reprioritize(state, older_is_more)
            for item in filter(None, twin.slots):
                if twin.is_usable(twin.slots.index(item)):
                    item["priority"] += 0.1 * (twin.added - item["serial"])
        twin.expect(state)


def older_is_more(priority, age, notes):
    del notes
    return priority + 0.1 * age.astype(jnp.float32)


def expect_sample(twin, state, sample):
    """It was drawn as it says, and weighs what it should."""
    weights = np.asarray(twin.expect(state))
    is_valid = np.asarray(sample.is_valid)
    assert np.all(is_valid) == (weights.sum() > 0)
    if not is_valid.any():
        np.testing.assert_array_equal(sample.importance_weights, 0)
        return
    slots = np.asarray(sample.ticket.slot)
    share = weights / weights.sum()
    np.testing.assert_allclose(sample.probability, share[slots], rtol=1e-3)
    correction = 1 / share[slots]
    np.testing.assert_allclose(
        sample.importance_weights, correction / correction.max(), rtol=1e-3
    )
    numbers = [twin.slots[slot]["number"] for slot in slots]
    np.testing.assert_array_equal(sample.items.action, numbers)
    np.testing.assert_array_equal(
        sample.notes["times_replayed"],
        [twin.slots[slot]["times_replayed"] for slot in slots],
    )


# ------------------------------------------------------------------------ what is drawn

NAMES = ("uniform", "proportional", "rank_based", "greedy")


def filled(name, priority, **options):
    """A replay with items 0 ... n - 1 of these priorities."""
    this = of_items(name, **options)
    priority = jnp.asarray(priority, jnp.float32)
    state = this.of.init(jnp.int32(0))
    state = this.add(state, jnp.arange(priority.size, dtype=jnp.int32), priority)
    return this, state


@pytest.mark.parametrize("name", ["uniform", "proportional", "rank_based"])
def test_a_whole_correction_makes_any_mean_that_of_all_items(name):
    # E[w f] = sum_i P_i (1 / (n P_i)) f_i, for every f: w P must be the same for all.
    this, state = filled(name, [1, 5, 0.1, 2, 8, 3], normalize="none")
    _, sample = this.sample(state, jax.random.key(0), batch_size=64)
    product = sample.importance_weights * sample.probability
    np.testing.assert_allclose(product, 1 / 6, rtol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_without_correction_all_weights_are_1(name):
    this, state = filled(name, [1, 5, 0.1, 2])
    _, sample = this.sample(
        state, jax.random.key(0), batch_size=4, importance_exponent=0.0
    )
    np.testing.assert_array_equal(sample.importance_weights, 1)


def test_the_buffers_largest_weight_is_not_the_batchs():
    priority = [1, 1, 1, 0.01]
    this, state = filled("proportional", priority, normalize="buffer", exponent=1.0)
    _, sample = this.sample(state, jax.random.key(0), batch_size=2)
    np.testing.assert_allclose(sample.importance_weights, 0.01, rtol=1e-5)
    this, state = filled("proportional", priority, exponent=1.0)
    _, sample = this.sample(state, jax.random.key(0), batch_size=2)
    np.testing.assert_allclose(sample.importance_weights, 1, rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_replay_draws_nothing_that_counts(name):
    this = of_items(name)
    state = this.of.init(jnp.int32(0))
    assert not this.of.can_sample(state, 3)
    state, sample = this.sample(state, jax.random.key(0), batch_size=3)
    assert not sample.is_valid.any()
    np.testing.assert_array_equal(sample.importance_weights, 0)
    state = this.update(state, sample.ticket, jnp.full(3, 7.0))
    state = this.add(state, jnp.arange(2, dtype=jnp.int32))
    assert this.of.can_sample(state, 3)


# -------------------------------------------------------------------- what new ones get


@pytest.mark.parametrize(
    ("new_priority", "expected"), [("running", 9.0), ("highest", 3.0), (0.5, 0.5)]
)
def test_new_items_get_the_priority_that_was_asked_for(new_priority, expected):
    this, state = filled(
        "proportional", [2.0, 3.0], new_priority=new_priority, exponent=0.5
    )
    _, sample = this.sample(state, jax.random.key(0), batch_size=1)
    # 9 is seen, and gone again.
    for seen in (9.0, 1.0):
        state = this.update(state, sample.ticket, jnp.array([seen]))
    state = this.update(state, sample.ticket, jnp.array([3.0]))
    state = this.add(state, jnp.array([5], jnp.int32))
    weight = state.sampler.weights.reshape(-1)[2]
    np.testing.assert_allclose(weight, expected**0.5, rtol=1e-5)


def test_the_highest_priority_of_an_empty_buffer_is_1():
    this = of_items("proportional", new_priority="highest")
    state = this.add(this.of.init(jnp.int32(0)), jnp.zeros(1, jnp.int32))
    _, sample = this.sample(state, jax.random.key(0), batch_size=1)
    np.testing.assert_array_equal(sample.probability, 1)


def test_what_is_evicted_is_what_is_easy_and_old():
    score = functools.partial(priorities.eviction_score, age_coef=0.0)
    priority = [5, 1, 4, 3, 2, 9, 8, 7]
    kept = lambda this, state: set(
        np.asarray(this.sample(state, jax.random.key(0), batch_size=400)[1].items)
    )
    this, state = filled("proportional", priority, eviction=score, exponent=1.0)
    state = this.add(state, jnp.array([100, 101], jnp.int32), jnp.array([6.0, 6.0]))
    np.testing.assert_array_equal(state.cursor.size, 8)
    assert kept(this, state) == {0, 2, 3, 5, 6, 7, 100, 101}
    old = functools.partial(priorities.eviction_score, age_coef=1e6)
    this, state = filled("proportional", priority, eviction=old, exponent=1.0)
    state = this.add(state, jnp.array([100, 101], jnp.int32))
    assert kept(this, state) == {2, 3, 4, 5, 6, 7, 100, 101}


# ------------------------------------------------------------------------------- limits


def test_the_limiter_counts_what_is_added_and_drawn():
    this = of_items("uniform", limiter=limiter.limiter(2.0, min_size=2, tolerance=4.0))
    state = this.of.init(jnp.int32(0))
    assert this.of.can_add(state) & ~this.of.can_sample(state, 1)
    state = this.add(state, jnp.arange(3, dtype=jnp.int32))
    assert state.balance == 2.0
    assert this.of.can_sample(state, 6) & ~this.of.can_sample(state, 7)
    state, _ = this.sample(state, jax.random.key(0), batch_size=6)
    assert state.balance == -4.0
    assert ~this.of.can_sample(state, 1)
    state = this.add(state, jnp.arange(5, dtype=jnp.int32))
    assert state.balance == 6.0
    assert ~this.of.can_add(state)


def test_steps_that_all_wait_do_not_keep_others_out():
    storage = ring.transitions(12, num_streams=4)
    of = replay.uniform(storage, limiter=limiter.limiter(8.0, tolerance=4.0))
    batch = steps(np.random.default_rng(0), 4)._replace(is_valid=np.ones(4, bool))
    add = jax.jit(of.add)
    state = add(of.init(EXAMPLE), batch)
    assert state.balance > 4.0
    assert of.can_add(state) & ~of.can_sample(state, 1)
    state = add(state, batch)
    assert ~of.can_add(state) & of.can_sample(state, 1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda of: of(normalize="all"), "normalize 'all' must be one of"),
        (lambda of: of(new_priority="old"), "new_priority 'old' must be one of"),
        (lambda of: of(new_priority=0.0), "new_priority 0.0 must be above 0"),
        (lambda of: of(decay=1.5), "decay 1.5 must be in"),
        (lambda of: of(notes=("age",)), "notes 'age' must be one of"),
        (lambda of: of(exponent=-1.0), "exponent -1.0 must be at least 0"),
        (lambda of: of(spread="even"), "spread 'even' must be one of"),
        (lambda of: of(uniform_fraction=2.0), "uniform_fraction 2.0 must be in"),
        (
            lambda of: of(spread="without_replacement", uniform_fraction=0.5),
            "uniform_fraction 0.5 must be 0",
        ),
    ],
)
def test_impossible_options_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make(functools.partial(replay.proportional, ring.items(4)))


def test_options_that_do_not_fit_are_refused():
    oldest = lambda priority, age: age.astype(jnp.float32)
    with pytest.raises(ValueError, match="eviction must be None"):
        replay.uniform(ring.transitions(4), eviction=oldest)
    with pytest.raises(ValueError, match="sort_period 3 must be 1 with eviction"):
        replay.rank_based(ring.items(3000), eviction=oldest)
    ranked = ranks.rank_based(4, exponent=0.7, largest_write=4, sort_period=0)
    with pytest.raises(ValueError, match="sort_period 0 must be 1 with eviction"):
        replay.replay(ring.items(4), ranked, eviction=oldest)
    with pytest.raises(ValueError, match=r"min_size 5 must be in \[1, 4\]"):
        replay.uniform(ring.items(4), limiter=limiter.limiter(1.0, min_size=5))
    with pytest.raises(TypeError, match="alpha"):
        replay.proportional(ring.items(4), alpha=0.5)
    this, state = filled("greedy", [1, 2])
    with pytest.raises(ValueError, match=r"exponent 1\.0 must be None"):
        this.of.set_exponent(state, 1.0)
    with pytest.raises(ValueError, match="batch_size 0 must be at least 1"):
        this.of.sample(state, jax.random.key(0), batch_size=0)
    with pytest.raises(ValueError, match="largest_add, of 9 must be in"):
        this.of.add(state, jnp.zeros(9, jnp.int32))
    this, state = filled("greedy", [1, 2], notes=NOTES)
    _, sample = this.sample(state, jax.random.key(0), batch_size=1)
    with pytest.raises(ValueError, match="td_error None must be given"):
        this.of.update(state, sample.ticket, jnp.ones(1))


# ------------------------------------------------------------------------ how it is run


def turn(this, state, inputs):
    """Adds, draws, and says that what was drawn is worth its number."""
    items, seed = inputs
    state = this.of.add(state, items)
    state, sample = this.of.sample(state, jax.random.key(seed), batch_size=4)
    worth = 1.0 + sample.items.astype(jnp.float32)
    return this.of.update(state, sample.ticket, worth), sample.items


@pytest.mark.parametrize("name", ["proportional", "rank_based"])
def test_a_scan_and_a_population_do_what_single_calls_do(name):
    this = of_items(name)
    step = functools.partial(turn, this)
    items = jnp.arange(30, dtype=jnp.int32).reshape(2, 5, 3)
    seeds = jnp.arange(10).reshape(2, 5)
    states = jax.vmap(lambda _: this.of.init(jnp.int32(0)))(jnp.arange(2))
    run = jax.vmap(lambda *inputs: jax.lax.scan(step, inputs[0], inputs[1:]))
    together, drawn = jax.jit(run)(states, items, seeds)
    compiled_step = jax.jit(step)
    for member in range(2):
        state = this.of.init(jnp.int32(0))
        for number in range(5):
            inputs = items[member, number], seeds[member, number]
            state, alone = compiled_step(state, inputs)
            np.testing.assert_array_equal(drawn[member, number], alone)
        mine = jax.tree.map(lambda x, m=member: x[m], together)
        jax.tree.map(np.testing.assert_array_equal, mine, state)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [1, 32])
def test_nothing_of_the_buffers_size_is_allocated(name, size):
    capacity = 2**14
    options = {
        # All the trees that there may be, and no sorting.
        "proportional": {"normalize": "buffer", "new_priority": "highest"},
        "rank_based": {"sort_period": 0},
    }.get(name, {})
    this = of_items(name, capacity, notes=NOTES, **options)
    state = jax.eval_shape(this.of.init, jnp.zeros(8))
    key = jax.eval_shape(lambda: jax.random.key(0))
    draw = functools.partial(this.of.sample, batch_size=size)
    items, priority = jnp.zeros((size, 8)), jnp.zeros(size)
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))

    def turn(state, items, key, priority):
        """What a learner does, in one program."""
        state, sample = draw(this.of.add(state, items), key)
        return this.of.update(state, sample.ticket, priority, td_error=priority), sample

    for function, inputs in (
        (this.of.add, (items, priority)),
        (turn, (items, key, priority)),
    ):
        compiled = jax.jit(function, donate_argnums=0).lower(state, *inputs).compile()
        memory = compiled.memory_analysis()
        assert memory.temp_size_in_bytes < capacity  # As a byte a slot would be.
        assert memory.alias_size_in_bytes >= 0.99 * held


@pytest.mark.parametrize("name", NAMES)
def test_a_state_made_outside_of_a_program_can_be_donated(name):
    this = of_items(name, notes=NOTES)
    add = jax.jit(this.of.add, donate_argnums=0)
    state = add(this.of.init(jnp.int32(0)), jnp.zeros(2, jnp.int32))
    assert state.num_usable == 2
