"""Proximal policy optimisation with a clipped surrogate, for one device of several."""

import dataclasses
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, Key, Shaped

from fps_jax import checks
from fps_jax.agents import gradient
from fps_jax.agents.ppo_loss import Batch, advantages_and_targets, make_loss
from fps_jax.models.networks import ACTIVATIONS, ActorCritic, actor_critic
from fps_jax.models.normalize import MomentsState, normalize, running_moments
from fps_jax.objectives import masked
from fps_jax.types import Agent, AgentState, EnvSpec, Metrics, Trajectory


class Hyper(NamedTuple):
    """The numeric hyper-parameters: traced leaves, so none of them recompiles.

    Each is described in `PPOConfig`.
    """

    learning_rate: Float[Array, ""]
    final_learning_rate_fraction: Float[Array, ""]
    total_env_steps: Float[Array, ""]
    gamma: Float[Array, ""]
    lambda_: Float[Array, ""]
    clip_epsilon: Float[Array, ""]
    entropy_coef: Float[Array, ""]
    value_coef: Float[Array, ""]
    max_grad_norm: Float[Array, ""]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PPOConfig:
    """Options of PPO.

    Attributes:
      learning_rate: step size at the start.
      final_learning_rate_fraction: step size at the end over that at the start, in
        [0, 1]; it moves linearly in env steps. 1 keeps it constant.
      gamma: discount of one step, in [0, 1].
      lambda_: decay of the advantage's trace, in [0, 1].
      clip_epsilon: half-width of the interval of the ratio, in (0, 1).
      entropy_coef: weight of the entropy bonus, at least 0.
      value_coef: weight of the value loss, at least 0.
      max_grad_norm: longest gradient, in its global Euclidean norm, above 0.
      num_epochs: passes over each batch.
      minibatch_size: rows of one gradient step, over all devices; divides the batch
        of num_envs x rollout_steps rows.
      normalize_advantage: what is standardised: each minibatch, each batch, nothing.
      normalize_observations: standardise vector observations by their running moments.
      scale_returns: let the value network predict returns over their running
        deviation, so that its loss does not depend on the unit of reward.
      recompute_advantages: recompute advantages and targets before each epoch.
      optimizer: how gradients become steps.
      adam_epsilon: added to Adam's root mean square.
      hidden_sizes: width of each hidden layer, of the policy and of the value.
      activation: of the hidden layers: tanh, relu, elu or swish.
      init_log_std: log standard deviation of a Gaussian policy at the start; actions
        range over [-1, 1].
    """

    learning_rate: float = 3e-4
    final_learning_rate_fraction: float = 0.0
    gamma: float = 0.99
    lambda_: float = 0.95
    clip_epsilon: float = 0.2
    entropy_coef: float = 0.0
    value_coef: float = 0.5
    max_grad_norm: float = 0.5
    num_epochs: int = 10
    minibatch_size: int = 64
    normalize_advantage: Literal["minibatch", "batch", "none"] = "minibatch"
    normalize_observations: bool = True
    scale_returns: bool = True
    recompute_advantages: bool = False
    optimizer: Literal["adam", "sgd"] = "adam"
    adam_epsilon: float = 1e-5
    hidden_sizes: tuple[int, ...] = (64, 64)
    activation: str = "tanh"
    init_log_std: float = -0.5

    def __post_init__(self):
        """Refuses options that are out of range."""
        fractions = "gamma", "lambda_", "final_learning_rate_fraction"
        checks.in_range(self, 0, 1, *fractions)
        checks.in_range(self, 0, 1, "clip_epsilon", is_open=True)
        coefficients = "learning_rate", "entropy_coef", "value_coef"
        checks.in_range(self, 0, math.inf, *coefficients)
        scales = "max_grad_norm", "adam_epsilon"
        checks.in_range(self, 0, math.inf, *scales, is_open=True)
        checks.in_range(self, -20, 2, "init_log_std")
        checks.in_range(self, 1, math.inf, "num_epochs", "minibatch_size")
        checks.one_of(self, ACTIVATIONS, "activation")
        checks.one_of(self, ("minibatch", "batch", "none"), "normalize_advantage")
        checks.one_of(self, ("adam", "sgd"), "optimizer")
        if not all(size >= 1 for size in self.hidden_sizes):
            raise ValueError(f"hidden_sizes {self.hidden_sizes} must be at least 1.")

    @property
    def name(self) -> str:
        """The agent's name."""
        return "ppo"

    def make(self, spec: EnvSpec, *, total_env_steps: int) -> Agent:
        """Builds PPO for an environment; see `AgentConfig.make`."""
        network = actor_critic(
            spec,
            hidden_sizes=self.hidden_sizes,
            activation=self.activation,
            init_log_std=self.init_log_std,
        )
        values = dataclasses.asdict(self) | {"total_env_steps": total_env_steps}
        hyper = {k: jnp.asarray(values[k], jnp.float32) for k in Hyper._fields}
        return make_agent(self, network, spec, Hyper(**hyper))


class PPOState(NamedTuple):
    """What PPO learns; the same on every device.

    Attributes:
      params: of the network.
      optimizer: of optax.
      observation_moments: of the observations that the actors saw.
      return_moments: of the value targets; scalars.
      hyper: the numeric hyper-parameters.
      key: root of the learner's random numbers; folded with `update`.
      update: updates made, scalar.
    """

    params: Any
    optimizer: optax.OptState
    observation_moments: MomentsState
    return_moments: MomentsState
    hyper: Hyper
    key: Key[Array, ""]
    update: Int[Array, ""]


class ActorParams(NamedTuple):
    """What acting needs.

    Attributes:
      params: of the network.
      observation_moments: frozen with them.
    """

    params: Any
    observation_moments: MomentsState


def make_agent(
    config: PPOConfig, network: ActorCritic, spec: EnvSpec, hyper: Hyper
) -> Agent:
    """Composes PPO from a network and its options.

    Args:
      config: the static choices; its numbers are only read through `hyper`.
      network: the policy and the value function.
      spec: the environment.
      hyper: the numbers, as they start.
    """
    moments = running_moments(spec.observation_shape)
    scalar_moments = running_moments(())
    learn = make_learn(config, network)
    is_vector = len(spec.observation_shape) == 1
    normalizes = config.normalize_observations and is_vector

    def observe(state: MomentsState, observation):
        if normalizes:
            return normalize(state, observation)
        return observation.astype(jnp.float32) if is_vector else observation

    def init(key: Key[Array, ""]) -> AgentState:
        key_params, key_learn = jax.random.split(key)
        blank = jnp.zeros((1, *spec.observation_shape), jnp.float32)
        params = network.init(key_params, blank)
        learner = PPOState(
            params=params,
            optimizer=optimizer_of(config, hyper).init(params),
            observation_moments=moments.init(),
            return_moments=scalar_moments.init(),
            hyper=hyper,
            key=key_learn,
            update=jnp.zeros((), jnp.int32),
        )
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
        learner, targets, metrics = learn(learner, trajectory, observation, axis_name)
        learner = learner._replace(
            observation_moments=moments.update(
                learner.observation_moments,
                trajectory.observation[:-1],
                trajectory.is_valid,
                axis_name=axis_name,
            )
            if normalizes
            else learner.observation_moments,
            return_moments=scalar_moments.update(
                learner.return_moments,
                targets,
                trajectory.is_valid,
                axis_name=axis_name,
            ),
            update=learner.update + 1,
        )
        return AgentState(learner), metrics

    return Agent(init, actor_params, act, update)


def make_learn(config: PPOConfig, network: ActorCritic):
    """Makes the part of the update that moves the parameters.

    Args:
      config: the static choices.
      network: the policy and the value function.

    Returns:
      ``learn(learner, trajectory, observation, axis_name)`` with observations as the
      network reads them, ``[T + 1, E, ...]``; returns the learner, the value targets
      ``[T, E]`` in units of reward, and metrics.
    """

    def learn(
        learner: PPOState, trajectory: Trajectory, observation, axis_name: str | None
    ):
        rows, devices = trajectory.reward.size, gradient.axis_size(axis_name)
        minibatches = gradient.num_minibatches(config.minibatch_size, rows, devices)
        hyper = learner.hyper
        steps_per_update = rows * devices / hyper.total_env_steps
        learning_rate = gradient.linear_decay(
            hyper.learning_rate,
            hyper.final_learning_rate_fraction,
            learner.update.astype(jnp.float32) * steps_per_update,
        )
        step = gradient.gradient_step(
            make_loss(
                network,
                hyper,
                normalizes_advantage=config.normalize_advantage == "minibatch",
                axis_name=axis_name,
            ),
            optimizer_of(config, hyper),
            learning_rate=learning_rate,
            axis_name=axis_name,
        )
        scale = (
            jnp.sqrt(learner.return_moments.variance + 1e-8)
            if config.scale_returns
            else jnp.ones((), jnp.float32)
        )
        signals = lambda params: advantages_and_targets(
            network, params, trajectory, observation, scale=scale, hyper=hyper
        )
        value, advantage, target = signals(learner.params)
        flat = lambda x: x.reshape(rows, *x.shape[2:])
        is_valid, action = flat(trajectory.is_valid), flat(trajectory.action)
        # Not even a NaN of a row that is not valid may reach a gradient.
        acted = is_valid.reshape(rows, *(1 for _ in action.shape[1:]))

        def make_batch(advantage, target) -> Batch:
            advantage = flat(advantage)
            if config.normalize_advantage == "batch":
                advantage = masked.standardize(advantage, is_valid, axis_name=axis_name)
            return Batch(
                observation=flat(observation[:-1]),
                action=jnp.where(acted, action, 0),
                log_prob=flat(trajectory.behaviour["log_prob"]),
                advantage=advantage,
                target=flat(target) / scale,
                is_valid=is_valid,
            )

        batch = make_batch(advantage, target)

        def batch_of(params) -> Batch:
            recomputes = config.recompute_advantages
            return make_batch(*signals(params)[1:]) if recomputes else batch

        key = jax.random.fold_in(learner.key, learner.update)
        (params, optimizer), metrics = gradient.minibatch_epochs(
            step,
            (learner.params, learner.optimizer),
            batch_of,
            gradient.device_key(key, axis_name),
            rows=rows,
            num_epochs=config.num_epochs,
            num_minibatches=minibatches,
        )
        metrics |= {
            "learning_rate": learning_rate,
            "return_scale": scale,
            "explained_variance": masked.explained_variance(
                value, target, trajectory.is_valid, axis_name=axis_name
            ),
        }
        learner = learner._replace(params=params, optimizer=optimizer)
        return learner, target, metrics

    return learn


def optimizer_of(config: PPOConfig, hyper: Hyper) -> optax.GradientTransformation:
    """The optimiser that the options name.

    Args:
      config: names it.
      hyper: gives the longest gradient.
    """
    return gradient.gradient_transform(
        config.optimizer,
        max_grad_norm=hyper.max_grad_norm,
        adam_epsilon=config.adam_epsilon,
    )
