"""Four devices' shards against one big replay, and against what each of them holds."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices import AXIS, BACKENDS, over_devices
from scipy import stats

from fps_jax.replay import replay, ring
from fps_jax.types import Step

DEVICES, CAPACITY, SIZE = 4, 8, 6
NUM_ITEMS = DEVICES * CAPACITY


def priorities_of_all():
    """Of ``[D, N]`` items; the shards' sums differ a hundredfold."""
    rng = np.random.default_rng(0)
    scale = np.array([[10.0], [0.1], [1.0], [3.0]])
    return np.float32(scale * (0.1 + rng.random((DEVICES, CAPACITY))))


PRIORITIES = priorities_of_all()
EXPONENT = 0.8
SHARES = np.float64(PRIORITIES) ** EXPONENT
SHARES /= SHARES.sum()


def keys_of(*numbers):
    """One key, on every device."""
    data = [[jax.random.key_data(jax.random.key(n)) for n in numbers]] * DEVICES
    return np.array(data)


def compiled(name, backend, **options):
    """A replay of items that say which they are, and its functions over devices."""
    options = {"normalize": "none"} | options
    of = getattr(replay, name)(ring.items(CAPACITY), **options)

    def fill(priority):
        first = jax.lax.axis_index(AXIS) * CAPACITY
        items = {"number": first + jnp.arange(CAPACITY, dtype=jnp.int32)}
        items["flag"] = items["number"] % 3 == 0
        state = of.init(jax.tree.map(lambda x: x[0], items))
        return of.add(state, items, priority, axis_name=AXIS)

    def draw(state, data):
        key = jax.random.wrap_key_data(data)
        return of.sample(
            state, key, batch_size=SIZE, importance_exponent=0.5, axis_name=AXIS
        )[1]

    def draw_often(priority, data):
        return jax.lax.map(functools.partial(draw, fill(priority)), data)

    def turn(priority, data, worth):
        state = fill(priority)
        sample = draw(state, data[0])
        state = of.update(state, sample.ticket, worth, axis_name=AXIS)
        return state, sample

    over = functools.partial(over_devices, backend=backend)
    return over(fill), over(draw_often), over(turn)


OPTIONS = {
    "uniform": {},
    "proportional": {"exponent": EXPONENT},
    "rank_based": {"exponent": EXPONENT, "num_shards": DEVICES, "sort_period": 1},
    "greedy": {},
}


def shares_of(name):
    """The probability of each item, ``[D N]``."""
    if name == "proportional":
        return SHARES.reshape(-1)
    if name == "rank_based":
        rank = 1 + np.argsort(np.argsort(-PRIORITIES.reshape(-1)))
        return rank**-EXPONENT / np.sum(rank**-EXPONENT)
    return np.full(NUM_ITEMS, 1 / NUM_ITEMS)


@pytest.mark.parametrize(
    ("name", "backend"),
    [*((name, "pmap") for name in OPTIONS), ("proportional", "shard_map")],
)
def test_the_shards_draw_and_weigh_as_one_replay_would(name, backend):
    _, draw_often, _ = compiled(name, backend, **OPTIONS[name])
    times = 400
    samples = draw_often(PRIORITIES, keys_of(*range(times)))
    # Every device gets what it drew, whoever owns it.
    numbers = np.asarray(samples.items["number"])
    np.testing.assert_array_equal(samples.items["flag"], numbers % 3 == 0)
    assert samples.items["flag"].dtype == bool
    ticket = samples.ticket
    np.testing.assert_array_equal(numbers, ticket.shard * CAPACITY + ticket.slot)
    np.testing.assert_array_equal(ticket.serial, ticket.slot)
    assert np.all(samples.is_valid)
    share = shares_of(name)[numbers]
    np.testing.assert_allclose(samples.probability, share, rtol=1e-4)
    weights = (NUM_ITEMS * share) ** -0.5
    np.testing.assert_allclose(samples.importance_weights, weights, rtol=1e-4)
    if name == "greedy":
        best = np.argsort(-PRIORITIES.reshape(-1))[: DEVICES * SIZE]
        np.testing.assert_array_equal(numbers[:, 0].reshape(-1), best)
        return
    # Stratified draws vary less than independent ones: the test is on the safe side.
    counts = np.bincount(numbers.reshape(-1), minlength=NUM_ITEMS)
    assert stats.chisquare(counts, shares_of(name) * counts.sum()).pvalue > 1e-4


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_was_drawn_is_told_to_its_owner(backend):
    *_, turn = compiled("proportional", backend, exponent=1.0)
    worth = 100.0 + np.arange(DEVICES * SIZE, dtype=np.float32).reshape(DEVICES, SIZE)
    states, samples = turn(PRIORITIES, keys_of(3), worth)
    expected = PRIORITIES.reshape(-1).copy()
    # In the order of the devices, the last of equal ones stays.
    for number, value in zip(
        np.asarray(samples.items["number"]).reshape(-1), worth.reshape(-1)
    ):
        expected[number] = value
    leaves = np.asarray(states.sampler.weights).reshape(DEVICES, -1)[:, :CAPACITY]
    np.testing.assert_allclose(leaves.reshape(-1), expected, rtol=1e-6)
    np.testing.assert_array_equal(states.maximum, worth.max())
    np.testing.assert_array_equal(states.num_rejected, 0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bad_priority_is_counted_by_its_owner_alone(backend):
    *_, turn = compiled("proportional", backend, exponent=1.0)
    worth = np.full((DEVICES, SIZE), np.nan, np.float32)
    states, samples = turn(PRIORITIES, keys_of(3), worth)
    owned = np.bincount(np.asarray(samples.ticket.shard).reshape(-1), minlength=DEVICES)
    np.testing.assert_array_equal(states.num_rejected, owned)
    np.testing.assert_array_equal(states.maximum, PRIORITIES.max())


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_may_draw_from_its_own_and_send_nothing(backend):
    options = {"exponent": EXPONENT, "exchange": False}
    _, draw_often, turn = compiled("proportional", backend, **options)
    samples = draw_often(PRIORITIES, keys_of(*range(200)))
    numbers = np.asarray(samples.items["number"])
    own = np.arange(DEVICES)[:, None, None]
    np.testing.assert_array_equal(numbers // CAPACITY, own + 0 * numbers)
    share = SHARES / SHARES.sum(axis=1, keepdims=True) / DEVICES
    share = share.reshape(-1)
    np.testing.assert_allclose(samples.probability, share[numbers], rtol=1e-4)
    weights = (NUM_ITEMS * share[numbers]) ** -0.5
    np.testing.assert_allclose(samples.importance_weights, weights, rtol=1e-4)
    counts = np.bincount(numbers.reshape(-1), minlength=NUM_ITEMS)
    assert stats.chisquare(counts, share * counts.sum()).pvalue > 1e-4
    # The devices' draws are not each other's.
    slots = np.asarray(samples.ticket.slot)
    assert not np.array_equal(slots[0], slots[1])
    states, samples = turn(PRIORITIES, keys_of(3), np.full((4, SIZE), 50, np.float32))
    leaves = np.asarray(states.sampler.weights).reshape(DEVICES, -1)
    for device, slots in enumerate(np.asarray(samples.ticket.slot)):
        is_told = np.isclose(leaves[device], 50**EXPONENT)
        np.testing.assert_array_equal(np.flatnonzero(is_told), np.unique(slots))


@pytest.mark.parametrize("normalize", ["batch", "buffer"])
def test_the_largest_weight_is_that_of_all_devices(normalize):
    _, draw_often, _ = compiled(
        "proportional", "pmap", exponent=EXPONENT, normalize=normalize
    )
    samples = draw_often(PRIORITIES, keys_of(0, 1, 2))
    share = shares_of("proportional")[np.asarray(samples.items["number"])]
    lowest = share.min(axis=(0, 2), keepdims=True)
    lowest = SHARES.min() if normalize == "buffer" else lowest
    np.testing.assert_allclose(
        samples.importance_weights, (share / lowest) ** -0.5, rtol=1e-4
    )


def test_windows_are_dealt_along_their_batch():
    of = replay.uniform(ring.windows(CAPACITY, length=3))

    def run(data):
        first = jax.lax.axis_index(AXIS) * CAPACITY
        number = first + jnp.arange(CAPACITY, dtype=jnp.int32)
        no, yes = jnp.zeros(CAPACITY, bool), jnp.ones(CAPACITY, bool)
        steps = Step(number, number, jnp.zeros(CAPACITY), no, no, yes, {})
        state = of.init(jax.tree.map(lambda x: x[0], steps))
        for half in (slice(0, 4), slice(4, 8)):
            state = of.add(state, jax.tree.map(lambda x, half=half: x[half], steps))
        key = jax.random.wrap_key_data(data)
        return of.sample(state, key, batch_size=SIZE, axis_name=AXIS)[1]

    sample = over_devices(run, "pmap")(keys_of(5)[:, 0])
    first = sample.ticket.shard * CAPACITY + sample.ticket.slot
    expected = np.asarray(first)[:, None] + np.arange(3)[None, :, None]
    np.testing.assert_array_equal(sample.items.items.action, expected)
    assert np.all(sample.items.is_valid)
    assert np.all(sample.items.items.is_valid)


def test_a_rank_based_replay_says_for_how_many_devices_it_is():
    _, draw_often, _ = compiled("rank_based", "pmap", num_shards=2)
    with pytest.raises(ValueError, match="num_shards 2 must be that of the devices, 4"):
        draw_often(PRIORITIES, keys_of(0))
    with pytest.raises(ValueError, match="spread without_replacement must be on one"):
        compiled("proportional", "pmap", spread="without_replacement")[1](
            PRIORITIES, keys_of(0)
        )


@pytest.mark.parametrize("name", ["uniform", "proportional"])
def test_a_device_copies_nothing_of_its_shard(name):
    # What a device returns is reshaped, which XLA once made a part of every write.
    capacity = 2**14
    of = getattr(replay, name)(ring.items(capacity, largest_add=32))

    def turn(state, items, key, priority):
        state, sample = of.sample(of.add(state, items), key, batch_size=32)
        return of.update(state, sample.ticket, priority), sample

    one = lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype)
    state = jax.tree.map(one, jax.eval_shape(of.init, jnp.zeros(8)))
    mapped = jax.pmap(
        turn, devices=jax.devices()[:1], in_axes=(0, 0, None, 0), donate_argnums=0
    )
    inputs = jnp.zeros((1, 32, 8)), jax.random.key(0), jnp.zeros((1, 32))
    memory = mapped.lower(state, *inputs).compile().memory_analysis()
    assert memory.temp_size_in_bytes < capacity  # As a byte a slot would be.
