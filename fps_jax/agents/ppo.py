"""Proximal policy optimisation with a clipped surrogate, for one device of several."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key, Shaped

from fps_jax.agents.ppo_learn import PPOState, make_learning
from fps_jax.agents.ppo_options import Hyper, PPOOptions
from fps_jax.models.networks import ActorCritic, actor_critic
from fps_jax.models.normalize import MomentsState, normalize, running_moments
from fps_jax.types import Agent, AgentState, EnvSpec, Metrics, Trajectory


@dataclasses.dataclass(frozen=True, kw_only=True)
class PPOConfig(PPOOptions):
    """PPO with these options; see `PPOOptions`."""

    def make(
        self,
        spec: EnvSpec,
        *,
        total_env_steps: int,
        num_envs: int = 1,
        rollout_steps: int = 1,
    ) -> Agent:
        """Builds PPO for an environment; see `AgentConfig.make`."""
        del num_envs, rollout_steps  # PPO fits any.
        network = actor_critic(
            spec,
            hidden_sizes=self.hidden_sizes,
            activation=self.activation,
            init_log_std=self.init_log_std,
            shares_torso=self.shares_torso,
            separates_losses=self.separates_losses,
        )
        return make_agent(self, network, spec, self.hyper(total_env_steps))


class ActorParams(NamedTuple):
    """What acting needs.

    Attributes:
      params: of the network.
      observation_moments: frozen with them.
    """

    params: Any
    observation_moments: MomentsState


def make_agent(
    options: PPOOptions, network: ActorCritic, spec: EnvSpec, hyper: Hyper
) -> Agent:
    """Composes PPO from a network and its options.

    Args:
      options: the static choices; its numbers are only read through `hyper`.
      network: the policy and the value function.
      spec: the environment.
      hyper: the numbers, as they start.
    """
    moments = running_moments(spec.observation_shape)
    learning = make_learning(options, network)
    is_vector = len(spec.observation_shape) == 1
    normalizes = options.normalize_observations and is_vector

    def observe(state: MomentsState, observation):
        if normalizes:
            return normalize(state, observation)
        return observation.astype(jnp.float32) if is_vector else observation

    def init(key: Key[Array, ""]) -> AgentState:
        key_params, key_learn = jax.random.split(key)
        blank = jnp.zeros((1, *spec.observation_shape), jnp.float32)
        params = network.init(key_params, blank)
        learner = learning.init(params, moments.init(), hyper, key_learn)
        return AgentState(learner)

    def actor_params(learner: PPOState, key: Key[Array, ""] | None) -> ActorParams:
        del key  # PPO explores by its policy alone.
        return ActorParams(learner.params, learner.observation_moments)

    def act(
        params: ActorParams,
        observation: Shaped[Array, " E *observation"],
        key: Key[Array, ""],
        *,
        explore: bool,
    ):
        policy: Any = network.apply(
            params.params,
            observe(params.observation_moments, observation),
            method="policy",
        )
        action = policy.sample(seed=key) if explore else policy.mode()
        return action, {"log_prob": policy.log_prob(action)}

    def update(
        state: AgentState, trajectory: Trajectory, *, axis_name: str | None = None
    ) -> tuple[AgentState, Metrics]:
        learner: PPOState = state.learner
        # The inputs are standardised as they were when the actors acted, so that the
        # first ratio is exactly 1; the statistics move only once learning is done.
        observation = observe(learner.observation_moments, trajectory.observation)
        learner, metrics = learning.step(learner, trajectory, observation, axis_name)
        if normalizes:
            seen = moments.update(
                learner.observation_moments,
                trajectory.observation[:-1],
                trajectory.is_valid,
                axis_name=axis_name,
            )
            learner = learner._replace(observation_moments=seen)
        return AgentState(learner._replace(update=learner.update + 1)), metrics

    return Agent(init, actor_params, act, update)
