"""Means under a mask, exact across devices; importance ratios and what they tell."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def masked_mean(
    x: Float[Array, "*items"],
    is_valid: Bool[Array, "*items"],
    *,
    axis_name: str | None = None,
) -> Float[Array, ""]:
    """Mean over the valid items of every device: sums and counts, divided once.

    An item that is not valid has no influence, whatever it holds, on the value or on
    the gradient with respect to `x`. Without any valid item the mean is 0.

    Args:
      x: the items of this device.
      is_valid: which of them count.
      axis_name: the device axis to reduce over, if any.
    """
    total, count = masked_sum(x, is_valid), jnp.sum(is_valid)
    if axis_name is not None:
        total, count = jax.lax.psum((total, count), axis_name)
    return total / jnp.maximum(count, 1).astype(x.dtype)


def masked_sum(
    x: Float[Array, "*items"], is_valid: Bool[Array, "*items"]
) -> Float[Array, ""]:
    """Sum over the valid items of this device.

    Args:
      x: the items of this device.
      is_valid: which of them count.
    """
    return jnp.sum(jnp.where(is_valid, x, 0.0))


def share_of_mean(
    is_valid: Bool[Array, "*items"], *, axis_name: str | None = None
) -> Callable[[Float[Array, "*items"]], Float[Array, ""]]:
    """This device's share of a mean over every device: its sum over the global count.

    The shares add up to the mean, and so do their gradients: differentiate the share,
    then ``psum``. (A loss that is itself reduced inside ``grad`` is counted once a
    device.)

    Args:
      is_valid: which items of this device count.
      axis_name: the device axis, if any.

    Returns:
      A function from the items to the share.
    """
    count = jnp.sum(is_valid)
    if axis_name is not None:
        count = jax.lax.psum(count, axis_name)
    count = jnp.maximum(count, 1)
    return lambda x: masked_sum(x, is_valid) / count.astype(x.dtype)


def deviations(
    x: Float[Array, "*items"],
    is_valid: Bool[Array, "*items"],
    *,
    axis_name: str | None = None,
) -> Float[Array, "*items"]:
    """Deviations from the mean of every device's valid items; 0 where not valid.

    The largest item is subtracted first: a small spread about a large mean keeps its
    digits, and equal items deviate by exactly 0, not by what rounding left of them.

    Args:
      x: the items of this device.
      is_valid: which of them count.
      axis_name: the device axis to reduce over, if any.
    """
    lowest = jnp.finfo(x.dtype).min
    pivot = jnp.max(jax.lax.stop_gradient(x), where=is_valid, initial=lowest)
    if axis_name is not None:
        pivot = jax.lax.pmax(pivot, axis_name)
    x = x - pivot
    mean = masked_mean(x, is_valid, axis_name=axis_name)
    return jnp.where(is_valid, x - mean, 0.0)


def explained_variance(
    value: Float[Array, "*items"],
    target: Float[Array, "*items"],
    is_valid: Bool[Array, "*items"],
    *,
    axis_name: str | None = None,
) -> Float[Array, ""]:
    """How much of the targets' variance the values explain.

        1 - Var(G - v) / Var(G)

    1 is perfect, 0 is as good as a constant; 0 by definition if the targets are equal.

    Args:
      value: predicted returns.
      target: returns.
      is_valid: which items count.
      axis_name: the device axis to reduce over, if any.
    """

    def variance(x):
        squares = jnp.square(deviations(x, is_valid, axis_name=axis_name))
        return masked_mean(squares, is_valid, axis_name=axis_name)

    total, unexplained = variance(target), variance(target - value)
    is_varied = total > 0.0
    unexplained_share = unexplained / jnp.where(is_varied, total, 1.0)
    return jnp.where(is_varied, 1.0 - unexplained_share, 0.0)


def standardize(
    x: Float[Array, "*items"],
    is_valid: Bool[Array, "*items"],
    *,
    axis_name: str | None = None,
    epsilon: float = 1e-8,
) -> Float[Array, "*items"]:
    """Centres and scales by the mean and deviation of every device's valid items.

        (x - mean) / (std + epsilon), 0 where not valid

    The deviation is the population's. If all valid items are equal the result is 0,
    and so is its gradient.

    Args:
      x: the items of this device.
      is_valid: which of them count.
      axis_name: the device axis to reduce over, if any.
      epsilon: added to the deviation.
    """
    centred = deviations(x, is_valid, axis_name=axis_name)
    variance = masked_mean(jnp.square(centred), is_valid, axis_name=axis_name)
    is_varied = variance > 0.0
    deviation = jnp.sqrt(jnp.where(is_varied, variance, 1.0))
    return jnp.where(is_varied, centred / (deviation + epsilon), 0.0)


def sanitized_log_ratio(
    log_prob: Float[Array, "*items"],
    behaviour_log_prob: Float[Array, "*items"],
    is_valid: Bool[Array, "*items"],
    *,
    bound: float = 20.0,
) -> Float[Array, "*items"]:
    """Log importance ratio that can be exponentiated in float32.

        clip(log pi(a|s) - log b(a|s), -bound, bound), 0 where not valid

    Masked items are replaced before anything is computed with them, so that not even
    an infinity there reaches a gradient. A NaN in a valid item stays, to be seen.

    Args:
      log_prob: log-probability under the policy that is optimised.
      behaviour_log_prob: log-probability under the policy that acted.
      is_valid: which items count.
      bound: largest magnitude; ``exp(20)`` is 4.9e8.
    """
    log_prob = jnp.where(is_valid, log_prob, 0.0)
    behaviour_log_prob = jnp.where(is_valid, behaviour_log_prob, 0.0)
    return jnp.clip(log_prob - behaviour_log_prob, -bound, bound)


def kl_k3(log_ratio: Float[Array, "*items"]) -> Float[Array, "*items"]:
    """Low-variance estimate of KL(b || pi) from one sample of b, never negative.

        (r - 1) - log r,  r = pi(a|s) / b(a|s)

    Schulman (2020), "Approximating KL divergence", estimator k3.

    Args:
      log_ratio: ``log pi(a|s) - log b(a|s)`` with a drawn from b.
    """
    return jnp.expm1(log_ratio) - log_ratio
