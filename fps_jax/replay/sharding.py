"""One replay over several devices: each owns a shard, and all of them draw as one.

Inside ``pmap`` or ``shard_map``, where `axis_name` names the device axis, a draw is the
same on every device: the totals of the shards are one more row of the tree. Each device
reads what it owns of the draws, and every one gets an equal part of what was read. With
`axis_name` None there is one shard, and nothing is sent.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from fps_jax.replay.sum_tree import descend


def own(axis_name: str | None) -> Int[Array, ""]:
    """The number of this device's shard.

    Args:
      axis_name: the device axis, if any.
    """
    return jnp.int32(0) if axis_name is None else jax.lax.axis_index(axis_name)


def count(axis_name: str | None) -> int:
    """The number of shards.

    Args:
      axis_name: the device axis, if any.
    """
    return 1 if axis_name is None else jax.lax.axis_size(axis_name)


def add_up(x: Shaped[Array, "*s"], axis_name: str | None) -> Shaped[Array, "*s"]:
    """The sum over the shards.

    Args:
      x: of this device.
      axis_name: the device axis, if any.
    """
    return x if axis_name is None else jax.lax.psum(x, axis_name)


def gather(x: Any, axis_name: str | None) -> Any:
    """The rows of all shards, one shard's after the other's.

    Args:
      x: a pytree of ``[B, ...]``.
      axis_name: the device axis, if any.
    """
    if axis_name is None:
        return x
    return jax.tree.map(lambda x: jax.lax.all_gather(x, axis_name, tiled=True), x)


def locate(
    total: Float[Array, ""],
    coarse: Float[Array, " B"],
    fine: Float[Array, " B"],
    axis_name: str | None,
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """The shards that targets are in, and where in them.

    Args:
      total: the sum of this shard's weights.
      coarse: the targets in the sum over all shards, without their fine part.
      fine: that part.
      axis_name: the device axis, if any.

    Returns:
      The shard of each target, and its coarse part less the sums of the shards before.
    """
    if axis_name is None:
        return jnp.zeros(coarse.shape, jnp.int32), coarse
    totals = jax.lax.all_gather(total, axis_name)
    row = jnp.broadcast_to(totals, (coarse.size, totals.size))
    shard, left = descend(row, jnp.maximum(coarse + fine, 0.0))
    return shard, coarse - left


def of_owners(x: Any, is_own: Bool[Array, " B"], axis_name: str | None) -> Any:
    """What the owner of each row has in it, on every device.

    Args:
      x: a pytree of ``[B, ...]``.
      is_own: ``[B]``, the rows that this device owns; every row has one owner.
      axis_name: the device axis, if any.
    """
    if axis_name is None:
        return x
    return jax.tree.map(
        lambda x: _restored(jax.lax.psum(_only(x, is_own), axis_name), x), x
    )


def deal(
    x: Any, is_own: Bool[Array, " B"], axis_name: str | None, *, axis: int = 0
) -> Any:
    """An equal part of the rows for each device, read by their owners.

    Args:
      x: a pytree of ``[B, ...]``.
      is_own: ``[B]``, the rows that this device owns; every row has one owner.
      axis_name: the device axis, if any.
      axis: where B is instead, if not first.

    Returns:
      A pytree of ``[B / D, ...]``.
    """
    if axis_name is None:
        return x
    scatter = lambda x: jax.lax.psum_scatter(
        x, axis_name, scatter_dimension=axis, tiled=True
    )
    return jax.tree.map(lambda x: _restored(scatter(_only(x, is_own, axis)), x), x)


def part(x: Any, axis_name: str | None) -> Any:
    """This device's part of rows that every device has.

    Args:
      x: a pytree of ``[B, ...]``.
      axis_name: the device axis, if any.
    """
    if axis_name is None:
        return x
    rows = lambda x: x.shape[0] // count(axis_name)
    return jax.tree.map(
        lambda x: jax.lax.dynamic_slice_in_dim(x, own(axis_name) * rows(x), rows(x)), x
    )


def _only(x: Shaped[Array, "*row"], is_own: Bool[Array, " B"], axis: int = 0) -> Array:
    """Rows of this device, the others 0: adding up leaves each as its owner has it."""
    is_own = jnp.expand_dims(is_own, [i for i in range(x.ndim) if i != axis])
    x = x.astype(jnp.uint8) if x.dtype == jnp.bool_ else x
    return jnp.where(is_own, x, jnp.zeros((), x.dtype))


def _restored(total: Array, like: Array) -> Array:
    return total.astype(like.dtype)
