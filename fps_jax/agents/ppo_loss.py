"""What PPO learns from and what it minimises."""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
from jaxtyping import Array, Bool, Float, Shaped

from fps_jax.agents.ppo_options import Hyper, PPOOptions
from fps_jax.models.networks import ActorCritic
from fps_jax.objectives import masked, returns
from fps_jax.objectives.clip_ppo import Interval
from fps_jax.objectives.clip_ppo_loss import Losses, clip_ppo_loss
from fps_jax.objectives.tally import Tally
from fps_jax.types import Trajectory


class Batch(NamedTuple):
    """Rows to learn from, each ``[B, ...]``; values in the network's own unit."""

    observation: Shaped[Array, " B *observation"]
    action: Shaped[Array, " B *action"]
    log_prob: Float[Array, " B"]
    advantage: Float[Array, " B"]
    target: Float[Array, " B"]
    old_value: Float[Array, " B"]
    is_valid: Bool[Array, " B"]


class Prediction(NamedTuple):
    """What the network says of a minibatch, each ``[B]``.

    Attributes:
      log_prob: of the actions.
      proximal_log_prob: of the policy to stay close to; None is the one that acted.
      entropy: of the policy.
      value: of the observations.
      advantage: as the minibatch weighs them.
    """

    log_prob: Float[Array, "*items"]
    proximal_log_prob: Float[Array, "*items"] | None
    entropy: Float[Array, "*items"]
    value: Float[Array, "*items"]
    advantage: Float[Array, "*items"]


class Loss(NamedTuple):
    """PPO's loss in two steps.

    Attributes:
      predict: ``predict(params, proximal_params, minibatch) -> Prediction``.
      evaluate: ``evaluate(prediction, batch) -> (Losses, Tally)``, of items of any
        shape; the losses are this device's shares of means over all devices.
    """

    predict: Callable[[Any, Any, Batch], Prediction]
    evaluate: Callable[[Prediction, Batch], tuple[Losses, Tally]]

    def of_params(
        self, params: Any, proximal_params: Any, batch: Batch
    ) -> tuple[Float[Array, ""], Prediction]:
        """The loss to be differentiated, and the prediction that it is made from.

        Args:
          params: of the network.
          proximal_params: of the policy to stay close to; None is the one that acted.
          batch: a minibatch.
        """
        prediction = self.predict(params, proximal_params, batch)
        return self.evaluate(prediction, batch)[0].total(), prediction


def make_loss(
    network: ActorCritic,
    options: PPOOptions,
    hyper: Hyper,
    *,
    clip_epsilon: Interval,
    axis_name: str | None,
) -> Loss:
    """Makes PPO's loss; see `clip_ppo_loss`.

    Args:
      network: the policy and the value function.
      options: the static choices.
      hyper: the numbers.
      clip_epsilon: those two of them that are scheduled.
      axis_name: the device axis, if any.
    """

    def predict(params: Any, proximal_params: Any, batch: Batch) -> Prediction:
        policy, value = cast(Any, network.apply(params, batch.observation))
        proximal: Any = None
        if proximal_params is not None:
            proximal = network.apply(
                proximal_params, batch.observation, method="policy"
            )
        advantage = batch.advantage
        if options.normalize_advantage == "minibatch":
            advantage = masked.standardize(
                advantage, batch.is_valid, axis_name=axis_name
            )
        return Prediction(
            log_prob=policy.log_prob(batch.action),
            proximal_log_prob=proximal and proximal.log_prob(batch.action),
            entropy=policy.entropy(),
            value=value,
            advantage=advantage,
        )

    def evaluate(prediction: Prediction, batch: Batch) -> tuple[Losses, Tally]:
        return clip_ppo_loss(
            prediction.log_prob,
            batch.log_prob,
            prediction.advantage,
            batch.is_valid,
            clip_epsilon=clip_epsilon,
            dual_clip=hyper.dual_clip,
            proximal_log_prob=prediction.proximal_log_prob,
            max_importance_ratio=hyper.max_importance_ratio,
            entropy=prediction.entropy,
            entropy_coeff=hyper.entropy_coef,
            value=prediction.value,
            value_target=batch.target,
            old_value=batch.old_value,
            critic_coeff=hyper.value_coef,
            loss_critic_type=options.value_loss,
            clip_value=hyper.clip_value,
            axis_name=axis_name,
        )

    return Loss(predict, evaluate)


def advantages_and_targets(
    network: ActorCritic,
    params: Any,
    trajectory: Trajectory,
    observation: Shaped[Array, "rows E *observation"],
    *,
    scale: Float[Array, ""],
    hyper: Hyper,
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
