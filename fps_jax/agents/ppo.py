"""Proximal policy optimisation with a clipped surrogate, for one device of several."""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, Key, Shaped

from fps_jax.models.networks import ACTIVATIONS, ActorCritic, actor_critic
from fps_jax.models.normalize import MomentsState, normalize, running_moments
from fps_jax.objectives import clip_ppo, ratios, returns
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
        for name, low, high in (
            ("learning_rate", 0.0, float("inf")),
            ("final_learning_rate_fraction", 0.0, 1.0),
            ("gamma", 0.0, 1.0),
            ("lambda_", 0.0, 1.0),
            ("entropy_coef", 0.0, float("inf")),
            ("value_coef", 0.0, float("inf")),
            ("num_epochs", 1, float("inf")),
            ("minibatch_size", 1, float("inf")),
        ):
            if not low <= getattr(self, name) <= high:
                raise ValueError(
                    f"{name} {getattr(self, name)} is not in [{low}, {high}]."
                )
        if not 0.0 < self.clip_epsilon < 1.0:
            raise ValueError(f"clip_epsilon {self.clip_epsilon} is not in (0, 1).")
        for name in ("max_grad_norm", "adam_epsilon"):
            if not getattr(self, name) > 0.0:
                raise ValueError(f"{name} {getattr(self, name)} is not above 0.")
        for name, choices in (
            ("activation", tuple(ACTIVATIONS)),
            ("normalize_advantage", ("minibatch", "batch", "none")),
            ("optimizer", ("adam", "sgd")),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"{name} {getattr(self, name)!r} is not one of {choices}."
                )

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


class Batch(NamedTuple):
    """Rows to learn from, each ``[B, ...]``."""

    observation: Shaped[Array, "B *observation"]
    action: Shaped[Array, "B *action"]
    log_prob: Float[Array, " B"]
    advantage: Float[Array, " B"]
    target: Float[Array, " B"]
    is_valid: Shaped[Array, " B"]


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
            optimizer=gradient_transform(config, hyper).init(params),
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
        observation: Shaped[Array, "E *observation"],
        key: Key[Array, ""],
        *,
        explore: bool,
    ):
        policy = network.apply(
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
        rows, devices = trajectory.reward.size, axis_size(axis_name)
        minibatches = split_evenly(config.minibatch_size, rows, devices)
        learning_rate = annealed_learning_rate(learner, rows * devices)
        scale = (
            jnp.sqrt(learner.return_moments.variance + 1e-8)
            if config.scale_returns
            else jnp.ones((), jnp.float32)
        )
        signals = lambda params: advantages_and_targets(
            network, params, trajectory, observation, scale, learner.hyper
        )
        value, advantage, target = signals(learner.params)
        is_valid = trajectory.is_valid.reshape(-1)
        items = {
            "observation": observation[:-1],
            "action": trajectory.action,
            "log_prob": trajectory.behaviour["log_prob"],
        }
        items = jax.tree.map(lambda x: x.reshape(rows, *x.shape[2:]), items)

        def make_batch(advantage, target) -> Batch:
            advantage = advantage.reshape(-1)
            if config.normalize_advantage == "batch":
                advantage = ratios.standardize(advantage, is_valid, axis_name=axis_name)
            target = target.reshape(-1) / scale
            return Batch(
                **items, advantage=advantage, target=target, is_valid=is_valid
            )

        batch = make_batch(advantage, target)

        def one_epoch(carry, key):
            fresh = signals(carry[0])[1:]
            used = make_batch(*fresh) if config.recompute_advantages else batch
            order = jax.random.permutation(key, rows).reshape(minibatches, -1)
            step = make_step(config, network, learner.hyper, learning_rate, axis_name)
            return jax.lax.scan(
                lambda c, i: step(c, jax.tree.map(lambda x: x[i], used)), carry, order
            )

        key = jax.random.fold_in(learner.key, learner.update)
        if axis_name is not None:
            key = jax.random.fold_in(key, jax.lax.axis_index(axis_name))
        (params, optimizer), metrics = jax.lax.scan(
            one_epoch,
            (learner.params, learner.optimizer),
            jax.random.split(key, config.num_epochs),
        )
        metrics = jax.tree.map(jnp.mean, metrics) | {
            "learning_rate": learning_rate,
            "return_scale": scale,
            "explained_variance": ratios.explained_variance(
                value, target, trajectory.is_valid, axis_name=axis_name
            ),
        }
        learner = learner._replace(params=params, optimizer=optimizer)
        return learner, target, metrics

    return learn


def advantages_and_targets(
    network: ActorCritic, params, trajectory: Trajectory, observation, scale, hyper
):
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
    values = jax.lax.stop_gradient(
        network.apply(params, observation, method="value") * scale
    )

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


def make_step(
    config: PPOConfig, network: ActorCritic, hyper: Hyper, learning_rate, axis_name
):
    """Makes one gradient step on one minibatch.

    Args:
      config: the static choices.
      network: the policy and the value function.
      hyper: the coefficients.
      learning_rate: step size.
      axis_name: the device axis, if any.

    Returns:
      ``step((params, optimizer), minibatch) -> ((params, optimizer), metrics)``.
    """
    transform = gradient_transform(config, hyper)

    def loss_fn(params, batch: Batch):
        policy, value = network.apply(params, batch.observation)
        log_ratio = ratios.sanitized_log_ratio(
            policy.log_prob(batch.action), batch.log_prob, batch.is_valid
        )
        advantage = batch.advantage
        if config.normalize_advantage == "minibatch":
            advantage = ratios.standardize(
                advantage, batch.is_valid, axis_name=axis_name
            )
        surrogate = clip_ppo.clipped_surrogate(
            log_ratio, advantage, clip_epsilon=hyper.clip_epsilon
        )
        clipped = clip_ppo.is_clipped(log_ratio, clip_epsilon=hyper.clip_epsilon)
        mean = ratios.share_of_mean(batch.is_valid, axis_name=axis_name)
        metrics = {
            "policy_loss": -mean(surrogate),
            "value_loss": mean(clip_ppo.value_loss(value, batch.target)),
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

    def step(carry, batch: Batch):
        params, optimizer = carry
        gradient, metrics = jax.grad(loss_fn, has_aux=True)(params, batch)
        if axis_name is not None:
            gradient, metrics = jax.lax.psum((gradient, metrics), axis_name)
        metrics["grad_norm"] = optax.global_norm(gradient)
        direction, optimizer = transform.update(gradient, optimizer)
        params = jax.tree.map(lambda p, d: p - learning_rate * d, params, direction)
        return (params, optimizer), metrics

    return step


def gradient_transform(
    config: PPOConfig, hyper: Hyper
) -> optax.GradientTransformation:
    """From a gradient to a direction of unit step size; its limit may be traced.

    Args:
      config: names the optimiser.
      hyper: gives the longest gradient.
    """
    scale = (
        optax.scale_by_adam(eps=config.adam_epsilon)
        if config.optimizer == "adam"
        else optax.identity()
    )
    return optax.chain(optax.clip_by_global_norm(hyper.max_grad_norm), scale)


def annealed_learning_rate(learner: PPOState, rows: int) -> Float[Array, ""]:
    """Step size after some updates, linear in env steps down to its final fraction.

    Args:
      learner: gives the number of updates and the ends of the line.
      rows: env steps of one update, over all devices.
    """
    hyper = learner.hyper
    done = learner.update.astype(jnp.float32) * (rows / hyper.total_env_steps)
    fall = 1.0 - hyper.final_learning_rate_fraction
    return hyper.learning_rate * (1.0 - fall * jnp.clip(done, 0.0, 1.0))


def split_evenly(minibatch_size: int, rows: int, devices: int) -> int:
    """The number of minibatches of a batch.

    Args:
      minibatch_size: rows of one gradient step, over all devices.
      rows: rows of the batch on one device.
      devices: how many there are.

    Raises:
      ValueError: if either does not divide.
    """
    if minibatch_size % devices or (rows * devices) % minibatch_size:
        raise ValueError(
            f"minibatch_size {minibatch_size} must be a multiple of {devices} learner "
            f"devices and divide the batch of {rows * devices} rows "
            "(num_envs x rollout_steps x actors)."
        )
    return rows * devices // minibatch_size


def axis_size(axis_name: str | None) -> int:
    """Number of devices on the axis; 1 without one.

    Args:
      axis_name: the device axis, if any.
    """
    return 1 if axis_name is None else jax.lax.axis_size(axis_name)
