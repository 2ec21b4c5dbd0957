"""A sum-tree of arrays: draws in proportion to weights, and changes to a few of them.

A node's row of K children adds up to the node, from the first child to the last, always
in that order. An update writes leaves and adds up the rows above them anew; it adds no
difference, so nothing drifts: every parent is bitwise the sum of its row, and a NaN is
gone once its leaf is written again. A search compares with the same running sums, so it
ends in a leaf above 0 as long as there is one. (Weights below float32's smallest normal
number, 1.2e-38, are 0 to a backend that flushes them.)
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from fps_jax import checks

Tree = tuple[Float[Array, "_ _"], ...]
"""Rows of every level, ``[rows, K]``, from the leaves to the single row at the top.

Leaves beyond the capacity are 0.
"""
SPREADS = ("stratified", "systematic", "independent")
"""How `draw` spreads its targets."""


class SumTree(NamedTuple):
    """Functions of a tree over N leaves.

    Indices are int32; those outside of ``[0, N)`` are ignored by `update`.

    Attributes:
      init: ``init() -> tree``, all leaves 0.
      build: ``build(leaves [N]) -> tree``, in O(N).
      update: ``update(tree, indices [B], values [B]) -> tree``; of equal indices the
        last one's value stays, on every backend.
      write: ``write(tree, start, values [B]) -> tree``, a contiguous piece of a ring:
        leaves ``start ... start + B - 1`` modulo N, B at most N; in O(B).
      find: ``find(tree, targets [B], fine=0.0) -> indices [B]``, of the leaves in
        whose piece of ``[0, total)`` the targets are: the first leaf whose running sum
        is above ``targets + fine``, two numbers so that it can be told more finely than
        in one. Targets beyond the total find the last leaf above 0; if all leaves are
        0 what is found is leaf 0.
      total: ``total(tree)``, the sum of the leaves.
      leaves: ``leaves(tree) -> [N]``.
      get: ``get(tree, indices [B]) -> [B]``, leaves by their indices.
    """

    init: Callable[[], Tree]
    build: Callable[[Float[Array, " N"]], Tree]
    update: Callable[[Tree, Int[Array, " B"], Float[Array, " B"]], Tree]
    write: Callable[[Tree, Int[Array, ""], Float[Array, " B"]], Tree]
    find: Callable[..., Int[Array, " B"]]
    total: Callable[[Tree], Float[Array, ""]]
    leaves: Callable[[Tree], Float[Array, " N"]]
    get: Callable[[Tree, Int[Array, " B"]], Float[Array, " B"]]


def sum_tree(capacity: int, *, fan_out: int = 16) -> SumTree:
    """Makes the functions of a tree.

    Args:
      capacity: N, the number of leaves, at least 1.
      fan_out: K, children of a node, at least 2.

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

    def init() -> Tree:
        return tuple(jnp.zeros((r, fan_out), jnp.float32) for r in rows)

    def build(leaves: Float[Array, " N"]) -> Tree:
        levels, values = [], leaves
        for r in rows:
            padding = jnp.zeros(r * fan_out - values.size, values.dtype)
            levels.append(jnp.concatenate([values, padding]).reshape(r, fan_out))
            values = _row_totals(levels[-1])
        return tuple(levels)

    def update(tree: Tree, indices: Int[Array, " B"], values: Float[Array, " B"]):
        indices, values = _last_of_equals(indices, values)
        is_kept = (indices >= 0) & (indices < capacity)
        levels = []
        for level in tree:
            # What is ignored gets places of its own, outside.
            outside = level.size + jnp.arange(indices.size, dtype=jnp.int32)
            place = jnp.where(is_kept, indices, outside)
            level = level.reshape(-1).at[place].set(values, mode="drop")
            levels.append(level.reshape(-1, fan_out))
            indices = indices // fan_out
            values = _row_totals(levels[-1][jnp.where(is_kept, indices, 0)])
        return tuple(levels)

    def write(tree: Tree, start: Int[Array, ""], values: Float[Array, " B"]) -> Tree:
        checks.number("values", values.size, 0, capacity)
        place = (start + jnp.arange(values.size, dtype=jnp.int32)) % capacity
        levels = []
        for level in tree:
            level = level.reshape(-1).at[place].set(values).reshape(-1, fan_out)
            # The rows are a piece of a ring as well, but for up to two at its ends.
            touched = min(-(-values.size // fan_out) + 2, len(level))
            start = start // fan_out
            place = (start + jnp.arange(touched, dtype=jnp.int32)) % len(level)
            values = _row_totals(level[place])
            levels.append(level)
        return tuple(levels)

    def find(
        tree: Tree, targets: Float[Array, " B"], fine: Float[Array, " B"] | float = 0.0
    ) -> Int[Array, " B"]:
        node = jnp.zeros(targets.shape, jnp.int32)
        for level in reversed(tree):
            # A target that was rounded up to the end of a row is now a little below 0.
            child, left = _descend(level[node], jnp.maximum(targets + fine, 0.0))
            # Subtracted from the coarse part, which loses nothing by it.
            node, targets = node * fan_out + child, targets - left
        return node

    return SumTree(
        init=init,
        build=build,
        update=update,
        write=write,
        find=find,
        total=lambda tree: _row_totals(tree[-1])[0],
        leaves=lambda tree: tree[0].reshape(-1)[:capacity],
        get=lambda tree, indices: tree[0].reshape(-1)[indices],
    )


def _row_totals(rows: Float[Array, "rows K"]) -> Float[Array, " rows"]:
    """Sums of rows from left to right: one order everywhere, on every backend."""
    total = rows[:, 0]
    for k in range(1, rows.shape[1]):
        total = total + rows[:, k]
    return total


def _descend(row: Float[Array, "B K"], targets: Float[Array, " B"]):
    """The child that each target is in, and the sum of those left of it."""
    running = jnp.zeros_like(targets)
    child, left = jnp.zeros(targets.shape, jnp.int32), running
    last, left_of_last = child, running
    for k in range(row.shape[1]):
        is_above_0 = row[:, k] > 0.0
        last = jnp.where(is_above_0, k, last)
        left_of_last = jnp.where(is_above_0, running, left_of_last)
        running = running + row[:, k]
        is_passed = running <= targets
        child = child + is_passed.astype(jnp.int32)
        left = jnp.where(is_passed, running, left)
    # Rounding may put a target beyond the sum of its row.
    is_beyond = child > last
    return jnp.where(is_beyond, last, child), jnp.where(is_beyond, left_of_last, left)


def _last_of_equals(
    indices: Int[Array, " B"], values: Float[Array, " B"]
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """Keeps the last of equal indices; the others become -1."""
    place = jnp.arange(indices.size, dtype=jnp.int32)
    indices, place = jax.lax.sort((indices.astype(jnp.int32), place), num_keys=2)
    is_last = jnp.append(indices[1:] != indices[:-1], True)
    return jnp.where(is_last, indices, -1), values[place]


def draw(
    tree_of: SumTree,
    tree: Tree,
    key: Key[Array, ""],
    size: int,
    *,
    spread: str = "stratified",
) -> Int[Array, " B"]:
    """Draws leaves with replacement, each in proportion to its weight.

        stratified:   target_i = total (i + u_i) / B
        systematic:   target_i = total (i + u) / B
        independent:  target_i = total u_i

    Stratified draws take one leaf from each B-th part of the total (Schaul et al.,
    2016, arXiv:1511.05952, appendix B.2.1). Systematic ones take a leaf of share p
    either floor(B p) or ceil(B p) times. A target is known to about 2^-35 of the
    total: float32's 2^-24 would make some of ten million equal leaves twice as likely.

    Args:
      tree_of: functions of the tree.
      tree: the weights, not all of them 0.
      key: spent here.
      size: B, the number of draws.
      spread: "stratified", "systematic" or "independent".

    Raises:
      ValueError: if the spread is unknown or the size below 1.
    """
    checks.choice("spread", spread, SPREADS)
    checks.number("size", size, 1)
    key_coarse, key_fine = jax.random.split(key)
    u = jax.random.uniform(key_coarse, () if spread == "systematic" else (size,))
    stratum = jnp.arange(size, dtype=jnp.float32)
    share = u if spread == "independent" else (stratum + u) / size
    share = jnp.minimum(jnp.floor(share * 2.0**23), 2.0**23 - 1.0)
    # A uniform number has 23 bits: another one has those below them.
    more = jax.random.uniform(key_fine, (size,))
    # share total, in two parts: 12 bits times 12 bits are exact, the rest is small.
    total = tree_of.total(tree)
    bits = jax.lax.bitcast_convert_type(total, jnp.int32) & ~0xFFF
    high = jax.lax.bitcast_convert_type(bits, jnp.float32)
    first = jnp.floor(share * 2.0**-11)
    rest = (share - first * 2.0**11 + more) * 2.0**-23
    first = first * 2.0**-12
    return tree_of.find(tree, first * high, first * (total - high) + rest * total)


def draw_without_replacement(
    tree_of: SumTree, tree: Tree, key: Key[Array, ""], size: int
) -> tuple[Int[Array, " B"], Bool[Array, " B"]]:
    """Draws different leaves, one after the other, in proportion to what is left.

    The largest ``log w + Gumbel noise`` (Kool et al., 2019, arXiv:1903.06059), in O(N).

    Args:
      tree_of: functions of the tree.
      tree: the weights.
      key: spent here.
      size: B, the number of draws, at most N.

    Returns:
      Indices in the order of the draws, and which of them are valid: once the leaves
      above 0 are used up, none is.

    Raises:
      ValueError: if the size is out of range.
    """
    leaves = tree_of.leaves(tree)
    checks.number("size", size, 1, leaves.size)
    noise = jax.random.gumbel(key, leaves.shape)
    score, indices = jax.lax.top_k(jnp.log(leaves) + noise, size)
    return indices, score > -jnp.inf
