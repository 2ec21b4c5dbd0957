"""The clipped surrogate and the value loss, item by item."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from jax.test_util import check_grads

from fps_jax.objectives import clip_ppo

EPSILON = 0.2


def surrogate(log_ratio, advantage, clip_epsilon=EPSILON):
    return clip_ppo.clipped_surrogate(log_ratio, advantage, clip_epsilon=clip_epsilon)


def slope(log_ratio: float, advantage: float) -> float:
    """The surrogate's derivative by the log ratio, of one item."""
    at = jnp.float32(log_ratio), jnp.float32(advantage)
    return float(jax.grad(surrogate)(*at))


@pytest.mark.parametrize("clip_epsilon", [0.05, 0.2, 0.9])
def test_the_surrogate_is_equation_7(compiled, clip_epsilon):
    rng = np.random.default_rng(0)
    log_ratio, advantage = rng.normal(size=(2, 10, 20))
    items = zip(log_ratio.ravel(), advantage.ravel())
    expected = [
        reference.clipped_surrogate(np.exp(x), a, clip_epsilon) for x, a in items
    ]
    arrays = jnp.asarray(log_ratio, jnp.float32), jnp.asarray(advantage, jnp.float32)
    actual = compiled(surrogate)(*arrays, clip_epsilon)
    np.testing.assert_allclose(np.ravel(actual), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("ratio", "advantage", "is_flat"),
    [
        (1.5, 2.0, True),
        (1.5, -2.0, False),
        (0.5, 2.0, False),
        (0.5, -2.0, True),
        (1.1, 2.0, False),
        (1.1, -2.0, False),
        (0.9, 2.0, False),
        (0.9, -2.0, False),
    ],
)
def test_the_gradient_is_zero_where_the_advantage_asks_for_more_of_the_same(
    ratio, advantage, is_flat
):
    expected = 0.0 if is_flat else ratio * advantage
    np.testing.assert_allclose(slope(np.log(ratio), advantage), expected, rtol=1e-6)


@pytest.mark.parametrize("advantage", [-3.0, 0.0, 0.7])
def test_at_a_ratio_of_one_the_gradient_is_the_policy_gradient(advantage):
    assert surrogate(jnp.float32(0.0), jnp.float32(advantage)) == advantage
    np.testing.assert_allclose(slope(0.0, advantage), advantage, rtol=1e-6)


@pytest.mark.parametrize("log_ratio", [100.0, np.inf])
def test_a_ratio_beyond_float32_costs_nothing_where_it_is_clipped(log_ratio):
    for advantage in (2.0, 0.0):
        at = jnp.float32(log_ratio), jnp.float32(advantage)
        np.testing.assert_allclose(surrogate(*at), 1.2 * advantage, rtol=1e-6)
        assert slope(log_ratio, advantage) == 0
    at = jnp.float32(-log_ratio), jnp.float32(-2.0)
    np.testing.assert_allclose(surrogate(*at), -1.6, rtol=1e-6)
    assert slope(-log_ratio, -2.0) == 0


def test_the_surrogate_never_exceeds_the_unclipped_one():
    log_ratio, advantage = np.random.default_rng(1).normal(size=(2, 500))
    arrays = jnp.asarray(log_ratio, jnp.float32), jnp.asarray(advantage, jnp.float32)
    unclipped = np.exp(log_ratio) * advantage
    excess = np.asarray(surrogate(*arrays)) - unclipped
    assert np.all(excess < 1e-5)
    assert np.any(excess < -0.1)


def test_the_interval_may_be_traced_and_differ_by_member():
    log_ratio, advantage = jnp.log(jnp.array([1.5, 0.5])), jnp.array([1.0, -1.0])
    epsilons = jnp.array([0.1, 0.4])
    over_members = jax.jit(jax.vmap(surrogate, (None, None, 0)))
    actual = over_members(log_ratio, advantage, epsilons)
    np.testing.assert_allclose(actual, [[1.1, -0.9], [1.4, -0.6]], rtol=1e-6)


def test_a_log_ratio_and_its_weight_are_bounded_and_lose_no_gradient():
    log_prob = jnp.array([-1.0, -50.0, 3.0, -jnp.inf, -2.0, jnp.nan])
    behaviour = jnp.array([-1.5, 0.0, -40.0, -1.0, -jnp.inf, 0.0])
    proximal = jnp.array([-1.2, -40.0, 3.0, -1.0, -2.0, 0.0])
    keep = jnp.ones(6, bool)
    f = lambda x, near=None, **more: clip_ppo.decoupled_log_ratios(
        x, behaviour, near, keep, **more
    )
    log_ratio, log_weight = f(log_prob)
    np.testing.assert_allclose(log_ratio, [0.5, -20, 20, -20, 20, np.nan], rtol=1e-6)
    np.testing.assert_array_equal(log_weight[:5], 0)
    log_ratio, log_weight = f(log_prob, proximal)
    np.testing.assert_allclose(log_ratio[:3], [0.2, -10, 0], rtol=1e-5)
    np.testing.assert_allclose(log_weight[:3], [0.3, -10, 20], rtol=1e-5)
    gradient = jax.grad(lambda x: jnp.sum(f(x)[0]))(log_prob)
    np.testing.assert_array_equal(gradient[jnp.array([0, 1, 2, 4])], 1)
    assert jnp.isfinite(gradient[3])
    at_once = jax.grad(lambda x: jnp.sum(f(x, max_importance_ratio=1.1)[1]))
    np.testing.assert_array_equal(at_once(log_prob)[:5], 0)


def test_an_interval_may_be_wider_on_one_side():
    log_ratio = jnp.log(jnp.array([0.5, 1.5]))
    clip = lambda advantage: surrogate(log_ratio, advantage * jnp.ones(2), (0.1, 0.4))
    np.testing.assert_allclose(clip(1.0), [0.5, 1.4], rtol=1e-6)
    np.testing.assert_allclose(clip(-1.0), [-0.9, -1.5], rtol=1e-6)


def test_outside_is_either_side_and_active_is_where_the_gradient_is_zero():
    log_ratio = jnp.log(jnp.array([0.5, 0.79, 0.81, 1.0, 1.19, 1.21, 3.0]))
    for advantage in (2.0, -2.0):
        advantages = jnp.full(7, advantage)
        sides = clip_ppo.clipped_sides(log_ratio, advantages, clip_epsilon=EPSILON)
        np.testing.assert_array_equal(sides["low"], [1, 1, 0, 0, 0, 0, 0])
        np.testing.assert_array_equal(sides["high"], [0, 0, 0, 0, 0, 1, 1])
        slopes = jax.vmap(jax.grad(surrogate))(log_ratio, advantages)
        active = sides["active_low"] | sides["active_high"]
        np.testing.assert_array_equal(active, slopes == 0)


# ------------------------------------------------------------------------- the value


@pytest.mark.parametrize(
    ("kind", "expected", "slope"),
    [
        ("l1", [3.0, 0.5, 0.0], [-1.0, 1.0, 0.0]),
        ("l2", [9.0, 0.25, 0.0], [-6.0, 1.0, 0.0]),
        ("smooth_l1", [2.5, 0.125, 0.0], [-1.0, 0.5, 0.0]),
    ],
)
def test_each_kind_of_value_loss_is_its_distance(kind, expected, slope):
    value, target = jnp.array([1.0, -1.5, 2.0]), jnp.array([4.0, -2.0, 2.0])
    loss = lambda value: clip_ppo.value_loss(value, target, kind=kind)
    np.testing.assert_allclose(loss(value), expected)
    np.testing.assert_allclose(jax.grad(lambda v: jnp.sum(loss(v)))(value), slope)


@pytest.mark.parametrize("kind", ["l1", "l2", "smooth_l1"])
def test_a_clipped_value_loss_is_the_worse_of_two(kind):
    value, old, target = np.random.default_rng(3).normal(size=(3, 200))
    distance = {
        "l1": np.abs,
        "l2": np.square,
        "smooth_l1": lambda x: np.where(np.abs(x) < 1, x**2 / 2, np.abs(x) - 0.5),
    }[kind]
    moved = old + np.clip(value - old, -0.3, 0.3)
    expected = np.maximum(distance(value - target), distance(moved - target))
    arrays = (jnp.asarray(x, jnp.float32) for x in (value, target))
    actual = clip_ppo.value_loss(
        *arrays, kind=kind, old_value=jnp.asarray(old, jnp.float32), clip_value=0.3
    )
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)
    assert np.any(expected > distance(value - target) + 0.1)


def test_a_value_that_moved_too_far_learns_nothing_where_that_helped():
    loss = lambda value: clip_ppo.value_loss(
        value, jnp.float32(2.0), old_value=jnp.float32(0.0), clip_value=0.5
    )
    assert jax.grad(loss)(jnp.float32(1.0)) == 0
    assert jax.grad(loss)(jnp.float32(-1.0)) == -6


def test_a_value_cannot_be_clipped_to_nothing_known():
    with pytest.raises(
        ValueError, match=r"clip_value 0.2 must be given with old_value"
    ):
        clip_ppo.value_loss(jnp.zeros(2), jnp.zeros(2), clip_value=0.2)
    with pytest.raises(ValueError, match="kind 'l3' must be one of l1, l2, smooth_l1"):
        clip_ppo.value_loss(jnp.zeros(2), jnp.zeros(2), kind="l3")


def test_gradients_agree_with_finite_differences(float64):
    rng = np.random.default_rng(2)
    log_ratio, advantage = jnp.asarray(rng.normal(size=(2, 30)))
    distance = jnp.abs(jnp.expm1(log_ratio)) - EPSILON
    assert jnp.min(jnp.abs(distance)) > 1e-3  # no kink within a difference
    f = jax.jit(surrogate)
    at = (log_ratio, advantage, jnp.asarray(EPSILON))
    assert f(*at).dtype == jnp.float64
    check_grads(f, at, order=1, modes=["rev"], atol=1e-6, rtol=1e-6)
