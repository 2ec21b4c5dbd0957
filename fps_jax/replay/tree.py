"""Trees of arrays: every node is its row of K children in one number.

An update writes leaves and reduces the rows above them anew; it adds no difference, so
nothing drifts: every parent is bitwise what its row comes to, always reduced from left
to right, and a NaN is gone once its leaf is written again. Sums make a sum-tree, maxima
a priority queue.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fps_jax import checks

Tree = tuple[Float[Array, "_ _"], ...]
"""Rows of every level, ``[rows, K]``, from the leaves to the single row at the top.

What lies beyond the capacity is neutral: 0 in a sum.
"""


class ArrayTree(NamedTuple):
    """Functions of a tree over N leaves.

    Indices are int32; those outside of ``[0, N)`` are ignored by `update`.

    Attributes:
      init: ``init() -> tree``, all leaves neutral.
      build: ``build(leaves [N]) -> tree``, in O(N).
      update: ``update(tree, indices [B], values [B]) -> tree``; of equal indices the
        last one's value stays, on every backend.
      write: ``write(tree, start, values [B]) -> tree``, a contiguous piece of a ring:
        leaves ``start ... start + B - 1`` modulo N, B at most N; in O(B).
      root: ``root(tree)``, all leaves in one number.
      leaves: ``leaves(tree) -> [N]``.
      get: ``get(tree, indices [B]) -> [B]``, leaves by their indices.
    """

    init: Callable[[], Tree]
    build: Callable[[Float[Array, " N"]], Tree]
    update: Callable[[Tree, Int[Array, " B"], Float[Array, " B"]], Tree]
    write: Callable[[Tree, Int[Array, ""], Float[Array, " B"]], Tree]
    root: Callable[[Tree], Float[Array, ""]]
    leaves: Callable[[Tree], Float[Array, " N"]]
    get: Callable[[Tree, Int[Array, " B"]], Float[Array, " B"]]


def array_tree(
    capacity: int,
    *,
    fan_out: int = 16,
    combine: Callable[[Array, Array], Array] = jnp.add,
    neutral: float = 0.0,
) -> ArrayTree:
    """Makes the functions of a tree.

    Args:
      capacity: N, the number of leaves, at least 1.
      fan_out: K, children of a node, at least 2.
      combine: of two nodes; associative but for rounding.
      neutral: what changes nothing when combined.

    Raises:
      ValueError: if a number is out of range, or there are too many leaves for int32.
    """
    checks.number("capacity", capacity, 1)
    checks.number("fan_out", fan_out, 2)
    rows = [-(-capacity // fan_out)]
    while rows[-1] > 1:
        rows.append(-(-rows[-1] // fan_out))
    if rows[0] * fan_out >= 2**31:
        raise ValueError(f"capacity {capacity} must be below 2^31 - {fan_out}.")

    def reduce(level: Float[Array, "rows K"]) -> Float[Array, " rows"]:
        total = level[:, 0]
        for k in range(1, fan_out):
            total = combine(total, level[:, k])
        return total

    def init() -> Tree:
        return tuple(jnp.full((r, fan_out), neutral, jnp.float32) for r in rows)

    def build(leaves: Float[Array, " N"]) -> Tree:
        levels, values = [], leaves
        for r in rows:
            padding = jnp.full(r * fan_out - values.size, neutral, values.dtype)
            levels.append(jnp.concatenate([values, padding]).reshape(r, fan_out))
            values = reduce(levels[-1])
        return tuple(levels)

    def update(tree: Tree, indices: Int[Array, " B"], values: Float[Array, " B"]):
        if indices.size == 1:
            # XLA makes of a scatter of one a copy of the whole array.
            indices = jnp.append(indices, -1)
            values = jnp.append(values, 0.0)
        indices, place = last_of_equals(indices, capacity)
        is_kept, values = indices >= 0, values[place]
        levels = []
        for level in tree:
            # What is ignored gets places of its own, outside.
            outside = level.size + jnp.arange(indices.size, dtype=jnp.int32)
            place = jnp.where(is_kept, indices, outside)
            level = level.reshape(-1).at[place].set(values, mode="drop")
            levels.append(level.reshape(-1, fan_out))
            indices = indices // fan_out
            values = reduce(levels[-1][jnp.where(is_kept, indices, 0)])
        return tuple(levels)

    def write(tree: Tree, start: Int[Array, ""], values: Float[Array, " B"]) -> Tree:
        checks.number("values", values.size, 0, capacity)
        levels, length = [], capacity
        for level in tree:
            # The rows are a piece of a ring as well, up to two longer at its ends.
            touched = min(-(-values.size // fan_out) + 2, len(level))
            row = start // fan_out + jnp.arange(touched, dtype=jnp.int32)
            row = row % len(level)
            child = jnp.arange(fan_out, dtype=jnp.int32)
            place = row[:, None] * fan_out + child[None]
            position = (place - start) % length
            is_new = (position < values.size) & (place < length)
            rows = jnp.where(is_new, jnp.append(values, 0.0)[position], level[row])
            levels.append(level.at[row].set(rows))
            start, length, values = start // fan_out, len(level), reduce(rows)
        return tuple(levels)

    return ArrayTree(
        init=init,
        build=build,
        update=update,
        write=write,
        root=lambda tree: reduce(tree[-1])[0],
        leaves=lambda tree: tree[0].reshape(-1)[:capacity],
        get=lambda tree, indices: tree[0].reshape(-1)[indices],
    )


def last_of_equals(
    indices: Int[Array, " B"], capacity: int
) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """Keeps the last of equal indices.

    Args:
      indices: ``[B]``; those outside of ``[0, N)`` are left out.
      capacity: N.

    Returns:
      The indices in order, -1 for what is not kept, and the places that they had.
    """
    size = indices.size
    place = jnp.arange(size, dtype=jnp.int32)
    is_inside = (indices >= 0) & (indices < capacity)
    indices = jnp.where(is_inside, indices, capacity)
    if (capacity + 1) * size <= 2**32:
        # One number for both: a sort of pairs takes longer.
        number = indices.astype(jnp.uint32) * size + place.astype(jnp.uint32)
        number = jnp.sort(number)
        indices, place = (x.astype(jnp.int32) for x in (number // size, number % size))
    else:
        indices, place = jax.lax.sort((indices, place), num_keys=2)
    is_last = jnp.append(indices[1:] != indices[:-1], True)
    return jnp.where(is_last & (indices < capacity), indices, -1), place
