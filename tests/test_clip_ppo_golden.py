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


LARGEST = max(case["config"]["batch"] for case in CASES)


@functools.partial(jax.jit, static_argnames=("loss_critic_type", "reduction", "clips"))
def golden(moving, data, numbers, clip_value, *, loss_critic_type, reduction, clips):
    """Losses, metrics and gradients of a case; only what must be is static."""
    low, high, entropy_coeff, critic_coeff, cap = numbers

    def total(moving):
        log_prob, entropy, value = moving
        losses, told = clip_ppo_loss(
            log_prob,
            data["behaviour_log_prob"],
            data["advantage"],
            data["is_valid"],
            clip_epsilon=low if clips == "by epsilon" else (low, high),
            proximal_log_prob=data["proximal_log_prob"],
            max_importance_ratio=cap,
            entropy=entropy,
            entropy_coeff=entropy_coeff,
            value=value,
            value_target=data["value_target"],
            old_value=data["old_value"],
            critic_coeff=critic_coeff,
            loss_critic_type=loss_critic_type,
            clip_value={"by epsilon": True, "by number": clip_value}.get(clips),
            reduction=reduction,
        )
        return jnp.sum(losses.total()), (losses, tally.metrics(told))

    return jax.grad(total, has_aux=True)(moving)


standardize = jax.jit(functools.partial(masked.standardize, correction=1, epsilon=0.0))


def padded(x, dtype):
    """A case's items on the shape that all share; what is added is masked."""
    filled = np.full(LARGEST, np.nan)
    filled[: len(x)] = x
    return jnp.asarray(filled, dtype)


def ours(case, dtype):
    """Losses, metrics and gradients of a case, under torchrl's names."""
    config, inputs = case["config"], dict(case["inputs"])
    size, epsilon, limit = (config[k] for k in ("batch", "clip_epsilon", "clip_value"))
    mask = np.array(inputs.pop("mask") or [True] * size)
    data = {k: padded(x, dtype) for k, x in inputs.items() if x is not None}
    data.setdefault("proximal_log_prob", data["behaviour_log_prob"])
    data["is_valid"] = jnp.asarray(np.append(mask, np.zeros(LARGEST - size, bool)))
    if config["normalize_advantage"]:
        data["advantage"] = standardize(data["advantage"], data["is_valid"])
    moving = tuple(data.pop(name) for name in ("log_prob", "entropy", "value"))
    numbers = (
        *(epsilon if isinstance(epsilon, list) else (epsilon, epsilon)),
        config["entropy_coeff"],
        config["critic_coeff"],
        config["max_importance_ratio"] or 1e30,
    )
    by = {None: "not", True: "by epsilon"}.get(limit, "by number")
    gradients, (losses, metrics) = golden(
        moving,
        data,
        tuple(jnp.asarray(x, dtype) for x in numbers),
        jnp.asarray(0.0 if limit is None else limit, dtype),
        loss_critic_type=config["loss_critic_type"],
        reduction=config["reduction"],
        clips=by,
    )
    found = {f"loss_{name}": x for name, x in losses._asdict().items()} | {
        "clip_fraction": metrics["clip_fraction"],
        "kl_approx": metrics["kl_k1"],
        **{k: metrics[k] for k in ("entropy", "ESS", "max_ratio", "mean_ratio")},
        "explained_variance": metrics["explained_variance"],
        "value_clip_fraction": metrics.get("value_clip_fraction"),
    }
    found |= dict(zip(("grad_log_prob", "grad_entropy", "grad_value"), gradients))
    return {
        k: x if x is None or x.ndim == 0 else x[:size] for k, x in found.items()
    }, mask


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
