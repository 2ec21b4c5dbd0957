"""What PPO learns from and what it minimises."""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
from jaxtyping import Array, Bool, Float, Shaped

from fps_jax.models.networks import ActorCritic
from fps_jax.objectives import clip_ppo, masked, ratios, returns
from fps_jax.types import Metrics, Trajectory


class Batch(NamedTuple):
    """Rows to learn from, each ``[B, ...]``."""

    observation: Shaped[Array, " B *observation"]
    action: Shaped[Array, " B *action"]
    log_prob: Float[Array, " B"]
    advantage: Float[Array, " B"]
    target: Float[Array, " B"]
    is_valid: Bool[Array, " B"]


def advantages_and_targets(
    network: ActorCritic,
    params: Any,
    trajectory: Trajectory,
    observation: Shaped[Array, "rows E *observation"],
    *,
    scale: Float[Array, ""],
    hyper: Any,
) -> tuple[Float[Array, "T E"], Float[Array, "T E"], Float[Array, "T E"]]:
    """Values, advantages and value targets of a segment, in units of reward.

    Args:
      network: the value function.
      params: its parameters.
      trajectory: the segment.
      observation: ``[T + 1, E, ...]`` as the network reads it.
      scale: the unit that the network predicts returns in.
      hyper: gives gamma and lambda_.

    Returns:
      value, advantage and target, each ``[T, E]``.
    """
    value: Any = network.apply(params, observation, method="value")
    values = jax.lax.stop_gradient(value * scale)

    def one_environment(reward, terminated, truncated, is_valid, values):
        discount, trace = returns.discounts_and_traces(
            terminated, truncated, is_valid, gamma=hyper.gamma
        )
        advantage = returns.generalized_advantages(
            reward,
            discount,
            trace,
            values[:-1],
            values[1:],
            is_valid,
            lambda_=hyper.lambda_,
        )
        return advantage, values[:-1] + advantage

    advantage, target = jax.vmap(one_environment, in_axes=1, out_axes=1)(
        trajectory.reward,
        trajectory.terminated,
        trajectory.truncated,
        trajectory.is_valid,
        values,
    )
    return values[:-1], advantage, target


def make_loss(
    network: ActorCritic,
    hyper: Any,
    *,
    normalizes_advantage: bool,
    axis_name: str | None,
) -> Callable[[Any, Batch], tuple[Float[Array, ""], Metrics]]:
    """Makes PPO's loss on a minibatch.

        -mean(clipped surrogate) + value_coef mean(value loss) - entropy_coef entropy

    Args:
      network: the policy and the value function.
      hyper: gives clip_epsilon, value_coef and entropy_coef.
      normalizes_advantage: standardise each minibatch's advantages.
      axis_name: the device axis, if any.

    Returns:
      ``loss_fn(params, minibatch) -> (loss, metrics)``, this device's shares of means
      over all devices.
    """

    def loss_fn(params, batch: Batch):
        policy, value = cast(Any, network.apply(params, batch.observation))
        log_ratio = ratios.sanitized_log_ratio(
            policy.log_prob(batch.action), batch.log_prob, batch.is_valid
        )
        advantage = batch.advantage
        if normalizes_advantage:
            advantage = masked.standardize(
                advantage, batch.is_valid, axis_name=axis_name
            )
        surrogate = clip_ppo.clipped_surrogate(
            log_ratio, advantage, clip_epsilon=hyper.clip_epsilon
        )
        sides = clip_ppo.clipped_sides(
            log_ratio, advantage, clip_epsilon=hyper.clip_epsilon
        )
        clipped = (sides["low"] | sides["high"]).astype(log_ratio.dtype)
        mean = masked.share_of_mean(batch.is_valid, axis_name=axis_name)
        metrics = {
            "policy_loss": -mean(surrogate),
            "value_loss": 0.5 * mean(clip_ppo.value_loss(value, batch.target)),
            "entropy": mean(policy.entropy()),
            "kl": mean(ratios.kl_k3(log_ratio)),
            "clip_fraction": mean(clipped),
        }
        loss = (
            metrics["policy_loss"]
            + hyper.value_coef * metrics["value_loss"]
            - hyper.entropy_coef * metrics["entropy"]
        )
        return loss, metrics | {"loss": loss}

    return loss_fn
