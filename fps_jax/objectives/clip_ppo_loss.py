"""The whole clipped PPO loss, and metrics that add up over microbatches and devices.

The options and metrics are those of torchrl's ``ClipPPOLoss`` and some more. Where they
differ: one mask holds for losses, statistics and metrics; targets, advantages and old
values are constants; ratios neither overflow nor lose their gradient; what contradicts
itself is refused.
"""

import functools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from fps_jax import checks
from fps_jax.objectives import clip_ppo, masked, ratios, tally
from fps_jax.objectives.clip_ppo import Interval, Scalar

Heads = Float[Array, "*items"] | Mapping[str, Float[Array, "*items"]]
"""One array for the whole action, or one of each of its heads by their names."""


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
    log_prob: Heads,
    behaviour_log_prob: Heads,
    advantage: Float[Array, "*items"],
    is_valid: Bool[Array, "*items"],
    *,
    ratio: str = "joint",
    clip_epsilon: Interval = 0.2,
    dual_clip: Scalar | None = None,
    proximal_log_prob: Heads | None = None,
    max_importance_ratio: Scalar | None = None,
    entropy: Heads | None = None,
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

    with `clip_ppo.clipped_surrogate` and `clip_ppo.value_loss`. Items may have any
    shape; one that is not valid has no influence, whatever it holds. Of an action with
    several heads, the ratio of the whole is clipped, or that of each head on its own,
    and then their objectives are added. If policy and value share parameters and only
    the policy is to train them, stop the gradient of what the value's head is given
    (torchrl's ``separate_losses``).

    Args:
      log_prob: ``log pi(a|s)`` of the policy that is optimised, of the whole action
        (an action's dimensions are added up first) or of each head.
      behaviour_log_prob: of the policy that acted.
      advantage: in any unit; see `masked.standardize`.
      is_valid: which items count.
      ratio: "joint" clips the ratio of all heads together; "per_head" each head's.
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
      AssertionError: if the arrays are not all of one shape.
    """
    checks.choice("reduction", reduction, ("none", "mean", "sum"))
    _check_policy(clip_epsilon, dual_clip, max_importance_ratio)
    heads = _heads(ratio, log_prob, behaviour_log_prob, proximal_log_prob)
    of_values = [x for x in (value, value_target, old_value) if x is not None]
    # A row against a column would silently become an outer product.
    arrays = jax.tree.leaves((heads, advantage, entropy, of_values))
    chex.assert_equal_shape([is_valid, *arrays])
    log_ratios = {
        head: clip_ppo.decoupled_log_ratios(
            now, then, near, is_valid, max_importance_ratio=max_importance_ratio
        )
        for head, (now, then, near) in heads.items()
    }
    advantage = jax.lax.stop_gradient(jnp.where(is_valid, advantage, 0.0))
    items = _policy_items(log_ratios, advantage, clip_epsilon, dual_clip)
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
    importance = _added([jnp.add(*pair) for pair in log_ratios.values()])
    told = tally.of(items, importance, errors, is_valid)
    reduce = _reducer(reduction, is_valid, axis_name)
    of_term = lambda name: reduce(items.get(f"loss_{name}", jnp.zeros_like(advantage)))
    return Losses(*map(of_term, Losses._fields)), jax.lax.stop_gradient(told)


def _reducer(reduction, is_valid, axis_name):
    """From items to what the reduction leaves of them."""
    return {
        "none": lambda x: jnp.where(is_valid, x, 0.0),
        "sum": lambda x: masked.total(x, is_valid),
        "mean": masked.share_of_mean(is_valid, axis_name=axis_name),
    }[reduction]


def _added(terms: Iterable[Array]) -> Array:
    """Their sum; one term is itself."""
    return functools.reduce(jnp.add, terms)


def _heads(ratio, log_prob, behaviour, proximal) -> dict[str, Any]:
    """Of each ratio that is clipped, the three log-probabilities that it is made of."""
    checks.choice("ratio", ratio, ("joint", "per_head"))
    given = [x for x in (log_prob, behaviour, proximal) if x is not None]
    if not any(isinstance(x, Mapping) for x in given):
        if ratio == "per_head":
            raise ValueError(f"ratio {ratio!r} must be given log-probs of each head.")
        return {"": (log_prob, behaviour, proximal)}
    names = [sorted(x) if isinstance(x, Mapping) else [] for x in given]
    if not names[0] or any(heads != names[0] for heads in names):
        raise ValueError(f"log_probs of heads {names} must be of the same heads.")
    if ratio == "joint":
        joint = lambda x: None if x is None else _added(x.values())
        return {"": (joint(log_prob), joint(behaviour), joint(proximal))}
    of = lambda x, head: None if x is None else x[head]
    return {
        head: (log_prob[head], behaviour[head], of(proximal, head)) for head in names[0]
    }


def _policy_items(log_ratios, advantage, clip_epsilon, dual_clip):
    """The objective, and what is counted of the ratios that are clipped."""
    surrogates, flags, by_head = [], [], {}
    for head, (log_ratio, log_weight) in log_ratios.items():
        surrogates.append(
            clip_ppo.clipped_surrogate(
                log_ratio,
                advantage,
                clip_epsilon=clip_epsilon,
                log_weight=log_weight,
                dual_clip=dual_clip,
            )
        )
        sides = clip_ppo.clipped_sides(log_ratio, advantage, clip_epsilon=clip_epsilon)
        flags.append({f"clip_fraction_{side}": flag for side, flag in sides.items()})
        flags[-1]["clip_fraction"] = sides["low"] | sides["high"]
        if head:
            by_head[f"kl_k3/{head}"] = ratios.kl_k3(log_ratio)
    joint = _added([log_ratio for log_ratio, _ in log_ratios.values()])
    share = lambda *flags: jnp.mean(jnp.stack(flags).astype(advantage.dtype), axis=0)
    return {
        "loss_objective": -_added(surrogates),
        "kl_k1": ratios.kl_k1(joint),
        "kl_k2": ratios.kl_k2(joint),
        "kl_k3": ratios.kl_k3(joint),
        **jax.tree.map(share, *flags),
        **by_head,
    }


def _entropy_items(entropy, coeff, is_valid):
    """The bonus of all heads, and each head's entropy."""
    heads = entropy if isinstance(entropy, Mapping) else {"": entropy}
    weights = coeff if isinstance(coeff, Mapping) else dict.fromkeys(heads, coeff)
    for name, weight in weights.items():
        checks.number(f"entropy_coeff {name}".strip(), weight, 0)
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


def _check_policy(clip_epsilon, dual_clip, max_importance_ratio) -> None:
    if isinstance(clip_epsilon, tuple):
        checks.number("clip_epsilon low", clip_epsilon[0], 0, 1, ends="[)")
        checks.number("clip_epsilon high", clip_epsilon[1], 0)
    else:
        checks.number("clip_epsilon", clip_epsilon, 0, 1, ends="()")
    checks.number("dual_clip", dual_clip, 1, ends="(]")
    checks.number("max_importance_ratio", max_importance_ratio, 0, ends="(]")


def _interval_of_values(clip_epsilon):
    if isinstance(clip_epsilon, tuple):
        raise ValueError(
            "clip_value True must be a number with a clip_epsilon of two, "
            f"{clip_epsilon}."
        )
    return clip_epsilon


def _check_critic(target, old_value, critic_coeff, clip_value):
    """The old value and the target, if the options make sense."""
    checks.number("critic_coeff", critic_coeff, 0)
    checks.number("clip_value", clip_value, 0)
    if target is None:
        raise ValueError("value_target None must be given with a value.")
    if clip_value is not None and old_value is None:
        raise ValueError(f"clip_value {clip_value} must be given with old_value.")
    return target if old_value is None else old_value, target
