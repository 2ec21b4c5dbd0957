"""The clipped PPO loss, item by item. Schulman et al. (2017), arXiv:1707.06347.

`clip_ppo_loss` puts these parts together.
"""

from typing import Any

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from fps_jax import checks

Scalar = Float[Array, ""] | float
Interval = Scalar | tuple[Scalar, Scalar]
"""``epsilon`` for ``[1 - epsilon, 1 + epsilon]``, or the two of them apart."""


def log_interval(
    clip_epsilon: Interval, dtype: Any
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Logarithms of the two ends of the interval of the ratio.

    Args:
      clip_epsilon: half-width in (0, 1); or ``(low, high)`` with low in [0, 1) and high
        at least 0, as in Clip-Higher (Yu et al., 2025, arXiv:2503.14476, eq. 10).
      dtype: of the result.
    """
    is_pair = isinstance(clip_epsilon, tuple)
    low, high = clip_epsilon if is_pair else (clip_epsilon, clip_epsilon)
    return jnp.log1p(-jnp.asarray(low, dtype)), jnp.log1p(jnp.asarray(high, dtype))


def clipped_surrogate(
    log_ratio: Float[Array, "*items"],
    advantage: Float[Array, "*items"],
    *,
    clip_epsilon: Interval,
    log_weight: Float[Array, "*items"] | float = 0.0,
    dual_clip: Scalar | None = None,
) -> Float[Array, "*items"]:
    """The pessimistic bound on the policy's improvement, to be maximised.

        w min(r A, clip(r, 1 - epsilon_low, 1 + epsilon_high) A),  r = exp(log_ratio)

    and, where A < 0 and `dual_clip` is given, at least ``w dual_clip A``. Equation 7,
    weighted as in Hilton et al. (2021), arXiv:2110.00641, and clipped a second time as
    in Ye et al. (2020), arXiv:1912.09729, equation 5.

    Its gradient is zero where the ratio has left the interval in the direction that
    the advantage asks for. The branch is chosen before the exponential, so that a log
    ratio too large to be exponentiated costs nothing where it is clipped.

    Args:
      log_ratio: ``log pi(a|s) - log pi_prox(a|s)``, the ratio that is kept close to 1.
      advantage: advantage of the action, in any unit.
      clip_epsilon: see `log_interval`.
      log_weight: ``log pi_prox(a|s) - log b(a|s)``, as a constant; 0 if the proximal
        policy is the one that acted.
      dual_clip: largest ratio of an action that was worse than expected, above 1.
    """
    chex.assert_equal_shape([log_ratio, advantage])
    lower, upper = log_interval(clip_epsilon, log_ratio.dtype)
    worse = jnp.maximum(log_ratio, lower)
    if dual_clip is not None:
        worse = jnp.minimum(worse, jnp.log(jnp.asarray(dual_clip, log_ratio.dtype)))
    pessimistic = jnp.where(advantage >= 0.0, jnp.minimum(log_ratio, upper), worse)
    return jnp.exp(pessimistic + log_weight) * advantage


def clipped_sides(
    log_ratio: Float[Array, "*items"],
    advantage: Float[Array, "*items"],
    *,
    clip_epsilon: Interval,
) -> dict[str, Bool[Array, "*items"]]:
    """Which items are outside the interval, and which of those learn nothing.

    Outside counts both signs of the advantage; the gradient of `clipped_surrogate` is
    zero on the active ones alone, where the advantage asks for more of the same.

    Args:
      log_ratio: see `clipped_surrogate`.
      advantage: see `clipped_surrogate`.
      clip_epsilon: see `log_interval`.

    Returns:
      ``low``, ``high``, ``active_low`` and ``active_high``.
    """
    lower, upper = log_interval(clip_epsilon, log_ratio.dtype)
    low, high = log_ratio < lower, log_ratio > upper
    return {
        "low": low,
        "high": high,
        "active_low": low & (advantage < 0.0),
        "active_high": high & (advantage > 0.0),
    }


def decoupled_log_ratios(
    log_prob: Float[Array, "*items"],
    behaviour_log_prob: Float[Array, "*items"],
    proximal_log_prob: Float[Array, "*items"] | None,
    is_valid: Bool[Array, "*items"],
    *,
    max_importance_ratio: Scalar | None = None,
    bound: float = 20.0,
) -> tuple[Float[Array, "*items"], Float[Array, "*items"]]:
    """The ratio that is clipped, and the constant weight that goes with it.

        log_ratio  = log pi - log pi_prox
        log_weight = min(log pi - log b, log max_importance_ratio) - log_ratio

    The second is ``log pi_prox - log b`` where nothing is capped. Both of its terms are
    constants: a capped item keeps the gradient of its ratio, as in the reference code
    of Hilton et al. (2021), arXiv:2110.00641, whose cap lifts log b instead.

    What is not valid is replaced before anything is computed with it; a NaN in a valid
    item stays, to be seen. No logarithm is larger than `bound`, which ends no gradient
    either.

    Args:
      log_prob: under the policy that is optimised.
      behaviour_log_prob: under the policy that acted.
      proximal_log_prob: under the policy to stay close to; None is the one that acted.
      is_valid: which items count.
      max_importance_ratio: largest ``pi / b``, above 0; None is no limit.
      bound: largest magnitude of a logarithm; ``exp(20)`` is 4.9e8.
    """
    log_prob, behaviour, proximal = (
        jnp.where(is_valid, x, 0.0)
        for x in (
            log_prob,
            behaviour_log_prob,
            behaviour_log_prob if proximal_log_prob is None else proximal_log_prob,
        )
    )
    constant = jax.lax.stop_gradient(log_prob)
    total = jnp.clip(constant - jax.lax.stop_gradient(behaviour), -bound, bound)
    if max_importance_ratio is not None:
        log_cap = jnp.log(jnp.asarray(max_importance_ratio, log_prob.dtype))
        total = jnp.minimum(total, log_cap)
    ratio = jnp.clip(constant - jax.lax.stop_gradient(proximal), -bound, bound)
    finite = jnp.where(jnp.isfinite(log_prob), log_prob, 0.0)
    return ratio + (finite - jax.lax.stop_gradient(finite)), total - ratio


def value_loss(
    value: Float[Array, "*items"],
    target: Float[Array, "*items"],
    *,
    kind: str = "l2",
    old_value: Float[Array, "*items"] | None = None,
    clip_value: Scalar | None = None,
) -> Float[Array, "*items"]:
    """Distance of a value from its target; with `clip_value`, the worse of two.

        max(d(v - G), d(v_old + clip(v - v_old, -clip_value, clip_value) - G))

    where d is ``x^2`` for l2 (without a half), ``|x|`` for l1, and for smooth_l1
    ``x^2 / 2`` below 1 and ``|x| - 1/2`` above.

    Args:
      value: predicted return.
      target: the return to predict; a constant.
      kind: "l1", "l2" or "smooth_l1".
      old_value: what was predicted when the data was collected, in the same unit. A
        value that the present network predicts would make the clipping do nothing.
      clip_value: how far a prediction may move, in the unit of the value, at least 0.

    Raises:
      ValueError: if the kind is unknown, or there is a `clip_value` without an
        `old_value`.
      AssertionError: if value and target differ in shape.
    """
    checks.choice("kind", kind, DISTANCES)
    chex.assert_equal_shape([value, target])
    distance, target = DISTANCES[kind], jax.lax.stop_gradient(target)
    loss = distance(value - target)
    if clip_value is None:
        return loss
    if old_value is None:
        raise ValueError(f"clip_value {clip_value} must be given with old_value.")
    old_value = jax.lax.stop_gradient(old_value)
    moved = jnp.clip(value - old_value, -clip_value, clip_value)
    return jnp.maximum(loss, distance(old_value + moved - target))


def _smooth_l1(x):
    size = jnp.abs(x)
    return jnp.where(size < 1.0, 0.5 * jnp.square(x), size - 0.5)


def _l1(x):
    # jnp.abs has a slope of 1 at 0.
    return x * jnp.sign(x)


DISTANCES = {"l1": _l1, "l2": jnp.square, "smooth_l1": _smooth_l1}
"""What `value_loss` may measure, by name."""


def monte_carlo_entropy(
    log_prob: Float[Array, "samples ..."], *, is_reparameterized: bool
) -> Float[Array, "..."]:
    """Entropy from samples of the policy, with a gradient that is the entropy's own.

        -mean_s log pi(a_s)

    The gradient of ``log pi(a)`` at a fixed action is 0 on average, whatever pi is: if
    the actions do not carry the gradient themselves, it is that of
    ``-mean_s log pi(a_s) log pi(a_s)``, the first factor as a constant.

    Args:
      log_prob: of each sample, ``[samples, *items]``.
      is_reparameterized: whether the samples are differentiable by the parameters.
    """
    entropy = -jnp.mean(log_prob, axis=0)
    if is_reparameterized:
        return entropy
    constant = jax.lax.stop_gradient(log_prob)
    score = -jnp.mean(constant * log_prob, axis=0)
    return jax.lax.stop_gradient(entropy) + score - jax.lax.stop_gradient(score)
