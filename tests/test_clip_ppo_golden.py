"""The whole clipped PPO loss against the numbers that torchrl computes."""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from fps_jax.objectives import masked, tally
from fps_jax.objectives.clip_ppo_loss import clip_ppo_loss

GOLDEN = json.loads((pathlib.Path(__file__).parent / "data/clip_ppo.json").read_text())
CASES = GOLDEN["cases"]


@functools.cache
def golden_function(
    clip_epsilon, clip_value, loss_critic_type, normalizes, cap, reduction, decoupled
):
    """The loss of one configuration, its gradients, and its metrics."""

    def total(differentiable, data, entropy_coeff, critic_coeff):
        log_prob, entropy, value = differentiable
        advantage = data["advantage"]
        if normalizes:
            advantage = masked.standardize(
                advantage, data["is_valid"], correction=1, epsilon=0.0
            )
        losses, told = clip_ppo_loss(
            log_prob,
            data["behaviour_log_prob"],
            advantage,
            data["is_valid"],
            clip_epsilon=clip_epsilon,
            proximal_log_prob=data["proximal_log_prob"] if decoupled else None,
            max_importance_ratio=cap,
            entropy=entropy,
            entropy_coeff=entropy_coeff,
            value=value,
            value_target=data["value_target"],
            old_value=data["old_value"],
            critic_coeff=critic_coeff,
            loss_critic_type=loss_critic_type,
            clip_value=clip_value,
            reduction=reduction,
        )
        return jnp.sum(losses.total()), (losses, tally.metrics(told))

    return jax.jit(jax.grad(total, has_aux=True))


def ours(case, dtype):
    """Losses, metrics and gradients of a case, under torchrl's names."""
    config, inputs = case["config"], dict(case["inputs"])
    epsilon = config["clip_epsilon"]
    f = golden_function(
        tuple(epsilon) if isinstance(epsilon, list) else epsilon,
        config["clip_value"],
        config["loss_critic_type"],
        config["normalize_advantage"],
        config["max_importance_ratio"],
        config["reduction"],
        config["delay_actor"],
    )
    mask = inputs.pop("mask") or [True] * config["batch"]
    data = {k: jnp.asarray(x, dtype) for k, x in inputs.items() if x is not None}
    data["is_valid"] = jnp.asarray(mask)
    moving = tuple(data.pop(name) for name in ("log_prob", "entropy", "value"))
    gradients, (losses, metrics) = f(
        moving,
        data | {"proximal_log_prob": data.get("proximal_log_prob")},
        jnp.asarray(config["entropy_coeff"], dtype),
        jnp.asarray(config["critic_coeff"], dtype),
    )
    found = {f"loss_{name}": x for name, x in losses._asdict().items()} | {
        "clip_fraction": metrics["clip_fraction"],
        "kl_approx": metrics["kl_k1"],
        **{k: metrics[k] for k in ("entropy", "ESS", "max_ratio", "mean_ratio")},
        "explained_variance": metrics["explained_variance"],
        "value_clip_fraction": metrics.get("value_clip_fraction"),
    }
    names = "grad_log_prob", "grad_entropy", "grad_value"
    return found | dict(zip(names, gradients)), np.asarray(mask)


def corrected(case, mask):
    """What torchrl says, and where it is wrong, what is right instead.

    Its metrics count masked items as well, and one target has all its variance
    explained. Of these the right value is computed here, from the definitions.
    """
    expected = {k: np.asarray(x, np.float64) for k, x in case["expected"].items()}
    if case["config"]["batch"] == 1:
        expected["explained_variance"] = np.zeros(1)
    if mask.all():
        return expected
    config = case["config"]
    x = {
        k: np.asarray(v, np.float64)[mask]
        for k, v in case["inputs"].items()
        if v is not None
    }
    proximal = x.get("proximal_log_prob", x["behaviour_log_prob"])
    ratio = np.exp(x["log_prob"] - proximal)
    weight = np.exp(x["log_prob"] - x["behaviour_log_prob"])
    weight = np.minimum(weight, config["max_importance_ratio"] or np.inf)
    epsilon = config["clip_epsilon"]
    low, high = epsilon if isinstance(epsilon, list) else (epsilon, epsilon)
    error = x["value_target"] - x["value"]
    expected |= {
        "clip_fraction": np.mean((ratio < 1 - low) | (ratio > 1 + high)),
        "kl_approx": np.mean(proximal - x["log_prob"]),
        "entropy": x["entropy"].mean(),
        "ESS": weight.sum() ** 2 / (len(weight) * (weight**2).sum()),
        "max_ratio": weight.max(),
        "mean_ratio": weight.mean(),
        "explained_variance": 1 - error.var() / x["value_target"].var(),
    }
    if "value_clip_fraction" in expected:
        limit = low if config["clip_value"] is True else config["clip_value"]
        moved = np.abs(x["value"] - x["old_value"])
        expected["value_clip_fraction"] = np.mean(moved > limit)
    return expected


def expect_torchrl(case, dtype, tolerance):
    found, mask = ours(case, dtype)
    for name, expected in corrected(case, mask).items():
        actual = np.asarray(found[name]).ravel()
        np.testing.assert_allclose(
            actual, expected.ravel(), rtol=tolerance, atol=tolerance, err_msg=name
        )


def test_losses_metrics_and_gradients_are_torchrl_s(float64):
    assert len(CASES) == 100
    for case in CASES:
        expect_torchrl(case, jnp.float64, 1e-6)


def test_in_float32_they_are_so_to_four_digits():
    for case in CASES[::5]:
        expect_torchrl(case, jnp.float32, 1e-4)
