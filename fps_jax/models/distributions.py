"""Thin constructors over distrax: the policies that heads parameterise."""

from typing import Any

import distrax
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def categorical(logits: Float[Array, "*batch actions"]) -> distrax.Distribution:
    """Distribution over ``0 .. actions - 1`` from unnormalised log-probabilities.

    Args:
      logits: unnormalised log-probabilities, last axis over the actions.
    """
    return distrax.Categorical(logits=logits)


def epsilon_greedy(
    q: Float[Array, "*batch actions"], epsilon: Float[Array, "*batch"]
) -> distrax.Distribution:
    """The action of the largest value, or with probability epsilon any of them.

        pi(a) = (1 - epsilon) 1[a = argmax q] + epsilon / actions

    Of several largest the first one is taken.

    Args:
      q: values of the actions.
      epsilon: in [0, 1].
    """
    size = q.shape[-1]
    greedy = jax.nn.one_hot(jnp.argmax(q, axis=-1), size)
    epsilon = epsilon[..., None]
    return distrax.Categorical(probs=(1.0 - epsilon) * greedy + epsilon / size)


def boltzmann(
    q: Float[Array, "*batch actions"], temperature: Float[Array, "*batch"]
) -> distrax.Distribution:
    """The better an action, the likelier it is: ``pi(a) ~ exp(q(a) / temperature)``.

    Args:
      q: values of the actions.
      temperature: above 0, in units of return.
    """
    return distrax.Categorical(logits=q / temperature[..., None])


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
