"""One learner on many devices, on one host or on several.

The learner's half of the state is replicated without a leading axis; what a device
owns, and the environments' rows that it learns from, carry a leading device axis.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fps_jax.types import Agent, AgentState, Metrics, Trajectory

AXIS = "learner"
Backend = Literal["pmap", "shard_map"]
Update = Callable[[AgentState, Trajectory], tuple[AgentState, Metrics]]


def learner_mesh(
    devices: Sequence[jax.Device],  # pyright: ignore[reportInvalidTypeForm]
) -> Mesh:
    """Lays the learner's devices, of all hosts, on one axis.

    Args:
      devices: of one kind, in the order that shards the environments.
    """
    return Mesh(np.asarray(devices), (AXIS,))


def join_hosts(
    coordinator_address: str | None, num_processes: int | None, process_id: int | None
) -> None:
    """Joins the other hosts; before anything else touches a device.

    Args:
      coordinator_address: of the first host; None asks the cluster, here and below.
      num_processes: how many hosts there are.
      process_id: which of them this is.
    """
    jax.distributed.initialize(
        coordinator_address,
        num_processes,
        process_id,
        # Those that come to their end meet first; one that fails must not wait five
        # minutes for the others to do the same.
        shutdown_timeout_seconds=5,
    )


def meet_hosts() -> None:
    """Waits for all hosts, so that they end together."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("the end")


def learner_devices(per_host: int | None) -> list[Any]:
    """The first devices of each host, in the hosts' order.

    Args:
      per_host: how many of each; None is all.

    Raises:
      ValueError: if a host has fewer.
    """
    have = jax.local_device_count()
    if per_host is not None and per_host > have:
        raise ValueError(
            f"learner_devices {per_host} is more than the {have} there are."
        )
    devices = []
    for host in range(jax.process_count()):
        here = [d for d in jax.devices() if d.process_index == host]
        devices += here[:per_host]
    return devices


def replicate(tree: Any, mesh: Mesh) -> Any:
    """Puts the same values on every device of every host, as copies to be donated.

    Args:
      tree: host arrays or typed keys, the same on every host.
      mesh: the learner's devices.
    """
    sharding = NamedSharding(mesh, PartitionSpec())

    def put(x):
        # Each device its own copy: JAX would share host memory that is well aligned.
        parts = [jax.device_put(x.copy(), d) for d in mesh.local_devices]
        return jax.make_array_from_single_device_arrays(x.shape, sharding, parts)

    return map_data(put, tree)


def shard(tree: Any, mesh: Mesh) -> Any:
    """Splits each leaf's leading axis, one part a device.

    Args:
      tree: host arrays or typed keys whose leading axis is this host's devices of the
        mesh.
      mesh: the learner's devices.
    """
    sharding = NamedSharding(mesh, PartitionSpec(AXIS))
    put = functools.partial(jax.make_array_from_process_local_data, sharding)
    return map_data(put, tree)


def map_data(put: Callable[[np.ndarray], Any], tree: Any) -> Any:
    """Maps over host arrays; a typed key goes as its data and comes out as a key.

    Args:
      put: of the data of one leaf.
      tree: host arrays and typed keys.
    """

    def one(x):
        if not _is_key(x):
            return put(jax.device_get(x))
        data = put(jax.device_get(jax.random.key_data(x)))
        if isinstance(data, np.ndarray):
            # A key lives on a device: wrapping would move it there unasked.
            data = jax.device_put(data)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))

    return jax.tree.map(one, tree)


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def shard_environments(trajectories: Sequence[Trajectory], parts: int) -> Trajectory:
    """Joins the actors' environments and splits them over this host's devices.

    Args:
      trajectories: host arrays ``[T, E, ...]``, one an actor, in the actors' order.
      parts: this host's devices of the mesh; they divide the environments.

    Returns:
      ``[D, T, E / D, ...]``.
    """

    def join(*xs: Any):
        x = xs[0] if len(xs) == 1 else np.concatenate(xs, axis=1)
        shape = len(x), parts, x.shape[1] // parts, *x.shape[2:]
        return np.moveaxis(x.reshape(shape), 1, 0)

    return jax.tree.map(join, *trajectories)


def first_replica(tree: Any) -> Any:
    """This host's first copy of replicated arrays, without a gather.

    The result aliases its source: it dies with the next donated update.

    Args:
      tree: replicated arrays.
    """

    return jax.tree.map(lambda x: x.addressable_data(0), tree)


def read(tree: Any) -> Any:
    """Copies replicated arrays to the host, without a gather. Keys stay keys.

    Args:
      tree: replicated arrays.
    """
    return map_data(np.array, first_replica(tree))


def read_state(state: AgentState) -> AgentState:
    """Copies a state to the host: the learner once, each of this host's parts.

    Args:
      state: as `init_state` places it.
    """

    def parts(x):
        shards = sorted(x.addressable_shards, key=lambda part: part.index[0].start or 0)
        pieces = [map_data(np.array, part.data) for part in shards]
        return (jnp if _is_key(x) else np).concatenate(pieces)

    return AgentState(read(state.learner), jax.tree.map(parts, state.local))


def place_state(state: AgentState, mesh: Mesh) -> AgentState:
    """Puts a state that `read_state` gave back on devices.

    Args:
      state: host arrays.
      mesh: the learner's devices; as many of this host as `state.local` has parts.
    """
    return AgentState(replicate(state.learner, mesh), shard(state.local, mesh))


def init_state(agent: Agent, key: jax.Array, mesh: Mesh) -> AgentState:
    """Initialises an agent on every device of a mesh.

    Args:
      agent: the agent.
      key: the same on every host.
      mesh: the learner's devices.
    """
    state = jax.device_get(jax.jit(agent.init)(key))
    copies = lambda x: np.broadcast_to(x, (mesh.local_mesh.size, *x.shape))
    return place_state(AgentState(state.learner, map_data(copies, state.local)), mesh)


def parallelize(agent: Agent, mesh: Mesh, *, backend: Backend = "pmap") -> Update:
    """Compiles an agent's update for all devices of a mesh; the state is donated.

    Both backends run the same program and take and return the same arrays. To the
    agent's metrics it adds ``env_steps``, the valid rows of all devices, unless the
    agent counts them itself.

    Args:
      agent: the agent; its update reduces over `AXIS`.
      mesh: the learner's devices.
      backend: the map; shard_map is what new JAX code uses, pmap is its elder.

    Raises:
      ValueError: if the backend is unknown.
    """

    def update(state: AgentState, trajectory: Trajectory):
        state, metrics = agent.update(state, trajectory, axis_name=AXIS)
        valid = jnp.sum(trajectory.is_valid, dtype=jnp.int32)
        return state, {"env_steps": jax.lax.psum(valid, AXIS)} | metrics

    if backend == "pmap":
        axes = AgentState(learner=None, local=0)
        return jax.pmap(
            update,
            axis_name=AXIS,
            in_axes=(axes, 0),
            out_axes=(axes, None),
            devices=list(mesh.devices),
            donate_argnums=0,
        )
    if backend == "shard_map":
        return _shard_map(update, mesh)
    raise ValueError(f"backend {backend!r} is not one of ('pmap', 'shard_map').")


def _shard_map(update: Update, mesh: Mesh) -> Update:
    """Maps as pmap does: each device sees its part without the device axis."""

    def one_device(state: AgentState, trajectory: Trajectory):
        mine = lambda tree: jax.tree.map(lambda x: jnp.squeeze(x, 0), tree)
        state, metrics = update(
            state._replace(local=mine(state.local)), mine(trajectory)
        )
        stacked = jax.tree.map(lambda x: jnp.expand_dims(x, 0), state.local)
        return state._replace(local=stacked), metrics

    specs = AgentState(learner=PartitionSpec(), local=PartitionSpec(AXIS))
    # The agents reduce their gradients themselves; with check_vma JAX would reduce
    # the gradient of a replicated parameter a second time.
    mapped = jax.shard_map(
        one_device,
        mesh=mesh,
        in_specs=(specs, PartitionSpec(AXIS)),
        out_specs=(specs, PartitionSpec()),
        check_vma=False,
    )
    return jax.jit(mapped, donate_argnums=0)
