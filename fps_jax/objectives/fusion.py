"""The fusion gradient: a score function's and a critic's, equation 14 of the paper.

    rho grad log pi(a|s) (A - eta A_bar - mean) / std
        + dpg_coef grad_a Q(s, a)|_{a=mu(s)} grad mu(s)

The critic's first-order expansion A_bar about the policy's mean is taken from the
advantage A, and its gradient, which is known in closed form, is added again: on-policy
the sum is unbiased for every critic (Gu et al., 2017, arXiv:1611.02247, equation 7).

Two biases belong to equation 14 as it is printed. Only the first term is divided by the
deviation: in expectation the sum is ``grad J / std + (1 - 1 / std) grad_Q``, right in
direction only if std is 1 or `critic_weight` divides the other term by it as well. And
a truncated ratio takes less of the critic's gradient away than is added.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from fps_jax import checks
from fps_jax.objectives import masked, ratios
from fps_jax.objectives.clip_ppo import Interval, clipped_surrogate

Scalar = Float[Array, ""] | float

CONTROL_VARIATES = ("ones", "conservative", "aggressive", "optimal", "zero")
"""How much of the control variate `control_variate_coef` takes."""
STATISTICS = ("residual", "advantage", "center_only", "none")
"""What `learning_signal` centres and scales by."""
CRITIC_SCALES = ("none", "inv_sigma", "inv_control_variate_std")
"""What `critic_weight` divides the critic's term by."""
SURROGATES = ("R1", "R2", "R3")
"""Functions whose gradient is the score function's term; see `surrogate`."""
_FLOOR = 1e-8


def control_variate(
    q_of_action: Callable[[Float[Array, "*items A"]], Float[Array, "*items"]],
    mean: Float[Array, "*items A"],
    action: Float[Array, "*items A"],
) -> Float[Array, "*items"]:
    """The critic's advantage, to first order about the policy's mean.

        A_bar = grad_a Q(s, a)|_{a=mu(s)} (a - mu(s))

    Below equation 6 of the paper. If the policy squashes what it draws, pass the
    critic as a function of what is drawn, and mean and action before squashing.

    Args:
      q_of_action: the critic at the items' states, item by item.
      mean: mu(s) of the policy.
      action: what it drew.
    """
    value, pull = jax.vjp(q_of_action, mean)
    (slope,) = pull(jnp.ones_like(value))
    return jnp.sum(slope * (action - mean), axis=-1)


def control_variate_coef(
    advantage: Float[Array, "*items"],
    control_variate: Float[Array, "*items"],
    is_valid: Bool[Array, "*items"],
    *,
    kind: str = "ones",
    axis_name: str | None = None,
) -> Float[Array, "*items"]:
    """How much of the control variate is subtracted, and of its mean added again.

        ones           1, as printed
        conservative   1 if A A_bar > 0, else 0
        aggressive     sign(A A_bar)
        optimal        sum(A A_bar) / sum(A_bar^2), over the items of every device
        zero           0

    Gu et al. (2017), section 3.2. The second and third depend on the action, so that
    the sum of both terms is no longer unbiased.

    Args:
      advantage: A, of each item.
      control_variate: A_bar.
      is_valid: which items count.
      kind: one of `CONTROL_VARIATES`.
      axis_name: the device axis to reduce over, if any.

    Raises:
      ValueError: if the kind is unknown.
    """
    checks.choice("kind", kind, CONTROL_VARIATES)
    if kind == "optimal":
        slope = regression_slope(
            advantage, control_variate, is_valid, axis_name=axis_name
        )
        return jnp.broadcast_to(slope, advantage.shape)
    agreement = jnp.sign(advantage) * jnp.sign(control_variate)
    return {
        "ones": jnp.ones_like(advantage),
        "conservative": jnp.maximum(agreement, 0.0),
        "aggressive": agreement,
        "zero": jnp.zeros_like(advantage),
    }[kind]


def regression_slope(
    advantage: Float[Array, "*items"],
    control_variate: Float[Array, "*items"],
    is_valid: Bool[Array, "*items"],
    *,
    axis_name: str | None = None,
) -> Float[Array, ""]:
    """The coefficient that takes most variance away: ``sum(A A_bar) / sum(A_bar^2)``.

    Args:
      advantage: A, of each item.
      control_variate: A_bar, 0 on average.
      is_valid: which items count.
      axis_name: the device axis to reduce over, if any.
    """
    mean = lambda x: masked.mean(x, is_valid, axis_name=axis_name)
    square = mean(jnp.square(control_variate))
    return mean(advantage * control_variate) / jnp.maximum(square, _FLOOR)


class Signal(NamedTuple):
    """What the score function is multiplied by.

    Attributes:
      value: of each item, 0 where not valid.
      mean: what was subtracted.
      std: what it was divided by, above 0.
    """

    value: Float[Array, "*items"]
    mean: Float[Array, ""]
    std: Float[Array, ""]


def learning_signal(
    advantage: Float[Array, "*items"],
    residual: Float[Array, "*items"],
    is_valid: Bool[Array, "*items"],
    *,
    statistics: str = "residual",
    axis_name: str | None = None,
) -> Signal:
    """Centres and scales what is left of the advantage: ``(l - mean) / std``.

    Args:
      advantage: A, of each item.
      residual: ``l = A - eta A_bar``.
      is_valid: which items count.
      statistics: "residual": of l, and then the signal has mean 0 and deviation 1;
        "advantage": of A; "center_only": the mean of l alone; or "none".
      axis_name: the device axis to reduce over, if any.

    Raises:
      ValueError: if the statistics are unknown.
    """
    checks.choice("statistics", statistics, STATISTICS)
    one, zero = jnp.ones((), residual.dtype), jnp.zeros((), residual.dtype)
    average = lambda x: masked.mean(x, is_valid, axis_name=axis_name)
    of = advantage if statistics == "advantage" else residual
    mean = zero if statistics == "none" else average(of)
    std = one
    if statistics in ("residual", "advantage"):
        apart = masked.deviations(of, is_valid, axis_name=axis_name)
        std = jnp.maximum(jnp.sqrt(average(jnp.square(apart))), _FLOOR)
    value = jnp.where(is_valid, (residual - mean) / std, 0.0)
    return jax.lax.stop_gradient(Signal(value, mean, std))


def critic_weight(
    std: Float[Array, ""],
    control_variate: Float[Array, "*items"],
    is_valid: Bool[Array, "*items"],
    *,
    scale: str = "none",
    axis_name: str | None = None,
) -> Float[Array, ""]:
    """What the critic's term is multiplied by.

        none                      1, as printed
        inv_sigma                 1 / std, which makes the sum unbiased but for 1 / std
        inv_control_variate_std   1 / std of A_bar over the items

    Args:
      std: of the `learning_signal`.
      control_variate: A_bar, of each item.
      is_valid: which items count.
      scale: one of `CRITIC_SCALES`.
      axis_name: the device axis to reduce over, if any.

    Raises:
      ValueError: if the scale is unknown.
    """
    checks.choice("scale", scale, CRITIC_SCALES)
    if scale == "none":
        return jnp.ones_like(std)
    if scale == "inv_sigma":
        return 1.0 / std
    apart = masked.deviations(control_variate, is_valid, axis_name=axis_name)
    variance = masked.mean(jnp.square(apart), is_valid, axis_name=axis_name)
    return 1.0 / jnp.maximum(jnp.sqrt(variance), _FLOOR)


def surrogate(
    log_prob: Float[Array, "*items"],
    old_log_prob: Float[Array, "*items"],
    behaviour_log_prob: Float[Array, "*items"],
    signal: Float[Array, "*items"],
    is_valid: Bool[Array, "*items"],
    *,
    kind: str = "R3",
    rho_bar: Scalar = 1.0,
    clip_epsilon: Interval | None = None,
) -> Float[Array, "*items"]:
    """The score function's term as something to be maximised, 0 where not valid.

        R3   min(rho_bar, pi_old / b) (pi / pi_old) l
        R2   min(rho_bar, pi_old / b) log pi l
        R1   min(rho_bar, pi / b) l

    At ``pi = pi_old`` the gradients of R3 and R2 are the first term of equation 14; R3
    alone stays a good estimate while pi moves, and clips as PPO does (Hilton et al.,
    2021, arXiv:2110.00641). R2 is what V-trace's authors descend. R1 is how the paper
    words it; what is truncated has no gradient there, whatever the sign of l.

    Args:
      log_prob: ``log pi(a|s)``, of the policy that is optimised.
      old_log_prob: at the start of this update.
      behaviour_log_prob: of the policy that acted.
      signal: l, a constant.
      is_valid: which items count.
      kind: "R1", "R2" or "R3".
      rho_bar: largest ratio, above 0; may be infinite.
      clip_epsilon: of R3's ratio, see `clip_ppo.log_interval`; None does not clip.

    Raises:
      ValueError: if the kind is unknown, or has no ratio to be clipped.
    """
    checks.choice("kind", kind, SURROGATES)
    if clip_epsilon is not None and kind != "R3":
        raise ValueError(f"clip_epsilon {clip_epsilon} must be None for kind {kind}.")
    log_prob, old, behaviour, signal = (
        jnp.where(is_valid, x, 0.0)
        for x in (log_prob, old_log_prob, behaviour_log_prob, signal)
    )
    if kind == "R1":
        return ratios.truncated_ratio(log_prob - behaviour, rho_bar) * signal
    weight = ratios.truncated_ratio(old - behaviour, rho_bar)
    if kind == "R2":
        return weight * log_prob * signal
    log_ratio = ratios.bounded(log_prob - old)
    if clip_epsilon is None:
        return weight * jnp.exp(log_ratio) * signal
    return weight * clipped_surrogate(log_ratio, signal, clip_epsilon=clip_epsilon)


def diagnostics(
    advantage: Float[Array, "*items"],
    control_variate: Float[Array, "*items"],
    residual: Float[Array, "*items"],
    is_valid: Bool[Array, "*items"],
    *,
    axis_name: str | None = None,
) -> dict[str, Float[Array, ""]]:
    """What the control variate is worth, over every device's items.

    Args:
      advantage: A, of each item.
      control_variate: A_bar.
      residual: ``A - eta A_bar``.
      is_valid: which items count.
      axis_name: the device axis to reduce over, if any.

    Returns:
      ``control_variate_correlation`` of A and A_bar, ``residual_variance`` over that of
      A, and ``control_variate_slope``, see `regression_slope`.
    """
    mean = lambda x: masked.mean(x, is_valid, axis_name=axis_name)
    apart = lambda x: masked.deviations(x, is_valid, axis_name=axis_name)
    a, c, left = apart(advantage), apart(control_variate), apart(residual)
    of_a, of_c = mean(jnp.square(a)), mean(jnp.square(c))
    both = jnp.sqrt(of_a) * jnp.sqrt(of_c)
    return {
        "control_variate_correlation": mean(a * c) / jnp.maximum(both, _FLOOR),
        "control_variate_slope": regression_slope(
            advantage, control_variate, is_valid, axis_name=axis_name
        ),
        "residual_variance": mean(jnp.square(left)) / jnp.maximum(of_a, _FLOOR),
    }
