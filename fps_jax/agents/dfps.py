"""Distributed fusion-based policy search, for one device of several.

One update is one iteration of the chief: remember the segment, fit the critics, take
what the segment tells at the parameters as they are, move the policy, and only then fit
the value. Cao, Xiao & Zhou (2019), "Distributed Fusion-Based Policy Search for Fast
Robot Locomotion Learning", section IV.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, Shaped

from fps_jax.agents import dfps_critic, dfps_dpg, dfps_policy, dfps_value, gradient
from fps_jax.agents.dfps_networks import Gaussian, make_networks
from fps_jax.agents.dfps_options import DFPSOptions, Hyper
from fps_jax.agents.dfps_replay import make_experience
from fps_jax.agents.dfps_signals import (
    Segment,
    Signals,
    joined,
    segment_of,
    segment_of_window,
    signals_of,
)
from fps_jax.agents.dfps_state import (
    DFPSState,
    Frozen,
    Local,
    Parts,
    freeze,
    returns_so_far,
)
from fps_jax.agents.memory import Memory
from fps_jax.models import noise
from fps_jax.models.normalize import (
    AverageState,
    MomentsState,
    MovingAverage,
    moving_average,
    normalize,
    running_moments,
)
from fps_jax.objectives.trust_region import TrustRegion, steer
from fps_jax.types import Agent, AgentState, EnvSpec, Metrics, Trajectory


@dataclasses.dataclass(frozen=True, kw_only=True)
class DFPSConfig(DFPSOptions):
    """DFPS with these options; see `DFPSOptions`."""

    def make(
        self, spec: EnvSpec, *, total_env_steps: int, num_envs: int, rollout_steps: int
    ) -> Agent:
        """Builds DFPS for an environment; see `AgentConfig.make`."""
        experience = None
        networks = make_networks(self, spec)
        if self.has_replay:
            experience = make_experience(
                self, spec, num_envs=num_envs, rollout_steps=rollout_steps
            )
        if num_envs % self.noise_groups:
            raise ValueError(
                f"noise_groups {self.noise_groups} must divide the {num_envs} "
                "environments of a device."
            )
        parts = Parts(self, networks, experience)
        return make_agent(parts, spec, total_env_steps, num_envs=num_envs)


class ActorParams(NamedTuple):
    """What acting needs.

    Attributes:
      policy: parameters, perturbed; every leaf has a leading axis over the groups.
      observation_moments: frozen with them.
      action_noise: deviation of noise on actions, scalar.
      noise_scale: deviation of the noise on parameters, scalar.
      noise_key: data of the key that it was drawn with.
    """

    policy: Any
    observation_moments: MomentsState
    action_noise: Float[Array, ""]
    noise_scale: Float[Array, ""]
    noise_key: Shaped[Array, " words"]


def make_agent(
    parts: Parts, spec: EnvSpec, total_env_steps: int, *, num_envs: int
) -> Agent:
    """Composes DFPS from its parts.

    Args:
      parts: options, networks and replay.
      spec: the environment.
      total_env_steps: the planned length of the run.
      num_envs: E, environments of a device.
    """

    def init(key: Key[Array, ""]) -> AgentState:
        memory = () if parts.experience is None else parts.experience.init()
        learner = init_learner(parts, spec, total_env_steps, key)
        return AgentState(learner, Local(memory, jnp.zeros(num_envs)))

    def update(
        state: AgentState, trajectory: Trajectory, *, axis_name: str | None = None
    ) -> tuple[AgentState, Metrics]:
        learner, local, metrics = iterate(
            parts, state.learner, state.local, trajectory, axis_name
        )
        return AgentState(learner, local), metrics

    def act(
        params: ActorParams,
        observation: Shaped[Array, " E features"],
        key: Key[Array, ""],
        *,
        explore: bool,
    ):
        return _act(parts, params, observation, key, explore=explore)

    def published(learner: DFPSState, key: Key[Array, ""] | None) -> ActorParams:
        return actor_params(parts, learner, key)

    return Agent(init, published, act, update)


def init_learner(
    parts: Parts, spec: EnvSpec, total_env_steps: int, key: Key[Array, ""]
) -> DFPSState:
    """What DFPS knows at the start.

    Args:
      parts: options and networks.
      spec: the environment.
      total_env_steps: the planned length of the run.
      key: spent here.
    """
    options = parts.options
    key_params, key_learn = jax.random.split(key)
    hyper = options.hyper(total_env_steps)
    policy, value, critics = parts.networks.init(key_params)
    number = lambda x: jnp.asarray(x, jnp.float32)
    learned = lambda params: parts.learned(params, hyper)
    average = averaging(hyper)
    return DFPSState(
        policy=learned(policy),
        dpg_optimizer=learned(policy).optimizer if dfps_dpg.is_separate(parts) else (),
        value=learned(value),
        critics=None if critics is None else learned(critics),
        target_policy=None if critics is None else policy,
        target_critics=critics,
        average=None if average is None else average.init(policy),
        trust_region=TrustRegion(number(options.kl_coef), number(1.0)),
        noise_scale=number(options.noise_scale),
        slope=number(0.0),
        observation_moments=running_moments(spec.observation_shape).init(),
        return_moments=running_moments(()).init(),
        hyper=hyper,
        key=key_learn,
        update=jnp.zeros((), jnp.int32),
    )


def averaging(hyper: Hyper) -> MovingAverage | None:
    """What averages the policy's parameters over updates, if anything does.

    Args:
      hyper: says how far back.
    """
    return None if hyper.average_decay is None else moving_average(hyper.average_decay)


def actor_params(
    parts: Parts, learner: DFPSState, key: Key[Array, ""] | None
) -> ActorParams:
    """What an actor acts with until the next push; its noise is drawn here.

    Args:
      parts: says where there is noise.
      learner: the policy and the scale of its noise.
      key: of the actor and the version; None asks for the policy that is evaluated,
        without noise.
    """
    options, params = parts.options, learner.policy.params
    if key is None and learner.average is not None:
        params = learner.average.value
    zero = jnp.zeros(())
    plain = jax.tree.map(lambda x: x[None], params)
    words = jax.random.key_data(learner.key)
    quiet = ActorParams(plain, learner.observation_moments, zero, zero, words)
    if key is None or options.noise == "none":
        return quiet
    if options.noise == "actions":
        return quiet._replace(action_noise=learner.hyper.action_noise)
    own: Any = keys_of(learner)[2] if options.shares_noise else key
    one = lambda index: noise.perturb(
        params, jax.random.fold_in(own, index), learner.noise_scale
    )
    groups = 1 if options.shares_noise else options.noise_groups
    return quiet._replace(
        policy=jax.vmap(one)(jnp.arange(groups)),
        noise_scale=learner.noise_scale,
        noise_key=jax.random.key_data(own),
    )


def _act(
    parts: Parts,
    params: ActorParams,
    observation,
    key: Key[Array, ""],
    *,
    explore: bool,
):
    """Acts in each group of environments with its own policy."""
    options, networks = parts.options, parts.networks
    if options.normalize_observations:
        observation = normalize(params.observation_moments, observation)
    groups = jax.tree.leaves(params.policy)[0].shape[0]
    size = observation.shape[0]
    grouped = observation.reshape(groups, size // groups, *observation.shape[1:])
    policy: Gaussian = jax.vmap(networks.policy)(params.policy, grouped)
    policy = jax.tree.map(lambda x: x.reshape(size, *x.shape[2:]), policy)
    if options.noise == "actions":
        variance = jnp.exp(2.0 * policy.log_std) + jnp.square(params.action_noise)
        policy = policy._replace(log_std=0.5 * jnp.log(variance))
    drawn = policy.sample(key) if explore else policy.mean
    behaviour = {"log_prob": policy.log_prob(drawn)}
    if options.squash == "tanh":
        behaviour["drawn"] = drawn
    if options.noise == "parameters":
        each = lambda x: jnp.broadcast_to(x, (size, *x.shape))
        behaviour["noise_scale"] = each(params.noise_scale)
        behaviour["noise_key"] = each(params.noise_key)
    action = networks.execute(drawn) if options.squash == "tanh" else drawn
    return action, behaviour


def keys_of(state: DFPSState) -> Key[Array, " 3"]:
    """Keys of this iteration: of learning, of the noise's scale, of shared noise.

    Args:
      state: its root, and the updates made.
    """
    return jax.random.split(jax.random.fold_in(state.key, state.update), 3)


# ------------------------------------------------------------------- an iteration


def iterate(
    parts: Parts,
    state: DFPSState,
    local: Local,
    trajectory: Trajectory,
    axis_name: str | None,
) -> tuple[DFPSState, Local, Metrics]:
    """One iteration of the chief.

    Args:
      parts: of the agent.
      state: what it has learned.
      local: what this device knows of its environments.
      trajectory: what they did.
      axis_name: the device axis, if any.

    Returns:
      Both as they are after it, and metrics over all devices.
    """
    options, experience = parts.options, parts.experience
    rows = trajectory.reward.size * gradient.axis_size(axis_name)
    key_device, key_noise, _ = keys_of(state)
    keys = jax.random.split(gradient.device_key(key_device, axis_name), 6)
    is_ready, memory = jnp.zeros((), bool), None
    if experience is not None:
        memory = experience.add(local.memory, trajectory)
        is_ready = experience.size(memory) >= options.learning_starts
    frozen = freeze(parts, state, rows=rows, is_ready=is_ready, axis_name=axis_name)
    metrics: Metrics = {}
    if options.has_critic and memory is not None:
        steps = max(1, round(options.critic_utd * rows))
        state, memory, told = dfps_critic.learn(
            parts, state, memory, frozen, keys[0], steps=steps
        )
        metrics |= told
    latest = segment_of(trajectory, frozen)
    segment = _policy_data(parts, memory, latest, frozen, keys[1])
    if options.value_first:
        state, told = dfps_value.learn(
            parts, state, memory, latest, None, frozen, keys[5]
        )
        metrics |= told
    signals, told = signals_of(parts, state, segment, frozen)
    metrics |= told
    batch = dfps_policy.rows_of(parts, segment, signals, memory, frozen, keys[2])
    state, told = dfps_policy.learn(parts, state, batch, signals, frozen, keys[3])
    metrics |= told
    if dfps_dpg.is_separate(parts) and memory is not None:
        steps = max(1, round(options.dpg_utd * rows))
        weight = signals.critic_weight
        state, told = dfps_dpg.follow_critic(
            parts, state, memory, weight, frozen, keys[4], steps=steps
        )
        metrics |= told
    if not options.value_first:
        same = segment is latest
        state, told = dfps_value.learn(
            parts, state, memory, latest, signals if same else None, frozen, keys[5]
        )
        metrics |= told
    state, told = _settle(
        parts, state, segment, signals, metrics["kl"], frozen, key_noise
    )
    state, so_far = _observe(parts, state, trajectory, local.return_so_far, axis_name)
    local = Local(() if memory is None else memory, so_far)
    return state._replace(update=state.update + 1), local, metrics | told


def _policy_data(
    parts: Parts, memory: Memory | None, latest: Segment, frozen: Frozen, key
) -> Segment:
    """The rows that the policy learns from: of the queue, of the replay, or of both."""
    options = parts.options
    if options.policy_data == "queue":
        return latest
    assert parts.experience is not None
    assert memory is not None
    window = parts.experience.segments(memory, key, latest.reward.shape[1])
    remembered = segment_of_window(window, frozen)
    return remembered if options.policy_data == "replay" else joined(latest, remembered)


def _settle(
    parts: Parts,
    state: DFPSState,
    segment: Segment,
    signals: Signals,
    kl: Float[Array, ""],
    frozen: Frozen,
    key: Key[Array, ""],
) -> tuple[DFPSState, Metrics]:
    """What follows the policy: target, average, trust region, the noise's scale."""
    options, hyper, networks = parts.options, state.hyper, parts.networks
    metrics: Metrics = {}
    if options.trust_region == "kl_hinge":
        trust_region = steer(state.trust_region, kl, hyper.kl_target)
        state = state._replace(trust_region=trust_region)
        metrics |= trust_region._asdict()
    if state.critics is not None:
        follow = moving_average(1.0 - hyper.policy_target_rate, is_debiased=False)
        average = AverageState(jnp.ones(()), state.target_policy)
        target = follow.update(average, state.policy.params).value
        slope = state.slope + hyper.nu_rate * (signals.slope - state.slope)
        state = state._replace(target_policy=target, slope=slope)
    average = averaging(hyper)
    if average is not None and state.average is not None:
        averaged = average.update(state.average, state.policy.params)
        state = state._replace(average=averaged)
    if options.noise == "parameters":
        observation = segment.observation[:-1]
        mean = networks.policy(state.policy.params, observation).mean
        noisy = noise.perturb(state.policy.params, key, state.noise_scale)
        distance = noise.action_distance(
            mean,
            networks.policy(noisy, observation).mean,
            segment.is_valid,
            axis_name=frozen.axis_name,
        )
        metrics |= {"noise_scale": state.noise_scale, "noise_distance": distance}
        if options.adapts_noise:
            scale = noise.adapt(state.noise_scale, distance, hyper.noise_distance)
            state = state._replace(noise_scale=scale)
    return state, metrics


def _observe(
    parts: Parts,
    state: DFPSState,
    trajectory: Trajectory,
    return_so_far: Float[Array, " E"],
    axis_name: str | None,
) -> tuple[DFPSState, Float[Array, " E"]]:
    """Moves the statistics, which were frozen until here."""
    is_valid = trajectory.is_valid
    if parts.options.normalize_observations:
        moments = state.observation_moments
        seen = running_moments(moments.mean.shape).update(
            moments, trajectory.observation[:-1], is_valid, axis_name=axis_name
        )
        state = state._replace(observation_moments=seen)
    so_far = returns_so_far(trajectory, return_so_far, state.hyper.gamma)
    seen = running_moments(()).update(
        state.return_moments, so_far, is_valid, axis_name=axis_name
    )
    return state._replace(return_moments=seen), so_far[-1]
