"""Returns and advantages of one trajectory; batches of them by ``vmap``.

Three flags describe a row, and none stands for another: `terminated` zeroes the value
of what follows, `truncated` keeps that value but ends the trajectory's sum, and
``is_valid = False`` marks a row that belongs to no episode. `discounts_and_traces`
turns them into the two factors that every recursion here needs.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

Scalar = Float[Array, ""] | float


def discounts_and_traces(
    terminated: Bool[Array, " T"],
    truncated: Bool[Array, " T"],
    is_valid: Bool[Array, " T"],
    *,
    gamma: Scalar,
) -> tuple[Float[Array, " T"], Float[Array, " T"]]:
    """Turns the flags of each row into its discount and its trace.

        discount_t = gamma (1 - terminated_t)
        trace_t    = is_valid_t (1 - terminated_t) (1 - truncated_t)

    Args:
      terminated: the episode ended in a state worth nothing.
      truncated: the episode was cut in a state that has a value.
      is_valid: False on rows that belong to no episode.
      gamma: discount of one step, in [0, 1].

    Returns:
      discount_t: factor of the value of the state that row t led to.
      trace_t: 1 where row t + 1 continues the episode of row t, else 0.
    """
    ends = terminated | truncated
    discount_t = jnp.where(terminated, 0.0, gamma)
    trace_t = jnp.where(is_valid & ~ends, 1.0, 0.0)
    return discount_t, trace_t


def generalized_advantages(
    r_t: Float[Array, " T"],
    discount_t: Float[Array, " T"],
    trace_t: Float[Array, " T"],
    v_tm1: Float[Array, " T"],
    v_t: Float[Array, " T"],
    is_valid: Bool[Array, " T"],
    *,
    lambda_: Scalar,
) -> Float[Array, " T"]:
    """Generalised advantage estimates that bootstrap truncations and stop at every end.

        delta_t = r_t + discount_t v_t - v_tm1
        A_t     = delta_t + discount_t lambda trace_t A_{t+1}

    with ``A = 0`` after the last row and on rows that are not valid. A truncated row
    bootstraps from `v_t`, the value of the true final state, and takes nothing from
    the rows that follow it. Schulman et al. (2016), eq. 16, arXiv:1506.02438.

    A row that is not valid is replaced before anything is computed with it, so that
    not even a NaN there reaches a gradient.

    Args:
      r_t: reward of row t.
      discount_t: see `discounts_and_traces`.
      trace_t: see `discounts_and_traces`.
      v_tm1: value of the state that row t acted in; gradients pass through.
      v_t: value of the state that row t led to; gradients pass through.
      is_valid: False on rows that belong to no episode; what they hold is ignored.
      lambda_: 0 is one-step TD, 1 is the Monte-Carlo advantage, in [0, 1].

    Returns:
      A_t, in reward units; 0 where not valid.
    """
    r_t, discount_t, v_tm1, v_t = (
        jnp.where(is_valid, x, 0.0) for x in (r_t, discount_t, v_tm1, v_t)
    )
    delta_t = r_t + discount_t * v_t - v_tm1
    decay_t = discount_t * trace_t * lambda_

    def backward(next_advantage, row):
        delta, decay = row
        advantage = delta + decay * next_advantage
        return advantage, advantage

    initial = jnp.zeros((), delta_t.dtype)
    _, advantages = jax.lax.scan(backward, initial, (delta_t, decay_t), reverse=True)
    return advantages


def lambda_returns(
    r_t: Float[Array, " T"],
    discount_t: Float[Array, " T"],
    trace_t: Float[Array, " T"],
    v_tm1: Float[Array, " T"],
    v_t: Float[Array, " T"],
    is_valid: Bool[Array, " T"],
    *,
    lambda_: Scalar,
) -> Float[Array, " T"]:
    """Lambda-returns: the targets of a value function.

        G_t = v_tm1 + A_t
            = r_t + discount_t ((1 - lambda trace_t) v_t + lambda trace_t G_{t+1})

    where ``G_{t+1} = v_t`` after the last row, and ``v_t[t] = v_tm1[t + 1]`` wherever
    an episode goes on. Sutton & Barto (2018), eq. 12.18, with the cuts of
    `generalized_advantages`.

    Args:
      r_t: reward of row t.
      discount_t: see `discounts_and_traces`.
      trace_t: see `discounts_and_traces`.
      v_tm1: value of the state that row t acted in.
      v_t: value of the state that row t led to.
      is_valid: False on rows that belong to no episode; what they hold is ignored.
      lambda_: 0 is one-step TD, 1 is Monte Carlo, in [0, 1].

    Returns:
      G_t, in reward units; 0 where not valid.
    """
    advantages = generalized_advantages(
        r_t, discount_t, trace_t, v_tm1, v_t, is_valid, lambda_=lambda_
    )
    return jnp.where(is_valid, v_tm1, 0.0) + advantages
