"""Policies' distributions, against scipy and their own samples."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from fps_jax.models.distributions import categorical, diagonal_gaussian

LOGITS = np.array([[2.0, -1.0, 0.5, 0.0], [0.0, 0.0, 0.0, 0.0]], np.float32)
MEAN = np.array([[0.5, -2.0, 0.0], [1.0, 3.0, -0.1]], np.float32)
LOG_STD = np.array([[-1.0, 0.0, 0.3], [-0.5, 0.7, -2.0]], np.float32)
DRAWS = 20_000


def gaussian():
    return diagonal_gaussian(jnp.asarray(MEAN), jnp.asarray(LOG_STD))


def probabilities() -> np.ndarray:
    weights = np.exp(LOGITS.astype(np.float64))
    return weights / weights.sum(-1, keepdims=True)


def test_log_probabilities_of_a_gaussian_are_joint_over_the_action(compiled):
    action = np.random.default_rng(0).normal(size=(2, 3)).astype(np.float32)
    log_prob = compiled(
        lambda mean, log_std, a: diagonal_gaussian(mean, log_std).log_prob(a)
    )
    actual = log_prob(*map(jnp.asarray, (MEAN, LOG_STD, action)))
    expected = stats.norm(MEAN, np.exp(LOG_STD)).logpdf(action).sum(-1)
    assert actual.shape == (2,)
    np.testing.assert_allclose(actual, expected, rtol=1e-5)


def test_a_gaussian_s_entropy_is_the_sum_over_its_dimensions():
    expected = stats.norm(MEAN, np.exp(LOG_STD)).entropy().sum(-1)
    np.testing.assert_allclose(gaussian().entropy(), expected, rtol=1e-6)
    np.testing.assert_array_equal(gaussian().mode(), MEAN)


def test_samples_of_a_gaussian_have_its_moments():
    draws = gaussian().sample(seed=jax.random.key(0), sample_shape=(DRAWS,))
    draws, deviation = np.asarray(draws, np.float64), np.exp(LOG_STD)
    assert draws.shape == (DRAWS, 2, 3)
    error = np.abs(draws.mean(0) - MEAN) / (deviation / np.sqrt(DRAWS))
    assert np.max(error) < 5
    error = np.abs(draws.std(0) / deviation - 1) * np.sqrt(2 * DRAWS)
    assert np.max(error) < 5
    first, second = np.reshape((draws - draws.mean(0)) / draws.std(0), (DRAWS, 6))[
        :, :2
    ].T
    assert np.abs(np.mean(first * second)) < 5 / np.sqrt(DRAWS)


def test_a_gaussian_s_score_is_analytic():
    action = MEAN + np.float32(0.4)
    score = jax.grad(
        lambda mean, log_std: jnp.sum(
            diagonal_gaussian(mean, log_std).log_prob(action)
        ),
        argnums=(0, 1),
    )(jnp.asarray(MEAN), jnp.asarray(LOG_STD))
    standard = (action - MEAN) / np.exp(LOG_STD)
    np.testing.assert_allclose(score[0], standard / np.exp(LOG_STD), rtol=1e-4)
    np.testing.assert_allclose(score[1], standard**2 - 1, rtol=1e-4)


def test_log_probabilities_and_entropy_of_a_categorical_are_normalised(compiled):
    both = compiled(lambda x, a: (categorical(x).log_prob(a), categorical(x).entropy()))
    for shift in (0.0, 50.0):  # logits are relative
        for action in range(4):
            actions = jnp.full(2, action)
            log_prob, entropy = both(jnp.asarray(LOGITS + np.float32(shift)), actions)
            expected = np.log(probabilities()[:, action])
            np.testing.assert_allclose(log_prob, expected, rtol=1e-4)
            expected = [stats.entropy(p) for p in probabilities()]
            np.testing.assert_allclose(entropy, expected, rtol=1e-4)


def test_samples_of_a_categorical_have_its_frequencies():
    policy = categorical(jnp.asarray(LOGITS))
    draws = np.asarray(policy.sample(seed=jax.random.key(1), sample_shape=(DRAWS,)))
    frequency = np.stack([np.bincount(d, minlength=4) / DRAWS for d in draws.T])
    exact = probabilities()
    sigma = np.sqrt(exact * (1 - exact) / DRAWS)
    assert np.max(np.abs(frequency - exact) / sigma) < 5
    assert policy.mode()[0] == 0


def test_a_categorical_s_score_is_the_chosen_less_the_probabilities():
    log_prob = lambda logits: jnp.sum(categorical(logits).log_prob(jnp.array([1, 3])))
    score = jax.grad(log_prob)(jnp.asarray(LOGITS))
    np.testing.assert_allclose(score, np.eye(4)[[1, 3]] - probabilities(), atol=1e-6)


def test_an_impossible_action_has_no_influence_on_the_entropy():
    logits = jnp.array([0.0, 0.0, -jnp.inf])
    np.testing.assert_allclose(categorical(logits).entropy(), np.log(2), rtol=1e-6)
    assert categorical(logits).log_prob(jnp.asarray(2)) == -jnp.inf


@pytest.mark.parametrize("lead", [(), (2, 3)])
def test_any_leading_axes_are_a_batch(lead):
    gaussian = diagonal_gaussian(jnp.zeros((*lead, 4)), jnp.zeros((*lead, 4)))
    discrete = categorical(jnp.zeros((*lead, 4)))
    for policy, event in ((gaussian, (4,)), (discrete, ())):
        action = policy.sample(seed=jax.random.key(2))
        assert action.shape == (*lead, *event)
        assert policy.log_prob(action).shape == policy.entropy().shape == lead
