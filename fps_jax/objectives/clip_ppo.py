"""The clipped PPO loss, item by item. Schulman et al. (2017), arXiv:1707.06347."""

import jax.numpy as jnp
from jaxtyping import Array, Float

Scalar = Float[Array, ""] | float


def clipped_surrogate(
    log_ratio: Float[Array, "*items"],
    advantage: Float[Array, "*items"],
    *,
    clip_epsilon: Scalar,
) -> Float[Array, "*items"]:
    """The pessimistic bound on the policy's improvement, to be maximised.

        min(r A, clip(r, 1 - epsilon, 1 + epsilon) A),  r = exp(log_ratio)

    Its gradient is zero where the ratio has left the interval in the direction that
    the advantage asks for. Equation 7.

    The branch is chosen before the exponential, so that a log ratio too large to be
    exponentiated costs nothing where it is clipped.

    Args:
      log_ratio: ``log pi(a|s) - log b(a|s)``.
      advantage: advantage of the action, in any unit.
      clip_epsilon: half-width of the interval, in (0, 1).
    """
    lower, upper = jnp.log1p(-clip_epsilon), jnp.log1p(clip_epsilon)
    pessimistic = jnp.where(
        advantage >= 0.0, jnp.minimum(log_ratio, upper), jnp.maximum(log_ratio, lower)
    )
    return jnp.exp(pessimistic) * advantage


def is_clipped(
    log_ratio: Float[Array, "*items"], *, clip_epsilon: Scalar
) -> Float[Array, "*items"]:
    """1 where the ratio is outside ``[1 - epsilon, 1 + epsilon]``, else 0.

    The gradient of `clipped_surrogate` is zero on only some of these: those where the
    advantage asks for more of the same.

    Args:
      log_ratio: ``log pi(a|s) - log b(a|s)``.
      clip_epsilon: half-width of the interval, in (0, 1).
    """
    lower, upper = jnp.log1p(-clip_epsilon), jnp.log1p(clip_epsilon)
    outside = (log_ratio < lower) | (log_ratio > upper)
    return outside.astype(log_ratio.dtype)


def value_loss(
    value: Float[Array, "*items"], target: Float[Array, "*items"]
) -> Float[Array, "*items"]:
    """Half the squared error of a value: ``(v - G)^2 / 2``.

    Args:
      value: predicted return.
      target: the return to predict, as a constant.
    """
    return 0.5 * jnp.square(value - target)
