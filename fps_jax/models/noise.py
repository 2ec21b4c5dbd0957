"""Noise on a policy's parameters: exploration that is consistent within a segment.

Plappert et al. (2018), arXiv:1706.01905; equation 8 of the fusion paper.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Key

Scalar = Float[Array, ""] | float

ADAPTATION = 1.01
"""By what the scale is multiplied or divided."""


def is_noisy(path: Any) -> bool:
    """Whether a parameter gets noise: weights and biases, but not of layer norms.

    A log standard deviation is neither.

    Args:
      path: of a leaf, as `jax.tree_util` gives it.
    """
    names = [str(getattr(entry, "key", entry)) for entry in path]
    is_norm = any(name.startswith("LayerNorm") for name in names)
    return names[-1] in ("kernel", "bias") and not is_norm


def perturb(params: Any, key: Key[Array, ""], scale: Scalar) -> Any:
    """Adds noise to parameters: ``theta + scale epsilon``, epsilon from N(0, 1).

    The same key gives the same parameters.

    Args:
      params: of a network, those of `is_noisy` among them are perturbed.
      key: spent here; each leaf has a key of its own.
      scale: standard deviation, at least 0.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(params)
    keys = jax.random.split(key, len(leaves))

    def one(path: Any, x: Array, key: Key[Array, ""]) -> Array:
        if not is_noisy(path):
            return x
        return x + jnp.asarray(scale, x.dtype) * jax.random.normal(
            key, x.shape, x.dtype
        )

    noisy = [one(path, x, key) for (path, x), key in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(structure, noisy)


def action_distance(
    mean: Float[Array, "*items A"],
    perturbed_mean: Float[Array, "*items A"],
    is_valid: Bool[Array, "*items"],
    *,
    axis_name: str | None = None,
) -> Float[Array, ""]:
    """How far noise moves actions: ``sqrt(mean_{s,j} (mu_j(s) - mu'_j(s))^2)``.

    Args:
      mean: of the policy.
      perturbed_mean: of the policy with noise.
      is_valid: which items count.
      axis_name: the device axis to reduce over, if any.
    """
    square = jnp.mean(jnp.square(mean - perturbed_mean), axis=-1)
    sums = jnp.sum(jnp.where(is_valid, square, 0.0)), jnp.sum(is_valid)
    if axis_name is not None:
        sums = jax.lax.psum(sums, axis_name)
    return jnp.sqrt(sums[0] / jnp.maximum(sums[1], 1).astype(square.dtype))


def adapt(
    scale: Float[Array, ""], distance: Scalar, wanted: Scalar
) -> Float[Array, ""]:
    """The scale that brings the distance closer to the wanted one.

        scale / 1.01 if distance > wanted, else 1.01 scale

    Args:
      scale: of the noise.
      distance: see `action_distance`.
      wanted: in units of an action whose range is [-1, 1].
    """
    return jnp.where(distance > wanted, scale / ADAPTATION, scale * ADAPTATION)
