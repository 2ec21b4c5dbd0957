"""A population: agents that differ in numbers alone, as one agent with an axis P.

The members share one program. Their states are stacked along a leading axis, over which
`vmap` maps the four functions, and their environments stand one member after another
on the axis of environments: ``[P * E, ...]``. Devices split the members, each with all
of its batch; or, for few large members, they split every member's batch.
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
        differ = [str(mine) for mine, yours in zip(other, first) if mine != yours]
        if differ:
            raise ValueError(
                f"members of one population differ in {', '.join(differ)}, which "
                f"changes the program."
            )
    hypers = [jax.device_get(c.hyper(total_env_steps)) for c in configs]
    return jax.tree.map(lambda *xs: np.stack(xs), *hypers)


def population(agent: Agent, spec: EnvSpec, hyper: Any, *, splits_batch: bool) -> Agent:
    """Makes one agent of P members.

    Where devices split the members, all of the state is `AgentState.local` and
    ``init`` gives that of every device at once; the metrics are gathered, so that they
    are ``[P]`` on each device. Where they split the batch, the state is as the
    member's own, with P in front of each leaf. Beside the metrics of the members stand
    their ``env_steps``.

    Args:
      agent: a member, whichever.
      spec: the environment.
      hyper: the members' numeric hyper-parameters, each leaf ``[P]``.
      splits_batch: whether devices split each member's batch, not the members.

    Returns:
      An agent whose ``init`` and ``act`` take ``[P]`` keys, and whose ``actor_params``
      takes all members' learners, ``[D, P / D, ...]`` where devices split them.
    """

    def init(keys: Key[Array, " P"]) -> AgentState:
        states = jax.vmap(agent.init)(keys)
        learner = states.learner._replace(hyper=jax.tree.map(jnp.asarray, hyper))
        states = AgentState(learner, states.local)
        return states if splits_batch else AgentState((), states)

    def actor_params(learner: Any, keys: Key[Array, " P"] | None) -> Any:
        if not splits_batch:
            join = lambda x: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])
            learner = jax.tree.map(join, learner)
        if keys is None:
            return jax.vmap(lambda one: agent.actor_params(one, None))(learner)
        return jax.vmap(agent.actor_params)(learner, keys)

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
        if isinstance(spec.action, Continuous):
            # A member whose parameters are not finite must not end the others' step.
            action = jnp.where(jnp.isfinite(action), action, 0)
        return action, behaviour

    def update(
        state: AgentState, trajectory: Trajectory, *, axis_name: str | None = None
    ) -> tuple[AgentState, Metrics]:
        states = state if splits_batch else state.local
        members = len(jax.tree.leaves(states)[0])
        each = trajectory.reward.shape[1] // members
        split = lambda x: x.reshape(x.shape[0], members, each, *x.shape[2:])
        batch = jax.tree.map(split, trajectory)
        inner = axis_name if splits_batch else None
        one = functools.partial(agent.update, axis_name=inner)
        states, metrics = jax.vmap(one, in_axes=(0, 1))(states, batch)
        steps = jnp.sum(batch.is_valid, axis=(0, 2), dtype=jnp.int32)
        if splits_batch:
            steps = jax.lax.psum(steps, axis_name) if axis_name else steps
            return states, metrics | {"env_steps": steps}
        metrics = metrics | {"env_steps": steps}
        if axis_name is not None:
            gather = functools.partial(jax.lax.all_gather, tiled=True)
            metrics = jax.tree.map(lambda x: gather(x, axis_name), metrics)
        return AgentState((), states), metrics

    return Agent(init, actor_params, act, update)


def join_members(
    trajectories: Sequence[Trajectory], members: int, *, groups: int
) -> Trajectory:
    """Joins the actors' environments, one member after another.

    Args:
      trajectories: host arrays ``[T, P * E, ...]``, one an actor, in the actors' order.
      members: P.
      groups: parts of each member's environments that are kept together, as devices
        that split the batch take them: each then holds one part of every member.

    Returns:
      ``[T, groups * P * (A E / groups), ...]`` for A actors.
    """

    def join(*xs: Any):
        each = xs[0].shape[1] // members
        of_actors = [x.reshape(len(x), members, each, *x.shape[2:]) for x in xs]
        x = np.concatenate(of_actors, axis=2) if len(xs) > 1 else of_actors[0]
        if groups > 1:
            part = x.shape[2] // groups
            x = x.reshape(len(x), members, groups, part, *x.shape[3:]).swapaxes(1, 2)
        return x.reshape(len(x), members * each * len(xs), *xs[0].shape[2:])

    return jax.tree.map(join, *trajectories)
