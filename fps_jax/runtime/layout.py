"""Where the members of a population lie: on which devices, and along which axis.

Devices split the members if they can: all of the state is then `AgentState.local`,
``[D, P / D, ...]``. If not they split every member's batch: the learners are ``[P,
...]`` on each device, and what a device owns is ``[D, P, ...]``.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from fps_jax.agents.population import join_members
from fps_jax.runtime import parallel
from fps_jax.types import Agent, AgentState, Trajectory


@dataclasses.dataclass(frozen=True)
class Layout:
    """Lays P members out on devices; `layout_of` makes it.

    Attributes:
      members: P.
      mesh: the learner's devices.
      splits_batch: whether they split each member's batch, not the members.
    """

    members: int
    mesh: Mesh
    splits_batch: bool

    @property
    def member_mesh(self) -> Mesh:
        """The devices that one member's update runs on."""
        if self.splits_batch:
            return self.mesh
        return parallel.learner_mesh(self.mesh.local_devices[:1])

    def init(self, agent: Agent, keys: jax.Array) -> AgentState:
        """Initialises all members.

        Args:
          agent: that `agents.population.population` made.
          keys: one a member.
        """
        if self.splits_batch:
            return parallel.init_state(agent, keys, self.mesh)
        return self._split(jax.device_get(jax.jit(agent.init)(keys)).local)

    def learner_view(self, state: AgentState) -> Any:
        """All members' learners on one device, as acting reads them.

        Args:
          state: of the population.
        """
        if self.splits_batch:
            return parallel.first_replica(state.learner)
        if self.mesh.size == 1:
            return parallel.first_replica(state.local.learner)
        return jax.device_put(state.local.learner, self.mesh.local_devices[0])

    def batch_of(self, trajectories: Sequence[Trajectory]) -> Trajectory:
        """Lays the actors' rows out: ``[D, T, ...]``.

        Args:
          trajectories: host arrays, one an actor.
        """
        groups = self.mesh.size if self.splits_batch else 1
        joined = join_members(trajectories, self.members, groups=groups)
        return parallel.shard_environments([joined], self.mesh.size)

    def of_members(self, state: AgentState) -> list[AgentState]:
        """Each member's state on the host, as a run of its own would have it.

        Args:
          state: of the population.
        """
        host, members = parallel.read_state(state), range(self.members)
        take = lambda tree, *at: parallel.map_data(lambda x: x[at], tree)
        if self.splits_batch:
            every = slice(None)
            return [
                AgentState(take(host.learner, p), take(host.local, every, p))
                for p in members
            ]
        whole = parallel.map_data(_join_two, host.local)
        return [
            AgentState(take(whole.learner, p), take(whole.local, slice(p, p + 1)))
            for p in members
        ]

    def place(self, states: Sequence[AgentState]) -> AgentState:
        """Puts what `of_members` gave back on the devices.

        Args:
          states: one a member.
        """
        learner, local = _stack(states)  # [P, ...], and [P, D, ...] of each device.
        if self.splits_batch:
            local = parallel.map_data(lambda x: np.swapaxes(x, 0, 1), local)
            return parallel.place_state(AgentState(learner, local), self.mesh)
        return self._split(AgentState(learner, parallel.map_data(_join_two, local)))

    def _split(self, states: AgentState) -> AgentState:
        """Splits whole members, stacked along P, over the devices."""
        # Not -1: a leaf may be empty.
        size = self.mesh.size, self.members // self.mesh.size
        split = lambda x: x.reshape(*size, *x.shape[1:])
        local = parallel.map_data(split, states)
        return parallel.place_state(AgentState((), local), self.mesh)


def layout_of(members: int, learner_devices: int | None) -> Layout:
    """Chooses a layout: devices split the members if their number allows it.

    Args:
      members: P.
      learner_devices: how many learn; None is all.

    Raises:
      ValueError: if there are fewer.
    """
    mesh = parallel.learner_mesh(parallel.learner_devices(learner_devices))
    return Layout(members, mesh, splits_batch=members % mesh.size != 0)


def _join_two(x: np.ndarray) -> np.ndarray:
    """Makes one axis of the two that lead."""
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def _stack(states: Sequence[AgentState]) -> AgentState:
    """Stacks host arrays and typed keys along a new leading axis."""
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    stack = lambda *xs: jnp.stack(xs) if is_key(xs[0]) else np.stack(xs)
    return jax.tree.map(stack, *states)
