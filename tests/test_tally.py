"""Metrics of batches cut anyhow, over one device or four, against their definitions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from devices import AXIS, BACKENDS, device_masks, over_devices
from hypothesis import given, settings
from hypothesis import strategies as st

from fps_jax.objectives import tally

ITEMS = 24


def draw(seed: int, shape=(ITEMS,), spread: float = 1.0):
    """A quantity, log ratios, targets and errors, float32."""
    rng = np.random.default_rng(seed)
    normal = lambda scale, loc=0.0: rng.normal(loc, scale, shape).astype(np.float32)
    return normal(2.0), normal(spread), normal(3.0, 5.0), normal(1.0, 0.5)


@jax.jit
def told(quantity, log_ratio, target, error, is_valid):
    return tally.of({"quantity": quantity}, log_ratio, (target, error), is_valid)


def definitions(quantity, log_ratio, target, error, is_valid):
    """Each metric as its definition reads, in float64."""
    quantity, log_ratio, target, error = (
        np.float64(x)[is_valid] for x in (quantity, log_ratio, target, error)
    )
    ratio = np.exp(log_ratio)
    return {
        "quantity": quantity.mean(),
        "ESS": ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum()),
        "max_ratio": ratio.max(),
        "mean_ratio": ratio.mean(),
        "explained_variance": 1 - error.var() / target.var(),
        "explained_error": 1 - np.mean(error**2) / target.var(),
    }


def stack(parts):
    return jax.tree.map(lambda *xs: jnp.stack(xs), *parts)


def expect(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, err_msg=name)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    st.integers(0, 10**6),
    st.lists(st.integers(0, 3), min_size=ITEMS, max_size=ITEMS),
    st.sampled_from([0.1, 3.0, 12.0]),
)
def test_batches_cut_anyhow_have_the_metrics_of_the_whole(seed, owner, spread):
    data, owner = draw(seed, spread=spread), np.array(owner)
    is_valid = np.random.default_rng(seed).random(ITEMS) < 0.8
    is_valid[:2] = True
    # A part of its own for each, on the same shape: the others' items are masked.
    merged = tally.merge(
        stack([told(*data, is_valid & (owner == i)) for i in range(4)])
    )
    expect(tally.metrics(merged), definitions(*data, is_valid))


@pytest.mark.parametrize("backend", BACKENDS)
def test_four_devices_have_the_metrics_of_all_items(backend):
    is_valid = device_masks()
    data = draw(5, is_valid.shape)
    one_device = lambda *args: tally.across(told(*args), AXIS)
    found = over_devices(one_device, backend)(*data, is_valid)
    for i in range(4):
        mine = jax.tree.map(lambda x, i=i: x[i], found)
        expect(tally.metrics(mine), definitions(*data, is_valid))
    explained = over_devices(
        lambda v, g, keep: tally.explained_variance(v, g, keep, axis_name=AXIS), backend
    )(data[2] - data[3], data[2], is_valid)
    for name, value in explained.items():
        expected = definitions(*data, is_valid)[name]
        np.testing.assert_allclose(value, np.full(4, expected), rtol=1e-4)


@pytest.mark.parametrize("junk", [np.nan, np.inf, -np.inf, 1e30])
def test_what_a_masked_item_holds_is_in_no_metric(junk):
    is_valid = np.arange(ITEMS) % 3 > 0
    data = draw(6)
    dirty = [np.where(is_valid, x, np.float32(junk)) for x in data]
    clean = told(*data, is_valid)
    jax.tree.map(np.testing.assert_array_equal, told(*dirty, is_valid), clean)


def test_without_a_valid_item_every_metric_is_zero_and_merging_changes_nothing():
    nothing = told(*draw(7), np.zeros(ITEMS, bool))
    assert all(x == 0 for x in tally.metrics(nothing).values())
    something = told(*draw(7), np.ones(ITEMS, bool))
    for parts in ([nothing, something], [something, nothing]):
        merged = tally.metrics(tally.merge(stack(parts)))
        expect(merged, tally.metrics(something))


def test_a_ratio_beyond_float32_is_the_largest_number_and_not_infinite():
    quantity, _, target, error = draw(8)
    metrics = tally.metrics(
        told(quantity, jnp.full(ITEMS, 1e4), target, error, np.ones(ITEMS, bool))
    )
    assert 1e38 < metrics["max_ratio"] < np.inf
    assert 1e38 < metrics["mean_ratio"] < np.inf
    assert metrics["ESS"] == 1


@pytest.mark.parametrize(
    ("target", "variance", "error"),
    [
        ("value", 1.0, 1.0),
        ("value + 3", 1.0, None),
        ("noise", None, None),
        ("equal", 0.0, 0.0),
    ],
)
def test_explained_variance_is_one_less_the_share_of_the_error(target, variance, error):
    value, noise, _, _ = draw(9, (40,))
    target = {
        "value": value,
        "value + 3": value + 3,
        "noise": value + 2 * noise,
        "equal": np.full(40, 0.1, np.float32),
    }[target]
    is_valid = np.arange(40) < 37
    v, g = np.float64(value[:37]), np.float64(target[:37])
    variance = reference.explained_variance(v, g) if variance is None else variance
    error = 1 - np.mean((g - v) ** 2) / g.var() if error is None else error
    found = tally.explained_variance(*map(jnp.asarray, (value, target, is_valid)))
    np.testing.assert_allclose(found["explained_variance"], variance, 1e-5, 1e-6)
    np.testing.assert_allclose(found["explained_error"], error, 1e-5, 1e-6)


@pytest.mark.parametrize("item", [0.1, -3.3, 1234.567])
def test_equal_targets_explain_nothing_in_any_split(item):
    quantity, log_ratio, value, _ = draw(10)
    target = np.full(ITEMS, item, np.float32)
    parts = [
        told(quantity, log_ratio, target, target - value, np.arange(ITEMS) < count)
        for count in (1, 2, 7, ITEMS)
    ]
    for one in (*parts, tally.merge(stack(parts))):
        metrics = tally.metrics(one)
        assert metrics["explained_variance"] == metrics["explained_error"] == 0
