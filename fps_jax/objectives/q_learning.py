"""What the value of an action should have been: TD errors, and targets of critics."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fps_jax.objectives import masked
from fps_jax.objectives.returns import truncated_is_returns

Scalar = Float[Array, ""] | float


def td_target(
    r_t: Float[Array, "*items"],
    discount_t: Float[Array, "*items"],
    v_t: Float[Array, "*items"],
) -> Float[Array, "*items"]:
    """What an action came to: ``r_t + discount_t v_t``, without gradient.

    Equation 7 of the paper, with the target critic's value of the target policy's
    action as `v_t`. Over n steps `r_t` is the discounted sum of their rewards, and
    `discount_t` the discount to the n-th power.

    Args:
      r_t: reward.
      discount_t: of what follows; 0 after a termination.
      v_t: value of the state that it led to.
    """
    return jax.lax.stop_gradient(r_t + discount_t * v_t)


def q_td_error(
    q_tm1: Float[Array, " A"],
    a_tm1: Int[Array, ""],
    r_t: Float[Array, ""],
    discount_t: Float[Array, ""],
    q_t: Float[Array, " A"],
    q_t_selector: Float[Array, " A"],
) -> Float[Array, ""]:
    """How far the value of an action was from what it came to.

        delta = r_t + discount_t q_t[argmax_a q_t_selector[a]] - q_tm1[a_tm1]

    With values of the online network as the selector this is Double Q-learning's (van
    Hasselt et al., 2016, equation 4; line 10 of Algorithm 1 in Schaul et al., 2016);
    with `q_t` itself it is Q-learning's (equation 2 of the latter). Only `q_tm1` has a
    gradient.

    Args:
      q_tm1: values of all actions in the state that was acted in.
      a_tm1: the action taken.
      r_t: reward; over n steps the discounted sum of theirs.
      discount_t: of what follows; 0 after a termination.
      q_t: the target network's values in the state that it led to.
      q_t_selector: values by which the action there is chosen.
    """
    value = q_t[jnp.argmax(q_t_selector)]
    return td_target(r_t, discount_t, value) - q_tm1[a_tm1]


def clipped_loss(
    td_error: Float[Array, "*items"], clip: Scalar | None
) -> Float[Array, "*items"]:
    """A loss whose gradient is the TD error, clipped: half its square, then linear.

        d loss / d td_error = clip(td_error, -c, c)

    Mnih et al. (2015), methods; the loss of Huber (1964).

    Args:
      td_error: delta.
      clip: c, above 0; None clips nothing.
    """
    if clip is None:
        return 0.5 * jnp.square(td_error)
    inner = jnp.clip(td_error, -clip, clip)
    return inner * (td_error - 0.5 * inner)


def least(q: Float[Array, " C *items"]) -> Float[Array, "*items"]:
    """The smallest of several critics' values (Fujimoto et al., 2018, equation 10).

    The maximum that a policy seeks prefers what a critic overestimates; the least of
    two critics bounds that. arXiv:1802.09477.

    Args:
      q: ``[C, *items]``.
    """
    return jnp.min(q, axis=0)


def smoothed(
    action: Float[Array, "*items A"],
    noise: Float[Array, "*items A"],
    *,
    clip: Scalar,
) -> Float[Array, "*items A"]:
    """A target action with noise, so that the critic is even around it.

        clip(a + clip(noise, -c, c), -1, 1)

    Fujimoto et al. (2018), equation 14, arXiv:1802.09477.

    Args:
      action: of the target policy.
      noise: drawn anew for each item.
      clip: c, the largest noise, in units of an action whose range is [-1, 1].
    """
    return jnp.clip(action + jnp.clip(noise, -clip, clip), -1.0, 1.0)


def corrected_q_target(
    log_ratio: Float[Array, " n"],
    r_t: Float[Array, " n"],
    discount_t: Float[Array, " n"],
    trace_t: Float[Array, " n"],
    v_tm1: Float[Array, " n"],
    v_t: Float[Array, " n"],
    is_valid: Bool[Array, " n"],
    *,
    rho_bar: Scalar = 1.0,
    c_bar: Scalar = 1.0,
    lambda_: Scalar = 1.0,
) -> Float[Array, ""]:
    """Target of the first action of n steps, with the others' ratios truncated.

        q = r_0 + discount_0 Y_1

    where Y is the return of equation 13: the first action is given, those after it are
    corrected. Arguments as those of `truncated_is_returns`.

    Args:
      log_ratio: ``log pi(a|s) - log b(a|s)``.
      r_t: reward.
      discount_t: see `returns.discounts_and_traces`.
      trace_t: see `returns.discounts_and_traces`.
      v_tm1: value of the state that was acted in.
      v_t: value of the state that it led to.
      is_valid: which steps count.
      rho_bar: largest weight of an error.
      c_bar: largest ratio in a trace.
      lambda_: decay of the trace.
    """
    found = truncated_is_returns(
        log_ratio,
        r_t,
        discount_t,
        trace_t,
        v_tm1,
        v_t,
        is_valid,
        rho_bar=rho_bar,
        c_bar=c_bar,
        lambda_=lambda_,
    )
    return found.advantage[0] + jax.lax.stop_gradient(v_tm1[0])


def squared_error_share(
    q: Float[Array, "C B"],
    target: Float[Array, " B"],
    weights: Float[Array, " B"],
    is_valid: Bool[Array, " B"],
    *,
    axis_name: str | None = None,
) -> Float[Array, ""]:
    """This device's share of the critics' loss, see `masked.share_of_mean`.

        mean_i w_i sum_c (q_ci - y_i)^2

    Args:
      q: of each critic.
      target: y, a constant.
      weights: importance weights.
      is_valid: which items count.
      axis_name: the device axis, if any.
    """
    target = jax.lax.stop_gradient(target)
    error = jnp.sum(jnp.square(q - target[None]), axis=0)
    return masked.share_of_mean(is_valid, axis_name=axis_name)(weights * error)
