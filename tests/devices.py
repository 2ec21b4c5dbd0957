"""The two maps over the four CPU devices that `conftest` forces."""

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

AXIS = "devices"
BACKENDS = ("pmap", "shard_map")


def over_devices(f, backend: str):
    """Maps ``f(*shards)`` over arrays with a leading device axis of 4.

    Args:
      f: of one device; reduces over `AXIS`.
      backend: one of `BACKENDS`.

    Returns:
      A function of stacked arrays to the stacked results of every device.
    """
    devices = jax.devices()[:4]
    if backend == "pmap":
        return jax.pmap(f, axis_name=AXIS, devices=devices)

    def one_device(*shards):
        out = f(*jax.tree.map(lambda x: x[0], shards))
        return jax.tree.map(lambda x: x[None], out)

    mesh, spec = Mesh(np.array(devices), (AXIS,)), PartitionSpec(AXIS)
    return jax.jit(
        jax.shard_map(
            one_device, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
        )
    )


def device_masks() -> np.ndarray:
    """Five items a device, of which 5, 0, 1 and 3 count.

    A mean of the devices' means would be wrong.
    """
    return np.arange(5) < np.array([5, 0, 1, 3])[:, None]
