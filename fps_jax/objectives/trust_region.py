"""A soft trust region: a penalty on the divergence, and what steers its strength.

Heess et al. (2017), arXiv:1707.02286, with the numbers of Coady's public TRPO code.
The paper's beta is `kl_coef` here, its eta `kl_hinge_coef`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from fps_jax.objectives import masked

Scalar = Float[Array, ""] | float

FACTOR = 1.5
"""By what a coefficient is multiplied or divided."""
LARGEST_COEF = 35.0
"""Of `kl_coef`; the smallest is its inverse."""
LARGEST_SCALE = 10.0
"""Of the learning rate; the smallest is its inverse."""


def kl_penalty_share(
    kl: Float[Array, "*items"],
    is_valid: Bool[Array, "*items"],
    *,
    kl_coef: Scalar,
    kl_hinge_coef: Scalar,
    kl_target: Scalar,
    axis_name: str | None = None,
) -> Float[Array, ""]:
    """This device's share of the penalty, see `masked.share_of_mean`.

        kl_coef KL + kl_hinge_coef max(0, KL - 2 kl_target)^2

    with the mean KL over every device: the hinge is squared once, after the mean. The
    shares, and their gradients, add up to the penalty and its gradient.

    Args:
      kl: divergence of each item, from the old policy.
      is_valid: which items count.
      kl_coef: of the mean.
      kl_hinge_coef: of the hinge.
      kl_target: the divergence that is wanted of an update, in nats, above 0.
      axis_name: the device axis, if any.
    """
    share = masked.share_of_mean(is_valid, axis_name=axis_name)(kl)
    mean, devices = share, 1
    if axis_name is not None:
        mean, devices = jax.lax.psum(share, axis_name), jax.lax.axis_size(axis_name)
    excess = jax.lax.stop_gradient(jnp.maximum(mean - 2.0 * kl_target, 0.0))
    slope = 2.0 * kl_hinge_coef * excess
    value = kl_hinge_coef * jnp.square(excess) / devices
    hinge = value + slope * (share - jax.lax.stop_gradient(share))
    return kl_coef * share + hinge


class TrustRegion(NamedTuple):
    """What steers the divergence of an update; scalars.

    Attributes:
      kl_coef: weight of the divergence.
      learning_rate_scale: factor of the policy's learning rate.
    """

    kl_coef: Float[Array, ""]
    learning_rate_scale: Float[Array, ""]


def steer(state: TrustRegion, kl: Scalar, kl_target: Scalar) -> TrustRegion:
    """Strengthens the penalty after an update that went too far, or weakens it.

        KL > 2 target:   kl_coef <- min(35, 1.5 kl_coef)
        KL < target/2:   kl_coef <- max(1/35, kl_coef / 1.5)

    Once the coefficient is above 30 or below 1/30 the learning rate follows, by the
    same factor, within [0.1, 10].

    Args:
      state: before the update.
      kl: mean divergence that the update came to.
      kl_target: the one that is wanted.
    """
    up, down = kl > 2.0 * kl_target, kl < 0.5 * kl_target
    coef = jnp.where(up, state.kl_coef * FACTOR, state.kl_coef)
    coef = jnp.where(down, coef / FACTOR, coef)
    coef = jnp.clip(coef, 1.0 / LARGEST_COEF, LARGEST_COEF)
    scale = state.learning_rate_scale
    slower = up & (coef > 30.0) & (scale > 1.0 / LARGEST_SCALE)
    faster = down & (coef < 1.0 / 30.0) & (scale < LARGEST_SCALE)
    scale = jnp.where(slower, scale / FACTOR, scale)
    scale = jnp.where(faster, scale * FACTOR, scale)
    scale = jnp.clip(scale, 1.0 / LARGEST_SCALE, LARGEST_SCALE)
    return TrustRegion(coef, scale)
