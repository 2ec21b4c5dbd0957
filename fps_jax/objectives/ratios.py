"""Importance ratios, their truncation, and what they tell of two policies."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from fps_jax.objectives import masked, tally

Scalar = Float[Array, ""] | float


def truncated_ratio(
    log_ratio: Float[Array, "*items"], cap: Scalar, *, bound: float = 20.0
) -> Float[Array, "*items"]:
    """Importance ratio that is not larger than a cap: ``min(cap, pi(a|s) / b(a|s))``.

    It is truncated before it is exponentiated, so that no infinity appears.

    Args:
      log_ratio: ``log pi(a|s) - log b(a|s)``.
      cap: largest ratio, at least 0; may be infinite.
      bound: largest logarithm all the same; ``exp(20)`` is 4.9e8.
    """
    log_cap = jnp.minimum(jnp.log(jnp.asarray(cap, log_ratio.dtype)), bound)
    return jnp.exp(jnp.minimum(log_ratio, log_cap))


def bounded(
    log_ratio: Float[Array, "*items"], *, bound: float = 20.0
) -> Float[Array, "*items"]:
    """A log ratio that can be exponentiated, with the gradient that it had.

    Args:
      log_ratio: any.
      bound: its largest magnitude; ``exp(20)`` is 4.9e8.
    """
    constant = jax.lax.stop_gradient(log_ratio)
    return jnp.clip(constant, -bound, bound) + (log_ratio - constant)


def capped_fraction(
    log_ratio: Float[Array, "*items"],
    cap: Scalar,
    is_valid: Bool[Array, "*items"],
    *,
    axis_name: str | None = None,
) -> Float[Array, ""]:
    """Share of the valid items of every device whose ratio is above a cap.

    Args:
      log_ratio: ``log pi(a|s) - log b(a|s)``.
      cap: largest ratio, at least 0; may be infinite.
      is_valid: which items count.
      axis_name: the device axis to reduce over, if any.
    """
    is_capped = log_ratio > jnp.log(jnp.asarray(cap, log_ratio.dtype))
    return masked.mean(is_capped.astype(log_ratio.dtype), is_valid, axis_name=axis_name)


def effective_sample_size(
    log_ratio: Float[Array, "*items"],
    is_valid: Bool[Array, "*items"],
    *,
    axis_name: str | None = None,
) -> Float[Array, ""]:
    """How evenly the valid items of every device weigh, as a share of their number.

        (sum w)^2 / (N sum w^2),  w = exp(log_ratio)

    1 if all weigh the same, 1 / N if one has all the weight; 0 without any valid item.
    The largest logarithm is subtracted first, which changes nothing and overflows
    nowhere. Kish (1965).

    Args:
      log_ratio: ``log pi(a|s) - log b(a|s)``.
      is_valid: which items count.
      axis_name: the device axis to reduce over, if any.
    """
    told = tally.of({}, log_ratio, None, is_valid)
    told = told if axis_name is None else tally.across(told, axis_name)
    return tally.metrics(told)["ESS"]


def kl_k1(log_ratio: Float[Array, "*items"]) -> Float[Array, "*items"]:
    """Plain estimate of KL(b || pi) from one sample of b: ``-log r``; may be negative.

    Schulman (2020), "Approximating KL divergence", estimator k1.

    Args:
      log_ratio: ``log pi(a|s) - log b(a|s)`` with a drawn from b.
    """
    return -log_ratio


def kl_k2(log_ratio: Float[Array, "*items"]) -> Float[Array, "*items"]:
    """Biased estimate of KL(b || pi) from one sample of b: ``(log r)^2 / 2``.

    Schulman (2020), "Approximating KL divergence", estimator k2.

    Args:
      log_ratio: ``log pi(a|s) - log b(a|s)`` with a drawn from b.
    """
    return 0.5 * jnp.square(log_ratio)


def kl_k3(log_ratio: Float[Array, "*items"]) -> Float[Array, "*items"]:
    """Low-variance estimate of KL(b || pi) from one sample of b, never negative.

        (r - 1) - log r,  r = pi(a|s) / b(a|s)

    Schulman (2020), "Approximating KL divergence", estimator k3.

    Args:
      log_ratio: ``log pi(a|s) - log b(a|s)`` with a drawn from b.
    """
    return jnp.expm1(log_ratio) - log_ratio


def gaussian_kl(
    old_mean: Float[Array, "*items A"],
    old_log_std: Float[Array, "*items A"],
    mean: Float[Array, "*items A"],
    log_std: Float[Array, "*items A"],
) -> Float[Array, "*items"]:
    """KL(old || new) of diagonal Gaussians, exactly.

        sum_j [2 (l_j - l'_j) + e^{2 (l'_j - l_j)} + (m'_j - m_j)^2 / e^{2 l_j} - 1] / 2

    with means m, log standard deviations l, and a prime for the old ones.

    Args:
      old_mean: centre of the old policy.
      old_log_std: natural logarithm of its standard deviation.
      mean: centre of the new policy.
      log_std: natural logarithm of its standard deviation.
    """
    shrinkage = 2.0 * (old_log_std - log_std)
    shift = jnp.square(old_mean - mean) * jnp.exp(-2.0 * log_std)
    return 0.5 * jnp.sum(jnp.expm1(shrinkage) - shrinkage + shift, axis=-1)


def categorical_kl(
    old_logits: Float[Array, "*items actions"], logits: Float[Array, "*items actions"]
) -> Float[Array, "*items"]:
    """KL(old || new) of categorical policies, exactly.

        sum_a p'_a (log p'_a - log p_a),  0 where p'_a is 0

    Args:
      old_logits: unnormalised log-probabilities of the old policy.
      logits: those of the new one.
    """
    old_log = jax.nn.log_softmax(old_logits)
    is_taken = jnp.exp(old_log) > 0.0
    old_log, new_log = (
        jnp.where(is_taken, x, 0.0) for x in (old_log, jax.nn.log_softmax(logits))
    )
    terms = jnp.where(is_taken, jnp.exp(old_log) * (old_log - new_log), 0.0)
    return jnp.sum(terms, axis=-1)
