"""Advantages and lambda-returns, against mixtures of n-step returns and their laws."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import rlax
from jax.test_util import check_grads
from reference import Rows

from fps_jax.objectives import returns

GAMMA, LAMBDA = 0.9, 0.7


def estimate(estimator, rows: Rows, gamma=GAMMA, lambda_=LAMBDA):
    """Applies an estimator to the rows of one environment, as an agent does."""
    discount_t, trace_t = returns.discounts_and_traces(
        rows.terminated, rows.truncated, rows.is_valid, gamma=gamma
    )
    v_tm1, v_t = rows.value[:-1], rows.value[1:]
    return estimator(
        rows.reward, discount_t, trace_t, v_tm1, v_t, rows.is_valid, lambda_=lambda_
    )


def advantages(rows, gamma=GAMMA, lambda_=LAMBDA):
    return estimate(returns.generalized_advantages, rows, gamma, lambda_)


def lambda_returns(rows, gamma=GAMMA, lambda_=LAMBDA):
    return estimate(returns.lambda_returns, rows, gamma, lambda_)


def both(rows, gamma, lambda_):
    return advantages(rows, gamma, lambda_), lambda_returns(rows, gamma, lambda_)


fast_both = jax.jit(both)


def to_device(rows: Rows, dtype=np.float32) -> Rows:
    """The same rows as JAX arrays; floats in one dtype."""
    is_float = lambda x: np.issubdtype(x.dtype, np.floating)
    return jax.tree.map(lambda x: jnp.asarray(x, dtype if is_float(x) else None), rows)


def draw(seed: int, length: int, resets: bool = True) -> Rows:
    return reference.random_rows(np.random.default_rng(seed), length, resets)


@pytest.mark.parametrize(
    ("terminated", "truncated", "is_valid", "discount", "trace"),
    [
        (False, False, True, GAMMA, 1),
        (True, False, True, 0, 0),
        (False, True, True, GAMMA, 0),
        (True, True, True, 0, 0),
        (False, False, False, GAMMA, 0),
        (True, False, False, 0, 0),
        (False, True, False, GAMMA, 0),
        (True, True, False, 0, 0),
    ],
)
def test_each_flag_has_its_own_effect(terminated, truncated, is_valid, discount, trace):
    flags = (jnp.array([x]) for x in (terminated, truncated, is_valid))
    discount_t, trace_t = returns.discounts_and_traces(*flags, gamma=GAMMA)
    np.testing.assert_allclose(discount_t, [discount], rtol=1e-7)
    np.testing.assert_array_equal(trace_t, [trace])


def expect_mixtures(estimators, rows, lambda_):
    advantage, target = estimators(to_device(rows), GAMMA, lambda_)
    expected = reference.advantages(rows, GAMMA, lambda_)
    np.testing.assert_allclose(advantage, expected, rtol=1e-5, atol=1e-5)
    expected = reference.lambda_returns(rows, GAMMA, lambda_)
    np.testing.assert_allclose(target, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("length", [1, 2, 12])
@pytest.mark.parametrize("resets", [True, False], ids=["reset rows", "filtered rows"])
def test_both_estimators_equal_the_mixture_of_n_step_returns(length, resets):
    for seed in range(10):
        for lambda_ in (0.0, LAMBDA, 1.0):
            expect_mixtures(fast_both, draw(seed, length, resets), lambda_)


def test_both_estimators_are_the_same_uncompiled():
    expect_mixtures(both, draw(0, 12), LAMBDA)


@pytest.mark.parametrize("lambda_", [0.0, 0.8, 1.0])
def test_without_boundaries_the_advantages_are_rlax_s(lambda_):
    rows = draw(0, 30)
    never = np.zeros(30, bool)
    rows = to_device(rows._replace(terminated=never, truncated=never, is_valid=~never))
    expected = rlax.truncated_generalized_advantage_estimation(
        rows.reward, jnp.full(30, GAMMA), lambda_, rows.value
    )
    actual = fast_both(rows, GAMMA, lambda_)[0]
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("end", ["terminated", "truncated"])
def test_a_batch_with_an_inner_boundary_equals_its_parts_apart(end):
    rows = draw(1, 12)
    never = np.zeros(12, bool)
    rows = rows._replace(terminated=never, truncated=never, is_valid=~never)
    ends, is_reset = never.copy(), never.copy()
    ends[4], is_reset[5] = True, True
    rows = to_device(rows._replace(is_valid=~is_reset)._replace(**{end: ends}))

    cut = lambda a, b: Rows(*(x[a:b] for x in rows[:4]), rows.value[a : b + 1])
    first, second = cut(0, 5), cut(6, 12)
    assert first.reward.shape == (5,)  # time was cut, not the batch
    assert second.value.shape == (7,)
    parts = zip(*(fast_both(part, GAMMA, LAMBDA) for part in (first, second)))
    for whole, (before, after) in zip(fast_both(rows, GAMMA, LAMBDA), parts):
        joined = np.concatenate([before, [0.0], after])
        np.testing.assert_allclose(whole, joined, rtol=1e-6)


@jax.jit
def sensitivity(rows: Rows):
    """Derivatives of A_t by reward_k and by value_k, ``[T, T]`` and ``[T, T + 1]``."""
    f = lambda reward, value: advantages(rows._replace(reward=reward, value=value))
    return jax.jacobian(f, argnums=(0, 1))(rows.reward, rows.value)


@pytest.mark.parametrize(("end", "bootstraps"), [("terminated", 0), ("truncated", 1)])
def test_only_a_truncation_bootstraps_and_nothing_later_matters(end, bootstraps):
    rows = draw(2, 8)
    flags = {"terminated": np.zeros(8, bool), "truncated": np.zeros(8, bool)}
    flags[end][3] = True
    is_valid = np.arange(8) != 4
    by_reward, by_value = sensitivity(
        to_device(rows._replace(is_valid=is_valid, **flags))
    )
    decay = (GAMMA * LAMBDA) ** np.arange(3, -1, -1)
    np.testing.assert_allclose(by_reward[:4, 3], decay, rtol=1e-5)
    np.testing.assert_allclose(by_value[:4, 4], bootstraps * GAMMA * decay, rtol=1e-5)
    np.testing.assert_array_equal(by_reward[:4, 4:], 0)
    np.testing.assert_array_equal(by_value[:4, 5:], 0)
    np.testing.assert_array_equal(by_reward[4], 0)
    np.testing.assert_array_equal(by_value[4], 0)


@pytest.mark.parametrize(
    "estimator", [returns.generalized_advantages, returns.lambda_returns]
)
def test_what_a_masked_row_holds_changes_neither_result_nor_gradient(estimator):
    rows = to_device(draw(3, 12))
    assert 0 < np.sum(~rows.is_valid) < 6

    def loss(floats, gamma, lambda_):
        reward, v_tm1, v_t = floats
        discount_t, trace_t = returns.discounts_and_traces(
            rows.terminated, rows.truncated, rows.is_valid, gamma=gamma
        )
        out = estimator(
            reward, discount_t, trace_t, v_tm1, v_t, rows.is_valid, lambda_=lambda_
        )
        return jnp.sum(jnp.sin(out)), out

    floats = (rows.reward, rows.value[:-1], rows.value[1:])
    numbers = jnp.float32(GAMMA), jnp.float32(LAMBDA)
    run = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))
    gradient, out = clean = run(floats, *numbers)
    np.testing.assert_array_equal(out[~rows.is_valid], 0)
    np.testing.assert_array_equal(gradient[0][0][~rows.is_valid], 0)
    assert all(np.any(g != 0) for g in jax.tree.leaves(gradient))
    for content in (1e30, np.nan, np.inf, -np.inf):
        dirty = tuple(jnp.where(rows.is_valid, x, content) for x in floats)
        again = run(dirty, *numbers)
        jax.tree.map(np.testing.assert_array_equal, again, clean)


def test_lambda_zero_is_the_one_step_error():
    rows = draw(4, 20)
    future = np.where(rows.terminated, 0, GAMMA * rows.value[1:])
    expected = np.where(rows.is_valid, rows.reward + future - rows.value[:-1], 0)
    actual = fast_both(to_device(rows), GAMMA, 0.0)[0]
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def test_lambda_one_is_the_discounted_sum_of_rewards():
    rows = draw(5, 6)
    never = np.zeros(6, bool)
    last = np.arange(6) == 5
    rows = rows._replace(terminated=last, truncated=never, is_valid=~never)
    powers = GAMMA ** np.arange(6)
    expected = [rows.reward[t:] @ powers[: 6 - t] for t in range(6)]
    actual = fast_both(to_device(rows), GAMMA, 1.0)[1]
    np.testing.assert_allclose(actual, expected, rtol=1e-5)


def test_at_the_true_values_every_advantage_is_zero():
    rewards = np.array([1.0, -2.0, 0.5, 3.0])
    true = [rewards[t:] @ GAMMA ** np.arange(4 - t) for t in range(4)]
    never, last = np.zeros(4, bool), np.arange(4) == 3
    rows = Rows(rewards, last, never, ~never, np.array([*true, 7.0]))
    actual = fast_both(to_device(rows), GAMMA, LAMBDA)[0]
    np.testing.assert_allclose(actual, 0, atol=1e-6)


def test_gradients_agree_with_finite_differences(float64):
    rows = to_device(draw(6, 7), np.float64)

    def f(reward, value, gamma, lambda_):
        moved = rows._replace(reward=reward, value=value)
        return lambda_returns(moved, gamma, lambda_)

    at = (rows.reward, rows.value, jnp.asarray(GAMMA), jnp.asarray(LAMBDA))
    assert f(*at).dtype == jnp.float64
    check_grads(jax.jit(f), at, order=1, modes=["rev"], atol=1e-6, rtol=1e-6)


def test_environments_by_vmap_equal_each_alone_with_traced_numbers():
    each = [to_device(draw(seed, 9)) for seed in range(3)]
    batch = jax.tree.map(lambda *xs: jnp.stack(xs, axis=1), *each)
    gammas, lambdas = jnp.array([0.5, 0.9]), jnp.array([0.2, 1.0])
    over_environments = jax.vmap(advantages, (1, None, None), 1)
    over_members = jax.jit(jax.vmap(over_environments, (None, 0, 0)))
    out = over_members(batch, gammas, lambdas)
    assert out.shape == (2, 9, 3)
    for member in range(2):
        for i, rows in enumerate(each):
            expected = fast_both(rows, gammas[member], lambdas[member])[0]
            np.testing.assert_allclose(out[member, :, i], expected, rtol=1e-6)
