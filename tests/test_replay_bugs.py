"""What went wrong in other replays: each test is named for a public bug.

The comments name the projects and their issues.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fps_jax.replay import priorities, replay, ring
from fps_jax.replay.states import Ticket
from fps_jax.replay.sum_tree import SPREADS, find, spread_targets, sum_tree

KINDS = ("uniform", "proportional", "rank_based", "greedy")
HIGHEST = {"new_priority": "highest"}


class Compiled:
    """A replay of whole numbers, compiled; item i is the number i."""

    def __init__(self, kind="proportional", capacity=8, **options):
        if kind in ("proportional", "rank_based"):
            options = {"exponent": 1.0} | options
        if kind in ("proportional", "greedy"):
            options = {"fan_out": 4} | options  # Two levels.
        self.of = getattr(replay, kind)(ring.items(capacity), **options)
        self.add, self.update, self.set_exponent = map(
            jax.jit, (self.of.add, self.of.update, self.of.set_exponent)
        )
        self.sample = jax.jit(self.of.sample, static_argnames="batch_size")
        self.empty = self.of.init(jnp.int32(0))

    def empty_with(self, exponent):
        """A state with another exponent than the functions were made with."""
        sampler = self.empty.sampler._replace(exponent=jnp.float32(exponent))
        return self.empty._replace(sampler=sampler)

    def put(self, state, *numbers):
        """The state after these items, one at a time, of no known priority."""
        for i in numbers:
            state = self.add(state, jnp.full(1, i, jnp.int32))
        return state

    def holding(self, *priority, state=None):
        """The state after items of these priorities, one at a time."""
        state = state or self.empty
        for i, p in enumerate(priority):
            state = self.add(state, jnp.full(1, i, jnp.int32), jnp.full(1, p, float))
        return state

    def draws(self, state, seed=0, size=64, beta=1.0):
        given = {"batch_size": size, "importance_exponent": beta}
        return self.sample(state, jax.random.key(seed), **given)[1]

    def told(self, state, slots, priority):
        """The state after an update of slots that hold the items of their numbers."""
        rows = np.zeros((3, 8), np.float32)  # Some more, not valid.
        rows[:, : len(slots)] = slots, priority, np.ones(len(slots))
        of = ticket(rows[0].astype(np.int32))
        of = of._replace(is_valid=jnp.array(rows[2] > 0))
        return self.update(state, of, jnp.array(rows[1]))


compiled = functools.cache(Compiled)
expect_same = functools.partial(jax.tree.map, np.testing.assert_array_equal)


def ticket(slots):
    """Of slots that hold the items of their numbers."""
    slots = jnp.asarray(slots)
    is_valid = jnp.ones(slots.shape, bool)
    return Ticket(jnp.zeros_like(slots), slots, slots.astype(jnp.uint32), is_valid)


def draw(of, tree, key, size, spread="stratified"):
    """Leaves in proportion to their weights."""
    return find(of, tree, *spread_targets(key, of.root(tree), size, spread))


def weights(state, count=8):
    """Leaves of the sum-tree."""
    return np.asarray(state.sampler.weights).reshape(-1)[:count]


# ------------------------------------------------------------------- rounding and draws

N, FULL = 500, 300


@functools.cache
def worn():
    """After 1000 updates by heavy-tailed priorities, a third of them 0."""
    this = compiled(capacity=N, fan_out=16)
    state = this.add(this.empty, jnp.arange(FULL))

    def step(state, key):
        key_slot, key_size, key_zero = jax.random.split(key, 3)
        slots = jax.random.randint(key_slot, (64,), 0, FULL)
        priority = jnp.exp(6 * jax.random.normal(key_size, (64,)))
        is_above_0 = jax.random.bernoulli(key_zero, 0.7, (64,))
        priority = jnp.where(is_above_0, priority, 0.0)
        return this.of.update(state, ticket(slots), priority), None

    keys = jax.random.split(jax.random.key(0), 1000)
    return jax.jit(lambda state: jax.lax.scan(step, state, keys)[0])(state)


def test_the_root_does_not_drift_from_its_leaves():
    # flashbax #52.
    leaves = weights(worn(), N)
    root, total = sum_tree(N).root(worn().sampler.weights), leaves.sum(dtype=float)
    np.testing.assert_allclose(root, total, rtol=1e-6)


def test_no_slot_beyond_the_end_is_drawn_and_its_probability_is_its_own():
    # pytorch/rl #2230, #2239 and #2241: the index was clamped, its weight was not.
    this, leaves = compiled(capacity=N, fan_out=16), weights(worn(), N)
    sample = this.draws(worn(), size=8192)
    slots = np.asarray(sample.ticket.slot)
    np.testing.assert_array_equal(sample.items, slots)
    assert np.all(slots < FULL)
    assert np.all(leaves[slots] > 0)
    expected = leaves[slots] / leaves.sum(dtype=float)
    np.testing.assert_allclose(sample.probability, expected, rtol=1e-5)


def test_a_priority_of_0_is_not_drawn_and_does_not_take_the_others_weights():
    # ReinforcementLearningTrajectories.jl #59, ReinforcementLearningCore.jl #83.
    this = compiled()
    sample = this.draws(this.holding(0, 3, 0, 0, 1, 0, 0))
    assert set(np.asarray(sample.items).tolist()) == {1, 4}
    expected = np.where(sample.items == 4, 1, 1 / 3)
    np.testing.assert_allclose(sample.importance_weights, expected, rtol=1e-6)
    found = priorities.importance_weights(
        jnp.array([0.0, 0.25, 0.5]), 4, exponent=1.0, is_valid=jnp.ones(3, bool)
    )
    np.testing.assert_allclose(found, [0, 1, 0.5], rtol=1e-6)


def test_sums_need_not_be_initialised_again():
    # google-deepmind/reverb #43: "approximation error 0.000137 > 0.0001".
    rebuilt = sum_tree(N).build(jnp.array(weights(worn(), N)))
    expect_same(worn().sampler.weights, rebuilt)


def test_what_is_left_after_large_priorities_is_not_their_rounding():
    # rlpyt, sum_tree.py: subtraction left more than the remaining sum.
    this = compiled()
    state = this.told(this.holding(*[1] * 8), range(8), [1e25] * 7 + [1e-3])
    state = this.told(state, range(8), [0] * 7 + [1e-3])
    assert sum_tree(8, fan_out=4).root(state.sampler.weights) == np.float32(1e-3)
    np.testing.assert_array_equal(this.draws(state).items, 7)


def test_what_cannot_be_drawn_is_not_drawn_from_many_either():
    # jax-ml/jax #25498: cumulative sums in float32, some of which fall.
    of, rng = sum_tree(2**18), np.random.default_rng(0)
    leaves = np.abs(rng.standard_cauchy(2**18)).astype(np.float32)
    leaves[rng.random(2**18) < 0.6] = 0
    one = lambda key: draw(of, of.build(jnp.array(leaves)), key, 2**16)
    assert np.all(leaves[jax.jit(one)(jax.random.key(1))] > 0)


@pytest.mark.parametrize("spread", SPREADS)
def test_none_of_ten_million_items_is_out_of_reach(spread):
    # jax-ml/jax #26974: a uniform float32 is one of 2^23 numbers.
    total, size = 1e7, 20_000
    targets = spread_targets(jax.random.key(2), jnp.float32(total), size, spread)
    coarse, fine = (np.asarray(x, np.float64) for x in targets)
    between = (coarse + fine) / (total * 2.0**-23) % 1
    counts = np.bincount((16 * between).astype(int), minlength=16)
    np.testing.assert_allclose(counts, size / 16, atol=5 * np.sqrt(size / 16))


def test_what_is_finer_than_a_float_is_not_lost_on_the_way_down():
    # jax-ml/jax #26974: leaves of a quarter, behind one of nearly 2^24.
    of, large = sum_tree(32), 2.0**24 - 1.0
    tree = of.build(jnp.zeros(32).at[0].set(large).at[16:20].set(0.25))
    fine = jnp.array([0.1, 0.3, 0.6, 0.8])
    search = jax.jit(functools.partial(find, of))
    found = search(tree, jnp.full(4, large), fine)
    np.testing.assert_array_equal(found, [16, 17, 18, 19])


@pytest.mark.parametrize("spread", SPREADS)
def test_a_random_number_that_rounds_to_1_does_not_fall_off_the_end(
    spread, monkeypatch
):
    # tensorflow #51465: uniform(low, high) may be high.
    monkeypatch.setattr(jax.random, "uniform", lambda key, shape=(): jnp.ones(shape))
    of = sum_tree(8, fan_out=4)
    tree = of.build(jnp.array([0.1, 0.7, 0.3, 0, 0.2, 0, 0, 0]))
    slots = draw(of, tree, jax.random.key(0), 3, spread=spread)
    assert slots[-1] == 4
    assert np.all(slots <= 4)


def test_an_odd_capacity_keeps_the_order_and_ends_with_the_last_leaf():
    # vwxyzjn/cleanrl #546 and #557, Kaixhin/Rainbow #79 and #76.
    this = compiled(capacity=3, spread="systematic", fan_out=2)
    sample = this.draws(this.holding(1, 2, 3), size=6)
    np.testing.assert_array_equal(sample.items, [0, 1, 1, 2, 2, 2])
    for capacity in (3, 5, 7):
        of = sum_tree(capacity, fan_out=2)
        search = jax.jit(functools.partial(find, of))
        found = search(of.build(jnp.ones(capacity)), jnp.arange(9.0))
        np.testing.assert_array_equal(found, np.minimum(np.arange(9), capacity - 1))


@pytest.mark.parametrize("kind", KINDS)
def test_a_single_item_is_drawn_and_so_is_the_newest(kind):
    # openai/baselines #170 and #171; ptan #21: only slot 0 was, until it was full.
    this = compiled(kind)
    state = this.empty
    for i in range(3):
        state = this.put(state, i)
        sample = this.draws(state)
        drawn = np.asarray(sample.items)[sample.is_valid]
        assert len(drawn) == (i + 1 if kind == "greedy" else 64)  # Each slot once.
        assert set(drawn.tolist()) == set(range(i + 1))


@pytest.mark.parametrize("kind", KINDS)
def test_a_capacity_of_a_power_of_two_can_be_full_and_overwritten(kind):
    # ray #7180: out of range when full. dopamine: out of bounds at one more than that.
    this = compiled(kind)
    state = this.put(this.empty, *range(7))
    for newest in range(7, 26):
        state = this.put(state, newest)
        sample = this.draws(state)
        drawn = np.asarray(sample.items)[sample.is_valid]
        assert set(drawn.tolist()) == set(range(newest - 7, newest + 1))
        np.testing.assert_array_equal(drawn % 8, sample.ticket.slot[sample.is_valid])
    assert state.num_usable == state.cursor.size == 8


# ------------------------------------------------------- priorities and their exponents


def test_new_priorities_are_not_whole_numbers_because_the_slots_are():
    # flashbax #58: full_like(indices, 1.9).
    this = compiled()
    state = this.put(this.told(this.holding(1), [0], [1.9]), 1)
    np.testing.assert_array_equal(weights(state, 2), np.float32([1.9, 1.9]))


@pytest.mark.parametrize("new_priority", ["running", "highest"])
def test_the_exponent_is_not_applied_twice_to_new_priorities(new_priority):
    # pytorch/rl #3925 and #2211; dopamine's agents.
    this = compiled(**({} if new_priority == "running" else HIGHEST))
    state = this.holding(1, 1, state=this.empty_with(0.5))
    state = this.put(this.told(state, [0, 1], [16, 4]), 2, 3)
    np.testing.assert_allclose(weights(state, 4), [4, 2, 4, 4], rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, 100), ({"decay": 0.5}, 50), (HIGHEST, 0.25), ({"new_priority": 2.0}, 2)],
)
def test_one_early_outlier_is_not_forced_on_all_that_is_new(options, expected):
    # pytorch/rl #2210, #2215 and #2242, Kaixhin/Rainbow #13, ray #11750, rlpyt #102.
    this = compiled(**options)
    state = this.told(this.holding(1, 1), [0, 1], [100, 0.25])
    state = this.put(this.told(state, [0, 1], [0.25, 0.25]), 2)
    assert weights(state)[2] == expected


@pytest.mark.parametrize("new_priority", ["running", "highest"])
def test_another_exponent_leaves_no_weight_in_the_old_one(new_priority):
    # pytorch/rl #4014.
    this = compiled(**({} if new_priority == "running" else HIGHEST))
    state = this.holding(16, 4, 0, 9, state=this.empty_with(0.5))
    np.testing.assert_allclose(weights(state, 4), [4, 2, 0, 3], rtol=1e-6)
    state = this.set_exponent(state, jnp.float32(2.0))
    np.testing.assert_allclose(weights(state, 4), [256, 16, 0, 81], rtol=1e-5)
    # The state goes by its own exponent, whatever the functions were made with.
    state = this.put(this.told(state, [1], [3]), 4)
    np.testing.assert_allclose(weights(state, 5), [256, 9, 0, 81, 16**2], rtol=1e-5)


@pytest.mark.parametrize("kind", ["proportional", "rank_based"])
def test_a_restored_replay_has_not_forgotten_its_maximum(kind, tmp_path):
    # dopamine: 50.0 became 1.0. All the rest goes on as well, to the bit.
    this = compiled(kind)
    state = this.told(this.holding(*range(6)), [1, 2, 3], [50, np.nan, 7])
    leaves, structure = jax.tree.flatten(state)
    np.savez(tmp_path / "state.npz", *leaves)
    with np.load(tmp_path / "state.npz") as file:
        restored = jax.tree.unflatten(structure, map(jnp.asarray, file.values()))
    assert restored.maximum == 50
    assert restored.num_rejected == 1
    for _ in range(3):
        expect_same(this.draws(state), this.draws(restored))
        state, restored = (
            this.put(this.told(x, [0, 5], [3, 2]), 6, 7, 8) for x in (state, restored)
        )
        expect_same(state, restored)


@pytest.mark.parametrize(
    ("normalize", "uniform_fraction"), [("batch", 0), ("buffer", 0), ("buffer", 0.5)]
)
def test_the_batch_s_largest_weight_is_not_mistaken_for_the_buffer_s(
    normalize, uniform_fraction
):
    # chainerrl #570, openai/baselines #1131, google-research/seed_rl #3.
    options = {"uniform_fraction": uniform_fraction} if uniform_fraction else {}
    options |= {} if normalize == "batch" else {"normalize": normalize}
    this = compiled(**options)
    raw = np.array([1e-6, 4, 9, 16, 1, 4, 1, 25])
    for exponent in (1.0, 0.5):
        # tianshou compared p^alpha with a smallest p.
        state = this.holding(*raw, state=this.empty_with(exponent))
        sample = this.draws(state, beta=0.5)
        share = raw**exponent / np.sum(raw**exponent)
        share = uniform_fraction / 8 + (1 - uniform_fraction) * share
        p = share[np.asarray(sample.items)]
        np.testing.assert_allclose(sample.probability, p, rtol=1e-5)
        least = p.min() if normalize == "batch" else share.min()
        expected = (p / least) ** -0.5
        np.testing.assert_allclose(sample.importance_weights, expected, rtol=1e-4)
        assert uniform_fraction or p.min() > 2 * share.min()  # They differ.


@pytest.mark.parametrize("junk", [np.nan, np.inf, -np.inf, -1.0])
def test_a_nan_does_not_enter_the_tree(junk):
    # RL-with-tensorflow #54, muzero-general #111, rainbow-is-all-you-need #17.
    this = compiled()
    state = this.told(this.holding(1, 2, 3), [0, 1, 2], [4, junk, 6])
    np.testing.assert_array_equal(weights(state, 3), [4, 2, 6])
    assert state.num_rejected == 1
    assert state.maximum == 6
    state = this.holding(junk, 5, state=state)
    np.testing.assert_array_equal(weights(state, 5), [4, 2, 6, 6, 5])
    assert state.num_rejected == 2


EXTREMES = [0, 1e-45, 1e-38, 1e-30, 1e-20, 1, 1e20, 3e38]


@pytest.mark.parametrize(
    ("kind", "options"),
    [(k, {}) for k in KINDS] + [("proportional", {"normalize": "buffer"})],
)
def test_no_state_makes_a_weight_that_is_not_finite(kind, options):
    # Stoix and acme: (1 / p)^beta / max is NaN where a p is 0, and 0 elsewhere.
    this = compiled(kind, **options)
    for priority in (EXTREMES, [0] * 8, [3e38] * 8, [1e-45] * 8):
        sample = this.draws(this.holding(*priority))
        found = np.asarray(sample.importance_weights)
        assert np.all(np.isfinite(found))
        assert np.all(np.isfinite(sample.probability))
        assert np.all((found == 0) | sample.is_valid)
        assert found.max() == 1 or options or not np.any(sample.is_valid)


def test_an_add_that_wraps_does_not_start_its_priorities_again():
    # cpprb: leaves became 1, 2, 1.
    this = compiled()
    four = jnp.arange(6, 10), jnp.arange(7.0, 11.0)
    state = this.add(this.holding(1, 2, 3, 4, 5, 6), *four)
    np.testing.assert_array_equal(weights(state), [9, 10, 3, 4, 5, 6, 7, 8])


@pytest.mark.parametrize("kind", KINDS)
def test_a_replay_without_anything_to_draw_says_so(kind):
    # le2333/RTRRL #57: the head of the row, for ever.
    this = compiled(kind)
    sample = this.draws(this.empty)
    assert not np.any(sample.is_valid)
    assert not np.any(sample.importance_weights)
    assert not this.of.can_sample(this.empty, 1)


def test_priorities_that_are_all_0_do_not_mean_the_first_slot_for_ever():
    # le2333/RTRRL #57 again: what is drawn alike is all that is drawn.
    this = compiled(uniform_fraction=0.5, normalize="buffer")
    state = this.holding(*[0] * 8)
    samples = [this.draws(state, seed) for seed in range(16)]
    counts = np.bincount(np.concatenate([x.items for x in samples]), minlength=8)
    np.testing.assert_allclose(counts, 128, atol=5 * np.sqrt(128))
    for sample in samples:
        np.testing.assert_allclose(sample.probability, 1 / 8, rtol=1e-6)
        np.testing.assert_allclose(sample.importance_weights, 1, rtol=1e-6)
    this = compiled()  # Without uniform draws.
    assert not np.any(this.draws(this.holding(0, 0, 0)).is_valid)


# ------------------------------------------------------------- counters and duplicates


def nearly_wrapped(this):
    """An empty replay before the third last of 2^32 items."""
    last = jnp.uint32(2**32 - 1)
    return this.empty._replace(added=last - 2, num_updates=last, num_rejected=last)


def test_a_counter_that_wraps_takes_nothing_along():
    # flashbax #48, #51 and #58: an int32 wraps after 2^31 items.
    this = compiled()
    state = this.holding(*range(1, 9), state=nearly_wrapped(this))
    old = this.draws(state).ticket
    serials = set(np.asarray(old.serial).tolist())
    assert serials == {i % 2**32 for i in range(2**32 - 3, 2**32 + 5)}
    state = this.update(this.holding(100, state=state), old, jnp.full(64, 50.0))
    np.testing.assert_array_equal(weights(state), [100] + [50] * 7)
    assert state.num_updates == 0
    ages = this.of.reprioritize(state, lambda priority, age, notes: age.astype(float))
    np.testing.assert_array_equal(weights(ages), [1, 8, 7, 6, 5, 4, 3, 2])


def test_what_is_new_stays_new_when_its_counter_wraps():
    # flashbax #48, #51 and #58, for the order of ranks.
    this = compiled("rank_based", sort_period=0)
    state = nearly_wrapped(this)
    sampler = state.sampler._replace(sorted_at=state.added)
    sample = this.draws(this.put(state._replace(sampler=sampler), *range(5)))
    rank = 5 - np.asarray(sample.items)
    expected = 1 / rank / sum(1 / k for k in range(1, 6))
    np.testing.assert_allclose(sample.probability, expected, rtol=1e-5)
    assert set(rank.tolist()) == {1, 2, 3, 4, 5}


def test_the_last_of_duplicates_counts_and_not_the_first_or_the_fastest():
    # jax-ml/jax #11655 and #12359; dopamine: the first one counts.
    this = compiled()
    state = this.holding(*[1] * 8)
    state = this.told(state, [3, 5, 3, 3, 7, 5], [9, 8, 2, 4, 6, np.nan])
    np.testing.assert_array_equal(weights(state), [1, 1, 1, 4, 1, 8, 1, 6])
