"""What went wrong elsewhere: each test is named for a public bug that it would catch.

The comments name the projects and their issues.
"""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices import AXIS, device_masks, over_devices
from ppo_twin import Compiled, compiled, random_trajectory
from probes import CONTINUOUS, acted

from fps_jax.agents.ppo import PPOConfig
from fps_jax.models import distributions
from fps_jax.objectives import clip_ppo, masked, ratios, returns, tally
from fps_jax.objectives.clip_ppo_loss import clip_ppo_loss


def loss(log_ratio, advantage=1.0, is_valid=None, **more):
    """The loss of items with these log ratios to the policy that acted."""
    log_ratio = jnp.asarray(log_ratio, jnp.float32)
    of_items = lambda x: jnp.broadcast_to(jnp.asarray(x, jnp.float32), log_ratio.shape)
    keep = jnp.ones(log_ratio.shape, bool) if is_valid is None else jnp.array(is_valid)
    losses, told = clip_ppo_loss(
        log_ratio, jnp.zeros_like(log_ratio), of_items(advantage), keep, **more
    )
    return losses, tally.metrics(told)


def slope(log_ratio, *args, **more):
    log_ratio = jnp.asarray(log_ratio, jnp.float32)
    return jax.grad(lambda x: loss(x, *args, **more)[0].total())(log_ratio)


# ---------------------------------------------------------------- the loss and its mask


def test_a_log_ratio_of_100_does_not_make_the_gradient_nan():
    # PrimeIntellect-ai/prime-rl 2972, THUDM/slime 2198.
    for log_ratio in (89.0, 100.0, 1e30, np.inf):
        assert loss([log_ratio])[0].objective == np.float32(-1.2)
        assert slope([log_ratio]) == 0.0


@pytest.mark.parametrize("junk", [np.nan, np.inf, -np.inf, 1e30])
def test_a_masked_item_does_not_poison_the_batch(junk):
    # OpenRLHF/OpenRLHF 1314 and 1240.
    mask = [True, False]
    np.testing.assert_array_equal(
        slope([0.1, junk], [1.0, junk], mask), slope([0.1, 0.0], 1.0, mask)
    )
    _, metrics = loss([0.1, junk], [1.0, junk], mask)
    assert all(np.isfinite(x) for x in metrics.values())
    # A NaN that counts is not hidden.
    assert np.isnan(loss([0.1, np.nan])[0].objective)


@pytest.mark.parametrize("correction", [0, 1])
def test_a_minibatch_of_one_row_does_not_standardise_to_nan(correction):
    # DLR-RM/stable-baselines3 265, 325 and 440.
    one = masked.standardize(jnp.array([3.0]), jnp.ones(1, bool), correction=correction)
    assert np.isfinite(one)


def test_rows_against_columns_do_not_become_an_outer_product():
    # RLinf/RLinf 1568, RITCHIEHuang/DeepRL_Algorithms 13, automl/Mighty 126.
    unchecked = inspect.unwrap(
        clip_ppo_loss
    )  # As users call it: types are not looked at.
    row, column, keep = jnp.zeros(3), jnp.zeros((3, 1)), jnp.ones(3, bool)
    good = {"value": row, "value_target": row, "entropy": row}
    unchecked(row, row, row, keep, **good)
    for wrong in (
        (column, row, row, keep),
        (row, column, row, keep),
        (row, row, column, keep),
        (row, row, row, keep[:, None]),
    ):
        with pytest.raises(AssertionError, match="shape"):
            unchecked(*wrong, **good)
    for name in (*good, "proximal_log_prob", "old_value"):
        with pytest.raises(AssertionError, match="shape"):
            unchecked(row, row, row, keep, **(good | {name: column}))
    for part in (
        lambda a, b: inspect.unwrap(clip_ppo.value_loss)(a, b),
        lambda a, b: inspect.unwrap(clip_ppo.clipped_surrogate)(a, b, clip_epsilon=0.2),
    ):
        with pytest.raises(AssertionError, match="shape"):
            part(row, column)


def test_heads_are_not_clipped_before_they_are_added_up_unless_asked():
    # pytorch/rl 2791, 2753 and 2756.
    heads = {"arm": jnp.array([1.0]), "leg": jnp.array([-0.95])}
    still = jax.tree.map(jnp.zeros_like, heads)
    given = heads, still, jnp.ones(1), jnp.ones(1, bool)
    joint, told = clip_ppo_loss(*given)
    np.testing.assert_allclose(joint.objective, -np.exp(0.05), rtol=1e-6)
    assert tally.metrics(told)["clip_fraction"] == 0
    apart, told = clip_ppo_loss(*given, ratio="per_head")
    np.testing.assert_allclose(apart.objective, -1.2 - np.exp(-0.95), rtol=1e-6)
    assert tally.metrics(told)["clip_fraction"] == 1


def test_the_divergence_is_not_zero_between_a_policy_and_itself_moved():
    # pytorch/rl 1920 and 1922: both sides were the new policy.
    assert loss([0.3, -0.3])[1]["kl_k3"] > 0.04
    old, new = jnp.zeros((1, 2)), jnp.full((1, 2), 0.5)
    assert ratios.gaussian_kl(old, old, new, old) == 0.25


def test_a_clip_fraction_of_one_does_not_mean_that_nothing_is_learned():
    # pytorch/rl 2021 and 786, natolambert/rlhf-book 290.
    log_ratio, advantage = [1.0, -1.0], [-1.0, 1.0]  # Both are on their way back.
    _, metrics = loss(log_ratio, advantage)
    assert metrics["clip_fraction"] == 1
    active = metrics["clip_fraction_active_low"] + metrics["clip_fraction_active_high"]
    assert active == 0
    assert np.all(slope(log_ratio, advantage) != 0)


def test_the_effective_sample_size_of_one_item_keeps_its_shape():
    # pytorch/rl 3936 and 1708: a squeeze took the batch axis away.
    for size in (1, 3):
        ess = loss(np.zeros(size))[1]["ESS"]
        assert ess.shape == ()
        assert ess == 1


def test_padding_does_not_lessen_the_mean():
    # pytorch/rl 3866 and 4057, ray-project/ray 2992, sb3-contrib 75.
    whole, metrics = loss([0.1, 0.2])
    padded, padded_metrics = loss([0.1, 0.2, 5.0], 1.0, [True, True, False])
    np.testing.assert_allclose(padded.objective, whole.objective, rtol=1e-6)
    for name, value in metrics.items():
        np.testing.assert_allclose(padded_metrics[name], value, rtol=1e-6)


def test_padding_does_not_move_the_statistics_of_advantages():
    # MarcoMeter/recurrent-ppo-truncated-bptt 10, areal-project/AReaL 1346.
    keep = jnp.arange(5) < 3
    padded = masked.standardize(jnp.array([1.0, 2.0, 6.0, 0.0, 0.0]), keep)
    alone = masked.standardize(jnp.array([1.0, 2.0, 6.0]), jnp.ones(3, bool))
    np.testing.assert_allclose(padded[:3], alone, rtol=1e-6)


def test_an_estimated_divergence_is_not_negative():
    # DLR-RM/stable-baselines3 417, openai/spinningup 137.
    _, metrics = loss([0.3, 0.2])
    assert metrics["kl_k1"] < 0 < metrics["kl_k3"]


def test_the_dual_clip_leaves_good_actions_alone():
    # thu-ml/tianshou 433.
    for advantage in (1.0, 0.0, -1.0):
        with_it = loss([3.0], advantage, dual_clip=2.0)[0].objective
        without = loss([3.0], advantage)[0].objective
        assert (with_it != without) == (advantage < 0)


def test_the_value_s_clip_is_not_the_ratio_s():
    # hill-a/stable-baselines 216, ray-project/ray 19291 and 10430.
    value = {
        "value": jnp.array([9.0]),
        "value_target": jnp.array([0.0]),
        "old_value": jnp.array([1.0]),
        "loss_critic_type": "l2",
    }
    assert loss([0.0], **value)[0].critic == 81
    narrow = loss([0.0], **value, clip_epsilon=0.01, clip_value=3.0)
    wide = loss([0.0], **value, clip_epsilon=0.5, clip_value=3.0)
    assert narrow[0].critic == wide[0].critic == 81  # The worse of 9 and 4.
    assert narrow[1]["value_clip_fraction"] == 1


def test_uneven_microbatches_and_devices_are_not_averaged_as_if_they_were_even():
    # verl-project/verl 906, 5625, 5798 and 7321.
    rng, keep = np.random.default_rng(0), device_masks()
    log_ratio = rng.normal(0, 0.3, keep.shape).astype(np.float32)
    whole, expected = loss(log_ratio, 1.0, keep)

    def one_device(log_ratio, keep):
        losses, told = clip_ppo_loss(
            log_ratio,
            jnp.zeros_like(log_ratio),
            jnp.ones_like(log_ratio),
            keep,
            axis_name=AXIS,
        )
        return jax.lax.psum(losses.objective, AXIS), told

    objective, told = over_devices(one_device, "pmap")(log_ratio, keep)
    np.testing.assert_allclose(objective, np.full(4, whole.objective), rtol=1e-5)
    merged = tally.metrics(tally.merge(told))
    for name, value in expected.items():
        np.testing.assert_allclose(merged[name], value, rtol=1e-5, atol=1e-7)


def test_a_misspelt_option_is_not_swallowed():
    # RLinf/RLinf 316, THUDM/slime 2247; torchrl's own **kwargs.
    with pytest.raises(TypeError):
        loss([0.0], dual_clp=3.0)
    with pytest.raises(TypeError):
        PPOConfig(dual_clp=3.0)  # pyright: ignore[reportCallIssue]


# ---------------------------------------------------------------------------- policies


def test_the_entropy_of_a_squashed_policy_is_not_that_of_its_gaussian():
    # Denys88/rl_games 153, Unity ml-agents 4866, ray-project/ray 13053: the bonus
    # drove the deviation to infinity.
    noise = np.random.default_rng(0).normal(size=100_000).astype(np.float32)

    def entropy(log_std):
        u = jnp.exp(log_std) * noise
        gaussian = -0.5 * jnp.square(noise) - log_std - 0.5 * jnp.log(2 * jnp.pi)
        squash = 2.0 * (jnp.log(2.0) - u - jax.nn.softplus(-2.0 * u))
        return clip_ppo.monte_carlo_entropy(gaussian - squash, is_reparameterized=True)

    draws = 1.0 - 2.0 * noise * np.tanh(noise)
    np.testing.assert_allclose(
        jax.grad(entropy)(jnp.float32(0.0)),
        -0.21,
        atol=0.005 + 5 * draws.std() / np.sqrt(len(noise)),
    )


def test_entropy_is_summed_over_the_dimensions_of_an_action():
    # Unity ml-agents 4538.
    one, three = (jnp.zeros((1, size)) for size in (1, 3))
    entropy = lambda x: distributions.diagonal_gaussian(x, x).entropy()
    np.testing.assert_allclose(entropy(three), 3 * entropy(one), rtol=1e-6)


# ----------------------------------------------------------------------------- returns


def advantages(reward, values, *, terminated=(), truncated=(), invalid=()):
    """Advantages at gamma 0.5, lambda 1."""
    length = len(reward)
    flag = lambda rows: jnp.isin(jnp.arange(length), jnp.array([-1, *rows]))
    is_valid = ~flag(invalid)
    discount, trace = returns.discounts_and_traces(
        flag(terminated), flag(truncated), is_valid, gamma=0.5
    )
    values = jnp.asarray(values, jnp.float32)
    return returns.generalized_advantages(
        jnp.asarray(reward, jnp.float32),
        discount,
        trace,
        values[:-1],
        values[1:],
        is_valid,
        lambda_=1.0,
    )


def test_a_time_limit_is_not_an_end():
    # vwxyzjn/cleanrl 198, stable-baselines3 633 and 1864, luchris429/purejaxrl 20.
    cut = advantages([1.0, 0.0], [0.0, 8.0, 0.0], truncated=[0], invalid=[1])
    ended = advantages([1.0, 0.0], [0.0, 8.0, 0.0], terminated=[0], invalid=[1])
    np.testing.assert_allclose(cut, [1 + 0.5 * 8, 0])
    np.testing.assert_allclose(ended, [1, 0])


def test_a_cut_is_valued_at_the_final_observation_and_not_at_the_next_episode_s():
    # google-deepmind/mujoco_playground 305, pytorch/rl 2851, EdanToledo/Stoix 142.
    # Row 1 holds the final observation, worth 8; row 2 the reset's, worth 100.
    found = advantages(
        [1.0, 0.0, 2.0], [0.0, 8.0, 100.0, 0.0], truncated=[0], invalid=[1]
    )
    np.testing.assert_allclose(found, [1 + 0.5 * 8, 0, 2 - 100])


def test_an_end_is_not_seen_one_row_late_and_a_reset_row_teaches_nothing():
    # anthonytorlucci/rlevo 342, hill-a/stable-baselines 385, vwxyzjn/cleanrl 499.
    found = advantages([1.0, 1.0, 50.0, 1.0], np.zeros(5), terminated=[1], invalid=[2])
    np.testing.assert_allclose(found, [1.5, 1, 0, 1])


# --------------------------------------------------------------------------- the agent

AGENT = PPOConfig(
    learning_rate=0.05,
    final_learning_rate_fraction=1.0,
    num_epochs=2,
    minibatch_size=24,
    hidden_sizes=(8,),
    clip_value=1e-3,
    recompute_advantages=True,
    init_log_std=1.0,
)


def on_policy(this: Compiled, state=None):
    state = state or this.state
    trajectory = random_trajectory(3, this.spec)
    return state, acted(this.agent, state, trajectory)


def test_old_values_are_not_those_of_the_network_that_learns():
    # tensorflow/agents 352: the clip did nothing.
    this = compiled(AGENT, CONTINUOUS)
    _, metrics = this.update(*on_policy(this))
    assert metrics["value_clip_fraction"] > 0.2


def test_old_values_are_in_the_unit_of_the_new_ones():
    # instadeepai/Mava 811, marlbenchmark/on-policy 12. The unit here is 2.
    this = compiled(AGENT, CONTINUOUS)
    _, metrics = this.update(*on_policy(this, this.with_hyper(learning_rate=0.0)))
    assert metrics["value_clip_fraction"] == 0


def test_actions_beyond_their_bounds_are_not_scored_as_if_they_had_been_clipped():
    # rlworkgroup/garage 2129, pytorch/rl 1643, automl/Mighty 118.
    this = compiled(AGENT, CONTINUOUS)
    state, trajectory = on_policy(this, this.with_hyper(learning_rate=0.0))
    assert np.mean(np.abs(trajectory.action) > 1) > 0.1
    _, metrics = this.update(state, trajectory)
    np.testing.assert_allclose(metrics["max_ratio"], 1, rtol=1e-5)


def test_the_first_ratio_is_one():
    # huggingface/trl 454: another mode, or other statistics, than when it acted.
    this = compiled(AGENT, CONTINUOUS)
    _, metrics = this.update(*on_policy(this, this.with_hyper(learning_rate=0.0)))
    np.testing.assert_allclose(metrics["mean_ratio"], 1, rtol=1e-5)
    np.testing.assert_allclose(metrics["kl_k3"], 0, atol=1e-10)


def test_an_option_of_the_loss_reaches_the_loss():
    # RLinf/RLinf 316, THUDM/slime 2247: the dual clip was not forwarded.
    this = compiled(AGENT, CONTINUOUS)
    far = random_trajectory(3, this.spec)
    far.behaviour["log_prob"][:] = -30.0
    other = compiled(dataclasses.replace(AGENT, dual_clip=1.5), CONTINUOUS)
    without, with_it = (
        c.update(c.with_hyper(learning_rate=0.0), far)[1]["loss_objective"]
        for c in (this, other)
    )
    assert with_it < without
