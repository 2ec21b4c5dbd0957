"""Policies' distributions, against scipy and their own samples."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from fps_jax.models.distributions import (
    boltzmann,
    categorical,
    diagonal_gaussian,
    epsilon_greedy,
)

LOGITS = np.array([[2.0, -1.0, 0.5, 0.0], [0.0, 0.0, 0.0, 0.0]], np.float32)
MEAN = np.array([[0.5, -2.0, 0.0], [1.0, 3.0, -0.1]], np.float32)
LOG_STD = np.array([[-1.0, 0.0, 0.3], [-0.5, 0.7, -2.0]], np.float32)
DRAWS = 20_000


def gaussian():
    return diagonal_gaussian(jnp.asarray(MEAN), jnp.asarray(LOG_STD))


@jax.jit
def draw(policy, key):
    return policy.sample(seed=key, sample_shape=(DRAWS,))


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
    draws = np.asarray(draw(gaussian(), jax.random.key(0)), np.float64)
    assert draws.shape == (DRAWS, 2, 3)
    standard = np.reshape((draws - MEAN) / np.exp(LOG_STD), (DRAWS, 6))
    np.testing.assert_allclose(standard.mean(0), 0, atol=5 / np.sqrt(DRAWS))
    covariance = standard.T @ standard / DRAWS
    np.testing.assert_allclose(covariance, np.eye(6), atol=5 * np.sqrt(2 / DRAWS))


def test_a_gaussian_s_score_is_analytic():
    action = MEAN + np.float32(0.4)
    f = lambda mean, log_std: diagonal_gaussian(mean, log_std).log_prob(action).sum()
    at = jnp.asarray(MEAN), jnp.asarray(LOG_STD)
    score = jax.jit(jax.grad(f, argnums=(0, 1)))(*at)
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
    draws = np.asarray(draw(policy, jax.random.key(1)))
    frequency = np.stack([np.bincount(d, minlength=4) / DRAWS for d in draws.T])
    exact = probabilities()
    sigma = np.sqrt(exact * (1 - exact) / DRAWS)
    assert np.max(np.abs(frequency - exact) / sigma) < 5
    assert policy.mode()[0] == 0


def test_a_categorical_s_score_is_the_chosen_less_the_probabilities():
    log_prob = lambda logits: jnp.sum(categorical(logits).log_prob(jnp.array([1, 3])))
    score = jax.jit(jax.grad(log_prob))(jnp.asarray(LOGITS))
    np.testing.assert_allclose(score, np.eye(4)[[1, 3]] - probabilities(), atol=1e-6)


def test_an_impossible_action_has_no_influence_on_the_entropy():
    logits = jnp.array([0.0, 0.0, -jnp.inf])
    np.testing.assert_allclose(categorical(logits).entropy(), np.log(2), rtol=1e-6)
    assert categorical(logits).log_prob(jnp.asarray(2)) == -jnp.inf


@pytest.mark.parametrize("lead", [(), (2, 3)])
@pytest.mark.parametrize(
    ("policy", "event"),
    [
        (lambda x: diagonal_gaussian(x, x), (4,)),
        (categorical, ()),
    ],
    ids=["gaussian", "categorical"],
)
def test_any_leading_axes_are_a_batch(policy, event, lead):
    def all_of(x):
        action = policy(x).sample(seed=jax.random.key(2))
        return action, policy(x).log_prob(action), policy(x).entropy()

    action, *numbers = jax.eval_shape(all_of, jnp.zeros((*lead, 4)))
    assert action.shape == (*lead, *event)
    assert [x.shape for x in numbers] == [lead, lead]


def test_epsilon_of_the_actions_are_any_and_the_rest_the_first_best():
    epsilon = jnp.array([0.4, 1.0])
    found = epsilon_greedy(jnp.asarray(LOGITS), epsilon).probs
    np.testing.assert_allclose(found[0], [0.7, 0.1, 0.1, 0.1], rtol=1e-6)
    np.testing.assert_allclose(found[1], 0.25, rtol=1e-6)
    # Of equal values the first; and nothing else at all without an epsilon.
    surely = epsilon_greedy(jnp.asarray(LOGITS), jnp.zeros(2))
    np.testing.assert_array_equal(draw(surely, jax.random.key(0)), 0)


def test_better_actions_are_likelier_the_colder_it_is():
    temperature = jnp.array([0.5, 2.0])
    found = boltzmann(jnp.asarray(LOGITS), temperature).probs
    weights = np.exp(LOGITS / np.array([[0.5], [2.0]]))
    expected = weights / weights.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
