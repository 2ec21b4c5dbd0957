"""Where the members of a population lie: stacked in one program, or taking turns.

Stacked, `vmap` runs all members at once and devices split them: the state is
`AgentState.local`, ``[D, P / D, ...]``. In turns, the compiled update of a single run
is called for one member after another, whose batch the devices split. That is for
numbers of members that the devices do not divide, and for agents that own a replay:
mapped, a `cond` does what either branch does, such as the sort of a rank-based replay
at every draw. Acting is stacked either way.
"""

import abc
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from fps_jax.runtime import parallel, stacking
from fps_jax.runtime.program import Program, compile_agent
from fps_jax.types import Agent, AgentState, EnvSpec, Trajectory


class Layout(abc.ABC):
    """Lays P members out on devices; `choose` says which.

    Attributes:
      members: P.
      mesh: the learner's devices.
      devices_each: how many devices share one member's batch.
      program: the compiled functions, of all members.
    """

    devices_each: int
    program: Program

    def __init__(self, members: int, mesh: Mesh):
        """Prepares a layout.

        Args:
          members: P.
          mesh: the learner's devices.
        """
        self.members, self.mesh = members, mesh

    @property
    def member_mesh(self) -> Mesh:
        """The devices that one member's update runs on."""
        return parallel.learner_mesh(list(self.mesh.devices.flat)[: self.devices_each])

    @abc.abstractmethod
    def build(
        self, agent: Agent, spec: EnvSpec, hyper: Any, *, mapping: parallel.Backend
    ) -> None:
        """Compiles.

        Args:
          agent: a member's.
          spec: the environment.
          hyper: the members' numeric hyper-parameters, each leaf ``[P]``.
          mapping: what maps updates over devices.
        """

    @abc.abstractmethod
    def init(self, keys: jax.Array) -> Any:
        """The state of all members as they start.

        Args:
          keys: one a member.
        """

    @abc.abstractmethod
    def learner_view(self, state: Any) -> Any:
        """All members' learners on one device, as `Program.actor_params` takes them.

        Args:
          state: of the population.
        """

    @abc.abstractmethod
    def batch_of(self, trajectories: Sequence[Trajectory]) -> Any:
        """Lays the actors' rows out for the devices.

        Args:
          trajectories: host arrays ``[T, P * E, ...]``, one an actor.
        """

    @abc.abstractmethod
    def of_members(self, state: Any) -> list[AgentState]:
        """Each member's state on the host, as a run of its own would have it.

        Args:
          state: of the population.
        """

    @abc.abstractmethod
    def place(self, states: Sequence[AgentState]) -> Any:
        """Puts what `of_members` gave back on the devices.

        Args:
          states: one a member.
        """


class Stacked(Layout):
    """All members at once; devices split them."""

    devices_each = 1

    def build(self, agent, spec, hyper, *, mapping) -> None:
        """Compiles one program for all; see `Layout`."""
        self._agent = stacking.population(agent, spec, hyper)
        self.program = compile_agent(self._agent, self.mesh, mapping=mapping)

    def init(self, keys: jax.Array) -> AgentState:
        """The state of all members as they start; see `Layout`."""
        return self._split(jax.device_get(jax.jit(self._agent.init)(keys)).local)

    def learner_view(self, state: AgentState) -> Any:
        """All members' learners on one device; see `Layout`."""
        if self.mesh.size == 1:
            return parallel.first_replica(state.local.learner)
        return jax.device_put(state.local.learner, self.mesh.local_devices[0])

    def batch_of(self, trajectories: Sequence[Trajectory]) -> Trajectory:
        """Lays the rows out member by member, ``[D, T, P / D * E]``."""
        if len(trajectories) > 1:  # Those of one actor stand in that order.
            parts = [
                stacking.split_members(rows, self.members) for rows in trajectories
            ]
            trajectories = [rows for of_member in zip(*parts) for rows in of_member]
        return parallel.shard_environments(trajectories, self.mesh.size)

    def of_members(self, state: AgentState) -> list[AgentState]:
        """Each member's state on the host; see `Layout`."""
        joined = parallel.map_data(_join_two, parallel.read_state(state).local)
        take = lambda tree, at: parallel.map_data(lambda x: x[at], tree)
        return [
            AgentState(take(joined.learner, p), take(joined.local, slice(p, p + 1)))
            for p in range(self.members)
        ]

    def place(self, states: Sequence[AgentState]) -> AgentState:
        """Puts members back on the devices; see `Layout`."""
        learner, local = jax.tree.map(_stack, *states)  # Of local ``[P, 1, ...]``.
        return self._split(AgentState(learner, parallel.map_data(_join_two, local)))

    def _split(self, states: AgentState) -> AgentState:
        """Splits whole members, stacked along P, over the devices."""
        # Not -1: a leaf may be empty.
        size = self.mesh.size, self.members // self.mesh.size
        split = lambda x: x.reshape(*size, *x.shape[1:])
        local = parallel.map_data(split, states)
        return parallel.place_state(AgentState((), local), self.mesh)


class Turns(Layout):
    """One member after another, each on all devices; the state is a tuple."""

    def __init__(self, members: int, mesh: Mesh):
        """Prepares a layout; see `Layout`."""
        super().__init__(members, mesh)
        self.devices_each = mesh.size

    def build(self, agent, spec, hyper, *, mapping) -> None:
        """Compiles one member's update, and acting for all; see `Layout`."""
        self._one, self._hyper = compile_agent(agent, self.mesh, mapping=mapping), hyper
        together = stacking.population(agent, spec, hyper)
        acting = compile_agent(together, self.member_mesh, mapping=mapping)
        self.program = acting._replace(mesh=self.mesh, learn=self._learn)

    def _learn(self, states: Sequence[AgentState], batches: Sequence[Trajectory]):
        updated, metrics = [], []
        for state, batch in zip(states, batches):
            state, told = self._one.learn(state, batch)
            if jax.default_backend() == "cpu":
                # Two updates in flight would wait for each other's threads.
                jax.block_until_ready(state)
            updated.append(state)
            metrics.append(told)
        together = {name: tuple(told[name] for told in metrics) for name in metrics[0]}
        return tuple(updated), together

    def init(self, keys: jax.Array) -> tuple[AgentState, ...]:
        """The state of all members as they start; see `Layout`."""
        states = []
        for p in range(self.members):
            state = self._one.init(parallel.map_data(lambda x, p=p: x[p], keys))
            mine = jax.tree.map(lambda x, p=p: np.asarray(x[p]), self._hyper)
            hyper = parallel.replicate(mine, self.mesh)
            states.append(state._replace(learner=state.learner._replace(hyper=hyper)))
        return tuple(states)

    def learner_view(self, state: Sequence[AgentState]) -> Any:
        """All members' learners on one device; see `Layout`."""
        return tuple(parallel.first_replica(one.learner) for one in state)

    def batch_of(self, trajectories: Sequence[Trajectory]) -> tuple[Trajectory, ...]:
        """Lays out each member's rows, ``[D, T, E / D]``."""
        parts = [stacking.split_members(rows, self.members) for rows in trajectories]
        return tuple(
            parallel.shard_environments(of_member, self.mesh.size)
            for of_member in zip(*parts)
        )

    def of_members(self, state: Sequence[AgentState]) -> list[AgentState]:
        """Each member's state on the host; see `Layout`."""
        return [parallel.read_state(one) for one in state]

    def place(self, states: Sequence[AgentState]) -> tuple[AgentState, ...]:
        """Puts members back on the devices; see `Layout`."""
        return tuple(parallel.place_state(one, self.mesh) for one in states)


def choose(agent: Agent, members: int, mesh: Mesh) -> Layout:
    """Chooses a layout: stacked where that can be, and helps.

    Args:
      agent: a member's.
      members: P.
      mesh: the learner's devices.
    """
    state = jax.eval_shape(agent.init, jax.eval_shape(lambda: jax.random.key(0)))
    owns = bool(jax.tree.leaves(state.local))
    return (
        Turns(members, mesh) if owns or members % mesh.size else Stacked(members, mesh)
    )


def _join_two(x: np.ndarray) -> np.ndarray:
    """Makes one axis of the two that lead."""
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def _stack(*xs: Any) -> Any:
    """Stacks host arrays or typed keys along a new leading axis."""
    is_key = jnp.issubdtype(xs[0].dtype, jax.dtypes.prng_key)
    return jnp.stack(xs) if is_key else np.stack(xs)
