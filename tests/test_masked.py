"""Means under a mask, on one device and on four."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from devices import AXIS, BACKENDS, device_masks, over_devices
from jax.test_util import check_grads

from fps_jax.objectives import masked


def draw(seed: int, shape, loc: float = 0.0):
    """Random items, float32."""
    rng = np.random.default_rng(seed)
    return rng.normal(loc, 1.0, size=shape).astype(np.float32)


def test_a_mean_is_over_the_valid_items_alone(compiled):
    x, is_valid = draw(0, (4, 5), loc=3.0), device_masks()
    mean = compiled(masked.mean)(jnp.asarray(x), jnp.asarray(is_valid))
    np.testing.assert_allclose(mean, x[is_valid].mean(), rtol=1e-6)
    total = masked.total(jnp.asarray(x), jnp.asarray(is_valid))
    np.testing.assert_allclose(total, x[is_valid].sum(), rtol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_four_devices_agree_with_one_that_sees_every_item(backend):
    def statistics(x, is_valid, axis_name=None):
        return (
            masked.mean(x, is_valid, axis_name=axis_name),
            masked.standardize(x, is_valid, axis_name=axis_name),
        )

    x, is_valid = draw(1, (4, 5), loc=2.0), device_masks()
    mapped = over_devices(lambda *args: statistics(*args, axis_name=AXIS), backend)
    means, items = mapped(x, is_valid)
    mean, item = statistics(*map(jnp.asarray, (x, is_valid)))
    np.testing.assert_allclose(means, jnp.full(4, mean), rtol=1e-6)
    np.testing.assert_allclose(items, item, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_shares_and_their_gradients_add_up_to_the_mean_s(backend):
    x, is_valid = draw(3, (4, 5)), device_masks()
    parameter = np.float32(0.7)
    items = lambda parameter, x: jnp.sin(parameter * x)

    def share(parameter, x, is_valid):
        return masked.share_of_mean(is_valid, axis_name=AXIS)(items(parameter, x))

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
        return jnp.sum(jnp.sin(masked.standardize(x, is_valid, axis_name=axis_name)))

    x, is_valid = draw(15, (4, 5)), device_masks()
    local = lambda x, is_valid: jax.grad(loss)(x, is_valid, AXIS)
    expected = jax.grad(loss)(jnp.asarray(x), jnp.asarray(is_valid))
    actual = over_devices(local, backend)(x, is_valid)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


def test_standardised_items_have_mean_zero_and_deviation_one():
    x, is_valid = draw(4, (6, 7), loc=50.0), draw(5, (6, 7)) > 0
    out = np.asarray(masked.standardize(jnp.asarray(x), jnp.asarray(is_valid)))
    np.testing.assert_allclose(out, reference.standardized(x, is_valid), atol=2e-5)
    np.testing.assert_allclose(out[is_valid].mean(), 0, atol=1e-5)
    np.testing.assert_allclose(out[is_valid].std(), 1, rtol=1e-5)
    np.testing.assert_array_equal(out[~is_valid], 0)


def test_a_small_spread_about_a_large_mean_keeps_its_digits():
    x = np.float32(1e6) + draw(6, 999)
    is_valid = np.ones(999, bool)
    out = masked.standardize(jnp.asarray(x), jnp.asarray(is_valid))
    np.testing.assert_allclose(out, reference.standardized(x, is_valid), atol=1e-4)


@pytest.mark.parametrize("item", [0.1, -3.3, 1234.567])
def test_equal_items_standardise_to_zero(item):
    @jax.jit
    def results(x, is_valid):
        standard = lambda x: jnp.sum(jnp.sin(masked.standardize(x, is_valid)))
        return masked.standardize(x, is_valid), jax.grad(standard)(x)

    for count in (0, 1, 2, 7, 64):
        for result in results(jnp.full(64, item), jnp.arange(64) < count):
            np.testing.assert_array_equal(result, 0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_items_standardise_to_zero_on_every_device(backend):
    f = lambda x, is_valid: masked.standardize(x, is_valid, axis_name=AXIS)
    x = np.full((4, 5), 0.1, np.float32)
    np.testing.assert_array_equal(over_devices(f, backend)(x, device_masks()), 0)


def test_without_a_valid_item_a_mean_is_zero_and_so_is_its_gradient():
    x, nothing = jnp.asarray(draw(9, 5)), jnp.zeros(5, bool)
    for mean in (masked.mean, lambda x, v: masked.share_of_mean(v)(x)):
        assert mean(x, nothing) == 0
        np.testing.assert_array_equal(jax.grad(mean)(x, nothing), 0)


def test_what_a_masked_item_holds_changes_neither_result_nor_gradient():
    is_valid = jnp.asarray(device_masks())
    x, y = (jnp.asarray(draw(seed, (4, 5))) for seed in (10, 11))

    def results(x, y):
        standard = masked.standardize(x, is_valid)
        mean = masked.mean(x, is_valid) + masked.share_of_mean(is_valid)(y)
        return mean + jnp.sum(jnp.sin(standard)), standard

    run = jax.jit(jax.value_and_grad(results, argnums=(0, 1), has_aux=True))
    clean = run(x, y)
    for gradient in clean[1]:
        assert np.all(np.isfinite(gradient))
        assert np.any(gradient != 0)
        np.testing.assert_array_equal(gradient[~is_valid], 0)
    for content in (1e30, np.nan, np.inf, -np.inf):
        again = run(*(jnp.where(is_valid, a, content) for a in (x, y)))
        jax.tree.map(np.testing.assert_array_equal, again, clean)


def test_excluded_axes_are_standardised_apart():
    x, is_valid = draw(21, (8, 3), loc=4.0), draw(22, (8, 3)) > -0.7
    actual = masked.standardize(
        jnp.asarray(x), jnp.asarray(is_valid), exclude_axes=(-1,)
    )
    for i in range(3):
        expected = reference.standardized(x[:, i], is_valid[:, i])
        np.testing.assert_allclose(actual[:, i], expected, atol=2e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_excluded_axes_are_standardised_apart_over_all_devices(backend):
    x, is_valid = draw(23, (4, 5, 2)), draw(24, (4, 5, 2)) > 0
    f = functools.partial(masked.standardize, exclude_axes=(1,), correction=1)
    over = over_devices(functools.partial(f, axis_name=AXIS), backend)
    whole = f(jnp.asarray(x.reshape(20, 2)), jnp.asarray(is_valid.reshape(20, 2)))
    actual = over(x, is_valid).reshape(20, 2)
    np.testing.assert_allclose(actual, whole, rtol=1e-5, atol=1e-6)


def test_a_sample_s_deviation_wants_two_items_and_leaves_one_as_it_is():
    standard = functools.partial(masked.standardize, correction=1, epsilon=0.0)
    pair = standard(jnp.array([1.0, 3.0]), jnp.ones(2, bool))
    np.testing.assert_allclose(pair, [-(0.5**0.5), 0.5**0.5], rtol=1e-6)
    one = standard(jnp.array([7.0, 3.0]), jnp.array([False, True]))
    np.testing.assert_array_equal(one, [0.0, 3.0])
    slope = jax.grad(lambda x: jnp.sum(jnp.sin(standard(x, jnp.ones(1, bool)))))
    assert np.isfinite(slope(jnp.array([3.0])))


@pytest.mark.parametrize(
    ("axes", "message"),
    [((2,), "2 is not in 2"), ((0, -2), "each axis once"), ((0, 1), "leave an axis")],
)
def test_impossible_axes_are_refused(axes, message):
    with pytest.raises(ValueError, match=message):
        masked.standardize(jnp.ones((2, 3)), jnp.ones((2, 3), bool), exclude_axes=axes)


def test_gradients_agree_with_finite_differences(float64):
    is_valid = jnp.asarray(device_masks())
    x = jnp.asarray(draw(13, (4, 5)), jnp.float64)
    fs = (
        lambda x: masked.mean(jnp.sin(x), is_valid),
        lambda x: masked.share_of_mean(is_valid)(jnp.sin(x)),
        lambda x: masked.standardize(x, is_valid),
    )
    every = jax.jit(lambda x: [f(x) for f in fs])
    check_grads(every, (x,), order=1, modes=["rev"], atol=1e-6, rtol=1e-6)
