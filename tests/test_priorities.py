"""Priority rules and importance weights against float64 and against their own laws."""

import functools
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from devices import AXIS, BACKENDS, device_masks, over_devices
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fps_jax.replay import priorities
from fps_jax.replay.priorities import importance_weights, is_acceptable

SIZE = 12
NAN, INF = math.nan, math.inf
properties = functools.partial(settings, deadline=None, derandomize=True)


def items(seed=0, shape=(SIZE,)):
    """What a replay and a learner know of some items: errors, notes and the rest."""
    rng = np.random.default_rng(seed)
    some = lambda x, value, share: np.where(rng.random(shape) < share, value, x)
    real = lambda scale: np.float32(scale * rng.standard_t(2, shape))
    return SimpleNamespace(
        td_error=jnp.asarray(some(real(1), 0, 0.2), jnp.float32),
        last=jnp.asarray(some(some(real(1), 0, 0.2), NAN, 0.3), jnp.float32),
        priority=jnp.asarray(np.abs(real(2))),
        returns=jnp.asarray(real(3)),
        count=jnp.asarray(rng.integers(0, 50, shape), jnp.int32),
        is_same_episode=jnp.asarray(rng.random(shape) < 0.6),
        ratio=jnp.asarray(np.exp(rng.normal(size=shape)), jnp.float32),
    )


def clip(x, low, high):
    return min(max(x, low), high)


def naive_sign_consistent(x, grow, shrink, low, high):
    if math.isnan(x.last) or x.td_error * x.last == 0:
        return clip(x.priority, low, high)
    return clip(x.priority * (grow if x.td_error * x.last > 0 else shrink), low, high)


# Of each rule: what it does to items, its coefficients, and what it is for one of them.
RULES = {
    "absolute": (
        lambda x, **c: priorities.absolute(x.td_error, **c),
        {"epsilon": 0.01},
        lambda x, epsilon: abs(x.td_error) + epsilon,
    ),
    "signed": (
        lambda x, **c: priorities.signed(x.td_error, **c),
        {"positive": 2.0, "negative": 0.25, "epsilon": 0.01},
        lambda x, positive, negative, epsilon: (
            (positive * x.td_error if x.td_error > 0 else -negative * x.td_error)
            + epsilon
        ),
    ),
    "derivative": (
        lambda x, **c: priorities.derivative(x.td_error, x.last, **c),
        {"epsilon": 0.01},
        lambda x, epsilon: (
            abs(abs(x.td_error) - (0 if math.isnan(x.last) else abs(x.last))) + epsilon
        ),
    ),
    "sign_consistent": (
        lambda x, **c: priorities.sign_consistent(x.priority, x.td_error, x.last, **c),
        {"grow": 1.5, "shrink": 0.25, "low": 0.5, "high": 3.0},
        naive_sign_consistent,
    ),
    "return_boost": (
        lambda x, **c: priorities.return_boost(x.priority, x.returns, **c),
        {"low": -2.0, "high": 3.0, "coef": 4.0},
        lambda x, low, high, coef: (
            x.priority * (1 + coef * clip((x.returns - low) / (high - low), 0, 1))
        ),
    ),
    "staleness_bonus": (
        lambda x, **c: priorities.staleness_bonus(x.priority, x.count, **c),
        {"rate": 0.03},
        lambda x, rate: x.priority + rate * x.count,
    ),
    "staleness_offset": (
        lambda x, **c: priorities.staleness_offset(x.priority, 70, **c),
        {"rate": 0.03},
        lambda x, rate: x.priority - rate * 70,
    ),
    "novelty": (
        lambda x, **c: priorities.novelty(x.priority, x.count, **c),
        {"coef": 3.0},
        lambda x, coef: x.priority * (1 + coef / math.sqrt(1 + x.count)),
    ),
    "predecessor": (
        lambda x, **c: priorities.predecessor(
            x.priority, x.td_error, x.is_same_episode, **c
        ),
        {"coef": 0.7},
        lambda x, coef: (
            x.priority + coef * abs(x.td_error) if x.is_same_episode else x.priority
        ),
    ),
    "off_policy": (
        lambda x, **c: priorities.off_policy(x.td_error, x.ratio, **c),
        {"epsilon": 0.01},
        lambda x, epsilon: x.ratio * abs(x.td_error) + epsilon,
    ),
    "rejection": (
        lambda x: priorities.rejection(x.ratio),
        {},
        lambda x: min(1, x.ratio),
    ),
    "eviction_score": (
        lambda x, **c: priorities.eviction_score(x.priority, x.count, **c),
        {"age_coef": 1.3},
        lambda x, age_coef: age_coef * math.log(1 + x.count) - math.log(x.priority),
    ),
}


def one_by_one(x):
    """Items in Python's own numbers, which are float64."""
    columns = [np.asarray(value).tolist() for value in vars(x).values()]
    return [SimpleNamespace(**dict(zip(vars(x), row))) for row in zip(*columns)]


def apply(rule, x, **coefficients):
    """A rule of what came through a transformation as a dictionary."""
    return RULES[rule][0](SimpleNamespace(**x), **coefficients)


@pytest.mark.parametrize("rule", RULES)
@properties(max_examples=15)
@given(seed=st.integers(0, 10**6))
def test_a_rule_is_its_equation_in_float64(rule, seed):
    apply_rule, coefficients, naive = RULES[rule]
    x = items(seed)
    actual = apply_rule(x, **coefficients)
    expected = [naive(one, **coefficients) for one in one_by_one(x)]
    assert actual.dtype == jnp.float32
    np.testing.assert_allclose(actual, expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("rule", RULES)
def test_coefficients_may_be_traced_and_rules_mapped(rule):
    coefficients = RULES[rule][1]
    x = vars(items(1, (3, SIZE)))
    traced = {name: jnp.float32(value) for name, value in coefficients.items()}
    together = jax.jit(lambda x, c: jax.vmap(lambda x: apply(rule, x, **c))(x))
    actual = together(x, traced)
    for i in range(3):
        alone = apply(rule, {k: v[i] for k, v in x.items()}, **coefficients)
        np.testing.assert_allclose(actual[i], alone, rtol=1e-6, atol=1e-6)


TAKES_ERRORS = ["absolute", "signed", "derivative", "sign_consistent", "off_policy"]


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("rule", [*TAKES_ERRORS, "predecessor"])
def test_an_error_that_is_no_number_is_refused_and_the_others_are_not(rule, bad):
    x = items(2)
    x.is_same_episode = jnp.ones(SIZE, bool)
    coefficients = RULES[rule][1]
    before = apply(rule, vars(x), **coefficients)
    assert np.all(is_acceptable(before))
    x.td_error = x.td_error.at[3].set(bad)
    after = apply(rule, vars(x), **coefficients)
    expected = np.arange(SIZE) != 3
    np.testing.assert_array_equal(is_acceptable(after), expected)
    np.testing.assert_array_equal(after[expected], before[expected])
    # What is made of it is refused as well.
    later = priorities.novelty(
        priorities.staleness_bonus(after, x.count, rate=0.1), x.count, coef=1.0
    )
    np.testing.assert_array_equal(is_acceptable(later), expected)


# ------------------------------------------------------------------------- TD errors


def test_symmetric_signed_is_absolute_and_so_is_off_policy_on_policy():
    x = items(3)
    expected = priorities.absolute(x.td_error, epsilon=0.1)
    signed = priorities.signed(x.td_error, negative=1.0, epsilon=0.1)
    np.testing.assert_array_equal(signed, expected)
    ones = jnp.ones(SIZE)
    np.testing.assert_array_equal(
        priorities.off_policy(x.td_error, ones, epsilon=0.1), expected
    )
    unknown = jnp.full(SIZE, NAN)
    np.testing.assert_array_equal(
        priorities.derivative(x.td_error, unknown, epsilon=0.1), expected
    )


def test_of_equal_errors_the_positive_one_comes_first_by_default():
    better, worse = priorities.signed(jnp.array([1.0, -1.0]), epsilon=0.0)
    assert better == 1.0 > worse > 0.0


def test_an_error_that_stays_has_no_derivative_whatever_its_sign():
    x = items(4)
    for last in (x.td_error, -x.td_error):
        actual = priorities.derivative(x.td_error, last, epsilon=0.5)
        np.testing.assert_array_equal(actual, jnp.full(SIZE, 0.5))
    # A note that is no number is as good as none.
    actual = priorities.derivative(x.td_error, jnp.full(SIZE, -INF), epsilon=0.0)
    np.testing.assert_array_equal(actual, jnp.abs(x.td_error))


def test_signs_of_errors_whose_product_is_0_in_float32_still_agree():
    tiny = jnp.array([1e-30, -1e-30, 1e-30, -1e-30])
    last = jnp.array([1e-30, -1e-30, -1e-30, 1e-30])
    one = jnp.ones(4)
    actual = priorities.sign_consistent(one, tiny, last, low=0.0, high=9.0)
    np.testing.assert_allclose(actual, [1.2, 1.2, 0.5, 0.5], rtol=1e-6)
    huge = priorities.sign_consistent(one, 1e35 * tiny, 1e35 * last, low=0.0, high=9.0)
    np.testing.assert_array_equal(huge, actual)


def test_growth_and_shrinking_end_at_the_limits():
    priority, error = jnp.ones(2), jnp.array([2.0, 2.0])
    for _ in range(40):
        priority = priorities.sign_consistent(
            priority, error, jnp.array([1.0, -1.0]), low=0.125, high=16.0
        )
    np.testing.assert_array_equal(priority, [16.0, 0.125])


# -------------------------------------------------------------------- weight changes


def gradients(seed=0, scale=1.0):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(scale * rng.normal(size=shape), jnp.float32)
    return {"w": draw(5, 3, 4), "b": (draw(5, 2), draw(5)), "none": draw(5, 0)}


def naive_norm(tree):
    leaves = [np.asarray(x, np.float64).reshape(5, -1) for x in jax.tree.leaves(tree)]
    return np.linalg.norm(np.concatenate(leaves, axis=1), axis=1)


@pytest.mark.parametrize("scale", [1.0, 1e-35, 1e30, 5e37])
def test_a_norm_is_over_all_leaves_and_of_any_magnitude(compiled, scale):
    tree = gradients(scale=scale)
    tree = jax.tree.map(lambda x: -jnp.abs(x), tree)  # All below 0.
    actual = compiled(priorities.weight_change_norm)(tree)
    assert actual.shape == (5,)
    np.testing.assert_allclose(actual, naive_norm(tree), rtol=1e-6)


def test_an_item_s_norm_is_its_own():
    tree = gradients(1)
    expected = priorities.weight_change_norm(tree)
    tree["w"] = tree["w"].at[1].set(0.0).at[2, 0, 1].set(INF).at[3, 1, 1].set(NAN)
    tree["b"] = tuple(x.at[1].set(0.0) for x in tree["b"])
    actual = priorities.weight_change_norm(tree)
    np.testing.assert_array_equal(is_acceptable(actual), [1, 1, 0, 0, 1])
    np.testing.assert_array_equal(actual[jnp.array([0, 4])], expected[np.array([0, 4])])
    np.testing.assert_array_equal(actual[1:4], [0.0, INF, NAN])


def test_a_norm_of_what_an_optimiser_would_change():
    tree, optimizer = gradients(2), optax.sgd(0.25)
    state = optimizer.init(jax.tree.map(lambda x: x[0], tree))
    step = lambda gradient: optimizer.update(gradient, state)[0]
    actual = priorities.weight_change_norm(jax.vmap(step)(tree))
    np.testing.assert_allclose(actual, 0.25 * naive_norm(tree), rtol=1e-6)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)
    half["w"] = tree["w"]  # Parameters of several dtypes.
    actual = priorities.weight_change_norm(half)
    assert actual.dtype == jnp.float32
    np.testing.assert_allclose(actual, naive_norm(half), rtol=1e-6)


# ------------------------------------------------------------- what else may matter


def test_a_return_is_worth_nothing_up_to_low_and_all_of_coef_from_high_on():
    returns = jnp.array([-INF, -9.0, -1.0, 1.0, 3.0, 9.0, INF, NAN, 3e38])
    ones = jnp.ones(returns.size)
    boost = priorities.return_boost(ones, returns, low=-1.0, high=3.0, coef=2.0)
    np.testing.assert_array_equal(boost, [1, 1, 1, 2, 3, 3, 3, NAN, 3])


def test_limits_that_are_still_equal_raise_nothing():
    boost = jax.jit(
        lambda low, high: priorities.return_boost(
            jnp.ones(3), jnp.array([-1.0, 2.0, 5.0]), low=low, high=high, coef=2.0
        )
    )
    np.testing.assert_array_equal(
        boost(jnp.float32(2.0), jnp.float32(2.0)), jnp.ones(3)
    )


@properties(max_examples=40)
@given(seed=st.integers(0, 10**6))
def test_offsets_keep_the_order_that_bonuses_have_at_any_later_time(seed):
    rng = np.random.default_rng(seed)
    # Eighths: nothing is rounded, and so equal ones stay equal.
    priority = jnp.asarray(rng.integers(0, 40, SIZE) / 8, jnp.float32)
    replayed = rng.integers(0, 100, SIZE)
    offset = jnp.concatenate(
        [
            priorities.staleness_offset(priority[i : i + 1], int(step), rate=0.125)
            for i, step in enumerate(replayed)
        ]
    )
    for now in (100, 1000):
        age = jnp.asarray(now - replayed, jnp.int32)
        bonus = priorities.staleness_bonus(priority, age, rate=0.125)
        np.testing.assert_array_equal(bonus - offset, jnp.full(SIZE, now / 8))


def test_an_offset_loses_what_float32_cannot_hold_and_no_more():
    step, rate = 2**20, 0.5
    lost = rate * step * 2.0**-23
    priority = jnp.array([1.0, 1.0 + lost / 4, 1.0 + lost])
    first, too_near, next_one = priorities.staleness_offset(priority, step, rate=rate)
    assert first == too_near < next_one
    assert not is_acceptable(first[None])[0]  # No weight, an order.


def test_an_episode_s_last_item_gets_nothing_from_the_next_episode():
    error, is_same = jnp.array([NAN, 2.0, INF]), jnp.array([False, True, False])
    actual = priorities.predecessor(jnp.ones(3), error, is_same)
    np.testing.assert_array_equal(actual, [1.0, 3.0, 1.0])


def test_rules_compose():
    x = items(5)
    priority = priorities.novelty(
        priorities.derivative(x.td_error, x.last, epsilon=1e-6), x.count, coef=1.0
    )
    last = np.nan_to_num(np.float64(x.last))
    expected = np.abs(np.abs(np.float64(x.td_error)) - np.abs(last)) + 1e-6
    expected *= 1 + 1 / np.sqrt(1 + np.float64(x.count))
    np.testing.assert_allclose(priority, expected, rtol=1e-5, atol=1e-7)
    assert np.all(is_acceptable(priority))


# ------------------------------------------------------------------------ off policy

BEHAVIOUR = np.array([4, 2, 1, 1]) / 8
TARGET = np.array([1, 2, 1, 4]) / 8
STORED = np.repeat(np.arange(4), [4, 2, 1, 1])  # Exactly the behaviour's shares.


def shares(priority):
    """How often each action is drawn with exponent 1."""
    weight = np.float64(priority)
    return np.bincount(STORED, weight, minlength=4) / weight.sum()


def test_rejection_sampling_draws_the_target_as_far_as_it_is_not_truncated():
    ratio = jnp.asarray((TARGET / BEHAVIOUR)[STORED], jnp.float32)
    both = np.minimum(TARGET, BEHAVIOUR)
    np.testing.assert_allclose(shares(priorities.rejection(ratio)), both / both.sum())
    # Proposals over the largest ratio are never truncated: textbook rejection.
    whole = priorities.rejection(ratio / ratio.max())
    np.testing.assert_allclose(shares(whole), TARGET, rtol=1e-6)


def test_uniform_draws_with_a_ratio_are_weighted_importance_sampling():
    ratio = jnp.asarray((TARGET / BEHAVIOUR)[STORED], jnp.float32)
    uniform = jnp.full(8, 1 / 8)
    plain = importance_weights(uniform, 8, exponent=1.0, ratio=ratio, normalize="none")
    np.testing.assert_allclose(plain, ratio, rtol=1e-6)
    weights = importance_weights(uniform, 8, exponent=1.0, ratio=ratio)
    np.testing.assert_allclose(weights, ratio / ratio.max(), rtol=1e-6)
    f = np.array([1.0, -2.0, 5.0, 3.0])
    estimate = np.sum(np.float64(weights) * f[STORED]) / np.sum(np.float64(weights))
    np.testing.assert_allclose(estimate, TARGET @ f, rtol=1e-6)


# ----------------------------------------------------------------- importance weights


def distribution(seed=0, size=SIZE):
    weight = np.abs(np.random.default_rng(seed).standard_cauchy(size)) + 1e-3
    return jnp.asarray(weight / weight.sum(), jnp.float32)


def naive_weights(p, size, exponent, is_valid, ratio, normalize, least):
    """In float64, over the rows that count."""
    p, ratio = np.float64(p), np.float64(ratio)
    weight = np.zeros(p.size)
    counts = is_valid & (p > 0)
    weight[counts] = ratio[counts] * (size * p[counts]) ** -exponent
    if normalize == "batch" and weight.any():
        weight /= weight.max()
    if normalize == "buffer":
        weight /= (size * np.float64(least)) ** -exponent
    return weight


@pytest.mark.parametrize("normalize", priorities.NORMALIZATIONS)
@properties(max_examples=30)
@given(
    seed=st.integers(0, 10**6),
    exponent=st.sampled_from([0.0, 0.4, 1.0]),
    size=st.sampled_from([12, 10**6]),
)
def test_weights_are_their_equation_in_float64(normalize, seed, exponent, size):
    rng = np.random.default_rng(seed)
    p = distribution(seed) * np.float32(SIZE / size)
    p = jnp.where(rng.random(SIZE) < 0.2, 0.0, p)
    is_valid, ratio = jnp.asarray(rng.random(SIZE) < 0.7), items(seed).ratio
    least = jnp.float32(0.5) * p[p > 0].min(initial=1.0)
    actual = importance_weights(
        p,
        size,
        exponent=exponent,
        is_valid=is_valid,
        ratio=ratio,
        normalize=normalize,
        min_probability=least,
    )
    expected = naive_weights(p, size, exponent, is_valid, ratio, normalize, least)
    assert actual.dtype == jnp.float32
    np.testing.assert_allclose(actual, expected, rtol=5e-6)


@pytest.mark.parametrize("normalize", priorities.NORMALIZATIONS)
def test_exponent_0_corrects_nothing(normalize):
    p = distribution()
    actual = importance_weights(
        p, SIZE, exponent=0.0, normalize=normalize, min_probability=1e-6
    )
    np.testing.assert_array_equal(actual, jnp.ones(SIZE))


def test_exponent_1_is_unbiased_over_the_distribution_itself():
    p, f = distribution(1), np.random.default_rng(1).normal(size=SIZE)
    weights = importance_weights(p, SIZE, exponent=1.0, normalize="none")
    mean = np.sum(np.float64(p) * np.float64(weights) * f)
    np.testing.assert_allclose(mean, f.mean(), rtol=1e-5)


def test_batch_and_buffer_differ_by_the_rows_that_were_not_drawn():
    p = distribution(2)
    rows = jnp.array([0, 3, 3, 5])
    of = functools.partial(importance_weights, p[rows], SIZE, exponent=0.6)
    batch = of()
    buffer = of(normalize="buffer", min_probability=p.min())
    assert batch.max() == 1.0 > buffer.max()
    likely = importance_weights(jnp.array([0.5, 0.25]), SIZE, exponent=1.0)
    np.testing.assert_allclose(likely, [0.5, 1.0], rtol=1e-6)
    expected = np.float64(p.min() / p[rows]) ** 0.6
    np.testing.assert_allclose(buffer, expected, rtol=1e-5)
    np.testing.assert_allclose(batch, expected / expected.max(), rtol=1e-5)
    whole = importance_weights(
        p, SIZE, exponent=0.6, normalize="buffer", min_probability=p.min()
    )
    assert whole.max() == 1.0 == whole[p.argmin()]


@pytest.mark.parametrize("normalize", priorities.NORMALIZATIONS)
@pytest.mark.parametrize("garbage", [NAN, INF, -1.0, 0.0, 1e-38])
def test_rows_that_do_not_count_weigh_0_and_change_no_other(normalize, garbage):
    p, ratio = distribution(3), items(3).ratio
    is_valid = jnp.arange(SIZE) % 3 > 0
    of = lambda p, ratio, is_valid=is_valid: importance_weights(
        p,
        SIZE,
        exponent=0.5,
        is_valid=is_valid,
        ratio=ratio,
        normalize=normalize,
        min_probability=1e-5,
    )
    clean = of(p, ratio)
    np.testing.assert_array_equal(clean == 0.0, ~is_valid)
    for spoilt in (
        (jnp.where(is_valid, p, garbage), ratio),
        (p, jnp.where(is_valid, ratio, garbage)),
    ):
        np.testing.assert_array_equal(of(*spoilt), clean)
        if garbage != 1e-38:  # What is no number need not be told.
            np.testing.assert_array_equal(of(*spoilt, is_valid=None), clean)


@pytest.mark.parametrize("normalize", priorities.NORMALIZATIONS)
def test_without_rows_or_items_there_is_no_weight(compiled, normalize):
    of = lambda p, size, is_valid: importance_weights(
        p,
        size,
        exponent=1.0,
        is_valid=is_valid,
        normalize=normalize,
        min_probability=jnp.zeros(()),
    )
    zeros = jnp.zeros(SIZE)
    is_valid = jnp.zeros(SIZE, bool)
    p = distribution()
    np.testing.assert_array_equal(compiled(of)(p, jnp.int32(9), is_valid), zeros)
    np.testing.assert_array_equal(compiled(of)(p, jnp.int32(0), ~is_valid), zeros)
    np.testing.assert_array_equal(compiled(of)(zeros, jnp.int32(9), ~is_valid), zeros)
    assert of(jnp.zeros(0), 9, jnp.zeros(0, bool)).shape == (0,)


def test_tiny_probabilities_have_finite_weights():
    p = jnp.array([1e-30, 1e-3, 0.5])
    of = functools.partial(importance_weights, p, 10**6, exponent=1.0)
    expected = np.array([1e24, 1e-3, 2e-6])
    np.testing.assert_allclose(of(normalize="none"), expected, rtol=1e-5)
    np.testing.assert_allclose(of(), expected / 1e24, rtol=1e-5)
    buffer = of(normalize="buffer", min_probability=1e-31)
    np.testing.assert_allclose(buffer, expected / 1e25, rtol=1e-5)
    # A row far beyond float32 is held at its limit, the others are what they were.
    ratio = jnp.array([1e38, 1.0, 1.0])
    capped = of(ratio=ratio, normalize="none")
    np.testing.assert_allclose(capped, [np.exp(88.0), 1e-3, 2e-6], rtol=1e-5)
    assert np.all(np.isfinite(of(ratio=ratio)))


@properties(max_examples=100)
@example(p=[1e-45, 1.2e-38], size=1, exponent=1.0, normalize="none", least=0.0)
@given(
    p=st.lists(st.floats(width=32), max_size=5),
    size=st.integers(0, 2**31 - 1),
    exponent=st.floats(0.0, 1.0),
    normalize=st.sampled_from(priorities.NORMALIZATIONS),
    least=st.floats(width=32),
)
def test_weights_are_finite_whatever_the_state(p, size, exponent, normalize, least):
    weights = importance_weights(
        jnp.asarray(np.float32(p)),
        size,
        exponent=exponent,
        normalize=normalize,
        min_probability=least,
    )
    assert np.all(is_acceptable(weights))
    if normalize == "batch":
        assert np.all(weights <= 1.0)


@pytest.mark.parametrize("least", [0.0, NAN, -1.0, INF])
def test_a_buffer_without_a_least_probability_is_normalised_by_the_batch(least):
    of = functools.partial(importance_weights, distribution(4), SIZE, exponent=0.7)
    actual = of(normalize="buffer", min_probability=least)
    np.testing.assert_array_equal(actual, of())


@pytest.mark.parametrize("normalize", priorities.NORMALIZATIONS)
@pytest.mark.parametrize("axis_name", [None, AXIS])
def test_weights_are_constants_to_a_gradient(normalize, axis_name):
    x = jnp.asarray(np.random.default_rng(0).normal(size=SIZE), jnp.float32)

    def weights(p, ratio, exponent, least):
        return importance_weights(
            p,
            SIZE,
            exponent=exponent,
            ratio=ratio,
            normalize=normalize,
            min_probability=least,
            axis_name=axis_name,
        )

    loss = lambda x, *state: jnp.sum(x * weights(*state))
    state = distribution(5), items(5).ratio, jnp.float32(0.5), jnp.float32(1e-3)
    gradient, expected = jax.grad(loss, argnums=(0, 1, 2, 3, 4)), weights
    if axis_name is not None:
        mapped = functools.partial(jax.vmap, axis_name=axis_name, axis_size=1)
        gradient, expected = mapped(gradient), mapped(expected)
        x, *state = jax.tree.map(lambda x: x[None], (x, *state))
    of_x, *of_state = gradient(x, *state)
    np.testing.assert_array_equal(of_x, expected(*state))
    jax.tree.map(
        lambda x: np.testing.assert_array_equal(x, jnp.zeros_like(x)), of_state
    )


def test_an_annealed_exponent_does_not_compile_anew():
    schedule = optax.linear_schedule(0.4, 1.0, 10)
    p, traces = distribution(6), []

    @jax.jit
    def weights(step):
        traces.append(step)
        return importance_weights(p, SIZE, exponent=schedule(step), normalize="none")

    for step in (0, 5, 10, 20):
        exponent = 0.4 + 0.06 * min(step, 10)
        expected = (SIZE * np.float64(p)) ** -exponent
        np.testing.assert_allclose(weights(jnp.int32(step)), expected, rtol=1e-5)
    assert len(traces) == 1


# --------------------------------------------------------------------------- devices


@pytest.mark.parametrize("normalize", priorities.NORMALIZATIONS)
@pytest.mark.parametrize("backend", [*BACKENDS, "vmap"])
def test_four_devices_weigh_as_one_that_sees_every_row(backend, normalize):
    p, ratio = distribution(7, 20).reshape(4, 5), items(7, (4, 5)).ratio
    is_valid = jnp.asarray(device_masks())
    # One shard is empty; its least probability is 0 and must not count.
    least = jnp.where(is_valid, p, 1.0).min(axis=1).at[1].set(0.0)

    def weights(p, ratio, is_valid, least, axis_name=None):
        return importance_weights(
            p,
            20,
            exponent=0.7,
            is_valid=is_valid,
            ratio=ratio,
            normalize=normalize,
            min_probability=least,
            axis_name=axis_name,
        )

    of_device = functools.partial(weights, axis_name=AXIS)
    if backend == "vmap":
        mapped = jax.vmap(of_device, axis_name=AXIS)
    else:
        mapped = over_devices(of_device, backend)
    actual = mapped(*map(np.asarray, (p, ratio, is_valid, least)))
    whole = weights(p.ravel(), ratio.ravel(), is_valid.ravel(), p[is_valid].min())
    np.testing.assert_allclose(np.ravel(actual), whole, rtol=1e-6)


def test_shards_of_different_sizes_are_unbiased_with_their_mean_size():
    f = np.random.default_rng(0).normal(size=10)
    shards = [distribution(8, 3), distribution(9, 7)]
    total = 0.0
    for p, values in zip(shards, (f[:3], f[3:])):
        weights = importance_weights(p, 5, exponent=1.0, normalize="none")
        total += np.sum(np.float64(p) * np.float64(weights) * values) / 2
    np.testing.assert_allclose(total, f.mean(), rtol=1e-5)


@pytest.mark.parametrize("backend", [*BACKENDS, "vmap"])
def test_four_devices_have_one_maximum(backend):
    priority = np.array([[1, 2], [NAN, 7], [3, INF], [0, -9]], np.float32)

    def maximum(priority):
        start = jnp.ones(())
        return priorities.new_maximum(start, priority, decay=0.5, axis_name=AXIS)

    if backend == "vmap":
        mapped = jax.vmap(maximum, axis_name=AXIS)
    else:
        mapped = over_devices(maximum, backend)
    np.testing.assert_array_equal(mapped(priority), np.full(4, 7.0))


# -------------------------------------------------------------------- a whole replay


def test_what_a_replay_can_store():
    priority = jnp.array([0.0, 1.0, 3e38, -0.0, -1e-30, NAN, INF, -INF])
    expected = [True, True, True, True, False, False, False, False]
    np.testing.assert_array_equal(is_acceptable(priority), expected)


@pytest.mark.parametrize("decay", [1.0, 0.75, 0.0])
@properties(max_examples=40)
@given(batches=st.lists(st.lists(st.floats(width=32), min_size=3, max_size=3)))
def test_a_maximum_is_that_of_what_was_seen_and_could_be_stored(decay, batches):
    maximum, expected = jnp.ones(()), 1.0
    for batch in batches:
        maximum = priorities.new_maximum(
            maximum, jnp.asarray(batch, jnp.float32), decay=decay
        )
        stored = [x for x in batch if math.isfinite(x) and x >= 0]
        expected = max(decay * expected, *stored, 0.0)
        np.testing.assert_allclose(maximum, expected, rtol=1e-6, atol=1e-37)


def test_an_empty_batch_leaves_the_maximum_but_for_its_decay(compiled):
    of = lambda maximum, decay: priorities.new_maximum(
        maximum, jnp.zeros(0), decay=decay
    )
    assert compiled(of)(jnp.float32(4.0), jnp.float32(1.0)) == 4.0
    assert compiled(of)(jnp.float32(4.0), jnp.float32(0.25)) == 1.0
    assert priorities.new_maximum(jnp.float32(4.0), jnp.ones(2)) == 4.0  # No decay.


@properties(max_examples=60)
@given(seed=st.integers(0, 10**6), fraction=st.floats(0.0, 0.99))
def test_a_source_has_its_share_and_nobody_else_changes(seed, fraction):
    rng = np.random.default_rng(seed)
    weights = np.abs(rng.standard_cauchy(SIZE)).astype(np.float32)
    weights[rng.random(SIZE) < 0.3] = 0
    is_source = rng.random(SIZE) < rng.choice([0.0, 0.2, 0.5, 1.0])
    args = jnp.asarray(weights), jnp.asarray(is_source)
    actual = np.asarray(priorities.quota(*args, fraction))
    traced = jax.jit(priorities.quota)(*args, jnp.float32(fraction))
    np.testing.assert_allclose(traced, actual, rtol=1e-4)
    np.testing.assert_array_equal(actual[~is_source], weights[~is_source])
    before, others = (weights[m].sum(dtype=np.float64) for m in (is_source, ~is_source))
    if before == 0 or others == 0 or before > 1.0001 * fraction * (before + others):
        np.testing.assert_array_equal(actual, weights)
        return
    now = np.float64(actual)
    assert now[is_source].sum() / now.sum() == pytest.approx(fraction, rel=1e-4)
    shares = weights[is_source] / before
    np.testing.assert_allclose(actual[is_source], shares * now[is_source].sum(), 1e-5)


def test_a_source_of_next_to_nothing_is_raised_without_an_infinity():
    weights = jnp.array([3e-38, 1e-37, 1e8, 0.0])
    is_source = jnp.array([True, True, False, True])
    actual = priorities.quota(weights, is_source, 0.5)
    expected = [1e8 * 3 / 13, 1e8 * 10 / 13, 1e8, 0.0]
    np.testing.assert_allclose(actual, expected, rtol=1e-5)
    nothing = jnp.where(is_source, 0.0, weights)
    np.testing.assert_array_equal(priorities.quota(nothing, is_source, 0.5), nothing)


@properties(max_examples=40)
@given(seed=st.integers(0, 10**6))
def test_the_old_and_unimportant_go_first(seed):
    x, rng = items(seed), np.random.default_rng(seed)
    of = functools.partial(priorities.eviction_score, age_coef=0.8)
    score = of(x.priority, x.count)
    assert np.all(of(x.priority, x.count + 1) > score)
    assert np.all(of(x.priority * 1.01, x.count) < score)
    # A common factor of weights changes no order.
    scaled = of(x.priority * 1000.0, x.count)
    np.testing.assert_allclose(scaled, score - np.float32(np.log(1000)), atol=2e-5)
    # k times the age makes up for k^coef times the weight.
    k = rng.integers(2, 9)
    older = jnp.asarray(k * (1 + np.asarray(x.count)) - 1)
    traded = of(x.priority * np.float32(k**0.8), older)
    np.testing.assert_allclose(traded, score, atol=2e-5)


def test_the_age_s_coefficient_goes_from_least_weight_over_oldest_to_newest():
    weight = jnp.array([3.0, 1.0, 2.0, 0.0])
    age = jnp.array([9, 5, 1, 0], jnp.int32)
    order = lambda coef: np.argsort(
        -priorities.eviction_score(weight, age, age_coef=coef)
    ).tolist()
    assert order(0.0) == [3, 1, 2, 0]
    assert order(1e4) == [0, 1, 2, 3]
    assert order(-1e4) == [3, 2, 1, 0]


def test_of_items_that_cannot_be_drawn_the_older_goes_first():
    weight, age = jnp.array([0.0, 0.0, 1e-3]), jnp.array([1, 2, 1000], jnp.int32)
    score = priorities.eviction_score(weight, age, age_coef=1.0)
    assert np.all(np.isfinite(score))
    assert np.argsort(-score).tolist() == [1, 0, 2]


# --------------------------------------------------------------------------- refusals


OTHERS = {
    "importance_weights": (lambda x, **c: importance_weights(x.priority, 3, **c), {}),
    "new_maximum": (
        lambda x, **c: priorities.new_maximum(jnp.ones(()), x.priority, **c),
        {},
    ),
    "quota": (lambda x, **c: priorities.quota(x.priority, x.is_same_episode, **c), {}),
}


def call(name, **options):
    """A rule with items and other options that are right."""
    rule, coefficients, *_ = (RULES | OTHERS)[name]
    return rule(items(), **(coefficients | options))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("absolute", {"epsilon": -1.0}, r"epsilon -1.0 must be in \[0"),
        ("absolute", {"epsilon": NAN}, "epsilon nan must be in"),
        ("absolute", {"epsilon": INF}, "epsilon inf must be in"),
        ("signed", {"positive": -1.0}, "positive -1.0 must be in"),
        ("signed", {"negative": -1.0}, "negative -1.0 must be in"),
        ("signed", {"epsilon": -1.0}, "epsilon -1.0 must be in"),
        ("derivative", {"epsilon": -1.0}, "epsilon -1.0 must be in"),
        ("sign_consistent", {"grow": 0.5}, r"grow 0.5 .* \[1"),
        ("sign_consistent", {"shrink": 1.5}, r"1.5 .*, 1\]"),
        ("sign_consistent", {"low": -1.0}, r"low -1.0 must be in \[0"),
        ("sign_consistent", {"low": 2.0, "high": 1.0}, r"high 1.0 must be in \[2"),
        ("return_boost", {"low": 2.0, "high": 2.0}, r"high 2.0 .* \(2"),
        ("return_boost", {"low": NAN}, "low nan must be"),
        ("return_boost", {"coef": -1.0}, "coef -1.0 must be"),
        ("staleness_bonus", {"rate": -1.0}, "rate -1.0 must be in"),
        ("staleness_offset", {"rate": -1.0}, "rate -1.0 must be in"),
        ("novelty", {"coef": -1.0}, "coef -1.0 must be in"),
        ("predecessor", {"coef": -1.0}, "coef -1.0 must be in"),
        ("off_policy", {"epsilon": -1.0}, "epsilon -1.0 must be in"),
        ("importance_weights", {"exponent": 1.5}, r"exponent 1.5 must be in \[0, 1\]"),
        ("importance_weights", {"exponent": -0.5}, "exponent -0.5 must be in"),
        (
            "importance_weights",
            {"exponent": 0.5, "normalize": "max"},
            "normalize 'max' must be one of batch, buffer, none",
        ),
        (
            "importance_weights",
            {"exponent": 0.5, "normalize": "buffer"},
            "min_probability None must be a number",
        ),
        ("new_maximum", {"decay": 1.5}, r"decay 1.5 must be in \[0, 1\]"),
        ("quota", {"fraction": 1.0}, r"fraction 1.0 must be in \[0, 1\)"),
        ("eviction_score", {"age_coef": NAN}, "age_coef nan must be in"),
    ],
)
def test_an_impossible_coefficient_is_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        call(name, **options)


@pytest.mark.parametrize("known", ["low", "high", "neither"])
def test_limits_that_are_partly_traced_are_compared_to_none(known):
    def rules(low, high):
        limits = {"low": low, "high": high}
        limits |= (
            {known: {"low": 1.0, "high": 2.0}.get(known)} if known in limits else {}
        )
        return (
            call("return_boost", **limits),
            call("sign_consistent", **limits),
        )

    for actual, expected in zip(
        jax.jit(rules)(jnp.float32(1.0), jnp.float32(2.0)), rules(1.0, 2.0)
    ):
        np.testing.assert_allclose(actual, expected, rtol=1e-6)


def test_a_norm_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one argument"):
        priorities.weight_change_norm({})
