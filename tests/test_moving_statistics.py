"""Averages of parameters and percentiles of returns that move with a run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices import AXIS, BACKENDS, device_masks, over_devices
from hypothesis import given, settings
from hypothesis import strategies as st

from fps_jax.models.normalize import moving_average, percentile_scale

# ---------------------------------------------------------------- a moving average


def follow(average, xs):
    state = average.init(xs[0])
    for x in xs[1:]:
        state = average.update(state, x)
    return state


@pytest.mark.parametrize("is_debiased", [True, False])
@pytest.mark.parametrize("decay", [0.0, 0.5, 8 / 9])
def test_an_average_weighs_by_age(decay, is_debiased, compiled):
    xs = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32)
    average = moving_average(decay, is_debiased=is_debiased)
    average = average._replace(update=compiled(average.update))
    state = follow(average, [{"w": jnp.asarray(x)} for x in xs])
    weights = np.float64(decay) ** np.arange(11, -1, -1)
    if not is_debiased:
        weights[0] /= 1 - decay
    expected = (weights[:, None] * xs).sum(0) / weights.sum()
    np.testing.assert_allclose(state.value["w"], expected, rtol=1e-5, atol=1e-6)
    if is_debiased:
        np.testing.assert_allclose(state.weight, weights.sum(), rtol=1e-5)


def test_the_first_tree_fades_as_published():
    # Weight of the first after 1, 5 and 30 updates at decay 0.889.
    for is_debiased, expected in (
        (True, ["0.47", "0.12", "0.003"]),
        (False, ["0.889", "0.56", "0.029"]),
    ):
        average = moving_average(0.889, is_debiased=is_debiased)
        for updates, share in zip((1, 5, 30), expected):
            state = follow(average, [jnp.ones(())] + [jnp.zeros(())] * updates)
            assert f"{state.value:.{len(share) - 2}f}" == share


def test_a_reset_average_is_the_newest_tree_alone():
    average = moving_average(0.5)
    old = follow(average, [jnp.ones(2), jnp.zeros(2)])
    fresh = average.init(jnp.full(2, 7.0))
    np.testing.assert_array_equal(fresh.value, 7)
    assert fresh.weight == 1 < old.weight
    # The next one weighs as if nothing had been before.
    state = average.update(fresh, jnp.ones(2))
    np.testing.assert_allclose(state.value, 7 - 6 / 1.5, rtol=1e-6)


def test_a_decay_may_be_traced_and_differ_by_member():
    xs = jnp.arange(6.0)
    member = lambda decay: follow(moving_average(decay), list(xs)).value
    decays = jnp.array([0.1, 0.5, 0.9])
    together = jax.jit(jax.vmap(member))(decays)
    np.testing.assert_allclose(together, [member(float(d)) for d in decays], rtol=1e-5)


def test_the_dtype_of_the_parameters_is_kept():
    state = follow(moving_average(0.5), [jnp.zeros(2, jnp.bfloat16)] * 2)
    assert state.value.dtype == jnp.bfloat16


@pytest.mark.parametrize("decay", [1.0, -0.1, float("nan")])
def test_an_impossible_decay_is_refused(decay):
    with pytest.raises(ValueError, match=rf"decay {decay} must be in \[0, 1\)"):
        moving_average(decay)


# --------------------------------------------------------------- a range of returns

UPDATE = jax.jit(percentile_scale(1.0).update)


def test_the_range_is_that_of_the_percentiles():
    norm = percentile_scale(1.0)
    state = norm.update(norm.init(), jnp.linspace(0, 100, 101), jnp.ones(101, bool))
    np.testing.assert_allclose(norm.scale(state), 90, rtol=1e-6)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.integers(0, 10**6),
    st.integers(0, 2**9 - 1),
    st.sampled_from([np.nan, np.inf, -np.inf, 1e30]),
)
def test_masked_quantiles_are_numpy_s_of_what_counts(seed, bits, junk):
    x = np.random.default_rng(seed).normal(0, 3, 9).astype(np.float32)
    is_valid = np.array([bits >> i & 1 for i in range(9)], bool)
    x = np.where(is_valid, x, np.float32(junk))
    state = UPDATE(percentile_scale(1.0).init(), x, is_valid)
    if not is_valid.any():
        assert state == percentile_scale(1.0).init()
        return
    expected = np.quantile(np.float64(x[is_valid]), [0.05, 0.95])
    np.testing.assert_allclose(state[1:], expected, rtol=1e-4, atol=1e-5)
    assert state.weight == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_four_devices_agree_with_one_that_sees_every_item(backend):
    x = np.random.default_rng(1).normal(0, 3, (4, 5)).astype(np.float32)
    is_valid, norm = device_masks(), percentile_scale(0.3)

    def one_device(x, is_valid):
        return norm.update(norm.init(), x, is_valid, axis_name=AXIS)

    found = over_devices(one_device, backend)(x, is_valid)
    expected = norm.update(norm.init(), jnp.asarray(x), jnp.asarray(is_valid))
    for ours, whole in zip(found, expected):
        np.testing.assert_allclose(ours, np.full(4, whole), rtol=1e-6)


def test_from_zero_the_range_comes_slowly_unless_it_is_debiased():
    # A span of 90 at a rate of 0.01: after 1, 10, 100 and 300 updates.
    x, keep = jnp.linspace(0, 100, 101), jnp.ones(101, bool)
    slow, debiased = percentile_scale(0.01), percentile_scale(0.01, is_debiased=True)
    update, state, found = jax.jit(slow.update), slow.init(), {}
    for i in range(1, 301):
        state = update(state, x, keep)
        found[i] = slow.scale(state), debiased.scale(state)
    np.testing.assert_allclose(
        [found[i][0] for i in (1, 10, 100, 300)], [1.0, 8.6, 57, 85.6], rtol=5e-3
    )
    np.testing.assert_allclose([both[1] for both in found.values()], 90, rtol=1e-4)


def test_small_returns_are_not_blown_up():
    for is_debiased in (True, False):
        norm = percentile_scale(0.5, min_scale=1.0, is_debiased=is_debiased)
        assert norm.scale(norm.init()) == 1
        small = norm.update(norm.init(), jnp.full(3, 1e-6), jnp.ones(3, bool))
        assert norm.scale(small) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rate": 1.5}, r"rate 1.5 must be in \[0, 1\]"),
        ({"low": -0.1}, r"low -0.1 must be in \[0, 1\)"),
        ({"low": 0.6, "high": 0.5}, r"high 0.5 must be in \(0.6, 1\]"),
        ({"high": 1.2}, r"high 1.2 must be in \(0.05, 1\]"),
        ({"min_scale": 0.0}, "min_scale 0.0 must be above 0"),
    ],
)
def test_an_impossible_option_is_named_with_its_value(options, message):
    with pytest.raises(ValueError, match=message):
        percentile_scale(**({"rate": 0.01} | options))
