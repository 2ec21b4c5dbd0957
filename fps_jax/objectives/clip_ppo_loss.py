"""The whole clipped PPO loss, and metrics that add up over microbatches and devices.

The options and metrics are those of torchrl's ``ClipPPOLoss`` and some more. Where they
differ: one mask holds for losses, statistics and metrics; targets, advantages and old
values are constants; ratios neither overflow nor lose their gradient; what contradicts
itself is refused.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from fps_jax.objectives import clip_ppo, masked, ratios, tally
from fps_jax.objectives.clip_ppo import Interval, Scalar

Entropy = Float[Array, "*items"] | Mapping[str, Float[Array, "*items"]]


class Losses(NamedTuple):
    """The three terms, coefficients applied; the loss is their sum.

    Attributes:
      objective: minus the surrogate.
      entropy: minus the entropy bonus; 0 without entropies.
      critic: the value loss; 0 without values.
    """

    objective: Float[Array, "*reduced"]
    entropy: Float[Array, "*reduced"]
    critic: Float[Array, "*reduced"]

    def total(self) -> Float[Array, "*reduced"]:
        """Their sum, which is to be minimised."""
        return self.objective + self.entropy + self.critic


def clip_ppo_loss(
    log_prob: Float[Array, "*items"],
    behaviour_log_prob: Float[Array, "*items"],
    advantage: Float[Array, "*items"],
    is_valid: Bool[Array, "*items"],
    *,
    clip_epsilon: Interval = 0.2,
    dual_clip: Scalar | None = None,
    proximal_log_prob: Float[Array, "*items"] | None = None,
    max_importance_ratio: Scalar | None = None,
    entropy: Entropy | None = None,
    entropy_coeff: Scalar | Mapping[str, Scalar] = 0.01,
    value: Float[Array, "*items"] | None = None,
    value_target: Float[Array, "*items"] | None = None,
    old_value: Float[Array, "*items"] | None = None,
    critic_coeff: Scalar | None = 1.0,
    loss_critic_type: str = "smooth_l1",
    clip_value: Scalar | bool | None = None,
    reduction: str = "mean",
    axis_name: str | None = None,
) -> tuple[Losses, tally.Tally]:
    """The clipped PPO loss of a batch, and what its metrics are made of.

        objective = -surrogate,  entropy = -sum_h coeff_h H_h,  critic = coeff d(v, G)

    with `clip_ppo.clipped_surrogate` and `clip_ppo.value_loss`. Log-probabilities are
    joint: sum an action's dimensions and heads first; items of any shape are clipped
    one by one. An item that is not valid has no influence, whatever it holds. If policy
    and value share parameters and only the policy is to train them, stop the gradient
    of what the value's head is given (torchrl's ``separate_losses``).

    Args:
      log_prob: ``log pi(a|s)`` of the policy that is optimised.
      behaviour_log_prob: of the policy that acted.
      advantage: in any unit; see `masked.standardize`.
      is_valid: which items count.
      clip_epsilon: a number in (0, 1), or a pair; see `clip_ppo.log_interval`.
      dual_clip: largest ratio where the advantage is negative, above 1; None is none.
      proximal_log_prob: of the policy to stay close to, such as a moving average of
        the parameters (PPO-EWMA); None is the policy that acted.
      max_importance_ratio: largest ``pi / b``, above 0; None is no limit.
      entropy: of the policy, one array or one a head; None is no bonus.
      entropy_coeff: of all heads, or of each by its name, at least 0.
      value: predicted return; None is no value loss.
      value_target: the return to predict; with a value.
      old_value: predicted when the data was collected; with `clip_value`.
      critic_coeff: weight of the value loss, at least 0; None leaves it out.
      loss_critic_type: "l1", "l2" (without a half) or "smooth_l1".
      clip_value: how far a value may move; True is `clip_epsilon`.
      reduction: "mean" is this device's share of the mean over all devices' valid
        items; "sum" is over this device's valid items; "none" is 0 where not valid.
      axis_name: the device axis that a mean is over, if any.

    Returns:
      The losses, and a `tally.Tally` without gradient for `tally.metrics`.

    Raises:
      ValueError: if an option is out of range or unknown, or two contradict each
        other. Traced numbers are trusted.
    """
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"reduction {reduction!r} must be one of none, mean, sum.")
    _check_policy(clip_epsilon, dual_clip, max_importance_ratio)
    log_ratio, log_weight = clip_ppo.decoupled_log_ratios(
        log_prob,
        behaviour_log_prob,
        is_valid,
        proximal_log_prob=proximal_log_prob,
        max_importance_ratio=max_importance_ratio,
    )
    advantage = jax.lax.stop_gradient(jnp.where(is_valid, advantage, 0.0))
    items = _policy_items(log_ratio, log_weight, advantage, clip_epsilon, dual_clip)
    if entropy is not None or isinstance(entropy_coeff, Mapping):
        items |= _entropy_items(entropy, entropy_coeff, is_valid)
    errors = None
    if isinstance(clip_value, bool):
        clip_value = _interval_of_values(clip_epsilon) if clip_value else None
    if value is not None and critic_coeff is not None:
        old, target = _check_critic(value_target, old_value, critic_coeff, clip_value)
        value, target, old = (jnp.where(is_valid, x, 0.0) for x in (value, target, old))
        items |= _critic_items(
            value, target, old, critic_coeff, loss_critic_type, clip_value
        )
        errors = target, target - value
    elif clip_value is not None:
        raise ValueError(
            f"clip_value {clip_value} must be given with value and critic_coeff."
        )
    told = tally.of(items, log_ratio + log_weight, errors, is_valid)
    reduce = {
        "none": lambda x: jnp.where(is_valid, x, 0.0),
        "sum": lambda x: masked.total(x, is_valid),
        "mean": masked.share_of_mean(is_valid, axis_name=axis_name),
    }[reduction]
    nothing = jnp.zeros_like(advantage)
    names = "loss_objective", "loss_entropy", "loss_critic"
    losses = Losses(*(reduce(items.get(name, nothing)) for name in names))
    return losses, jax.lax.stop_gradient(told)


def _policy_items(log_ratio, log_weight, advantage, clip_epsilon, dual_clip):
    """The objective, and what is counted of the ratio that is clipped."""
    surrogate = clip_ppo.clipped_surrogate(
        log_ratio,
        advantage,
        clip_epsilon=clip_epsilon,
        log_weight=log_weight,
        dual_clip=dual_clip,
    )
    sides = clip_ppo.clipped_sides(log_ratio, advantage, clip_epsilon=clip_epsilon)
    return {
        "loss_objective": -surrogate,
        "kl_k1": ratios.kl_k1(log_ratio),
        "kl_k2": ratios.kl_k2(log_ratio),
        "kl_k3": ratios.kl_k3(log_ratio),
        "clip_fraction": sides["low"] | sides["high"],
    } | {f"clip_fraction_{side}": flags for side, flags in sides.items()}


def _entropy_items(entropy, coeff, is_valid):
    """The bonus of all heads, and each head's entropy."""
    heads = entropy if isinstance(entropy, Mapping) else {"": entropy}
    weights = coeff if isinstance(coeff, Mapping) else dict.fromkeys(heads, coeff)
    for name, weight in weights.items():
        _demand(f"entropy_coeff {name}".strip(), weight, lambda x: x >= 0, "at least 0")
    if isinstance(coeff, Mapping) and (set(coeff) != set(heads) or "" in heads):
        raise ValueError(
            f"entropy_coeff of heads {sorted(coeff)} must be of exactly the heads "
            f"{sorted(set(heads) - {''})} that entropy has."
        )
    heads = {name: jnp.where(is_valid, x, 0.0) for name, x in heads.items()}
    bonus = sum(weights[name] * x for name, x in heads.items())
    by_head = {f"entropy/{name}": x for name, x in heads.items() if name}
    return {"loss_entropy": -bonus, "entropy": sum(heads.values())} | by_head


def _critic_items(value, target, old_value, coeff, kind, clip_value):
    """The value loss, and the share of values that moved too far."""
    loss = clip_ppo.value_loss(
        value, target, kind=kind, old_value=old_value, clip_value=clip_value
    )
    items = {"loss_critic": coeff * loss}
    if clip_value is not None:
        items["value_clip_fraction"] = jnp.abs(value - old_value) > clip_value
    return items


def _demand(name: str, value: Any, is_good: Callable[[Any], bool], limit: str) -> None:
    """Refuses a number that is known to be impossible; traced ones are trusted."""
    if isinstance(value, (int, float)) and not is_good(value):
        raise ValueError(f"{name} {value} must be {limit}.")


def _check_policy(clip_epsilon, dual_clip, max_importance_ratio) -> None:
    if isinstance(clip_epsilon, tuple):
        low, high = clip_epsilon
        _demand("clip_epsilon low", low, lambda x: 0 <= x < 1, "in [0, 1)")
        _demand("clip_epsilon high", high, lambda x: x >= 0, "at least 0")
    else:
        _demand("clip_epsilon", clip_epsilon, lambda x: 0 < x < 1, "in (0, 1)")
    _demand("dual_clip", dual_clip, lambda x: x > 1, "above 1")
    cap = max_importance_ratio
    _demand("max_importance_ratio", cap, lambda x: x > 0, "above 0")


def _interval_of_values(clip_epsilon):
    if isinstance(clip_epsilon, tuple):
        raise ValueError(
            "clip_value True must be a number with a clip_epsilon of two, "
            f"{clip_epsilon}."
        )
    return clip_epsilon


def _check_critic(target, old_value, critic_coeff, clip_value):
    """The old value and the target, if the options make sense."""
    _demand("critic_coeff", critic_coeff, lambda x: x >= 0, "at least 0")
    _demand("clip_value", clip_value, lambda x: x >= 0, "at least 0")
    if target is None:
        raise ValueError("value_target None must be given with a value.")
    if clip_value is not None and old_value is None:
        raise ValueError(f"clip_value {clip_value} must be given with old_value.")
    return target if old_value is None else old_value, target
