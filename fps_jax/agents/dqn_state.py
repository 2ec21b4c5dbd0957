"""What DQN knows, and the parts that it is made of."""

from typing import Any, NamedTuple

import flax.linen as nn
import optax
from jaxtyping import Array, Float, Int, Key, Shaped

from fps_jax.agents import gradient
from fps_jax.agents.dqn_exploration import Feedback
from fps_jax.agents.dqn_options import DQNOptions, Hyper
from fps_jax.agents.gradient import Learned
from fps_jax.models.normalize import MomentsState, normalize
from fps_jax.replay.replay import Replay


class DQNState(NamedTuple):
    """What DQN learns; the same on every device.

    Attributes:
      q: parameters of the network, and their optimiser.
      target: parameters of the target network.
      observation_moments: of the observations that the actors saw; None unless they
        are standardised.
      feedback: counts by level of exploration; ``[0]`` without levels.
      hyper: the numeric hyper-parameters.
      key: root of the learner's random numbers; folded with `update`.
      update: updates made, scalar.
      gradient_steps: made, scalar.
      env_steps: seen, scalar.
    """

    q: Learned
    target: Any
    observation_moments: MomentsState | None
    feedback: Feedback
    hyper: Hyper
    key: Key[Array, ""]
    update: Int[Array, ""]
    gradient_steps: Int[Array, ""]
    env_steps: Int[Array, ""]


class Parts(NamedTuple):
    """What DQN is made of.

    Attributes:
      options: the static choices; its numbers are only read from the state's `hyper`.
      network: maps observations ``[B, ...]`` to values ``[B, A]``.
      replay: functions of a device's replay.
    """

    options: DQNOptions
    network: nn.Module
    replay: Replay

    def transform(self, hyper: Hyper) -> optax.GradientTransformation:
        """From gradients to steps.

        Args:
          hyper: gives the longest gradient.
        """
        return gradient.gradient_transform(
            self.options.optimizer,
            max_grad_norm=hyper.max_grad_norm,
            adam_epsilon=self.options.adam_epsilon,
        )

    def values(
        self,
        params: Any,
        moments: MomentsState | None,
        observation: Shaped[Array, "B ..."],
    ) -> Float[Array, "B A"]:
        """Values of all actions.

        Args:
          params: of the network.
          moments: by which observations are standardised, if they are.
          observation: as the environment gave it.
        """
        if moments is not None:
            observation = normalize(moments, observation)
        values: Any = self.network.apply(params, observation)
        return values

    @property
    def num_levels(self) -> int:
        """K, of exploration; 0 if it follows the schedule."""
        return len(self.options.exploration_levels)
