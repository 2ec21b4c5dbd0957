"""The clipped PPO loss of a few items, worked by hand, and every refusal."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fps_jax.objectives import clip_ppo, tally
from fps_jax.objectives.clip_ppo_loss import clip_ppo_loss


def small(**options):
    """A loss of three items whose log ratios are -1, 0 and 1."""
    given = {
        "log_prob": jnp.array([-1.0, 0.0, 1.0]),
        "behaviour_log_prob": jnp.zeros(3),
        "advantage": jnp.array([1.0, -1.0, 1.0]),
        "is_valid": jnp.ones(3, bool),
    }
    return clip_ppo_loss(**(given | options))


def test_without_entropy_or_value_their_losses_are_zero_and_unreported():
    losses, told = small()
    assert losses.entropy == losses.critic == 0
    assert not {"loss_entropy", "loss_critic", "entropy"} & set(tally.metrics(told))
    assert "explained_variance" not in tally.metrics(told)


def test_no_critic_coeff_really_removes_the_value_loss():
    value = {"value": jnp.ones(3), "value_target": jnp.zeros(3)}
    losses, told = small(**value, critic_coeff=None)
    assert losses.critic == 0
    assert "loss_critic" not in tally.metrics(told)
    assert small(**value)[0].critic == 0.5


def test_each_head_has_its_own_coefficient_and_its_own_metric():
    heads = {"arm": jnp.array([1.0, 2.0, 3.0]), "leg": jnp.array([0.0, 4.0, 8.0])}
    losses, told = small(entropy=heads, entropy_coeff={"arm": 0.5, "leg": 0.25})
    np.testing.assert_allclose(losses.entropy, -(0.5 * 2 + 0.25 * 4))
    metrics = tally.metrics(told)
    assert (metrics["entropy/arm"], metrics["entropy/leg"]) == (2, 4)
    assert metrics["entropy"] == 6
    np.testing.assert_allclose(small(entropy=heads, entropy_coeff=0.1)[0].entropy, -0.6)


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "loss", "gradient"),
    [
        (np.log(1000.0), -1.0, 100.0, 100.0),
        (np.log(1000.0), 1.0, -0.12, 0.0),
        (0.1, 1.0, -np.exp(0.1), -np.exp(0.1)),
    ],
)
def test_a_capped_item_keeps_a_gradient(log_ratio, advantage, loss, gradient):
    def objective(log_prob):
        return small(
            log_prob=log_prob,
            behaviour_log_prob=jnp.zeros(1),
            advantage=jnp.full(1, advantage, jnp.float32),
            is_valid=jnp.ones(1, bool),
            max_importance_ratio=100.0,
        )[0].objective

    at = jnp.full(1, log_ratio, jnp.float32)
    value, slope = jax.value_and_grad(objective)(at)
    np.testing.assert_allclose(value, loss, rtol=1e-5)
    np.testing.assert_allclose(slope, [gradient], rtol=1e-5, atol=1e-7)


def test_the_active_side_is_where_nothing_is_learned():
    def objective(log_prob):
        losses, told = small(
            log_prob=log_prob,
            behaviour_log_prob=jnp.zeros(4),
            advantage=jnp.array([1.0, -1.0, 1.0, -1.0]),
            is_valid=jnp.ones(4, bool),
        )
        return losses.objective, tally.metrics(told)

    at = jnp.array([-1.0, -1.0, 1.0, 1.0])
    gradient, metrics = jax.grad(objective, has_aux=True)(at)
    np.testing.assert_array_equal(gradient == 0, [False, True, True, False])
    assert metrics["clip_fraction"] == 1
    for side in ("low", "high"):
        assert metrics[f"clip_fraction_{side}"] == 0.5
        assert metrics[f"clip_fraction_active_{side}"] == 0.25


def test_the_dual_clip_holds_only_where_the_advantage_is_negative():
    objective = lambda log_ratio, advantage: clip_ppo.clipped_surrogate(
        log_ratio, advantage, clip_epsilon=0.2, dual_clip=3.0
    )
    log_ratio = jnp.log(jnp.array([10.0, 2.0, 10.0, 0.1]))
    advantage = jnp.array([-1.0, -1.0, 1.0, 1.0])
    np.testing.assert_allclose(
        objective(log_ratio, advantage), [-3.0, -2.0, 1.2, 0.1], rtol=1e-6
    )
    slopes = jax.vmap(jax.grad(objective))(log_ratio, advantage)
    np.testing.assert_allclose(slopes, [0.0, -2.0, 0.0, 0.1], rtol=1e-6)


@pytest.mark.parametrize("is_reparameterized", [True, False])
def test_the_gradient_of_a_sampled_entropy_is_the_entropy_s(is_reparameterized):
    draws = 200_000
    if is_reparameterized:
        noise = np.random.default_rng(0).normal(size=draws).astype(np.float32)

        def sampled(log_std):
            action = jnp.exp(log_std) * noise
            log_prob = -0.5 * jnp.square(action * jnp.exp(-log_std)) - log_std
            return clip_ppo.monte_carlo_entropy(log_prob, is_reparameterized=True)

        np.testing.assert_allclose(jax.grad(sampled)(jnp.float32(0.3)), 1.0, atol=1e-5)
        return
    logits = jnp.array([1.0, 0.0, -0.5])
    exact = lambda x: -jnp.sum(jax.nn.softmax(x) * jax.nn.log_softmax(x))
    probability = np.asarray(jax.nn.softmax(logits), np.float64)
    probability /= probability.sum()
    action = np.random.default_rng(1).choice(3, size=draws, p=probability)

    def sampled(logits):
        log_prob = jax.nn.log_softmax(logits)[action]
        return clip_ppo.monte_carlo_entropy(log_prob, is_reparameterized=False)

    value, slope = jax.value_and_grad(sampled)(logits)
    log = np.asarray(jax.nn.log_softmax(logits), np.float64)
    noise = 5 * np.sqrt(np.sum(probability * log**2)) / np.sqrt(draws)
    np.testing.assert_allclose(value, exact(logits), atol=noise)
    expected = jax.grad(exact)(logits)
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(slope, expected, atol=noise * np.abs(log).max())


VALUE = {"value": np.zeros(3, np.float32), "value_target": np.zeros(3, np.float32)}


TWO = {"arm": np.zeros(3, np.float32), "leg": np.zeros(3, np.float32)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_epsilon": 1.0}, r"clip_epsilon 1.0 must be in \(0, 1\)"),
        ({"clip_epsilon": -0.1}, r"clip_epsilon -0.1 must be in \(0, 1\)"),
        ({"clip_epsilon": (1.0, 0.2)}, r"clip_epsilon low 1.0 must be in \[0, 1\)"),
        ({"clip_epsilon": (0.2, -0.1)}, "clip_epsilon high -0.1 must be at least 0"),
        ({"dual_clip": 1.0}, "dual_clip 1.0 must be above 1"),
        ({"max_importance_ratio": 0.0}, "max_importance_ratio 0.0 must be above 0"),
        ({"critic_coeff": -1.0, **VALUE}, "critic_coeff -1.0 must be at least 0"),
        ({"clip_value": -0.2, **VALUE}, "clip_value -0.2 must be at least 0"),
        (
            {"entropy": TWO, "entropy_coeff": -0.1},
            "entropy_coeff arm -0.1 must be at least 0",
        ),
        (
            {"entropy": TWO, "entropy_coeff": {"arm": -0.5, "leg": 0.1}},
            "entropy_coeff arm -0.5 must be at least 0",
        ),
        (
            {"entropy": TWO, "entropy_coeff": {"arm": 0.5}},
            r"entropy_coeff of heads \['arm'\] must be of exactly .*'arm', 'leg'",
        ),
        (
            {"entropy": TWO, "entropy_coeff": {"arm": 0.5, "leg": 0.1, "eye": 0.1}},
            "must be of exactly the heads",
        ),
        (
            {"entropy": np.zeros(3, np.float32), "entropy_coeff": {"arm": 0.5}},
            r"must be of exactly the heads \[\]",
        ),
        (
            {"clip_epsilon": (0.2, 0.3), "clip_value": True},
            "clip_value True must be a number with a clip_epsilon of two",
        ),
        ({"clip_value": 0.2}, "clip_value 0.2 must be given with value"),
        ({"clip_value": 0.2, **VALUE}, "must be given with .*old_value"),
        ({"value": VALUE["value"]}, "value_target None must be given with a value"),
        (
            {"loss_critic_type": "huber", **VALUE},
            "kind 'huber' must be one of l1, l2, smooth_l1",
        ),
        ({"ratio": "whole"}, "ratio 'whole' must be one of joint, per_head"),
        ({"ratio": "per_head"}, "ratio 'per_head' must be given log-probs of each"),
        ({"log_prob": TWO}, r"log_probs of heads \[\['arm', 'leg'\], \[\]\]"),
        (
            {"log_prob": TWO, "behaviour_log_prob": {"arm": TWO["arm"]}},
            "must be of the same heads",
        ),
        ({"log_prob": {}, "behaviour_log_prob": {}}, "must be of the same heads"),
        ({"reduction": "max"}, "reduction 'max' must be one of none, mean, sum"),
    ],
)
def test_an_impossible_option_is_named_with_its_value(options, message):
    options = jax.tree.map(
        lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, options
    )
    with pytest.raises(ValueError, match=message):
        small(**options)


def test_an_unknown_option_is_refused():
    with pytest.raises(TypeError):
        small(clip_eps=0.1)


def test_shapes_that_would_make_an_outer_product_are_refused():
    with pytest.raises(Exception, match=r"(?i)type|shape"):
        small(advantage=jnp.ones((3, 1)))
