"""A population: agents that differ in numbers alone, as one agent with an axis P.

The members share one program. Their states are stacked along a leading axis, over which
`vmap` maps the four functions, and their environments stand one member after another
on the axis of environments: ``[P * E, ...]``. Devices split the members.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key, Shaped

from fps_jax.types import (
    Agent,
    AgentConfig,
    AgentState,
    Continuous,
    EnvSpec,
    Metrics,
    Trajectory,
)


def static_part(config: AgentConfig) -> tuple[Any, ...]:
    """What members of one population have in common: all that makes the program.

    A numeric hyper-parameter is left out but for whether it is None or 0, since either
    may leave a part of the program away.

    Args:
      config: an agent's options, with a method ``hyper``.
    """
    traced = hyper_names(config)

    def of_field(name: str, value: Any) -> Any:
        if name not in traced or value is None:
            return value
        return "0" if value == 0 else "a number"

    fields = ((f.name, getattr(config, f.name)) for f in dataclasses.fields(config))
    values = ((name, of_field(name, value)) for name, value in fields)
    return type(config), *values


def hyper_names(config: AgentConfig) -> frozenset[str]:
    """The options that are numeric hyper-parameters: those that members may vary."""
    return frozenset(config.hyper(total_env_steps=1)._fields)


def stack_hyper(configs: Sequence[AgentConfig], total_env_steps: int) -> Any:
    """The members' numeric hyper-parameters, each leaf ``[P]``, on the host.

    Args:
      configs: the members' options, equal in their `static_part`.
      total_env_steps: the planned length of every run.

    Raises:
      ValueError: if two members need different programs; it names the options.
    """
    first = static_part(configs[0])
    for config in configs:
        other = static_part(config)
        if other[0] is not first[0]:
            raise ValueError("members of one population are of different agents.")
        pairs = zip(other[1:], first[1:])
        differ = [mine[0] for mine, yours in pairs if mine != yours]
        if differ:
            raise ValueError(
                f"members of one population differ in {', '.join(differ)}, which "
                f"changes the program."
            )
    hypers = [jax.device_get(c.hyper(total_env_steps)) for c in configs]
    return jax.tree.map(lambda *xs: np.stack(xs), *hypers)


def population(agent: Agent, spec: EnvSpec, hyper: Any) -> Agent:
    """Makes one agent of P members; each device holds some of them, whole.

    All of the state is `AgentState.local`; the metrics are gathered, so that they are
    ``[P]`` on each device. Beside those of the members stand their ``env_steps``.

    Args:
      agent: a member, whichever.
      spec: the environment.
      hyper: the members' numeric hyper-parameters, each leaf ``[P]``.

    Returns:
      An agent whose ``init`` takes ``[P]`` keys and gives the state of all devices at
      once, and whose ``act`` takes ``[P]`` keys too; ``actor_params`` takes all
      members' learners, as ``[D, P / D, ...]`` or one by one.
    """

    def init(keys: Key[Array, " P"]) -> AgentState:
        # Not `vmap`: XLA's batched QR on a CPU, several at a time, can take all of its
        # threads and wait for one more, for ever (jaxlib 0.10.2, two cores).
        states = jax.lax.map(agent.init, keys)
        learner = states.learner._replace(hyper=jax.tree.map(jnp.asarray, hyper))
        return AgentState((), AgentState(learner, states.local))

    def actor_params(learners: Any, keys: Key[Array, " P"] | None) -> Any:
        if type(learners) is tuple:
            learners = jax.tree.map(lambda *xs: jnp.stack(xs), *learners)
        else:
            join = lambda x: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])
            learners = jax.tree.map(join, learners)
        if keys is None:
            return jax.vmap(lambda one: agent.actor_params(one, None))(learners)
        return jax.vmap(agent.actor_params)(learners, keys)

    def act(
        params: Any,
        observation: Shaped[Array, " PE *observation"],
        keys: Key[Array, " P"],
        *,
        explore: bool,
    ):
        each = observation.shape[0] // len(keys)
        mine = observation.reshape(len(keys), each, *observation.shape[1:])
        one = functools.partial(agent.act, explore=explore)
        acted = jax.vmap(one)(params, mine, keys)
        join = lambda x: x.reshape(observation.shape[0], *x.shape[2:])
        action, behaviour = jax.tree.map(join, acted)
        # A member whose parameters are not finite must not end the others' step.
        if isinstance(spec.action, Continuous):
            return jnp.where(jnp.isfinite(action), action, 0), behaviour
        return jnp.clip(action, 0, spec.action.num_actions - 1), behaviour

    def update(
        state: AgentState, trajectory: Trajectory, *, axis_name: str | None = None
    ) -> tuple[AgentState, Metrics]:
        members = len(jax.tree.leaves(state.local)[0])
        each = trajectory.reward.shape[1] // members
        split = lambda x: x.reshape(x.shape[0], members, each, *x.shape[2:])
        batch = jax.tree.map(split, trajectory)
        states, metrics = jax.vmap(agent.update, in_axes=(0, 1))(state.local, batch)
        steps = jnp.sum(batch.is_valid, axis=(0, 2), dtype=jnp.int32)
        metrics = metrics | {"env_steps": steps}
        if axis_name is not None:
            gather = functools.partial(jax.lax.all_gather, tiled=True)
            metrics = jax.tree.map(lambda x: gather(x, axis_name), metrics)
        return AgentState((), states), metrics

    return Agent(init, actor_params, act, update)


def split_members(trajectory: Trajectory, members: int) -> list[Trajectory]:
    """Takes the members' rows apart.

    Args:
      trajectory: host arrays of one actor, ``[T, P * E, ...]``.
      members: P.

    Returns:
      Of each member ``[T, E, ...]``.
    """
    each = trajectory.reward.shape[1] // members
    mine = lambda p: lambda x: x[:, p * each : (p + 1) * each]
    return [jax.tree.map(mine(p), trajectory) for p in range(members)]
