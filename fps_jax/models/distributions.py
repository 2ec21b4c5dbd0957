"""Thin constructors over distrax: the policies that heads parameterise."""

from typing import Any

import distrax
import jax.numpy as jnp
from jaxtyping import Array, Float


def categorical(logits: Float[Array, "*batch actions"]) -> distrax.Distribution:
    """Distribution over ``0 .. actions - 1`` from unnormalised log-probabilities.

    Args:
      logits: unnormalised log-probabilities, last axis over the actions.
    """
    return distrax.Categorical(logits=logits)


def diagonal_gaussian(
    mean: Float[Array, "*batch A"], log_std: Float[Array, "*batch A"]
) -> distrax.Distribution:
    """Independent Gaussians, one an action dimension; log-probabilities are joint.

    Args:
      mean: centre of each action dimension.
      log_std: natural logarithm of its standard deviation.
    """
    return distrax.Independent(distrax.Normal(mean, jnp.exp(log_std)), 1)


def gaussian_parameters(
    policy: distrax.Distribution,
) -> tuple[Float[Array, "*batch A"], Float[Array, "*batch A"]]:
    """Mean and log standard deviation of what `diagonal_gaussian` made.

    Args:
      policy: diagonal Gaussians.
    """
    assert isinstance(policy, distrax.Independent)
    normal: Any = policy.distribution
    return normal.loc, jnp.log(normal.scale)
