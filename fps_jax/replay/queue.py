"""Draws of the largest priorities: a priority queue, as a tree of maxima."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from fps_jax.replay import sharding
from fps_jax.replay.samplers import Draws, Pool, Sampler, alike
from fps_jax.replay.tree import ArrayTree, Tree, array_tree


def greedy(capacity: int, *, fan_out: int = 16) -> Sampler:
    """Draws the largest priorities, each slot once: a priority queue (section 3.2).

    Args:
      capacity: N.
      fan_out: K, children of a node.
    """
    most = array_tree(capacity, fan_out=fan_out, combine=jnp.maximum, neutral=-jnp.inf)
    only = lambda priority, is_usable: jnp.where(is_usable, priority, -jnp.inf)

    def draw(state: Tree, pool: Pool, key: Key[Array, ""], size: int, axis_name):
        value, slot = largest(most, state, size)
        shard = jnp.full(slot.shape, sharding.own(axis_name))
        value, slot, shard = sharding.gather((value, slot, shard), axis_name)
        value, best = jax.lax.top_k(value, size)
        probability = jnp.full((size,), alike(pool))
        return state, Draws(shard[best], slot[best], probability, value > -jnp.inf)

    return Sampler(
        only_orders=True,
        init=most.init,
        write=lambda state, start, priority, is_usable: most.write(
            state, start, only(priority, is_usable)
        ),
        update=most.update,
        draw=draw,
        priority=lambda state, slots: (
            most.leaves(state) if slots is None else most.get(state, slots)
        ),
        rebuild=lambda state, pool, priority, is_usable, axis_name: most.build(
            only(priority, is_usable)
        ),
        largest=most.root,
        lowest_probability=lambda state, pool, axis_name: alike(pool),
    )


def largest(
    tree_of: ArrayTree, tree: Tree, size: int
) -> tuple[Float[Array, " B"], Int[Array, " B"]]:
    """The largest leaves of a tree of maxima, in order.

    They are below the largest nodes of every level, so those are all that is looked at:
    ``O(B K log N)``.

    Args:
      tree_of: functions of the tree.
      tree: of maxima.
      size: B; leaves that are not there are given as minus infinity.

    Returns:
      The leaves and their indices, 0 for those that are not there.
    """
    node, value = jnp.zeros(1, jnp.int32), jnp.zeros(1)
    for start in reversed(tree_of.starts):
        # Below what is only padding there is no row.
        rows = jnp.where(value[:, None] > -jnp.inf, tree[start + node], -jnp.inf)
        rows = rows.reshape(-1)
        value, place = jax.lax.top_k(rows, min(size, rows.size))
        row, child = jnp.divmod(place, tree.shape[1])
        node = node[row] * tree.shape[1] + child
        node = jnp.where(value > -jnp.inf, node, 0)
    missing = (0, size - node.size)
    return jnp.pad(value, missing, constant_values=-jnp.inf), jnp.pad(node, missing)
