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

Tree = Float[Array, "R K"]
"""Rows of all levels: those of the leaves first, the single row at the top last.

What lies beyond the capacity is neutral: 0 in a sum.
"""


class ArrayTree(NamedTuple):
    """Functions of a tree over N leaves.

    Indices are int32; those outside of ``[0, N)`` are ignored by `update`.

    Attributes:
      starts: where the rows of each level begin, from the leaves up.
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

    starts: tuple[int, ...]
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
    starts = tuple(sum(rows[:level]) for level in range(len(rows)))
    if sum(rows) * fan_out >= 2**31:
        raise ValueError(f"capacity {capacity} must have below 2^31 nodes.")

    def reduce(children: Float[Array, "rows K"]) -> Float[Array, " rows"]:
        total = children[:, 0]
        for k in range(1, fan_out):
            total = combine(total, children[:, k])
        return total

    def build(leaves: Float[Array, " N"]) -> Tree:
        levels, values = [], leaves
        for count in rows:
            padding = jnp.full(count * fan_out - values.size, neutral, values.dtype)
            levels.append(jnp.append(values, padding).reshape(count, fan_out))
            values = reduce(levels[-1])
        return jnp.concatenate(levels)

    def update(tree: Tree, indices: Int[Array, " B"], values: Float[Array, " B"]):
        if indices.size == 1:
            # XLA makes of a scatter of one a copy of the whole array.
            indices = jnp.append(indices, -1)
            values = jnp.append(values, 0.0)
        indices, place = last_of_equals(indices, capacity)
        is_kept = indices >= 0

        def set_and_reduce(below: tuple[Tree, Array, Array], start: Int[Array, ""]):
            tree, node, value = below
            place = jnp.where(is_kept, start * fan_out + node, tree.size)
            tree = tree.reshape(-1).at[place].set(value, mode="drop")
            tree, row = tree.reshape(-1, fan_out), node // fan_out
            return (tree, row, reduce(tree[start + row])), None

        leaf = jnp.where(is_kept, indices, 0)
        bottom, up = (tree, leaf, values[place]), jnp.array(starts, jnp.int32)
        return jax.lax.scan(set_and_reduce, bottom, up)[0][0]

    def write(tree: Tree, start: Int[Array, ""], values: Float[Array, " B"]) -> Tree:
        checks.number("values", values.size, 0, capacity)
        length = capacity
        for first, count in zip(starts, rows):
            # The rows are a piece of a ring as well, up to two longer at its ends. One
            # would be a slice to XLA, which copies the whole array.
            touched = max(min(-(-values.size // fan_out) + 2, count), 2)
            row = start // fan_out + jnp.arange(touched, dtype=jnp.int32)
            row = row % count
            child = jnp.arange(fan_out, dtype=jnp.int32)
            place = row[:, None] * fan_out + child[None]
            position = (place - start) % length
            is_new = (position < values.size) & (place < length)
            fresh = jnp.append(values, 0.0)[position]
            fresh = jnp.where(is_new, fresh, tree[first + row])
            tree = tree.at[first + row].set(fresh)
            start, length, values = start // fan_out, count, reduce(fresh)
        return tree

    return ArrayTree(
        starts=starts,
        init=lambda: jnp.full((sum(rows), fan_out), neutral, jnp.float32),
        build=build,
        update=update,
        write=write,
        root=lambda tree: reduce(tree[-1:])[0],
        leaves=lambda tree: tree[: rows[0]].reshape(-1)[:capacity],
        get=lambda tree, indices: tree.reshape(-1)[indices],
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
