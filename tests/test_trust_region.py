"""The penalty on a divergence, and what steers it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fps_jax.objectives import ratios, trust_region
from fps_jax.objectives.trust_region import TrustRegion

OPTIONS = {"kl_coef": 2.0, "kl_hinge_coef": 50.0, "kl_target": 0.01}
penalty = functools.partial(trust_region.kl_penalty_share, **OPTIONS)


@pytest.mark.parametrize("mean", [0.005, 0.0199, 0.05])
def test_it_is_the_mean_and_a_squared_hinge(float64, mean):
    kl = np.array([0.5, 1.5, 99.0]) * mean
    is_valid = jnp.array([True, True, False])
    found = penalty(jnp.asarray(kl), is_valid)
    expected = 2.0 * mean + 50.0 * max(0.0, mean - 0.02) ** 2
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    slope = jax.grad(lambda kl: penalty(kl, is_valid))(jnp.asarray(kl))
    rise = 2.0 + 100.0 * max(0.0, mean - 0.02)
    np.testing.assert_allclose(slope, [rise / 2, rise / 2, 0.0], rtol=1e-12)


def test_the_hinge_is_squared_once_over_all_devices(float64):
    # One device is far beyond the hinge, the others below: together, a little beyond.
    kl = jnp.array([[0.1, 0.06], [0.01, 0.0], [0.0, 0.0], [0.02, 0.01]])
    is_valid = jnp.array([[True, True], [True, False], [True, True], [True, True]])
    share = functools.partial(penalty, axis_name="d")
    shares = jax.vmap(share, axis_name="d")(kl, is_valid)
    np.testing.assert_allclose(jnp.sum(shares), penalty(kl, is_valid), rtol=1e-12)

    slopes = jax.vmap(jax.grad(share), axis_name="d")(kl, is_valid)
    alone = jax.grad(lambda kl: penalty(kl, is_valid))(kl)
    np.testing.assert_allclose(slopes, alone, rtol=1e-12)


def test_it_vanishes_with_its_slope_at_the_old_policy(float64):
    mean, log_std = jnp.array([[0.3, -1.0]]), jnp.array([[-0.5, 0.2]])

    def of(parameters):
        kl = ratios.gaussian_kl(mean, log_std, *parameters)
        return penalty(kl, jnp.ones(1, bool))

    value, slope = jax.value_and_grad(of)((mean, log_std))
    np.testing.assert_array_equal(value, 0)
    np.testing.assert_allclose(jax.tree.leaves(slope), np.zeros((2, 1, 2)), atol=1e-15)


def test_steering_is_that_of_a_naive_twin(float64):
    rng, target = np.random.default_rng(0), 0.01
    coef, scale = 1.0, 1.0
    state = TrustRegion(jnp.asarray(coef), jnp.asarray(scale))
    step = jax.jit(trust_region.steer)
    # Long stretches too far and too short, so that both ends are reached.
    drift = np.repeat(rng.choice([0.1, 1.0, 8.0], 60), 12) * target
    for kl in drift * rng.uniform(0.6, 1.4, drift.size):
        if kl > 2 * target:
            coef = min(35.0, 1.5 * coef)
            if coef > 30 and scale > 0.1:
                scale = max(0.1, scale / 1.5)
        elif kl < target / 2:
            coef = max(1 / 35, coef / 1.5)
            if coef < 1 / 30 and scale < 10:
                scale = min(10.0, scale * 1.5)
        state = step(state, kl, target)
        np.testing.assert_allclose(state, (coef, scale), rtol=1e-9)
    assert coef != 1.0


@pytest.mark.parametrize("kl", [0.005, 0.01, 0.02])
def test_nothing_moves_within_the_region(kl):
    state = TrustRegion(jnp.float32(3.0), jnp.float32(0.7))
    after = trust_region.steer(state, jnp.float32(kl), 0.01)
    np.testing.assert_array_equal(after, state)
