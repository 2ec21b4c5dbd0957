"""The whole clipped PPO loss: its laws, heads and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices import AXIS, BACKENDS, over_devices
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads

from fps_jax.objectives import clip_ppo, masked, tally
from fps_jax.objectives.clip_ppo_loss import Losses, clip_ppo_loss

ITEMS = 12


# ------------------------------------------------------------------------- properties


def draw(seed: int, items: int = ITEMS, spread: float = 0.3):
    """Everything a loss may be given, float32."""
    rng = np.random.default_rng(seed)
    normal = lambda scale=1.0: rng.normal(0, scale, items).astype(np.float32)
    behaviour = normal() - 1
    return {
        "log_prob": behaviour + normal(spread),
        "behaviour_log_prob": behaviour,
        "proximal_log_prob": behaviour + normal(spread),
        "advantage": normal(2),
        "entropy": np.abs(normal()),
        "value": normal(),
        "value_target": normal(),
        "old_value": normal(),
    }


FULL = {
    "clip_epsilon": (0.2, 0.28),
    "dual_clip": 3.0,
    "max_importance_ratio": 5.0,
    "loss_critic_type": "smooth_l1",
    "clip_value": 0.3,
}


def full_loss(data, is_valid, axis_name=None, reduction="mean"):
    return clip_ppo_loss(
        **data, **FULL, is_valid=is_valid, reduction=reduction, axis_name=axis_name
    )


def with_gradients(data, is_valid, axis_name=None, reduction="mean"):
    """Losses, metrics, and the gradients by everything that is given."""

    def total(data):
        losses, told = full_loss(data, is_valid, axis_name, reduction)
        return jnp.sum(losses.total()), (losses, told)

    gradients, (losses, told) = jax.grad(total, has_aux=True)(data)
    return gradients, losses, told


fast = jax.jit(with_gradients, static_argnames=("axis_name", "reduction"))


def values_of(data, is_valid):
    gradients, losses, told = fast(data, is_valid)
    return gradients, losses, tally.metrics(told)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.integers(0, 10**6),
    st.sampled_from([0.01, 3.0, 40.0, 1e4]),
    st.integers(0, 2**ITEMS - 1),
    st.sampled_from([np.nan, np.inf, -np.inf, 1e30]),
)
def test_nothing_overflows_and_masked_items_have_no_influence(seed, spread, bits, junk):
    data = draw(seed, spread=spread)
    is_valid = np.array([bits >> i & 1 for i in range(ITEMS)], bool)
    clean = values_of(data, is_valid)
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(clean))
    for gradient in jax.tree.leaves(clean[0]):
        np.testing.assert_array_equal(gradient[~is_valid], 0.0)
    dirty = {k: np.where(is_valid, x, np.float32(junk)) for k, x in data.items()}
    jax.tree.map(np.testing.assert_array_equal, values_of(dirty, is_valid), clean)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.permutations(range(ITEMS)))
def test_the_order_of_the_items_does_not_matter(seed, order):
    data, order = draw(seed), np.array(order)
    is_valid = np.random.default_rng(seed).random(ITEMS) < 0.7
    gradients, *rest = values_of(data, is_valid)
    moved = {k: x[order] for k, x in data.items()}
    moved_gradients, *moved_rest = values_of(moved, is_valid[order])
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(close, moved_rest, rest)
    jax.tree.map(close, moved_gradients, {k: x[order] for k, x in gradients.items()})


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.sampled_from([0.3, 3.0]))
def test_microbatches_add_up_to_the_batch(seed, spread):
    data = draw(seed, spread=spread)
    is_valid = np.random.default_rng(seed).random(ITEMS) < 0.6
    is_valid[:4] = False  # One microbatch has nothing to say.
    _, whole, told = fast(data, is_valid, reduction="sum")
    parts = []
    for i in range(3):
        mine = slice(4 * i, 4 * i + 4)
        piece = {k: x[mine] for k, x in data.items()}
        parts.append(fast(piece, is_valid[mine], reduction="sum")[1:])
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(close, Losses(*(sum(x) for x in zip(*(p[0] for p in parts)))), whole)
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *(p[1] for p in parts))
    merged = tally.metrics(tally.merge(stacked))
    jax.tree.map(close, merged, tally.metrics(told))


@pytest.mark.parametrize("backend", BACKENDS)
def test_four_devices_agree_with_one(backend):
    data = draw(7)
    is_valid = np.arange(ITEMS) % 5 > 0
    is_valid[3:6] = False  # One device has nothing to say.
    expected = fast(data, is_valid)

    def one_device(data, is_valid):
        gradients, losses, told = with_gradients(data, is_valid, AXIS)
        losses = jax.lax.psum(losses, AXIS)
        return gradients, losses, tally.across(told, AXIS)

    split = lambda x: x.reshape(4, 3)
    shards = jax.tree.map(split, data), split(is_valid)
    gradients, losses, told = over_devices(one_device, backend)(*shards)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(lambda a, b: close(a.reshape(-1), b), gradients, expected[0])
    same = lambda a, b: close(a, np.broadcast_to(b, a.shape))
    jax.tree.map(same, losses, expected[1])
    # Sums of squares relative to another largest ratio; compared once divided.
    own = jax.tree.map(lambda x: x[0], told)
    jax.tree.map(close, tally.metrics(own), tally.metrics(expected[2]))


def test_no_reduction_keeps_the_items_and_both_sums_follow_from_it():
    data, is_valid = draw(8), np.arange(ITEMS) % 3 > 0
    items = fast(data, is_valid, reduction="none")[1]
    total = fast(data, is_valid, reduction="sum")[1]
    mean = fast(data, is_valid)[1]
    for per_item, added, average in zip(items, total, mean):
        assert per_item.shape == (ITEMS,)
        np.testing.assert_array_equal(per_item[~is_valid], 0.0)
        np.testing.assert_allclose(per_item.sum(), added, rtol=1e-5)
        np.testing.assert_allclose(added / 8.0, average, rtol=1e-5)


def test_targets_advantages_and_old_values_are_constants():
    gradients, _, _ = fast(draw(9), np.ones(ITEMS, bool))
    moving = "log_prob", "entropy", "value"
    for name, gradient in gradients.items():
        assert np.any(gradient != 0) == (name in moving), name


def test_coefficients_may_be_traced_and_differ_by_member():
    data, is_valid = jax.tree.map(jnp.asarray, draw(10)), jnp.ones(ITEMS, bool)

    def member(clip_epsilon, entropy_coeff, critic_coeff, dual_clip, cap, clip_value):
        losses, _ = clip_ppo_loss(
            data["log_prob"],
            data["behaviour_log_prob"],
            data["advantage"],
            is_valid,
            clip_epsilon=clip_epsilon,
            entropy=data["entropy"],
            entropy_coeff=entropy_coeff,
            value=data["value"],
            value_target=data["value_target"],
            old_value=data["old_value"],
            critic_coeff=critic_coeff,
            dual_clip=dual_clip,
            max_importance_ratio=cap,
            clip_value=clip_value,
        )
        return losses.total()

    numbers = np.random.default_rng(0).uniform(0.05, 0.5, (6, 3)).astype(np.float32)
    numbers[3:5] += 1.0
    together = jax.jit(jax.vmap(member))(*numbers)
    alone = [member(*(float(x) for x in column)) for column in numbers.T]
    np.testing.assert_allclose(together, alone, rtol=1e-5)
    assert len({float(x) for x in alone}) == 3


# ------------------------------------------------------------ heads and special cases


HEADS = ("arm", "leg", "eye")


def headed(seed: int, spread: float = 0.3):
    """Log-probabilities of three heads, under three policies, and advantages."""
    draws = [draw(seed + i, spread=spread) for i in range(len(HEADS))]
    names = "log_prob", "behaviour_log_prob", "proximal_log_prob"
    heads = {n: {h: jnp.asarray(d[n]) for h, d in zip(HEADS, draws)} for n in names}
    return heads, jnp.asarray(draws[0]["advantage"])


def test_a_joint_ratio_is_that_of_the_heads_summed():
    heads, advantage = headed(20)
    keep = jnp.arange(ITEMS) % 4 > 0
    summed = {name: sum(x.values()) for name, x in heads.items()}
    for one, other in zip(
        clip_ppo_loss(**heads, advantage=advantage, is_valid=keep),
        clip_ppo_loss(**summed, advantage=advantage, is_valid=keep),
    ):
        jax.tree.map(np.testing.assert_array_equal, one, other)


def test_each_head_may_be_clipped_by_its_own_ratio():
    heads, advantage = headed(21)
    keep = jnp.arange(ITEMS) % 4 > 0
    options = {"max_importance_ratio": 1.1, "dual_clip": 1.15}

    def objective(heads):
        losses, told = clip_ppo_loss(
            **heads, advantage=advantage, is_valid=keep, ratio="per_head", **options
        )
        return losses.objective, tally.metrics(told)

    def alone(heads, head):
        mine = {name: x[head] for name, x in heads.items()}
        losses, told = clip_ppo_loss(
            **mine, advantage=advantage, is_valid=keep, **options
        )
        return losses.objective, tally.metrics(told)

    gradients, metrics = jax.jit(jax.grad(objective, has_aux=True))(heads)
    each = {h: jax.grad(alone, has_aux=True)(heads, h) for h in HEADS}
    for head, (own, own_metrics) in each.items():
        np.testing.assert_allclose(
            gradients["log_prob"][head], own["log_prob"][head], rtol=1e-5, atol=1e-7
        )
        np.testing.assert_allclose(
            metrics[f"kl_k3/{head}"], own_metrics["kl_k3"], rtol=1e-5
        )
    total = lambda name: sum(own[name] for _, own in each.values())
    for name in ("loss_objective", "kl_k1"):  # Divergences of the heads add up.
        np.testing.assert_allclose(metrics[name], total(name), rtol=1e-4, atol=1e-6)
    for name in ("clip_fraction", "clip_fraction_active_low"):
        np.testing.assert_allclose(metrics[name], total(name) / 3, rtol=1e-5)
    assert 0 < metrics["clip_fraction"] < 1


def test_the_decoupled_loss_is_that_of_the_reference_code():
    # Hilton et al. (2021), as their reference code writes it: the cap lifts log b.
    data = {k: x.astype(np.float64) for k, x in draw(11, spread=2.0).items()}
    lp, behaviour = data["log_prob"], data["behaviour_log_prob"]
    proximal, advantage = data["proximal_log_prob"], data["advantage"]
    adjusted = np.maximum(behaviour, lp - np.log(2.0))
    clipped = np.clip(lp - proximal, np.log(0.8), np.log(1.2)) + proximal
    expected = np.maximum(
        -advantage * np.exp(lp - adjusted), -advantage * np.exp(clipped - adjusted)
    )
    losses, _ = clip_ppo_loss(
        *(jnp.asarray(x, jnp.float32) for x in (lp, behaviour, advantage)),
        jnp.ones(ITEMS, bool),
        proximal_log_prob=jnp.asarray(proximal, jnp.float32),
        max_importance_ratio=2.0,
        reduction="none",
    )
    np.testing.assert_allclose(losses.objective, expected, rtol=1e-4, atol=1e-5)


def test_a_batch_without_a_valid_item_is_worth_nothing():
    gradients, losses, metrics = values_of(draw(12), np.zeros(ITEMS, bool))
    for x in jax.tree.leaves((gradients, losses, metrics)):
        np.testing.assert_array_equal(x, 0.0)


def test_a_nan_in_a_valid_item_is_seen():
    data = draw(13)
    data["log_prob"][2] = np.nan
    _, losses, metrics = values_of(data, np.ones(ITEMS, bool))
    assert np.isnan(losses.objective)
    assert np.isnan(metrics["mean_ratio"])


def test_gradients_agree_with_finite_differences(float64):
    data = {k: jnp.asarray(x, jnp.float64) for k, x in draw(14).items()}
    is_valid = jnp.arange(ITEMS) % 4 > 0
    moving = "log_prob", "entropy", "value"

    def total(*given):
        losses, _ = full_loss(data | dict(zip(moving, given)), is_valid)
        return losses.total()

    at = [data[name] for name in moving]
    assert total(*at).dtype == jnp.float64
    # The capped weight is a constant of the gradient, not of the value.
    weight = jnp.exp(data["log_prob"] - data["behaviour_log_prob"])
    assert jnp.max(weight) < FULL["max_importance_ratio"]
    moved = jax.jit(functools.partial(_objective_of_a_fixed_weight, data, is_valid))
    check_grads(moved, (data["log_prob"],), order=1, modes=["rev"], eps=1e-6)
    others = jax.jit(lambda entropy, value: total(at[0], entropy, value))
    check_grads(others, at[1:], order=1, modes=["rev"], eps=1e-6)


def _objective_of_a_fixed_weight(data, is_valid, log_prob):
    """The surrogate with the weight that the data had at the start."""
    weight = data["proximal_log_prob"] - data["behaviour_log_prob"]
    surrogate = clip_ppo.clipped_surrogate(
        log_prob - data["proximal_log_prob"],
        data["advantage"],
        clip_epsilon=FULL["clip_epsilon"],
        log_weight=weight,
        dual_clip=FULL["dual_clip"],
    )
    return masked.mean(surrogate, is_valid)
