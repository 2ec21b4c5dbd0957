"""DFPS's gradient at the old parameters is equation 14, and what follows from that."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dfps_twin import Twin, experience_of, frozen_of, small

from fps_jax.agents import dfps_policy
from fps_jax.agents.dfps_signals import segment_of, signals_of

ON = {"noise": "none"}


@functools.cache
def compiled(**options):
    """An agent, and what makes signals, metrics and a gradient of what it did."""
    this = small(**(ON | options))

    @jax.jit
    def of(learner, trajectory, is_ready=True):
        frozen = frozen_of(this, learner, is_ready)
        segment = segment_of(trajectory, frozen)
        signals, metrics = signals_of(this.parts, learner, segment, frozen)
        key = jax.random.key(0)
        rows = dfps_policy.rows_of(this.parts, segment, signals, None, frozen, key)
        terms_of = dfps_policy.terms(this.parts, learner, signals, frozen)
        slope = jax.grad(lambda p: terms_of(p, rows).loss())(learner.policy.params)
        return signals, metrics, slope

    return this, of


def told(seed, off_policy=0.0, numbers=(), **options):
    """An agent, what it did, and what that tells it with other numbers."""
    this, of = compiled(**options)
    trajectory = experience_of(this, seed, off_policy)
    hyper = this.state.learner.hyper
    hyper = hyper._replace(**{k: jnp.float32(x) for k, x in dict(numbers).items()})
    learner = this.state.learner._replace(hyper=hyper)
    return this, trajectory, *of(learner, trajectory)


def pulled_back(this, twin, direction):
    """What a direction of the means is as one of the parameters, downhill."""
    observation = jnp.asarray(twin.observation[:-1], jnp.float32)
    of = lambda params: this.parts.networks.policy(params, observation).mean
    _, pull = jax.vjp(of, this.state.learner.policy.params)
    return pull(jnp.asarray(-direction, jnp.float32))[0]


def compare(found, expected):
    """Compares gradients, but for the log deviation's, which has no critic's term."""
    close = lambda path, a, b: np.testing.assert_allclose(
        a, b, rtol=2e-3, atol=2e-5, err_msg=jax.tree_util.keystr(path)
    )
    drop = lambda tree: jax.tree_util.tree_map_with_path(
        lambda path, x: x * 0 if "log_std" in str(path) else x, tree
    )
    jax.tree_util.tree_map_with_path(close, drop(found), drop(expected))


@pytest.mark.parametrize("off_policy", [0.0, 0.7])
def test_the_literal_gradient_is_equation_14(off_policy):
    this, trajectory, signals, _, slope = told(0, off_policy)
    twin = Twin(this, trajectory)
    np.testing.assert_allclose(signals.target, twin.target, rtol=1e-3, atol=1e-4)
    direction = twin.direction_of_mean(weight=1.0)
    compare(slope, pulled_back(this, twin, direction))


def test_bars_lambda_and_coefficients_are_where_they_belong():
    numbers = {"rho_bar": 1.6, "c_bar": 1.1, "lambda_": 0.8, "gamma": 0.9}
    this, trajectory, _, _, slope = told(2, 0.8, numbers | {"dpg_coef": 0.3})
    twin = Twin(this, trajectory, **numbers)
    direction = twin.direction_of_mean(weight=1.0, dpg_coef=0.3)
    compare(slope, pulled_back(this, twin, direction))


def test_at_nu_of_one_only_the_critic_is_left():
    this, trajectory, _, _, slope = told(4, numbers={"ipg_nu": 1.0})
    twin = Twin(this, trajectory)
    only = np.where(twin.is_valid[..., None], twin.q_slope, 0.0) / twin.is_valid.sum()
    compare(slope, pulled_back(this, twin, only))


def test_squashed_actions_are_expanded_first_and_sigma_divides_both_terms():
    options = {"squash": "tanh", "dpg_scale": "inv_sigma"}
    this, trajectory, signals, _, slope = told(5, 0.5, **options)
    drawn = trajectory.behaviour["drawn"]
    np.testing.assert_allclose(trajectory.action, np.tanh(drawn), atol=1e-6)
    twin = Twin(this, trajectory)
    _, std = twin.signal(twin.advantage - twin.expansion)
    np.testing.assert_allclose(signals.critic_weight, 1 / std, rtol=1e-3)
    compare(slope, pulled_back(this, twin, twin.direction_of_mean()))


PLAIN = {
    "control_variate": "zero",
    "statistics": "none",
    "trust_region": "clip",
    "corrects_lag": False,
}


def test_without_a_control_variate_both_terms_stay():
    this, trajectory, _, _, slope = told(3, **PLAIN)
    twin = Twin(this, trajectory, statistics="none")
    direction = twin.direction_of_mean(coef=0.0, weight=1.0)
    compare(slope, pulled_back(this, twin, direction))


def test_uncorrected_the_behaviour_does_not_matter():
    _, _, signals, _, slope = told(6, 0.9, **PLAIN)
    _, _, on_policy, _, same = told(6, **PLAIN)
    np.testing.assert_array_equal(signals.log_prob, signals.behaviour_log_prob)
    np.testing.assert_array_equal(signals.target, on_policy.target)
    jax.tree.map(np.testing.assert_array_equal, slope, same)


def test_without_lag_and_noise_every_ratio_is_one():
    _, _, signals, metrics, _ = told(0)
    # Acting and learning are two programs, which round each in its own way.
    close = functools.partial(np.testing.assert_allclose, atol=3e-6)
    close(signals.log_prob, signals.behaviour_log_prob)
    close(metrics["ESS"], 1)


def test_the_penalty_has_no_slope_at_the_old_policy():
    _, _, _, _, slope = told(0)
    _, _, _, _, free = told(0, numbers={"kl_hinge_coef": 1e6})
    jax.tree.map(np.testing.assert_array_equal, slope, free)


def test_a_critic_that_is_not_ready_leaves_the_plain_gradient():
    this, of = compiled()
    trajectory = experience_of(this, 7, 0.4)
    _, metrics, slope = of(this.state.learner, trajectory, is_ready=False)
    twin = Twin(this, trajectory)
    direction = twin.direction_of_mean(coef=0.0, dpg_coef=0.0)
    compare(slope, pulled_back(this, twin, direction))
    np.testing.assert_allclose(metrics["residual_variance"], 1, rtol=1e-5)
