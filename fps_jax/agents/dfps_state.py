"""What DFPS knows, and the parts that it is made of."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, Key, Shaped

from fps_jax.agents.dfps_networks import Networks
from fps_jax.agents.dfps_options import DFPSOptions, Hyper
from fps_jax.agents.dfps_replay import Experience
from fps_jax.agents.gradient import Learned, gradient_transform, linear_decay
from fps_jax.models.normalize import AverageState, MomentsState, normalize
from fps_jax.objectives import sums
from fps_jax.objectives.trust_region import TrustRegion
from fps_jax.types import Trajectory


class DFPSState(NamedTuple):
    """What DFPS learns; the same on every device.

    Attributes:
      policy: its parameters and optimiser.
      dpg_optimizer: of the separate steps along the critic; () without them.
      value: its parameters and optimiser.
      critics: theirs; None without a critic.
      target_policy: moving average of the policy's parameters; None without a critic.
      target_critics: of the critics'; None without a critic.
      average: moving average of the policy's parameters, which is evaluated; None
        without ``average_decay``.
      trust_region: what steers the divergence.
      noise_scale: of parameter noise.
      slope: moving average of the control variate's slope.
      observation_moments: of the observations that the actors saw.
      return_moments: of discounted returns so far, see `returns_so_far`; scalars.
      hyper: the numeric hyper-parameters.
      key: root of the learner's random numbers; folded with `update`.
      update: updates made, scalar.
    """

    policy: Learned
    dpg_optimizer: optax.OptState
    value: Learned
    critics: Learned | None
    target_policy: Any
    target_critics: Any
    average: AverageState | None
    trust_region: TrustRegion
    noise_scale: Float[Array, ""]
    slope: Float[Array, ""]
    observation_moments: MomentsState
    return_moments: MomentsState
    hyper: Hyper
    key: Key[Array, ""]
    update: Int[Array, ""]


class Local(NamedTuple):
    """What a device knows of its own environments.

    Attributes:
      memory: what they did; () without a replay.
      return_so_far: ``[E]``, discounted, of the running episodes, in units of reward.
    """

    memory: Any
    return_so_far: Float[Array, " E"]


class Parts(NamedTuple):
    """What DFPS is made of.

    Attributes:
      options: the static choices; its numbers are only read from the state's `hyper`.
      networks: the policy, the value and the critics.
      experience: the replay; None without one.
    """

    options: DFPSOptions
    networks: Networks
    experience: Experience | None

    def transform(self, hyper: Hyper) -> optax.GradientTransformation:
        """Adam, as all networks have it.

        Args:
          hyper: gives the longest gradient.
        """
        return gradient_transform(
            "adam",
            max_grad_norm=hyper.max_grad_norm,
            adam_epsilon=self.options.adam_epsilon,
        )

    def learned(self, params: Any, hyper: Hyper) -> Learned:
        """Parameters with a new optimiser.

        Args:
          params: of a network.
          hyper: gives the longest gradient.
        """
        return Learned(params, self.transform(hyper).init(params), None)


class Frozen(NamedTuple):
    """What does not change within an iteration.

    Attributes:
      observation_moments: by which observations are standardised.
      scale: what rewards are divided by, and the unit of all values.
      learning_rate: of the policy; that of the value falls alike.
      value_learning_rate: of the value.
      dpg_learning_rate: of separate steps along the critic.
      nu: the score function's term is multiplied by 1 less this.
      is_ready: whether the critic may be used.
      axis_name: the device axis, if any; static.
    """

    observation_moments: MomentsState | None
    scale: Float[Array, ""]
    learning_rate: Float[Array, ""]
    value_learning_rate: Float[Array, ""]
    dpg_learning_rate: Float[Array, ""]
    nu: Float[Array, ""]
    is_ready: Bool[Array, ""]
    axis_name: str | None

    def observe(self, observation: Shaped[Array, "*batch"]) -> Float[Array, "*batch"]:
        """Observations as the networks read them.

        Args:
          observation: as the environment gave them.
        """
        if self.observation_moments is None:
            return observation.astype(jnp.float32)
        return normalize(self.observation_moments, observation)


def freeze(
    parts: Parts,
    state: DFPSState,
    *,
    rows: int,
    is_ready: Bool[Array, ""],
    axis_name: str | None,
) -> Frozen:
    """The numbers of an iteration.

    Args:
      parts: of the agent.
      state: at its start.
      rows: env steps of an update, over all devices.
      is_ready: whether the critic may be used.
      axis_name: the device axis, if any.
    """
    options, hyper = parts.options, state.hyper
    seen = state.update.astype(jnp.float32) * rows
    progress = seen / hyper.total_env_steps
    falls = linear_decay(1.0, hyper.final_learning_rate_fraction, progress)
    length = hyper.dpg_decay_steps
    dpg_progress = progress if length is None else seen / length
    nu = hyper.ipg_nu
    if options.adapts_nu:
        nu = jnp.clip(state.slope, 0.0, 1.0)
    elif hyper.final_ipg_nu is not None:
        nu += (hyper.final_ipg_nu - nu) * jnp.clip(progress, 0.0, 1.0)
    scale = jnp.ones((), jnp.float32)
    if options.scale_returns:
        scale = jnp.sqrt(state.return_moments.variance + 1e-8)
    moments = state.observation_moments if options.normalize_observations else None
    return Frozen(
        observation_moments=moments,
        scale=scale,
        learning_rate=hyper.learning_rate * falls,
        value_learning_rate=hyper.value_learning_rate * falls,
        dpg_learning_rate=linear_decay(
            hyper.dpg_learning_rate,
            hyper.final_dpg_learning_rate_fraction,
            dpg_progress,
        ),
        nu=nu,
        is_ready=is_ready,
        axis_name=axis_name,
    )


def returns_so_far(
    trajectory: Trajectory, before: Float[Array, " E"], gamma: Float[Array, ""]
) -> Float[Array, "T E"]:
    """Returns from the starts of the episodes: ``G_t = r_t + gamma G_{t-1}``.

    Their deviation is the unit that rewards are divided by. No value is bootstrapped
    from, so that no error of one can feed the unit that it is measured in.

    Args:
      trajectory: the rows; the one after an episode's end starts from 0.
      before: those of the row before the first.
      gamma: discount of one step.
    """
    reward = jnp.where(trajectory.is_valid, trajectory.reward, 0.0)
    decay = jnp.where(trajectory.is_valid, gamma, 0.0)
    first = reward[0] + decay[0] * before
    backwards = lambda x: sums.discounted(x[0][::-1], x[1][::-1])[::-1]
    rows = reward.at[0].set(first), decay
    return jax.vmap(backwards, in_axes=1, out_axes=1)(rows)
