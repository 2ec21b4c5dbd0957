"""A sum-tree: draws in proportion to weights, and changes to a few of them.

A node is the sum of its row. A search compares with the running sums that make it, so
it ends in a leaf above 0 as long as there is one. (Weights below float32's smallest
normal number, 1.2e-38, are 0 to a backend that flushes them.)
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from fps_jax import checks
from fps_jax.replay.tree import ArrayTree, Tree, array_tree

SPREADS = ("stratified", "systematic", "independent")
"""How `spread_targets` spreads its targets."""


def sum_tree(capacity: int, *, fan_out: int = 16) -> ArrayTree:
    """Makes the functions of a tree of sums.

    Args:
      capacity: N, the number of leaves, at least 1.
      fan_out: K, children of a node, at least 2.

    Raises:
      ValueError: if a number is out of range, or there are too many leaves for int32.
    """
    return array_tree(capacity, fan_out=fan_out)


def find(
    tree_of: ArrayTree,
    tree: Tree,
    targets: Float[Array, " B"],
    fine: Float[Array, " B"] | float = 0.0,
) -> Int[Array, " B"]:
    """The leaves in whose piece of ``[0, total)`` the targets are.

    That is the first leaf whose running sum is above ``targets + fine``, two numbers so
    that it can be told more finely than in one. Targets beyond the total find the leaf
    that completes it; if all leaves are 0 what is found is leaf 0.

    Args:
      tree_of: functions of the tree.
      tree: of sums.
      targets: the coarse part.
      fine: the rest.
    """

    def into_a_child(above: tuple[Array, Array], start: Int[Array, ""]):
        node, targets = above
        # A target that was rounded up to the end of a row is now a little below 0.
        rest = jnp.maximum(targets + fine, 0.0)
        child, left = descend(tree[start + node], rest)
        # Subtracted from the coarse part, which loses nothing by it.
        return (node * tree.shape[1] + child, targets - left), None

    top = jnp.zeros(targets.shape, jnp.int32)
    down = jnp.array(tree_of.starts[::-1], jnp.int32)
    # A loop, or XLA would search the levels above anew for each level below.
    return jax.lax.scan(into_a_child, (top, targets), down)[0][0]


def prefix(tree_of: ArrayTree, tree: Tree, count: Int[Array, ""]) -> Float[Array, ""]:
    """The sum of the first leaves.

    Args:
      tree_of: functions of the tree.
      tree: of sums.
      count: how many leaves, in ``[0, N]``.
    """
    first = lambda row, count: jnp.sum(
        jnp.where(jnp.arange(row.size) < count, row, 0.0)
    )
    total = jnp.zeros((), tree.dtype)
    for start in tree_of.starts[:-1]:
        row, rest = count // tree.shape[1], count % tree.shape[1]
        total, count = total + first(tree[start + row], rest), row
    return total + first(tree[-1], count)


def descend(row: Float[Array, "B K"], targets: Float[Array, " B"]):
    """The child that each target is in, and the sum of those left of it.

    It is the first child up to which the running sum is above the target, or is that of
    the whole row. Before the child it was less: so the child is above 0 if any is.

    Args:
      row: the children, ``[B, K]``.
      targets: ``[B]``, from 0 on.

    Returns:
      The child and the sum; each ``[B]``.
    """
    running = [row[:, 0]]
    for k in range(1, row.shape[1]):
        running.append(running[-1] + row[:, k])
    child, left = jnp.zeros(targets.shape, jnp.int32), jnp.zeros_like(targets)
    for until in running:
        # Rounding may put a target beyond the sum of its row.
        is_passed = (until <= targets) & (until < running[-1])
        child = child + is_passed.astype(jnp.int32)
        left = jnp.where(is_passed, until, left)
    return child, left


def spread_targets(
    key: Key[Array, ""], total: Float[Array, ""], size: int, spread: str
) -> tuple[Float[Array, " B"], Float[Array, " B"]]:
    """Draws targets in ``[0, total)``.

        stratified:   target_i = total (i + u_i) / B
        systematic:   target_i = total (i + u) / B
        independent:  target_i = total u_i

    Stratified draws take one leaf from each B-th part of the total (Schaul et al.,
    2016, arXiv:1511.05952, appendix B.2.1). Systematic ones take a leaf of share p
    either floor(B p) or ceil(B p) times. A target is known to about 2^-35 of the
    total: float32's 2^-24 would make some of ten million equal leaves twice as likely.

    Args:
      key: spent here.
      total: the sum of all weights.
      size: B, the number of draws.
      spread: "stratified", "systematic" or "independent".

    Returns:
      The targets in two parts, coarse and fine, whose sums they are.

    Raises:
      ValueError: if the spread is unknown or the size below 1.
    """
    checks.choice("spread", spread, SPREADS)
    checks.number("size", size, 1)
    # Two numbers of 23 bits for each draw: what divides the total, and what is below.
    coarse, more = jax.random.uniform(key, (2, size))
    u = coarse[:1] if spread == "systematic" else coarse
    stratum = jnp.arange(size, dtype=jnp.float32)
    share = u if spread == "independent" else (stratum + u) / size
    share = jnp.minimum(jnp.floor(share * 2.0**23), 2.0**23 - 1.0)
    # share total, in two parts: 12 bits times 12 bits are exact, the rest is small.
    bits = jax.lax.bitcast_convert_type(total, jnp.int32) & ~0xFFF
    high = jax.lax.bitcast_convert_type(bits, jnp.float32)
    first = jnp.floor(share * 2.0**-11)
    rest = (share - first * 2.0**11 + more) * 2.0**-23
    first = first * 2.0**-12
    return first * high, first * (total - high) + rest * total


def draw_without_replacement(
    tree_of: ArrayTree, tree: Tree, key: Key[Array, ""], size: int
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
