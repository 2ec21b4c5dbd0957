"""How slots are drawn: each alike, or in proportion to a priority.

A sampler knows priorities by their slots, and nothing of what is stored there. Draws
are the same on every device (see `sharding`).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

from fps_jax import checks
from fps_jax.replay import sharding
from fps_jax.replay.sum_tree import (
    SPREADS,
    draw_without_replacement,
    find,
    spread_targets,
    sum_tree,
)
from fps_jax.replay.tree import Tree, array_tree
from fps_jax.replay.wrap import after

ATTEMPTS = 4
"""Slots that are drawn for each uniform one, since some of them can't be used."""
SMALLEST, LARGEST = 1e-37, 1e30
"""Bounds of a weight above 0: below, it might be flushed to 0; above, ten million of
them would not have a finite sum."""


class Pool(NamedTuple):
    """What may be drawn from a shard.

    Attributes:
      head: the slot that is written next.
      added: how many items were ever added to the shard, modulo 2^32.
      skipped: how many of the newest items can't be drawn yet.
      span: how many items after those are there.
      is_usable: ``is_usable(slots) -> bools``, which of them may be drawn.
      num_usable: how many may be drawn, on all devices, int32.
    """

    head: Int[Array, ""]
    added: UInt32[Array, ""]
    skipped: int
    span: Int[Array, ""]
    is_usable: Callable[[Int[Array, "*B"]], Bool[Array, "*B"]]
    num_usable: Int[Array, ""]


class Draws(NamedTuple):
    """What was drawn, the same on every device.

    Attributes:
      shard: ``[B]``, the device that owns it.
      slot: ``[B]``, where it is there.
      probability: ``[B]``, of each draw.
      is_valid: ``[B]``, whether there was anything to draw.
    """

    shard: Int[Array, " B"]
    slot: Int[Array, " B"]
    probability: Float[Array, " B"]
    is_valid: Bool[Array, " B"]


class Sampler(NamedTuple):
    """Functions of a shard's priorities.

    Attributes:
      only_orders: whether priorities are only compared, so that they may be negative.
      init: ``init() -> state``; nothing can be drawn.
      write: ``write(state, start, priority [B], is_usable [B]) -> state``, a contiguous
        piece of the ring; what is not usable is not drawn.
      update: ``update(state, slots [B], priority [B]) -> state``; slots below 0 are
        left out, and of equal slots the last one counts.
      draw: ``draw(state, pool, key, size, axis_name) -> (state, Draws)``.
      priority: ``priority(state, slots [B]) -> [B]``, or of all N for slots None.
      rebuild: ``rebuild(state, pool, priority [N], is_usable [N], axis_name) ->
        state``, in O(N).
      largest: ``largest(state)``, the greatest priority of the shard, 0 if empty.
      lowest_probability: ``lowest_probability(state, pool, axis_name)``, the least that
        a draw can have.
      sort_period: after how many updates the slots are sorted, if they are. Unless it
        is 1, what was written since must be the newest part of the ring.
    """

    only_orders: bool
    init: Callable[[], Any]
    write: Callable[..., Any]
    update: Callable[[Any, Int[Array, " B"], Float[Array, " B"]], Any]
    draw: Callable[..., tuple[Any, Draws]]
    priority: Callable[[Any, Int[Array, " B"] | None], Float[Array, " _"]]
    rebuild: Callable[..., Any]
    largest: Callable[[Any], Float[Array, ""]]
    lowest_probability: Callable[[Any, Pool, str | None], Float[Array, ""]]
    sort_period: int | None = None


def uniform_draws(
    pool: Pool, capacity: int, key: Key[Array, ""], size: int, axis_name: str | None
) -> Draws:
    """Draws slots alike among those that may be drawn.

    Some are found unusable, such as those of steps that only reset an environment: of
    `ATTEMPTS` slots drawn for each place the first usable one is taken, and if there is
    none the draw is not valid.

    Args:
      pool: what may be drawn.
      capacity: N.
      key: spent here.
      size: B.
      axis_name: the device axis, if any.
    """
    num_shards = sharding.count(axis_name)
    # Shards are written alike, so each has as many items.
    bound = jnp.maximum(pool.span * num_shards, 1)
    number = jax.random.randint(key, (ATTEMPTS, size), 0, bound)
    shard = number % num_shards
    slot = (pool.head - 1 - pool.skipped - number // num_shards) % capacity
    is_found = pool.is_usable(slot) & (shard == sharding.own(axis_name))
    is_found = sharding.add_up(is_found.astype(jnp.int32), axis_name) > 0
    first = jnp.argmax(is_found, axis=0)
    pick = lambda x: jnp.take_along_axis(x, first[None], axis=0)[0]
    is_found = pick(is_found) & (pool.num_usable > 0)
    return Draws(pick(shard), pick(slot), jnp.full((size,), alike(pool)), is_found)


def alike(pool: Pool) -> Float[Array, ""]:
    """The probability of each item, if all have the same.

    Args:
      pool: what may be drawn.
    """
    return 1.0 / jnp.maximum(pool.num_usable, 1).astype(jnp.float32)


def chance_of_a_usable_slot(pool: Pool, axis_name: str | None) -> Float[Array, ""]:
    """The chance that `uniform_draws` finds a usable slot for a place.

    Args:
      pool: what may be drawn.
      axis_name: the device axis, if any.
    """
    num_slots = jnp.maximum(pool.span * sharding.count(axis_name), 1)
    share = pool.num_usable.astype(jnp.float32) / num_slots.astype(jnp.float32)
    return 1.0 - (1.0 - share) ** ATTEMPTS


def uniform(capacity: int, *, newest: int | None = None) -> Sampler:
    """Draws every slot alike, with replacement; priorities are not kept.

    Args:
      capacity: N.
      newest: draws only from so many of the newest slots of each shard; None is all. A
        draw's probability is told as if it were from all.

    Raises:
      ValueError: if the number is out of range.
    """
    checks.number("newest", newest, 1)
    bound = capacity if newest is None else min(newest, capacity)
    within = lambda pool: pool._replace(span=jnp.minimum(pool.span, bound))
    ones = lambda slots: jnp.ones(capacity if slots is None else slots.shape)
    return Sampler(
        only_orders=True,
        init=lambda: (),
        write=lambda state, start, priority, is_usable: state,
        update=lambda state, slots, priority: state,
        draw=lambda state, pool, key, size, axis_name: (
            state,
            uniform_draws(within(pool), capacity, key, size, axis_name),
        ),
        priority=lambda state, slots: ones(slots),
        rebuild=lambda state, pool, priority, is_usable, axis_name: state,
        largest=lambda state: jnp.float32(1.0),
        lowest_probability=lambda state, pool, axis_name: alike(pool),
    )


class Proportional(NamedTuple):
    """Weights, every one of them ``priority^exponent`` with this exponent.

    Attributes:
      exponent: alpha, 0 for uniform draws; it changes by `Replay.set_exponent` alone,
        which changes the weights with it.
      weights: their sum-tree.
      lowest: a tree of the least weight that can be drawn; () if nobody asks for it.
      highest: a tree of the greatest weight; () if nobody asks for it.
    """

    exponent: Float[Array, ""]
    weights: Tree
    lowest: Any
    highest: Any


def to_weight(
    priority: Float[Array, "*B"], exponent: Float[Array, ""]
) -> Float[Array, "*B"]:
    """``priority^exponent``, within bounds that keep sums exact and finite.

    Args:
      priority: finite, at least 0.
      exponent: alpha.
    """
    weight = jnp.clip(jnp.power(priority, exponent), SMALLEST, LARGEST)
    return jnp.where((priority > 0.0) | (exponent == 0.0), weight, 0.0)


def proportional(
    capacity: int,
    *,
    exponent: float | Float[Array, ""],
    spread: str = "stratified",
    uniform_fraction: float = 0.0,
    fan_out: int = 16,
    keeps_lowest: bool = False,
    keeps_highest: bool = False,
) -> Sampler:
    """Draws in proportion to ``priority^exponent``, by a sum-tree (section 3.3).

        P(i) = p_i^alpha / sum_k p_k^alpha

    Args:
      capacity: N.
      exponent: alpha, at least 0.
      spread: "stratified", "systematic" or "independent" (see `sum_tree`), or
        "without_replacement", in O(N), on one device.
      uniform_fraction: the chance of each draw to be uniform instead, in [0, 1]. Above
        0, all draws are uniform as long as no weight is above 0.
      fan_out: K, children of a node.
      keeps_lowest: whether the least probability of the buffer is kept at hand.
      keeps_highest: whether the greatest priority of the buffer is.

    Raises:
      ValueError: if a number or the spread is not what it may be.
    """
    checks.number("exponent", exponent, 0)
    checks.number("uniform_fraction", uniform_fraction, 0, 1)
    checks.choice("spread", spread, (*SPREADS, "without_replacement"))
    if spread == "without_replacement" and uniform_fraction:
        raise ValueError(
            f"uniform_fraction {uniform_fraction} must be 0 without replacement."
        )
    sums = sum_tree(capacity, fan_out=fan_out)
    least = array_tree(capacity, fan_out=fan_out, combine=jnp.minimum, neutral=jnp.inf)
    most = array_tree(capacity, fan_out=fan_out, combine=jnp.maximum)

    def each(change: Callable[..., Tree], state, *where: Any, weight, is_usable):
        """The same change in every tree that is kept."""
        is_drawn = is_usable if uniform_fraction else weight > 0.0
        drawn = jnp.where(is_drawn, weight, jnp.inf)
        lowest, highest = state.lowest, state.highest
        return state._replace(
            weights=change(sums, state.weights, *where, weight),
            lowest=change(least, lowest, *where, drawn) if keeps_lowest else (),
            highest=change(most, highest, *where, weight) if keeps_highest else (),
        )

    def init() -> Proportional:
        return Proportional(
            exponent=jnp.asarray(exponent, jnp.float32),
            weights=sums.init(),
            lowest=least.init() if keeps_lowest else (),
            highest=most.init() if keeps_highest else (),
        )

    def write(state: Proportional, start, priority, is_usable) -> Proportional:
        weight = jnp.where(is_usable, to_weight(priority, state.exponent), 0.0)
        change = lambda of, tree, start, weight: of.write(tree, start, weight)
        return each(change, state, start, weight=weight, is_usable=is_usable)

    def update(state: Proportional, slots, priority) -> Proportional:
        change = lambda of, tree, slots, weight: of.update(tree, slots, weight)
        weight = to_weight(priority, state.exponent)
        return each(change, state, slots, weight=weight, is_usable=True)

    def rebuild(state: Proportional, pool, priority, is_usable, axis_name):
        weight = jnp.where(is_usable, to_weight(priority, state.exponent), 0.0)
        change = lambda of, tree, weight: of.build(weight)
        return each(change, state, weight=weight, is_usable=is_usable)

    def mixed(probability, total, pool: Pool, axis_name) -> Float[Array, "*B"]:
        """What a probability by weight is, once some draws are uniform."""
        if not uniform_fraction:
            return probability
        share = uniform_fraction * chance_of_a_usable_slot(pool, axis_name)
        share = jnp.where(total > 0.0, share, 1.0)
        return (1.0 - share) * probability + share * alike(pool)

    def draw(state: Proportional, pool: Pool, key, size: int, axis_name):
        if spread == "without_replacement":
            return state, _different(state, key, size, axis_name)
        key, *more_keys = jax.random.split(key, 3) if uniform_fraction else [key]
        own_total = sums.root(state.weights)
        total = jnp.sum(sharding.gather(own_total[None], axis_name))
        coarse, fine = spread_targets(key, total, size, spread)
        shard, coarse = sharding.locate(own_total, coarse, fine, axis_name)
        is_own = lambda: shard == sharding.own(axis_name)
        slot = find(sums, state.weights, coarse, fine)
        slot = sharding.of_owners(slot, is_own(), axis_name)
        is_valid = jnp.full((size,), total > 0.0)
        if uniform_fraction:
            key_slots, key_which = more_keys
            others = uniform_draws(pool, capacity, key_slots, size, axis_name)
            is_alike = jax.random.uniform(key_which, (size,)) < uniform_fraction
            is_alike = (is_alike | ~is_valid) & others.is_valid
            shard = jnp.where(is_alike, others.shard, shard)
            slot = jnp.where(is_alike, others.slot, slot)
            is_valid = is_valid | is_alike
        weight = sums.get(state.weights, slot)
        weight = sharding.of_owners(weight, is_own(), axis_name)
        share = weight / jnp.where(total > 0.0, total, 1.0)
        probability = mixed(share, total, pool, axis_name)
        return state, Draws(shard, after(slot, weight), probability, is_valid)

    def _different(state: Proportional, key, size: int, axis_name) -> Draws:
        if axis_name is not None:
            raise ValueError(
                "spread without_replacement must be on one device, "
                f"not over the axis {axis_name!r}."
            )
        slot, is_valid = draw_without_replacement(sums, state.weights, key, size)
        total = sums.root(state.weights)
        share = sums.get(state.weights, slot) / jnp.where(total > 0.0, total, 1.0)
        return Draws(jnp.zeros_like(slot), slot, share, is_valid)

    def priority(state: Proportional, slots) -> Float[Array, " _"]:
        weight = (
            sums.leaves(state.weights)
            if slots is None
            else sums.get(state.weights, slots)
        )
        return jnp.power(weight, 1.0 / state.exponent)

    def lowest_probability(
        state: Proportional, pool: Pool, axis_name
    ) -> Float[Array, ""]:
        if not keeps_lowest:
            raise ValueError("keeps_lowest False must be True for its probability.")
        lowest = least.root(state.lowest)
        total = jnp.sum(sharding.gather(sums.root(state.weights)[None], axis_name))
        lowest = jnp.min(sharding.gather(lowest[None], axis_name))
        share = jnp.where(total > 0.0, lowest / jnp.where(total > 0.0, total, 1.0), 0.0)
        return mixed(share, total, pool, axis_name)

    def highest_priority(state: Proportional) -> Float[Array, ""]:
        if not keeps_highest:
            raise ValueError("keeps_highest False must be True for its priority.")
        return jnp.power(most.root(state.highest), 1.0 / state.exponent)

    return Sampler(
        only_orders=False,
        init=init,
        write=write,
        update=update,
        draw=draw,
        priority=priority,
        rebuild=rebuild,
        largest=highest_priority,
        lowest_probability=lowest_probability,
    )
