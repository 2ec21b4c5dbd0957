"""Importance ratios with bad numbers; their tallies on one device and on four."""

import distrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices import AXIS, BACKENDS, device_masks, over_devices
from jax.test_util import check_grads

from fps_jax.objectives import ratios


def draw(seed: int, shape, loc: float = 0.0):
    """Random items, float32."""
    rng = np.random.default_rng(seed)
    return rng.normal(loc, 1.0, size=shape).astype(np.float32)


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


@pytest.mark.parametrize("cap", [0.0, 0.5, 1.0, 7.0, float("inf")])
def test_a_truncated_ratio_is_at_most_its_cap(cap, compiled):
    log_ratio = np.array([-np.inf, -1e4, -2.0, 0.0, 0.7, 3.0], np.float32)
    actual = compiled(ratios.truncated_ratio)(jnp.asarray(log_ratio), cap)
    np.testing.assert_allclose(actual, np.minimum(cap, np.exp(log_ratio)), rtol=1e-6)


def test_a_truncated_ratio_and_its_gradient_never_overflow():
    log_ratio = jnp.array([1e4, jnp.inf, 89.0])
    for cap in (2.0, float("inf")):
        f = lambda x, cap=cap: ratios.truncated_ratio(x, cap)
        np.testing.assert_allclose(f(log_ratio), min(cap, np.exp(20.0)), rtol=1e-6)
        gradient = jax.grad(lambda x, f=f: jnp.sum(f(x)))(log_ratio)
        np.testing.assert_array_equal(gradient, 0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_tallies_of_four_devices_are_those_of_all_items(backend):
    log_ratio, is_valid = draw(20, (4, 5)), device_masks()
    kept = log_ratio[is_valid].astype(np.float64)
    weight = np.exp(kept)
    size = weight.sum() ** 2 / (len(kept) * (weight**2).sum())
    capped = (weight > 1.3).mean()
    assert 0 < capped < 1

    def tallies(x, is_valid, axis_name=None):
        return (
            ratios.effective_sample_size(x, is_valid, axis_name=axis_name),
            ratios.capped_fraction(x, 1.3, is_valid, axis_name=axis_name),
        )

    mapped = over_devices(lambda *args: tallies(*args, axis_name=AXIS), backend)
    for one, all_of_them, expected in zip(
        tallies(jnp.asarray(log_ratio), jnp.asarray(is_valid)),
        mapped(log_ratio, is_valid),
        (size, capped),
    ):
        np.testing.assert_allclose(one, expected, rtol=1e-6)
        np.testing.assert_allclose(all_of_them, np.full(4, expected), rtol=1e-6)


@pytest.mark.parametrize("shift", [0.0, 1e4, -1e4])
def test_the_effective_sample_size_is_between_one_item_and_all(shift):
    is_valid = jnp.arange(6) < 5
    size = lambda x: ratios.effective_sample_size(x + shift, is_valid)
    np.testing.assert_allclose(size(jnp.zeros(6)), 1.0, rtol=1e-6)
    alone = jnp.where(jnp.arange(6) == 2, 0.0, -300.0)
    np.testing.assert_allclose(size(alone), 1 / 5, rtol=1e-6)
    garbage = jnp.where(is_valid, 0.0, jnp.nan)
    np.testing.assert_allclose(size(garbage), 1.0, rtol=1e-6)
    assert ratios.effective_sample_size(garbage, jnp.zeros(6, bool)) == 0
    # Not even a policy that would never have acted so makes it a NaN.
    assert np.isfinite(ratios.effective_sample_size(jnp.full(6, -jnp.inf), is_valid))


def test_three_estimators_and_their_deviations_are_as_published():
    # Schulman (2020): N(0, 1) against N(0.1, 1), whose divergence is 0.005.
    draws = 200_000
    action = np.random.default_rng(1).normal(0.0, 1.0, draws)
    log_ratio = jnp.asarray(0.1 * action - 0.005, jnp.float32)
    for estimator, bias, deviation in (
        (ratios.kl_k1, 0.0, 20.0),
        (ratios.kl_k2, 0.002, 1.42),
        (ratios.kl_k3, 0.0, 1.42),
    ):
        estimates = np.asarray(estimator(log_ratio), np.float64) / 0.005
        noise = 5 * estimates.std() / np.sqrt(draws)
        np.testing.assert_allclose(estimates.mean(), 1 + bias, atol=noise)
        np.testing.assert_allclose(estimates.std(), deviation, rtol=0.02)


def draw_policies(seed: int, kind: str):
    """Two policies' parameters, and the divergence that distrax finds between them."""
    if kind == "gaussian":
        parts = [draw(seed + i, (4, 3)) for i in range(4)]
        old, new = (
            distrax.Independent(distrax.Normal(mean, np.exp(log_std)), 1)
            for mean, log_std in (parts[:2], parts[2:])
        )
        return ratios.gaussian_kl, parts, old.kl_divergence(new)
    parts = [draw(seed + i, (4, 5)) for i in range(2)]
    old, new = (distrax.Categorical(logits=logits) for logits in parts)
    return ratios.categorical_kl, parts, old.kl_divergence(new)


@pytest.mark.parametrize("kind", ["gaussian", "categorical"])
def test_the_exact_divergence_is_distrax_s_and_flat_where_it_is_zero(kind):
    divergence, parts, expected = draw_policies(30, kind)
    parts = [jnp.asarray(part) for part in parts]
    np.testing.assert_allclose(divergence(*parts), expected, rtol=1e-5)
    old = parts[: len(parts) // 2]
    moved = lambda *new: jnp.sum(divergence(*old, *new))
    np.testing.assert_allclose(moved(*old), 0, atol=1e-6)
    for gradient in jax.grad(moved, argnums=tuple(range(len(old))))(*old):
        np.testing.assert_allclose(gradient, 0, atol=1e-6)


def test_an_action_that_neither_takes_adds_nothing_to_the_divergence():
    old = jnp.array([0.0, 1.0, -jnp.inf])
    new = jnp.array([0.5, 0.2, -jnp.inf])
    expected = ratios.categorical_kl(old[:2], new[:2])
    np.testing.assert_allclose(ratios.categorical_kl(old, new), expected, rtol=1e-6)
    gradient = jax.grad(lambda x: ratios.categorical_kl(old, x))(new)
    assert np.all(np.isfinite(gradient))


def test_gradients_agree_with_finite_differences(float64):
    is_valid = jnp.asarray(device_masks())
    x, y = (jnp.asarray(draw(seed, (4, 5)), jnp.float64) for seed in (13, 14))
    fs = (
        lambda x: ratios.effective_sample_size(x, is_valid),
        lambda x: ratios.truncated_ratio(x, 1.3),
        lambda x: ratios.gaussian_kl(y, 0.3 * y, x, 0.2 * x),
        lambda x: ratios.categorical_kl(y, x),
        ratios.kl_k1,
        ratios.kl_k2,
        ratios.kl_k3,
    )
    every = jax.jit(lambda x: [f(x) for f in fs])
    check_grads(every, (x,), order=1, modes=["rev"], atol=1e-6, rtol=1e-6)
