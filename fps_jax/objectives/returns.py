"""Returns and advantages of one trajectory; batches of them by ``vmap``.

All of them add decayed one-step errors up, from the last row to the first: that sum
exists once, row by row, in parallel, and over windows.

Three flags describe a row, and none stands for another: `terminated` zeroes the value
of what follows, `truncated` keeps that value but ends the trajectory's sum, and
``is_valid = False`` marks a row that belongs to no episode. `discounts_and_traces`
turns them into the two factors that every recursion here needs.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from fps_jax import checks
from fps_jax.objectives import ratios, sums

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
    return sums.discounted(delta_t, discount_t * trace_t * lambda_)


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


def n_step_returns(
    r_t: Float[Array, " T"],
    discount_t: Float[Array, " T"],
    trace_t: Float[Array, " T"],
    v_tm1: Float[Array, " T"],
    v_t: Float[Array, " T"],
    is_valid: Bool[Array, " T"],
    *,
    n: int,
) -> Float[Array, " T"]:
    """Returns of the next n rows, which bootstrap from the value after them.

        R_t = r_t + discount_t r_{t+1} + ... + (product of n discounts) v_{t+n}
            = v_tm1 + sum_{k=t}^{t+n-1} (prod_{i=t}^{k-1} discount_i) delta_k

    A window that reaches the end of its episode, or of the trajectory, is cut there
    and bootstraps there. Equations 10 and 11 of the paper, which telescope into each
    other.

    Args:
      r_t: reward of row t.
      discount_t: see `discounts_and_traces`.
      trace_t: see `discounts_and_traces`.
      v_tm1: value of the state that row t acted in.
      v_t: value of the state that row t led to; ``v_tm1[t + 1]`` wherever an episode
        goes on.
      is_valid: False on rows that belong to no episode; what they hold is ignored.
      n: rows of a window, at least 1.

    Returns:
      R_t, in reward units; 0 where not valid.

    Raises:
      ValueError: if n is below 1.
    """
    return truncated_is_returns(
        jnp.zeros_like(r_t),
        r_t,
        discount_t,
        trace_t,
        v_tm1,
        v_t,
        is_valid,
        n=n,
    ).target


class TruncatedISReturns(NamedTuple):
    """What `truncated_is_returns` gives, all of it without gradient.

    Attributes:
      target: ``[T]``, of the value function.
      advantage: ``[T]``, of the action, from the next row's target.
      rho: ``[T]``, truncated ratio, the weight of an error.
      c: ``[T]``, truncated ratio, the decay of a trace.
    """

    target: Float[Array, " T"]
    advantage: Float[Array, " T"]
    rho: Float[Array, " T"]
    c: Float[Array, " T"]


def truncated_is_returns(
    log_ratio: Float[Array, " T"],
    r_t: Float[Array, " T"],
    discount_t: Float[Array, " T"],
    trace_t: Float[Array, " T"],
    v_tm1: Float[Array, " T"],
    v_t: Float[Array, " T"],
    is_valid: Bool[Array, " T"],
    *,
    rho_bar: Scalar = 1.0,
    c_bar: Scalar = 1.0,
    lambda_: Scalar = 1.0,
    n: int | None = None,
    trace: str = "vtrace",
    method: str = "auto",
) -> TruncatedISReturns:
    """Returns of a policy from what another one did, its ratios truncated.

        Y_t = v_tm1 + sum_{k=t}^{t+n-1} (prod_{i=t}^{k-1} discount_i c_i) rho_k delta_k
        A_t = r_t + discount_t Y_{t+1} - v_tm1
        delta_k = r_k + discount_k v_k - v_{k-1}
        rho_k = min(rho_bar, pi(a_k|s_k) / b(a_k|s_k))
        c_k   = lambda min(c_bar, pi(a_k|s_k) / b(a_k|s_k)),  1 with ``trace="none"``

    Equation 13 of the paper with the product that V-trace has (Espeholt et al., 2018,
    arXiv:1802.01561, section 4.1); ``trace="none"`` is equation 12, and is what 13
    says as it is printed. Its fixed point is the value of the policy between b and pi
    that `rho_bar` sets; `c_bar`, `lambda_` and `n` only set the speed. Equation 12 is
    no contraction and may diverge, and neither is 13 with ``c_bar > rho_bar``.

    Args:
      log_ratio: ``log pi(a|s) - log b(a|s)`` of row t.
      r_t: reward of row t.
      discount_t: see `discounts_and_traces`.
      trace_t: see `discounts_and_traces`.
      v_tm1: value of the state that row t acted in.
      v_t: value of the state that row t led to; ``v_tm1[t + 1]`` wherever an episode
        goes on.
      is_valid: False on rows that belong to no episode; what they hold is ignored.
      rho_bar: largest weight of an error, above 0; may be infinite.
      c_bar: largest ratio in a trace, in [0, rho_bar].
      lambda_: decay of the trace, in [0, 1].
      n: rows of a window, at least 1; None reaches to the end of the trajectory.
      trace: "vtrace" or "none": which product weighs the errors.
      method: "scan" from row to row; "associative", more work in fewer steps; "auto"
        chooses by `sums.ASSOCIATIVE_FROM`. Windows have a way of their own.

    Returns:
      Targets and advantages in units of reward, 0 where not valid, and the ratios.

    Raises:
      ValueError: if an option is out of range or unknown.
    """
    _check_is_options(rho_bar, c_bar, lambda_, n, trace)
    log_ratio, r_t, discount_t, v_tm1, v_t = (
        jnp.where(is_valid, x, 0.0) for x in (log_ratio, r_t, discount_t, v_tm1, v_t)
    )
    rho = ratios.truncated_ratio(log_ratio, rho_bar)
    c = (
        jnp.ones_like(rho)
        if trace == "none"
        else lambda_ * ratios.truncated_ratio(log_ratio, c_bar)
    )
    delta_t = r_t + discount_t * v_t - v_tm1
    reach_t = discount_t * trace_t
    decay_t = reach_t * c
    if n is None or n >= r_t.size:
        correction = sums.discounted(rho * delta_t, decay_t, method=method)
    else:
        correction = sums.windowed(rho * delta_t, decay_t, n)
    following = jnp.append(correction[1:], jnp.zeros_like(correction[:1]))
    return jax.lax.stop_gradient(
        TruncatedISReturns(
            target=v_tm1 + correction,
            advantage=delta_t + reach_t * following,
            rho=rho,
            c=c,
        )
    )


def _check_is_options(rho_bar, c_bar, lambda_, n, trace) -> None:
    checks.number("rho_bar", rho_bar, 0, ends="(]")
    checks.number("c_bar", c_bar, 0)
    checks.number("lambda_", lambda_, 0, 1)
    checks.number("n", n, 1)
    checks.choice("trace", trace, ("vtrace", "none"))
    known = all(isinstance(bar, (int, float)) for bar in (rho_bar, c_bar))
    if known and rho_bar < c_bar and trace == "vtrace":
        raise ValueError(
            f"rho_bar {rho_bar} must be at least c_bar {c_bar}: otherwise a trace "
            "carries errors further than they weigh, and the values may diverge."
        )
