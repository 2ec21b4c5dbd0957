"""Rank-based draws, ``P(i) ~ (1 / rank(i))^alpha``, from an order rarely sorted.

The paper draws one transition from each of k segments of equal probability, whose
bounds it precomputes, and takes a heap that is seldom sorted for the order (section
3.3, appendix B.2.1). Here the probabilities of the ranks are the leaves of a sum-tree
that is built once for all sizes of the buffer: k equal pieces of its first n leaves'
sum are those segments, with bounds that need not be whole ranks (the first rank alone
may be several segments). The order is a sorted one, as of the last time it was sorted.

What was written since is on top, the newest first: it has the ranks 1 ... F, and a slot
of the order comes after it. A slot that was overwritten since the order was made has
two ranks until the next sorting; its probability is the sum of both.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, UInt32

from fps_jax import checks
from fps_jax.replay import sharding
from fps_jax.replay.samplers import Draws, Pool, Sampler
from fps_jax.replay.sum_tree import SPREADS, find, prefix, spread_targets, sum_tree
from fps_jax.replay.tree import Tree, last_of_equals
from fps_jax.replay.wrap import Rows, wrap


class RankBased(NamedTuple):
    """Priorities of a shard, and their order over all D shards.

    Slot s of shard d is item ``d N + s``. Ranks count from 0 here.

    Attributes:
      exponent: alpha.
      by_rank: sum-tree of ``(1 + rank)^-alpha``, for up to ``2 D N`` ranks.
      priority: of each slot; minus infinity if it can't be drawn.
      order: ``[D N]``, items by falling priority, as of the last sorting.
      rank: ``[D N]``, the place of each item in that.
      num_ordered: how many of them could be drawn then.
      sorted_at: how many items had been added to each shard then, modulo 2^32.
      num_updates: how often priorities were updated since.
    """

    exponent: Float[Array, ""]
    by_rank: Tree
    priority: Rows
    order: Int[Array, " DN"]
    rank: Int[Array, " DN"]
    num_ordered: Int[Array, ""]
    sorted_at: UInt32[Array, ""]
    num_updates: Int[Array, ""]


def rank_based(
    capacity: int,
    *,
    exponent: float | Float[Array, ""],
    largest_write: int,
    sort_period: int | None = None,
    spread: str = "stratified",
    num_shards: int = 1,
) -> Sampler:
    """Draws by rank; a new item is on top until the next sorting.

    A draw may find a slot that can't be used, such as that of a step which only reset
    an environment, as long as the order does not know: that draw is not valid.

    Args:
      capacity: N, of each shard.
      exponent: alpha, at least 0.
      largest_write: the most slots of one write.
      sort_period: R, the updates after which the next draw sorts first, in
        ``O(N log N)``; 1 sorts before every draw: the exact order. 0 leaves it to
        `rebuild`, as is best under ``vmap``, where a condition costs both its branches.
        None is N / 1000, from 1 to 1000.
      spread: "stratified", "systematic" or "independent", see `sum_tree`.
      num_shards: D, the devices that the replay is spread over.

    Raises:
      ValueError: if a number or the spread is not what it may be.
    """
    if sort_period is None:
        sort_period = min(max(capacity // 1000, 1), 1000)
    checks.number("exponent", exponent, 0)
    checks.number("sort_period", sort_period, 0)
    checks.number("num_shards", num_shards, 1)
    checks.choice("spread", spread, SPREADS)
    rows = wrap(capacity, largest_write)
    num_items = num_shards * capacity
    ranks = sum_tree(2 * num_items)

    def init() -> RankBased:
        alpha = jnp.asarray(exponent, jnp.float32)
        items = jnp.arange(num_items, dtype=jnp.int32)
        return RankBased(
            exponent=alpha,
            by_rank=ranks.build(of_ranks(2 * num_items, alpha)),
            priority=rows.init(alpha, -jnp.inf),
            order=items,
            rank=jnp.copy(items),
            num_ordered=jnp.int32(0),
            sorted_at=jnp.uint32(0),
            num_updates=jnp.int32(0),
        )

    def write(state: RankBased, start, priority, is_usable) -> RankBased:
        priority = jnp.where(is_usable, priority, -jnp.inf)
        return state._replace(priority=rows.write(state.priority, start, priority))

    def update(state: RankBased, slots, priority) -> RankBased:
        slots, place = last_of_equals(slots, capacity)
        return state._replace(
            priority=rows.put(state.priority, slots, priority[place]),
            num_updates=state.num_updates + 1,
        )

    def sort(state: RankBased, pool: Pool, axis_name: str | None) -> RankBased:
        priority = sharding.gather(rows.all(state.priority), axis_name)
        items = jnp.arange(num_items, dtype=jnp.int32)
        _, order = jax.lax.sort((-priority, items), num_keys=1, is_stable=True)
        return state._replace(
            order=order,
            rank=jnp.zeros_like(order).at[order].set(items, unique_indices=True),
            num_ordered=jnp.sum(priority > -jnp.inf, dtype=jnp.int32),
            sorted_at=pool.added,
            num_updates=jnp.int32(0),
        )

    def sort_if_due(state: RankBased, pool: Pool, axis_name: str | None) -> RankBased:
        if sort_period < 2:
            return sort(state, pool, axis_name) if sort_period else state
        is_due = state.num_updates >= sort_period
        sorted_now = lambda state: sort(state, pool, axis_name)
        return jax.lax.cond(is_due, sorted_now, lambda state: state, state)

    def num_fresh(state: RankBased, pool: Pool) -> Int[Array, ""]:
        """How many slots of each shard were written since the last sorting."""
        added = (pool.added - state.sorted_at).astype(jnp.uint32)
        return jnp.minimum(added, pool.span.astype(jnp.uint32)).astype(jnp.int32)

    def draw(state: RankBased, pool: Pool, key: Key[Array, ""], size: int, axis_name):
        if sharding.count(axis_name) != num_shards:
            raise ValueError(
                f"num_shards {num_shards} must be that of the devices, "
                f"{sharding.count(axis_name)}."
            )
        state = sort_if_due(state, pool, axis_name)
        top = num_shards * num_fresh(state, pool)
        num_ranks = top + state.num_ordered
        total = prefix(ranks, state.by_rank, num_ranks)
        targets = spread_targets(key, total, size, spread)
        rank = find(ranks, state.by_rank, *targets)
        rank = jnp.minimum(rank, jnp.maximum(num_ranks - 1, 0))
        fresh_slot = (pool.head - 1 - pool.skipped - rank // num_shards) % capacity
        item = state.order[jnp.clip(rank - top, 0, num_items - 1)]
        item = jnp.where(rank < top, rank % num_shards * capacity + fresh_slot, item)
        shard, slot = item // capacity, item % capacity
        is_own = shard == sharding.own(axis_name)
        is_usable = sharding.of_owners(pool.is_usable(slot), is_own, axis_name)
        return state, Draws(
            shard=shard,
            slot=slot,
            probability=probability(state, pool, item, total),
            is_valid=is_usable & (num_ranks > 0),
        )

    def probability(state: RankBased, pool: Pool, item, total) -> Float[Array, " B"]:
        """The sum of the probabilities of an item's ranks: it may have one or two."""
        shard, slot = item // capacity, item % capacity
        fresh = num_fresh(state, pool)
        newer = (pool.head - 1 - pool.skipped - slot) % capacity
        on_top = ranks.get(state.by_rank, newer * num_shards + shard)
        place = state.rank[item]
        in_order = ranks.get(state.by_rank, fresh * num_shards + place)
        weight = jnp.where(newer < fresh, on_top, 0.0)
        weight += jnp.where(place < state.num_ordered, in_order, 0.0)
        return weight / jnp.where(total > 0.0, total, 1.0)

    def rebuild(state: RankBased, pool: Pool, priority, is_usable, axis_name):
        priority = jnp.where(is_usable, priority, -jnp.inf)
        by_rank = ranks.build(of_ranks(2 * num_items, state.exponent))
        state = state._replace(
            by_rank=by_rank, priority=rows.replace(state.priority, priority)
        )
        return sort(state, pool, axis_name)

    def lowest_probability(state: RankBased, pool: Pool, axis_name):
        num_ranks = num_shards * num_fresh(state, pool) + state.num_ordered
        last = ranks.get(state.by_rank, jnp.maximum(num_ranks - 1, 0))
        total = prefix(ranks, state.by_rank, num_ranks)
        return last / jnp.where(total > 0.0, total, 1.0)

    return Sampler(
        only_orders=True,
        init=init,
        write=write,
        update=update,
        draw=draw,
        priority=lambda state, slots: (
            rows.all(state.priority)
            if slots is None
            else rows.read(state.priority, slots)
        ),
        rebuild=rebuild,
        largest=lambda state: jnp.max(rows.all(state.priority)),
        lowest_probability=lowest_probability,
        sort_period=sort_period,
    )


def of_ranks(size: int, exponent: Float[Array, ""]) -> Float[Array, " n"]:
    """``(1 + rank)^-alpha`` for ranks ``0 ... n - 1``.

    Args:
      size: n.
      exponent: alpha.
    """
    return jnp.power(jnp.arange(1, size + 1, dtype=jnp.float32), -exponent)
