"""The fusion gradient's parts: identities, known biases, and naive twins."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import norm

from fps_jax.objectives import fusion
from fps_jax.objectives.clip_ppo import clipped_surrogate

# Centres of equally likely pieces of a standard Gaussian: a mean over them is an
# integral, good to about 1e-3 for what grows like a cube.
NODES = norm.ppf((np.arange(40_001) + 0.5) / 40_001)
ALL = jnp.ones(NODES.shape, bool)


def items(seed, size=40):
    """Advantages, control variates and a mask, of float64."""
    rng = np.random.default_rng(seed)
    a, c = rng.normal(size=(2, size))
    return a + 0.3, 0.5 * c + 0.2 * a, rng.random(size) < 0.7


def quadratic(seed, states=5, actions=3):
    """A critic that is quadratic in the action, state by state, and two policies."""
    rng = np.random.default_rng(seed)
    slope = rng.normal(size=(states, actions))
    bend = rng.normal(size=(states, actions, actions))
    q = lambda a: (
        jnp.einsum("sa,sa->s", slope, a) + jnp.einsum("sab,sa,sb->s", bend, a, a)
    )
    mean, action = rng.normal(size=(2, states, actions))
    by_hand = slope + np.einsum("sab,sb->sa", bend + bend.swapaxes(1, 2), mean)
    return q, mean, action, by_hand


def test_the_control_variate_is_the_slope_times_the_deviation(float64):
    q, mean, action, slope = quadratic(0)
    found = fusion.control_variate(q, jnp.asarray(mean), jnp.asarray(action))
    np.testing.assert_allclose(found, np.sum(slope * (action - mean), 1), rtol=1e-12)
    at_the_mean = fusion.control_variate(q, jnp.asarray(mean), jnp.asarray(mean))
    np.testing.assert_array_equal(at_the_mean, 0)


@functools.cache
def gaussian_problem():
    """One state, pi = N(0.4, 0.7^2), a true advantage, and a critic that is wrong."""
    mean, std = 0.4, 0.7
    action = mean + std * NODES
    truth = lambda a: 0.5 * a - 0.4 * a**2 + 0.1 * a**3
    critic = lambda a: -3.0 * a + 0.5 * a**2
    score = (action - mean) / std**2
    return mean, std, action, truth(action), critic, score


def expansion(critic, mean, action):
    of_one = lambda a: critic(a[:, 0])
    column = jnp.asarray(action)[:, None]
    return np.asarray(
        fusion.control_variate(of_one, jnp.full_like(column, mean), column)
    )


def test_the_fusion_gradient_is_unbiased_for_any_critic_on_policy(float64):
    mean, _, action, advantage, critic, score = gaussian_problem()
    slope_at_mean = float(jax.grad(critic)(mean))
    true_gradient = np.mean(score * advantage)
    bar = expansion(critic, mean, action)
    np.testing.assert_allclose(np.mean(score * bar), slope_at_mean, rtol=2e-3)
    # The log-deviation's score sees only even moments.
    of_log_std = score * (action - mean) - 1.0
    np.testing.assert_allclose(np.mean(of_log_std * bar), 0, atol=1e-9)
    fused = np.mean(score * (advantage - bar)) + slope_at_mean
    np.testing.assert_allclose(fused, true_gradient, atol=3e-3)


def test_equation_14_leans_on_the_critic_as_its_deviation_says(float64):
    # E[(14)] = grad J / std + (1 - 1 / std) grad_Q: for this critic of the wrong sign.
    mean, _, action, advantage, critic, score = gaussian_problem()
    bar = expansion(critic, mean, action)
    signal = fusion.learning_signal(
        jnp.asarray(advantage), jnp.asarray(advantage - bar), ALL
    )
    slope, true_gradient = float(jax.grad(critic)(mean)), np.mean(score * advantage)
    std = float(signal.std)
    printed = np.mean(score * signal.value) + slope
    expected = true_gradient / std + (1 - 1 / std) * slope
    np.testing.assert_allclose(printed, expected, atol=3e-3)
    assert printed < 0 < true_gradient
    weight = fusion.critic_weight(signal.std, jnp.asarray(bar), ALL, scale="inv_sigma")
    repaired = np.mean(score * signal.value) + float(weight) * slope
    np.testing.assert_allclose(repaired, true_gradient / std, atol=3e-3)


@pytest.mark.parametrize("rho_bar", [1.0, 2.0, np.inf])
def test_truncation_takes_less_of_the_critic_than_is_added(float64, rho_bar):
    # b = N(0, 1), pi = N(1/2, 1), and the control variate of a critic of slope 1.
    log_prob = lambda mean: -0.5 * (NODES - mean) ** 2
    old, behaviour, signal = map(jnp.asarray, (log_prob(0.5), log_prob(0), NODES - 0.5))
    gain = lambda mean: jnp.mean(
        fusion.surrogate(log_prob(mean), old, behaviour, signal, ALL, rho_bar=rho_bar)
    )
    # The ratio is at most rho_bar up to this action; on either side, second moments.
    c = 2 * np.log(rho_bar) + 0.25
    below = norm.cdf(c - 0.5)
    above = 0.0
    if np.isfinite(c):
        below -= (c - 0.5) * norm.pdf(c - 0.5)
        above = 1.25 * norm.sf(c) + (c - 1) * norm.pdf(c)
        above *= rho_bar
    share = below + above
    np.testing.assert_allclose(jax.grad(gain)(0.5), share, atol=5e-4)
    assert share <= 1.0
    assert (share < 0.9) == (rho_bar <= 2)


def linear_policy(seed, size=30):
    """A linear-Gaussian policy at its old parameters, and data of another."""
    rng = np.random.default_rng(seed)
    state = rng.normal(size=(size, 4))
    old = rng.normal(size=(4,))
    action = state @ old + rng.normal(size=size)
    old_log_prob = -0.5 * (action - state @ old) ** 2
    behaviour = old_log_prob + rng.normal(size=size)
    log_prob = lambda params: -0.5 * (action - state @ params) ** 2
    score = (action - state @ old)[:, None] * state
    signal = rng.normal(size=size)
    is_valid = rng.random(size) < 0.8
    arrays = map(jnp.asarray, (old_log_prob, behaviour, signal, is_valid))
    return log_prob, jnp.asarray(old), score, tuple(arrays)


def slope_of(kind, problem, rho_bar, **options):
    log_prob, old, _, (old_log_prob, behaviour, signal, is_valid) = problem
    total = lambda params: jnp.sum(
        fusion.surrogate(
            log_prob(params),
            old_log_prob,
            behaviour,
            signal,
            is_valid,
            kind=kind,
            rho_bar=rho_bar,
            **options,
        )
    )
    return jax.grad(total)(old)


@pytest.mark.parametrize("kind", ["R2", "R3"])
@pytest.mark.parametrize("rho_bar", [0.5, 1.0, np.inf])
def test_the_surrogates_slope_is_equation_14(float64, kind, rho_bar):
    problem = linear_policy(1)
    _, _, score, arrays = problem
    old_log_prob, behaviour, signal, is_valid = map(np.asarray, arrays)
    rho = np.minimum(np.exp(old_log_prob - behaviour), rho_bar)
    expected = np.sum((rho * signal * is_valid)[:, None] * score, axis=0)
    np.testing.assert_allclose(slope_of(kind, problem, rho_bar), expected, rtol=1e-10)


def test_r1_agrees_only_where_nothing_is_capped(float64):
    problem = linear_policy(2)
    free = slope_of("R3", problem, np.inf)
    np.testing.assert_allclose(slope_of("R1", problem, np.inf), free, rtol=1e-10)
    _, _, score, arrays = problem
    old_log_prob, behaviour, signal, is_valid = map(np.asarray, arrays)
    ratio = np.exp(old_log_prob - behaviour)
    counts = is_valid & (ratio < 1.0)
    expected = np.sum((ratio * signal * counts)[:, None] * score, axis=0)
    np.testing.assert_allclose(slope_of("R1", problem, 1.0), expected, rtol=1e-10)


def test_clipping_is_that_of_ppo_with_a_weight(float64):
    _, _, _, (old, behaviour, signal, is_valid) = linear_policy(3)
    log_prob = old + 0.4 * jnp.asarray(np.random.default_rng(4).normal(size=old.shape))
    found = fusion.surrogate(
        log_prob, old, behaviour, signal, is_valid, rho_bar=1.5, clip_epsilon=0.2
    )
    weight = np.minimum(np.exp(old - behaviour), 1.5)
    clipped = clipped_surrogate(log_prob - old, signal, clip_epsilon=0.2)
    np.testing.assert_allclose(found, np.where(is_valid, weight * clipped, 0))


def test_what_is_not_valid_has_no_influence_even_as_nan():
    log_prob = jnp.array([-1.0, jnp.nan])
    others = jnp.array([-1.2, jnp.inf]), jnp.array([-1.1, jnp.nan])
    is_valid = jnp.array([True, False])
    signal = jnp.array([2.0, jnp.nan])
    for kind in fusion.SURROGATES:
        of = functools.partial(fusion.surrogate, kind=kind, rho_bar=2.0)
        total = lambda x, of=of: jnp.sum(of(x, *others, signal, is_valid))
        slope = jax.grad(total)(log_prob)
        assert np.isfinite(slope).all()
        assert slope[1] == 0
        assert slope[0] != 0


def test_no_ratio_overflows():
    far = jnp.array([1e4, -1e4])
    zero, valid = jnp.zeros(2), jnp.ones(2, bool)
    for kind in fusion.SURROGATES:
        of = functools.partial(fusion.surrogate, kind=kind)
        total = lambda x, of=of: jnp.sum(of(x, zero, zero, jnp.ones(2), valid))
        value, slope = jax.value_and_grad(total)(far)
        assert np.isfinite(value)
        assert np.isfinite(slope).all()


@pytest.mark.parametrize("kind", fusion.CONTROL_VARIATES)
def test_coefficients_are_those_of_a_naive_twin(float64, kind):
    a, c, is_valid = items(5)
    a[3], c[4] = 0.0, 0.0
    found = fusion.control_variate_coef(
        jnp.asarray(a), jnp.asarray(c), jnp.asarray(is_valid), kind=kind
    )
    slope = np.sum((a * c)[is_valid]) / np.sum((c**2)[is_valid])
    expected = {
        "ones": np.ones_like(a),
        "conservative": (a * c > 0).astype(float),
        "aggressive": np.sign(a * c),
        "optimal": np.full_like(a, slope),
        "zero": np.zeros_like(a),
    }[kind]
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize("statistics", fusion.STATISTICS)
def test_signals_are_those_of_a_naive_twin(float64, statistics):
    a, c, is_valid = items(6)
    left = a - c
    found = fusion.learning_signal(
        jnp.asarray(a), jnp.asarray(left), jnp.asarray(is_valid), statistics=statistics
    )
    of = {"advantage": a, "none": np.zeros(1)}.get(statistics, left)
    of = of[is_valid] if of.size > 1 else of
    std = of.std() if statistics in ("residual", "advantage") else 1.0
    expected = np.where(is_valid, (left - of.mean()) / std, 0.0)
    np.testing.assert_allclose(found.value, expected, rtol=1e-10)
    np.testing.assert_allclose([found.mean, found.std], [of.mean(), std], rtol=1e-10)
    if statistics == "residual":
        shifted = fusion.learning_signal(
            jnp.asarray(a), jnp.asarray(left + 7.0), jnp.asarray(is_valid)
        )
        np.testing.assert_allclose(shifted.value, found.value, atol=1e-12)


def test_equal_residuals_and_none_at_all_have_a_signal_of_zero():
    same, valid = jnp.full(4, 0.3), jnp.ones(4, bool)
    np.testing.assert_array_equal(fusion.learning_signal(same, same, valid).value, 0)
    nothing = fusion.learning_signal(same, same, ~valid)
    np.testing.assert_array_equal(nothing.value, 0)
    assert np.isfinite(nothing.std)
    assert nothing.std > 0


@pytest.mark.parametrize("scale", fusion.CRITIC_SCALES)
def test_the_critics_weight_is_that_of_a_naive_twin(float64, scale):
    _, c, is_valid = items(7)
    found = fusion.critic_weight(
        jnp.asarray(2.5), jnp.asarray(c), jnp.asarray(is_valid), scale=scale
    )
    expected = {
        "none": 1.0,
        "inv_sigma": 0.4,
        "inv_control_variate_std": 1 / c[is_valid].std(),
    }[scale]
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_diagnostics_are_those_of_numpy(float64):
    a, c, is_valid = items(8)
    found = fusion.diagnostics(*map(jnp.asarray, (a, c, a - c, is_valid)))
    a, c = a[is_valid], c[is_valid]
    expected = {
        "control_variate_correlation": np.corrcoef(a, c)[0, 1],
        "control_variate_slope": np.sum(a * c) / np.sum(c * c),
        "residual_variance": (a - c).var() / a.var(),
    }
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-10)


def test_the_optimal_coefficient_takes_most_variance_away(float64):
    # var = (1 - corr^2) var(A) for a control variate of mean 0.
    a, c, _ = items(9, size=4000)
    c -= c.mean()
    valid = jnp.ones(a.shape, bool)
    slope = float(fusion.regression_slope(jnp.asarray(a), jnp.asarray(c), valid))
    corr = np.corrcoef(a, c)[0, 1]
    np.testing.assert_allclose(
        (a - slope * c).var(), (1 - corr**2) * a.var(), rtol=1e-9
    )


def test_several_devices_agree_with_one(float64):
    a, c, is_valid = map(jnp.asarray, items(10))

    def everything(a, c, is_valid, axis_name=None):
        coef = fusion.control_variate_coef(
            a, c, is_valid, kind="optimal", axis_name=axis_name
        )
        signal = fusion.learning_signal(a, a - coef * c, is_valid, axis_name=axis_name)
        weight = fusion.critic_weight(
            signal.std,
            c,
            is_valid,
            scale="inv_control_variate_std",
            axis_name=axis_name,
        )
        told = fusion.diagnostics(a, c, a - c, is_valid, axis_name=axis_name)
        return signal.value, signal.std, weight, told

    split = [x.reshape(4, 10) for x in (a, c, is_valid)]
    many = jax.vmap(functools.partial(everything, axis_name="d"), axis_name="d")(*split)
    one = everything(a, c, is_valid)
    np.testing.assert_allclose(many[0].reshape(-1), one[0], rtol=1e-9, atol=1e-12)
    for several, single in zip(
        jax.tree.leaves(many[1:]), jax.tree.leaves(one[1:]), strict=True
    ):
        np.testing.assert_allclose(several, single, rtol=1e-9)


def test_unknown_names_are_refused():
    one, valid = jnp.ones(1), jnp.ones(1, bool)
    calls = {
        "kind 'some'": lambda: fusion.control_variate_coef(
            one, one, valid, kind="some"
        ),
        "statistics 'all'": lambda: fusion.learning_signal(
            one, one, valid, statistics="all"
        ),
        "scale 'big'": lambda: fusion.critic_weight(one[0], one, valid, scale="big"),
        "kind 'R4'": lambda: fusion.surrogate(one, one, one, one, valid, kind="R4"),
        "clip_epsilon 0.2": lambda: fusion.surrogate(
            one, one, one, one, valid, kind="R1", clip_epsilon=0.2
        ),
    }
    for message, call in calls.items():
        with pytest.raises(ValueError, match=message):
            call()
