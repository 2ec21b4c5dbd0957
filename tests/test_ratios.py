"""Means under a mask on one device and on four; importance ratios with bad numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from devices import AXIS, BACKENDS, over_devices
from jax.test_util import check_grads

from fps_jax.objectives import ratios

COUNTS = (5, 0, 1, 3)
"""Valid items on each device, of 5: a mean of the devices' means would be wrong."""


def draw(seed: int, shape, loc: float = 0.0):
    """Random items, float32."""
    rng = np.random.default_rng(seed)
    return rng.normal(loc, 1.0, size=shape).astype(np.float32)


def device_masks() -> np.ndarray:
    return np.arange(5) < np.array(COUNTS)[:, None]


def test_a_mean_is_over_the_valid_items_alone(compiled):
    x, is_valid = draw(0, (4, 5), loc=3.0), device_masks()
    mean = compiled(ratios.masked_mean)(jnp.asarray(x), jnp.asarray(is_valid))
    np.testing.assert_allclose(mean, x[is_valid].mean(), rtol=1e-6)
    total = ratios.masked_sum(jnp.asarray(x), jnp.asarray(is_valid))
    np.testing.assert_allclose(total, x[is_valid].sum(), rtol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_four_devices_agree_with_one_that_sees_every_item(backend):
    def statistics(x, y, is_valid, axis_name=None):
        return (
            ratios.masked_mean(x, is_valid, axis_name=axis_name),
            ratios.explained_variance(x, y, is_valid, axis_name=axis_name),
            ratios.standardize(x, is_valid, axis_name=axis_name),
        )

    x, is_valid = draw(1, (4, 5), loc=2.0), device_masks()
    y = x + 0.5 * draw(2, (4, 5))
    mapped = over_devices(lambda *args: statistics(*args, axis_name=AXIS), backend)
    means, shares, items = mapped(x, y, is_valid)
    mean, share, item = statistics(*map(jnp.asarray, (x, y, is_valid)))
    np.testing.assert_allclose(means, jnp.full(4, mean), rtol=1e-6)
    np.testing.assert_allclose(shares, jnp.full(4, share), rtol=1e-5)
    np.testing.assert_allclose(items, item, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_shares_and_their_gradients_add_up_to_the_mean_s(backend):
    x, is_valid = draw(3, (4, 5)), device_masks()
    parameter = np.float32(0.7)
    items = lambda parameter, x: jnp.sin(parameter * x)

    def share(parameter, x, is_valid):
        return ratios.share_of_mean(is_valid, axis_name=AXIS)(items(parameter, x))

    def reduced(parameter, x, is_valid):
        both = jax.value_and_grad(share)(parameter, x, is_valid)
        return jax.lax.psum(both, AXIS)

    value, gradient = over_devices(reduced, backend)(np.full(4, parameter), x, is_valid)
    kept = x[is_valid].astype(np.float64)
    np.testing.assert_allclose(value, np.full(4, np.sin(0.7 * kept).mean()), rtol=1e-5)
    slope = (kept * np.cos(0.7 * kept)).mean()
    np.testing.assert_allclose(gradient, np.full(4, slope), rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_gradient_of_standardised_items_crosses_the_devices(backend):
    def loss(x, is_valid, axis_name=None):
        return jnp.sum(jnp.sin(ratios.standardize(x, is_valid, axis_name=axis_name)))

    x, is_valid = draw(15, (4, 5)), device_masks()
    local = lambda x, is_valid: jax.grad(loss)(x, is_valid, AXIS)
    expected = jax.grad(loss)(jnp.asarray(x), jnp.asarray(is_valid))
    actual = over_devices(local, backend)(x, is_valid)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


def test_standardised_items_have_mean_zero_and_deviation_one():
    x, is_valid = draw(4, (6, 7), loc=50.0), draw(5, (6, 7)) > 0
    out = np.asarray(ratios.standardize(jnp.asarray(x), jnp.asarray(is_valid)))
    np.testing.assert_allclose(out, reference.standardized(x, is_valid), atol=2e-5)
    np.testing.assert_allclose(out[is_valid].mean(), 0, atol=1e-5)
    np.testing.assert_allclose(out[is_valid].std(), 1, rtol=1e-5)
    np.testing.assert_array_equal(out[~is_valid], 0)


def test_a_small_spread_about_a_large_mean_keeps_its_digits():
    x = np.float32(1e6) + draw(6, 999)
    is_valid = np.ones(999, bool)
    out = ratios.standardize(jnp.asarray(x), jnp.asarray(is_valid))
    np.testing.assert_allclose(out, reference.standardized(x, is_valid), atol=1e-4)


@pytest.mark.parametrize(
    ("target", "expected"),
    [("value", 1.0), ("value + 3", 1.0), ("noise", None), ("equal", 0.0)],
)
def test_explained_variance_is_one_less_the_share_of_the_error(target, expected):
    value = draw(7, 40)
    target = {
        "value": value,
        "value + 3": value + 3,
        "noise": value + 2 * draw(8, 40),
        "equal": np.full(40, 0.1, np.float32),
    }[target]
    is_valid = np.arange(40) < 37
    if expected is None:
        expected = reference.explained_variance(value[:37], target[:37])
        assert 0 < expected < 0.5
    actual = ratios.explained_variance(*map(jnp.asarray, (value, target, is_valid)))
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("item", [0.1, -3.3, 1234.567])
def test_equal_items_explain_nothing_and_standardise_to_zero(item):
    @jax.jit
    def results(x, is_valid):
        standard = lambda x: jnp.sum(jnp.sin(ratios.standardize(x, is_valid)))
        ramp = jnp.arange(64, dtype=jnp.float32)
        return (
            ratios.standardize(x, is_valid),
            jax.grad(standard)(x),
            ratios.explained_variance(ramp, x, is_valid),
        )

    for count in (0, 1, 2, 7, 64):
        for result in results(jnp.full(64, item), jnp.arange(64) < count):
            np.testing.assert_array_equal(result, 0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_items_standardise_to_zero_on_every_device(backend):
    f = lambda x, is_valid: ratios.standardize(x, is_valid, axis_name=AXIS)
    x = np.full((4, 5), 0.1, np.float32)
    np.testing.assert_array_equal(over_devices(f, backend)(x, device_masks()), 0)


def test_without_a_valid_item_a_mean_is_zero_and_so_is_its_gradient():
    x, nothing = jnp.asarray(draw(9, 5)), jnp.zeros(5, bool)
    for mean in (ratios.masked_mean, lambda x, v: ratios.share_of_mean(v)(x)):
        assert mean(x, nothing) == 0
        np.testing.assert_array_equal(jax.grad(mean)(x, nothing), 0)


def test_what_a_masked_item_holds_changes_neither_result_nor_gradient():
    is_valid = jnp.asarray(device_masks())
    x, y = (jnp.asarray(draw(seed, (4, 5))) for seed in (10, 11))

    def results(x, y):
        surrogate = jnp.exp(ratios.sanitized_log_ratio(x, y, is_valid))
        total = (
            ratios.masked_mean(x, is_valid)
            + ratios.share_of_mean(is_valid)(y)
            + ratios.explained_variance(x, y, is_valid)
            + jnp.sum(jnp.sin(ratios.standardize(x, is_valid)))
            + jnp.sum(surrogate)
        )
        return total, surrogate

    run = jax.jit(jax.value_and_grad(results, argnums=(0, 1), has_aux=True))
    clean = run(x, y)
    for gradient in clean[1]:
        assert np.all(np.isfinite(gradient))
        assert np.any(gradient != 0)
        np.testing.assert_array_equal(gradient[~is_valid], 0)
    for content in (1e30, np.nan, np.inf, -np.inf):
        again = run(*(jnp.where(is_valid, a, content) for a in (x, y)))
        jax.tree.map(np.testing.assert_array_equal, again, clean)


def test_a_log_ratio_is_a_clipped_difference():
    log_prob = jnp.array([-1.0, -50.0, 3.0, -jnp.inf, -2.0, jnp.nan])
    behaviour = jnp.array([-1.5, 0.0, -40.0, -1.0, -jnp.inf, 0.0])
    is_valid = jnp.ones(6, bool)
    f = lambda x, b: ratios.sanitized_log_ratio(x, b, is_valid, bound=20.0)
    expected = [0.5, -20, 20, -20, 20, np.nan]
    np.testing.assert_allclose(f(log_prob, behaviour), expected, rtol=1e-6)
    loss = lambda x: jnp.sum(jnp.exp(f(x, behaviour)))
    gradient = jax.jit(jax.grad(loss))(log_prob)
    np.testing.assert_allclose(gradient[:5], [np.exp(0.5), 0, 0, 0, 0], rtol=1e-6)
    assert np.isfinite(np.float32(np.exp(20.0)))
    assert f(log_prob, log_prob)[0] == 0


def test_k3_is_never_negative_and_keeps_its_digits_near_a_ratio_of_one():
    log_ratio = np.concatenate([s * draw(12, 2000) for s in (1e-6, 1e-3, 1.0)])
    exact = log_ratio.astype(np.float64)
    exact = np.expm1(exact) - exact
    actual = np.asarray(ratios.kl_k3(jnp.asarray(log_ratio)))
    assert np.all(actual >= 0)
    for scale in np.split(np.stack([actual, exact]), 3, axis=1):
        np.testing.assert_allclose(*scale.mean(axis=1), rtol=1e-2)
    assert ratios.kl_k3(jnp.zeros(())) == 0


def test_k3_estimates_the_divergence_between_two_gaussians():
    b, pi, draws = 0.0, 0.4, 50_000
    action = np.random.default_rng(0).normal(b, 1.0, draws)
    log_ratio = ((action - b) ** 2 - (action - pi) ** 2) / 2
    estimates = np.asarray(ratios.kl_k3(jnp.asarray(log_ratio, jnp.float32)))
    exact, sigma = (pi - b) ** 2 / 2, estimates.std() / np.sqrt(draws)
    np.testing.assert_allclose(estimates.mean(), exact, atol=5 * sigma)


def test_gradients_agree_with_finite_differences(float64):
    is_valid = jnp.asarray(device_masks())
    x, y = (jnp.asarray(draw(seed, (4, 5)), jnp.float64) for seed in (13, 14))
    fs = (
        lambda x: ratios.masked_mean(jnp.sin(x), is_valid),
        lambda x: ratios.share_of_mean(is_valid)(jnp.sin(x)),
        lambda x: ratios.standardize(x, is_valid),
        lambda x: ratios.explained_variance(x, y, is_valid),
        lambda x: ratios.sanitized_log_ratio(x, y, is_valid),
        ratios.kl_k3,
    )
    every = jax.jit(lambda x: [f(x) for f in fs])
    check_grads(every, (x,), order=1, modes=["rev"], atol=1e-6, rtol=1e-6)
