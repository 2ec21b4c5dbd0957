"""Targets of critics against naive twins and identities."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import reference
import rlax

from fps_jax.objectives import q_learning, returns


def test_the_target_is_reward_and_what_follows_without_gradient(float64):
    arrays = jnp.array([1.0, 2.0]), jnp.array([0.9, 0.0]), jnp.array([3.0, 5.0])
    np.testing.assert_allclose(q_learning.td_target(*arrays), [3.7, 2.0])
    slopes = jax.grad(lambda xs: jnp.sum(q_learning.td_target(*xs)))(arrays)
    np.testing.assert_array_equal(slopes, np.zeros((3, 2)))


def test_the_least_of_the_critics_is_bootstrapped_from():
    q = jnp.array([[1.0, -2.0], [0.5, 3.0]])
    np.testing.assert_array_equal(q_learning.least(q), [0.5, -2.0])


def test_smoothing_is_clipped_twice():
    action = jnp.array([[0.0, 0.9, -0.9]])
    noise = jnp.array([[3.0, 0.4, -0.2]])
    found = q_learning.smoothed(action, noise, clip=0.3)
    np.testing.assert_allclose(found, [[0.3, 1.0, -1.0]], rtol=1e-6)


def targets(rows, log_ratio, gamma, **options):
    arrays = jax.tree.map(jnp.asarray, (rows, log_ratio))
    return compiled(*arrays, gamma, **options)


@jax.jit
def compiled(rows, log_ratio, gamma, **options):
    discount, trace = returns.discounts_and_traces(
        rows.terminated, rows.truncated, rows.is_valid, gamma=gamma
    )
    return q_learning.corrected_q_target(
        log_ratio,
        rows.reward,
        discount,
        trace,
        rows.value[:-1],
        rows.value[1:],
        rows.is_valid,
        **options,
    )


def naive(rows, ratio, gamma, rho_bar, c_bar):
    """From the definition: the first action's reward, and then equation 13."""
    total, decay, length = rows.reward[0], gamma, len(rows.reward)
    if rows.terminated[0]:
        return total
    total += gamma * rows.value[1]
    ends = rows.terminated | rows.truncated
    for k in range(1, length):
        if ends[k - 1] or not rows.is_valid[k]:
            break
        onwards = 0.0 if rows.terminated[k] else gamma
        delta = rows.reward[k] + onwards * rows.value[k + 1] - rows.value[k]
        total += decay * min(rho_bar, ratio[k]) * delta
        decay *= gamma * min(c_bar, ratio[k])
    return total


def test_corrected_targets_are_those_of_a_naive_twin(float64):
    for seed in range(60):
        rng = np.random.default_rng(seed)
        rows = reference.random_rows(rng, 5)
        log_ratio = rng.normal(size=5)
        found = targets(rows, log_ratio, 0.9, rho_bar=1.3, c_bar=1.1)
        expected = naive(rows, np.exp(log_ratio), 0.9, 1.3, 1.1)
        np.testing.assert_allclose(found, expected, rtol=1e-9, err_msg=str(seed))


def test_on_policy_they_are_the_n_step_target_and_the_first_ratio_is_idle(float64):
    rng = np.random.default_rng(3)
    rows = reference.random_rows(rng, 4)
    never = np.zeros(4, bool)
    rows = rows._replace(terminated=never, truncated=never, is_valid=~never)
    powers = 0.9 ** np.arange(5)
    expected = rows.reward @ powers[:4] + powers[4] * rows.value[4]
    np.testing.assert_allclose(targets(rows, np.zeros(4), 0.9), expected, rtol=1e-12)
    first = np.array([5.0, 0.0, 0.0, 0.0])
    np.testing.assert_allclose(targets(rows, first, 0.9), expected, rtol=1e-12)
    # Actions that the policy would never take end the trace after the first step.
    one_step = rows.reward[0] + 0.9 * rows.value[1]
    never_again = np.array([0.0, -1e3, -1e3, -1e3])
    np.testing.assert_allclose(targets(rows, never_again, 0.9), one_step, rtol=1e-12)


def test_the_loss_weighs_items_and_adds_the_critics_up(float64):
    q, target = (
        jnp.array([[1.0, 2.0, 9.0], [0.0, 1.0, 9.0]]),
        jnp.array([2.0, 2.0, 0.0]),
    )
    weights, is_valid = jnp.array([0.5, 1.0, 1.0]), jnp.array([True, True, False])
    found = q_learning.squared_error_share(q, target, weights, is_valid)
    np.testing.assert_allclose(found, (0.5 * (1 + 4) + (0 + 1)) / 2)
    slope = jax.grad(
        lambda q: q_learning.squared_error_share(q, target, weights, is_valid)
    )(q)
    np.testing.assert_allclose(slope, [[-0.5, 0.0, 0.0], [-1.0, -1.0, 0.0]])


def test_td_errors_are_rlaxs_and_move_the_value_of_the_action_alone(float64):
    rng = np.random.default_rng(0)
    for _ in range(20):
        q_tm1, q_t, selector = jnp.asarray(rng.normal(size=(3, 4)))
        rest = jnp.int32(rng.integers(4)), jnp.asarray(rng.normal()), jnp.float64(0.9)
        found = td_error(q_tm1, *rest, q_t, selector)
        np.testing.assert_allclose(
            found, rlax.double_q_learning(q_tm1, *rest, q_t, selector), rtol=1e-12
        )
        single = td_error(q_tm1, *rest, q_t, q_t)
        np.testing.assert_allclose(
            single, rlax.q_learning(q_tm1, *rest, q_t), rtol=1e-12
        )
        slopes = jax.grad(
            lambda all_q, rest=rest: td_error(all_q[0], *rest, all_q[1], all_q[2])
        )(jnp.stack([q_tm1, q_t, selector]))
        expected = np.zeros((3, 4))
        expected[0, rest[0]] = -1.0
        np.testing.assert_array_equal(slopes, expected)


td_error = jax.jit(q_learning.q_td_error)


def test_the_slope_of_the_clipped_loss_is_the_clipped_error(float64):
    error = jnp.array([-3.0, -0.5, 0.0, 0.7, 0.8, 5.0])
    for clip in (0.75, None):
        loss = lambda x, clip=clip: jnp.sum(q_learning.clipped_loss(x, clip))
        limit = np.inf if clip is None else clip
        np.testing.assert_allclose(jax.grad(loss)(error), np.clip(error, -limit, limit))
    np.testing.assert_allclose(
        q_learning.clipped_loss(error, 1.0), optax.huber_loss(error), rtol=1e-12
    )
