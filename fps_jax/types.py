"""The nouns that every room shares, and the legend of the axes.

Axes, always in this order when several stand side by side:

    P  population members      D  devices          T  time steps of a segment
    E  environments            B  batch            N  replay slots
    A  action size

Maths is written for one trajectory ``[T]`` or one item; ``vmap`` stands at the call
site. Batches are time-major, ``[T, E]``. ``x_tm1`` is on the left of a transition,
``x_t`` on its right. Every count of steps is in environment steps, without the rows
that only reset an environment.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, Shaped

Metrics = dict[str, Any]
"""Scalars by name; equal on every device once `Agent.update` returns them."""


class Trajectory(NamedTuple):
    """A segment of experience of E environments, as one actor or several saw it.

    Row ``t`` holds the observation that the policy saw, what it did, and what came of
    it. The observation that row ``t`` led to is ``observation[t + 1]``: after a
    finished episode that is the true final observation, so a truncation bootstraps
    from it. The row after a finished episode only resets the environment (its action
    is ignored, its reward is 0): there `is_valid` is False, and nothing may learn
    from it.

    Attributes:
      observation: ``[T + 1, E, ...]``, in the environment's dtype, float64 as float32.
      action: ``[T, E]`` integers or ``[T, E, A]`` floats, as the policy drew them:
        neither scaled nor clipped to the environment's bounds.
      reward: ``[T, E]``.
      terminated: ``[T, E]``, the episode ended in a state worth nothing.
      truncated: ``[T, E]``, the episode was cut; the state it was cut in has a value.
      is_valid: ``[T, E]``, False on rows that only reset an environment.
      behaviour: what `Agent.act` returned beside the action, each ``[T, E, ...]``;
        for a stochastic policy at least ``log_prob``.
      policy_version: ``[T, E]``, the number of updates behind the acting parameters.
    """

    observation: Shaped[Array, "T+1 E *observation"]
    action: Shaped[Array, "T E *action"]
    reward: Float[Array, "T E"]
    terminated: Bool[Array, "T E"]
    truncated: Bool[Array, "T E"]
    is_valid: Bool[Array, "T E"]
    behaviour: dict[str, Shaped[Array, "T E *behaviour"]]
    policy_version: Int[Array, "T E"]


class Step(NamedTuple):
    """Rows of a `Trajectory` as a replay stores them, one item a row.

    Attributes:
      observation: ``[B, ...]``, what the policy saw.
      action: ``[B, ...]``.
      reward: ``[B]``.
      terminated: ``[B]``, see `Trajectory`.
      truncated: ``[B]``.
      is_valid: ``[B]``, False on rows that only reset an environment.
      behaviour: what acting returned beside the action, each ``[B, ...]``.
    """

    observation: Shaped[Array, " B *observation"]
    action: Shaped[Array, " B *action"]
    reward: Float[Array, " B"]
    terminated: Bool[Array, " B"]
    truncated: Bool[Array, " B"]
    is_valid: Bool[Array, " B"]
    behaviour: dict[str, Shaped[Array, " B *behaviour"]]


class Transition(NamedTuple):
    """What n steps from an observation came to.

    Attributes:
      observation: ``[B, ...]``.
      action: ``[B, ...]``, the first of the n.
      reward: ``[B]``, ``r_1 + discount r_2 + ...``, up to n of them.
      discount: ``[B]``, of the value of `next_observation`: ``discount^m`` after m
        steps, 0 if the episode terminated.
      next_observation: ``[B, ...]``, that m steps led to: after a truncation the true
        final one.
      behaviour: of the first step, each ``[B, ...]``.
    """

    observation: Shaped[Array, " B *observation"]
    action: Shaped[Array, " B *action"]
    reward: Float[Array, " B"]
    discount: Float[Array, " B"]
    next_observation: Shaped[Array, " B *observation"]
    behaviour: dict[str, Shaped[Array, " B *behaviour"]]


class AgentState(NamedTuple):
    """What an agent knows, in two parts.

    Attributes:
      learner: the same on every device, a NamedTuple: parameters, optimiser,
        statistics, keys, counters, and as `hyper` the numeric hyper-parameters, as
        traced leaves: a resumed run replaces them by those that it is given.
      local: each device's own, such as its shard of a replay; ``()`` if there is none.
    """

    learner: Any
    local: Any = ()


class Discrete(NamedTuple):
    """Actions ``0 .. num_actions - 1``."""

    num_actions: int


class Continuous(NamedTuple):
    """Actions in a box. Policies act in ``[-1, 1]``; the runtime scales to the box.

    Attributes:
      low: lower bound of each action, ``[A]``, finite.
      high: upper bound of each action, ``[A]``, finite.
    """

    low: tuple[float, ...]
    high: tuple[float, ...]

    @property
    def size(self) -> int:
        """The number of action dimensions, A."""
        return len(self.low)


@dataclasses.dataclass(frozen=True)
class EnvSpec:
    """What an agent must know of an environment to be built.

    Attributes:
      env_id: the task id.
      observation_shape: shape of one observation.
      observation_dtype: its dtype as the agent sees it.
      action: the action space.
      max_episode_steps: the time limit, in steps; None if there is none.
    """

    env_id: str
    observation_shape: tuple[int, ...]
    observation_dtype: np.dtype
    action: Discrete | Continuous
    max_episode_steps: int | None = None


class Agent(NamedTuple):
    """Four pure functions; the runtime knows nothing else of an agent.

    Attributes:
      init: ``init(key) -> AgentState``, the state of one device.
      actor_params: ``actor_params(state.learner, key) -> params``, what acting needs:
        policy parameters, input statistics, exploration. `key` belongs to one actor
        and one version: an agent that perturbs its parameters spends it here. None
        asks for the unperturbed policy, as evaluation does.
      act: ``act(params, observation, key, *, explore) -> (action, behaviour)`` for
        observations ``[E, ...]``. `explore` is static: False asks for the greedy or
        mean action. `behaviour` is a dict that the trajectory carries to `update`.
      update: ``update(state, trajectory, *, axis_name=None) -> (state, metrics)``, one
        learner step on this device's environments. Under pmap or shard_map
        `axis_name` names the device axis: gradients and statistics are reduced over
        it, so that `state.learner` and the metrics are the same everywhere.
    """

    init: Callable[[Key[Array, ""]], AgentState]
    actor_params: Callable[[Any, Key[Array, ""] | None], Any]
    act: Callable[..., tuple[Shaped[Array, " E *action"], dict[str, Array]]]
    update: Callable[..., tuple[AgentState, Metrics]]


@runtime_checkable
class AgentConfig(Protocol):
    """The options of an agent: a frozen dataclass that can build it."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def name(self) -> str:
        """The agent's name: of its subcommand and of its folder of runs."""
        ...

    def hyper(self, total_env_steps: int) -> Any:
        """The numeric hyper-parameters: a NamedTuple, by the options' own names.

        ``make(...).init`` gives them as `hyper` of the learner, and nothing else there
        depends on them: members of a population have their own.

        Args:
          total_env_steps: the planned length of the run.
        """
        ...

    def make(
        self, spec: EnvSpec, *, total_env_steps: int, num_envs: int, rollout_steps: int
    ) -> Agent:
        """Builds the agent for an environment and a length of training.

        Args:
          spec: the environment.
          total_env_steps: the planned length, for schedules that end with it.
          num_envs: E, the environments that one device learns from.
          rollout_steps: T, the length of the segments that it is given.

        Raises:
          ValueError: if an option does not fit the environment.
        """
        ...
