"""Deep Q-networks with a replay, uniform or prioritized, for one device of several.

Algorithm 1 of Schaul et al. (2016), arXiv:1511.05952: store the segment with maximal
priority, and then, once for every K steps of it, draw transitions, take a step along
the gradient of their weighted TD errors, and tell the replay how large those were.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, Shaped

from fps_jax.agents import dqn_exploration as exploration
from fps_jax.agents import memory as memories
from fps_jax.agents.dqn_learn import learn
from fps_jax.agents.dqn_options import DQNOptions
from fps_jax.agents.dqn_state import DQNState, Parts
from fps_jax.agents.gradient import Learned
from fps_jax.models import distributions
from fps_jax.models.networks import q_network
from fps_jax.models.normalize import MomentsState, running_moments
from fps_jax.replay import frames, replay, ring
from fps_jax.replay.replay import Replay
from fps_jax.types import Agent, AgentState, EnvSpec, Metrics, Trajectory


@dataclasses.dataclass(frozen=True, kw_only=True)
class DQNConfig(DQNOptions):
    """DQN with these options; see `DQNOptions`."""

    def make(
        self, spec: EnvSpec, *, total_env_steps: int, num_envs: int, rollout_steps: int
    ) -> Agent:
        """Builds DQN for an environment; see `AgentConfig.make`."""
        network = q_network(
            spec,
            hidden_sizes=self.hidden_sizes,
            activation=self.activation,
            dueling=self.dueling,
        )
        of_replay = make_replay(
            self, spec, num_envs=num_envs, rollout_steps=rollout_steps
        )
        parts = Parts(self, network, of_replay)
        return make_agent(parts, spec, total_env_steps, num_envs=num_envs)


class ActorParams(NamedTuple):
    """What acting needs.

    Attributes:
      params: of the network.
      observation_moments: frozen with them; None unless observations are standardised.
      level: epsilon, or the temperature, of the schedule.
      probabilities: ``[K]``, of the levels that are drawn from instead.
      offset: decides which environment has which level until the next push.
      eval_epsilon: of evaluations.
    """

    params: Any
    observation_moments: MomentsState | None
    level: Float[Array, ""]
    probabilities: Float[Array, " K"]
    offset: Float[Array, ""]
    eval_epsilon: Float[Array, ""]


def make_replay(
    options: DQNOptions, spec: EnvSpec, *, num_envs: int, rollout_steps: int
) -> Replay:
    """Makes a device's replay: of vectors, or of frames that are each kept once.

    Several devices draw each from its own, and correct by weights that all share.

    Args:
      options: of the replay.
      spec: the environment.
      num_envs: E, environments of a device.
      rollout_steps: T, length of a segment.

    Raises:
      ValueError: if it can't hold two segments.
    """
    rows = num_envs * rollout_steps
    capacity = options.replay_capacity // num_envs * num_envs
    least = 2 * rows + options.n_step * num_envs
    if capacity < least:
        raise ValueError(
            f"replay_capacity {options.replay_capacity} must be at least two segments "
            f"and the steps that wait, {least} env steps."
        )
    common: Any = {
        "num_streams": num_envs,
        "n_step": options.n_step,
        "largest_add": rows,
    }
    if len(spec.observation_shape) == 3:
        stack = spec.observation_shape[0]
        storage = frames.transitions(capacity, stack=stack, **common)
    else:
        storage = ring.transitions(capacity, **common)
    alpha, _ = options.exponents
    own: Any = {"exchange": False}
    if options.replay == "proportional":
        return replay.proportional(storage, exponent=alpha, **own)
    if options.replay == "rank_based":
        period = options.sort_period
        return replay.rank_based(storage, exponent=alpha, sort_period=period, **own)
    of_kind = {"uniform": replay.uniform, "greedy": replay.greedy}[options.replay]
    return of_kind(storage, **own)


def make_agent(
    parts: Parts, spec: EnvSpec, total_env_steps: int, *, num_envs: int
) -> Agent:
    """Composes DQN from its parts.

    Args:
      parts: options, network and replay.
      spec: the environment.
      total_env_steps: the planned length of the run.
      num_envs: E, environments of a device.
    """
    options, num_levels = parts.options, parts.num_levels

    def init(key: Key[Array, ""]) -> AgentState:
        key_params, key_learn = jax.random.split(key)
        blank = jnp.zeros((1, *spec.observation_shape), spec.observation_dtype)
        params = parts.network.init(key_params, blank)
        hyper, moments = options.hyper(total_env_steps), None
        if options.normalize_observations and len(spec.observation_shape) == 1:
            moments = running_moments(spec.observation_shape).init()
        zero = jnp.zeros((), jnp.int32)
        learner = DQNState(
            q=Learned(params, parts.transform(hyper).init(params), None),
            target=params,
            observation_moments=moments,
            feedback=exploration.init(num_levels),
            hyper=hyper,
            key=key_learn,
            update=zero,
            gradient_steps=zero,
            env_steps=zero,
        )
        kept = {"level": jax.ShapeDtypeStruct((), jnp.int32)} if num_levels else {}
        memory = memories.init(parts.replay, spec, num_envs=num_envs, behaviour=kept)
        return AgentState(learner, memory)

    def actor_params(learner: DQNState, key: Key[Array, ""] | None) -> ActorParams:
        hyper = learner.hyper
        offset = jnp.zeros(()) if key is None else jax.random.uniform(key)
        return ActorParams(
            params=learner.q.params,
            observation_moments=learner.observation_moments,
            level=exploration.scheduled(options, hyper, learner.env_steps),
            probabilities=exploration.probabilities(
                learner.feedback, hyper.feedback_floor
            ),
            offset=offset,
            eval_epsilon=hyper.eval_epsilon,
        )

    def act(
        params: ActorParams,
        observation: Shaped[Array, " E *observation"],
        key: Key[Array, ""],
        *,
        explore: bool,
    ):
        envs = observation.shape[0]
        q = parts.values(params.params, params.observation_moments, observation)
        if not explore:
            epsilon = jnp.broadcast_to(params.eval_epsilon, (envs,))
            return distributions.epsilon_greedy(q, epsilon).sample(seed=key), {}
        behaviour = {}
        level = jnp.broadcast_to(params.level, (envs,))
        if num_levels:
            which = exploration.levels_of(params.probabilities, params.offset, envs)
            level = jnp.asarray(options.exploration_levels, jnp.float32)[which]
            behaviour["level"] = which
        is_greedy = options.exploration == "epsilon_greedy"
        policy_of = (
            distributions.epsilon_greedy if is_greedy else distributions.boltzmann
        )
        policy: Any = policy_of(q, level)
        action = policy.sample(seed=key)
        return action, behaviour | {"log_prob": policy.log_prob(action)}

    def update(
        state: AgentState, trajectory: Trajectory, *, axis_name: str | None = None
    ) -> tuple[AgentState, Metrics]:
        learner, memory, metrics = learn(
            parts, state.learner, state.local, trajectory, axis_name
        )
        return AgentState(learner, memory), metrics

    return Agent(init, actor_params, act, update)
