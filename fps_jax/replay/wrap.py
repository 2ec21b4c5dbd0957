"""Contiguous writes to a ring of rows, in place.

XLA writes a slice in place at the cost of its length, but a slice that wraps around the
end of a ring is two, of lengths that are known only at run time; and a scatter, which
wraps by its indices, takes longer for narrow rows. So the N rows stand
between two margins as long as the longest write:

    [ margin | 0 1 ... N-1 | margin ]

A write is made twice: at its place, and N rows before it. What sticks out at either
end, or did not wrap, falls into a margin, which nothing reads.

XLA's CPU has no bfloat16 and converts all N rows at each write; float16 and all other
dtypes are written in place there too.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from fps_jax import checks

Rows = Shaped[Array, "_ *row"]
"""N rows between two margins."""


class Wrap(NamedTuple):
    """Functions of an array of N rows.

    Attributes:
      init: ``init(example, fill=0) -> rows``, for rows like the example, an array or
        anything else with a shape and a dtype.
      write: ``write(rows, start, values [B, ...]) -> rows``, rows ``start ... start +
        B - 1`` modulo N, in O(B); a donated array is written in place.
      flag: ``flag(rows, start, flags [B]) -> (rows, replaced)``, a `write` of bools,
        and how many were True there.
      put: ``put(rows, slots [B], values [B, ...]) -> rows``, different rows, anywhere;
        slots below 0 are left out.
      increment: ``increment(rows, slots [B]) -> rows``, 1 more for each slot, some
        of which may be equal; slots below 0 are left out.
      read: ``read(rows, slots) -> [*slots.shape, ...]``.
      all: ``all(rows) -> [N, ...]``.
      replace: ``replace(rows, values [N, ...]) -> rows``, all of them.
    """

    init: Callable[..., Rows]
    write: Callable[[Rows, Int[Array, ""], Shaped[Array, " B *row"]], Rows]
    flag: Callable[
        [Rows, Int[Array, ""], Bool[Array, " B"]], tuple[Rows, Int[Array, ""]]
    ]
    put: Callable[[Rows, Int[Array, " B"], Shaped[Array, " B *row"]], Rows]
    increment: Callable[[Rows, Int[Array, " B"]], Rows]
    read: Callable[[Rows, Int[Array, "*B"]], Shaped[Array, "*B row"]]
    all: Callable[[Rows], Shaped[Array, " N *row"]]
    replace: Callable[[Rows, Shaped[Array, " N *row"]], Rows]


def wrap(capacity: int, largest_write: int) -> Wrap:
    """Makes the functions.

    Args:
      capacity: N, at least 1.
      largest_write: the most rows of one `write`, in ``[1, N]``.

    Raises:
      ValueError: if a number is out of range; later if a write is larger.
    """
    checks.number("capacity", capacity, 1)
    checks.number("largest_write", largest_write, 1, capacity)
    margin = largest_write

    def init(example: Any, fill: Any = 0) -> Rows:
        shape = (capacity + 2 * margin, *example.shape)
        return jnp.full(shape, fill, example.dtype)

    def write(rows: Rows, start: Int[Array, ""], values: Rows) -> Rows:
        checks.number("a write of", values.shape[0], 0, largest_write)
        # XLA would write narrower values into a part of each row.
        chex.assert_shape(values, (None, *rows.shape[1:]))
        place = jax.lax.dynamic_update_slice_in_dim
        rows = place(rows, values, start + margin, 0)
        return place(rows, values, jnp.maximum(start + margin - capacity, 0), 0)

    def flag(rows: Rows, start: Int[Array, ""], flags: Bool[Array, " B"]):
        # Two at least: XLA makes of a gather of one a slice, and then copies the array.
        later = jnp.arange(max(flags.size, 2), dtype=jnp.int32)
        old = rows[(start + later) % capacity + margin] & (later < flags.size)
        replaced = jnp.sum(old, dtype=jnp.int32)
        return write(rows, after(start, old), flags), replaced

    def read(rows: Rows, slots: Int[Array, "*B"]) -> Array:
        if slots.size == 1:
            # XLA makes of a gather of one a slice, and then copies the array before
            # it is written.
            two = rows[jnp.append(slots, slots) + margin]
            return two[:1].reshape(*slots.shape, *rows.shape[1:])
        return rows[slots + margin]

    def place_of(rows: Rows, slots: Int[Array, " B"]) -> Int[Array, " B"]:
        return jnp.where(slots >= 0, slots + margin, rows.shape[0])

    def put(rows: Rows, slots: Int[Array, " B"], values: Rows) -> Rows:
        chex.assert_shape(values, (slots.size, *rows.shape[1:]))
        if slots.size == 1:
            # XLA makes of a scatter of one a slice, which is read before it is written.
            slots = jnp.append(slots, -1)
            values = jnp.concatenate([values, values])
        return rows.at[place_of(rows, slots)].set(values, mode="drop")

    def increment(rows: Rows, slots: Int[Array, " B"]) -> Rows:
        return rows.at[place_of(rows, slots)].add(1, mode="drop")

    return Wrap(
        init=init,
        write=write,
        flag=flag,
        put=put,
        increment=increment,
        read=read,
        all=lambda rows: rows[margin : margin + capacity],
        replace=lambda rows, values: rows.at[margin : margin + capacity].set(values),
    )


def alone(step: Callable[[Any], Any], state: Any) -> Any:
    """``step(state)``, compiled apart from what reads its result.

    Under pmap and shard_map what a device returns is a reshaped copy of what its
    program reads on: XLA would make the step a part of both, and copy the arrays that
    it writes for each. It can't if the step is the body of a loop, of one turn, as long
    as it does not know that it is one.

    Args:
      step: what is done.
      state: arrays, before it.
    """
    once = jax.lax.optimization_barrier(jnp.int32(1))
    return jax.lax.fori_loop(0, once, lambda _, state: step(state), state)


def after(x: Int[Array, "*B"], *reads: Shaped[Array, "*C"]) -> Int[Array, "*B"]:
    """x, which nothing knows before the reads are done.

    XLA writes an array in place only if all that reads it is sure to come first, and
    copies it otherwise. Where a write does not depend on a read of the same array, this
    makes it so.

    Args:
      x: what the write depends on, such as a slot.
      *reads: what was read, bools or of four bytes each; of x's shape, or of any shape
        if x is one number.
    """
    for read in reads:
        if read.dtype == jnp.bool_:
            read = read.astype(jnp.int32)
        read = jax.lax.bitcast_convert_type(read, jnp.int32)
        # Never below 0, which XLA does not know.
        ones = jnp.minimum(jax.lax.population_count(read), 0)
        x = x + (ones if ones.shape == x.shape else jnp.sum(ones, dtype=jnp.int32))
    return x
