"""Drawing from a replay, and telling it what the draws were worth."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from fps_jax import checks
from fps_jax.replay import priorities, sharding
from fps_jax.replay.ring import age as age_of
from fps_jax.replay.states import (
    Parts,
    ReplayState,
    Sample,
    Ticket,
    is_acceptable,
    pool_of,
)
from fps_jax.replay.tree import last_of_equals
from fps_jax.replay.wrap import Rows


def sample(
    parts: Parts,
    state: ReplayState,
    key: Key[Array, ""],
    *,
    batch_size: int,
    importance_exponent: float | Float[Array, ""] = 1.0,
    axis_name: str | None = None,
    **reading: Any,
) -> tuple[ReplayState, Sample]:
    """Draws items; see `Replay`.

    Args:
      parts: of the replay.
      state: of this device's shard.
      key: spent here; the same on every device.
      batch_size: B, of each device.
      importance_exponent: beta of the importance weights, in [0, 1].
      axis_name: the device axis, if any.
      **reading: for the storage's ``get``.

    Raises:
      ValueError: if a number is out of range.
    """
    checks.number("batch_size", batch_size, 1)
    together = axis_name if parts.exchange else None
    if together != axis_name:
        key = jax.random.fold_in(key, sharding.own(axis_name))
    pool = pool_of(parts, state, together)
    size = batch_size * sharding.count(together)
    drawn, draws = parts.sampler.draw(state.sampler, pool, key, size, together)
    is_own = draws.shard == sharding.own(together)
    slot = jnp.where(is_own, draws.slot, 0)
    # Each device drawing for itself, an item is its shard's with a chance of 1 / D.
    apart = 1.0 if together == axis_name else 1.0 / sharding.count(axis_name)
    lowest = None
    if parts.normalize == "buffer":
        lowest = apart * parts.sampler.lowest_probability(drawn, pool, together)
    read = lambda kept: parts.rows.read(kept, slot)
    serial, notes = read(state.serial), jax.tree.map(read, state.notes)
    draws, lowest, serial, notes = _awaited(
        (draws, lowest, serial, notes), pool.num_usable
    )
    serial, notes = sharding.deal((serial, notes), is_own, together)
    items = parts.storage.get(state.memory, state.cursor, slot, **reading)
    items = sharding.deal(items, is_own, together, axis=parts.storage.batch_axis)
    if parts.storage.is_intact is not None:
        is_intact = parts.storage.is_intact(state.memory, state.cursor, slot)
        is_intact = sharding.of_owners(is_intact, is_own, together)
        draws = draws._replace(is_valid=draws.is_valid & is_intact)
    draws = sharding.part(draws, together)
    weights = priorities.importance_weights(
        apart * draws.probability,
        sharding.add_up(state.num_usable, axis_name),
        exponent=importance_exponent,
        is_valid=draws.is_valid,
        normalize=parts.normalize,
        min_probability=lowest,
        axis_name=axis_name,
    )
    if parts.limiter is not None:
        balance = parts.limiter.sampled(state.balance, batch_size)
        state = state._replace(balance=balance)
    return state._replace(sampler=drawn), Sample(
        items=items,
        importance_weights=weights,
        probability=apart * draws.probability,
        is_valid=draws.is_valid,
        ticket=Ticket(draws.shard, draws.slot, serial, draws.is_valid),
        notes=notes,
    )


def _awaited(read: Any, num_usable: Int[Array, ""]) -> Any:
    """What was read, once all of it was; zeros if nothing can be drawn.

    A write that depends on any of it comes after all the reads: XLA copies an array
    that is read and written if it does not know which is first.
    """
    zeros = lambda read: jax.tree.map(jnp.zeros_like, read)
    return jax.lax.cond(num_usable > 0, lambda read: read, zeros, read)


def update(
    parts: Parts,
    state: ReplayState,
    ticket: Ticket,
    priority: Float[Array, " B"],
    *,
    td_error: Float[Array, " B"] | None = None,
    predecessor_boost: Float[Array, " B"] | None = None,
    axis_name: str | None = None,
) -> ReplayState:
    """Tells the priorities of what was drawn; see `Replay`.

    Args:
      parts: of the replay.
      state: of this device's shard.
      ticket: of the sample.
      priority: raw, without the exponent; one that can't be stored is counted, and the
        item keeps what it has.
      td_error: to be noted, if the replay notes it.
      predecessor_boost: added to the priority of the step before each.
      axis_name: the device axis, if any.

    Raises:
      ValueError: if the TD error is to be noted and not given.
    """
    if "last_td_error" in state.notes and td_error is None:
        raise ValueError("td_error None must be given: the replay notes it.")
    together = axis_name if parts.exchange else None
    ticket, priority, td_error, predecessor_boost = sharding.gather(
        (ticket, priority, td_error, predecessor_boost), together
    )
    is_there = ticket.is_valid & (ticket.shard == sharding.own(together))
    is_there &= parts.rows.read(state.serial, ticket.slot) == ticket.serial
    is_kept = is_acceptable(parts, priority)
    rejected = jnp.sum(is_there & ~is_kept, dtype=jnp.uint32)
    counted = jnp.where(is_kept & ticket.is_valid, priority, 0.0)
    slots = jnp.where(is_there & is_kept, ticket.slot, -1)
    state = state._replace(
        sampler=parts.sampler.update(state.sampler, slots, priority),
        maximum=priorities.new_maximum(
            state.maximum, counted, decay=parts.decay, axis_name=axis_name
        ),
        num_updates=state.num_updates + jnp.uint32(1),
        num_rejected=state.num_rejected + rejected,
    )
    there = jnp.where(is_there, ticket.slot, -1)
    if predecessor_boost is not None:
        state = _boost_predecessors(parts, state, there, predecessor_boost)
    return state._replace(notes=_noted(parts, state, there, td_error))


def _boost_predecessors(
    parts: Parts, state: ReplayState, slots: Int[Array, " B"], boost: Float[Array, " B"]
) -> ReplayState:
    """Adds to the priorities of the steps before, of the same episode."""
    storage = parts.storage
    before = (slots - storage.num_streams) % storage.capacity
    # The oldest step has none before it: what is there is the newest one.
    is_there = age_of(state.cursor, before, storage.capacity) < state.cursor.size
    is_there &= age_of(state.cursor, before, storage.capacity) > age_of(
        state.cursor, slots, storage.capacity
    )
    is_there &= (slots >= 0) & ~storage.is_last(state.memory, before)
    is_there &= parts.rows.read(state.is_usable, before)
    priority = parts.sampler.priority(state.sampler, before) + boost
    is_there &= is_acceptable(parts, priority)
    before = jnp.where(is_there, before, -1)
    return state._replace(sampler=parts.sampler.update(state.sampler, before, priority))


def _noted(
    parts: Parts,
    state: ReplayState,
    slots: Int[Array, " B"],
    td_error: Float[Array, " B"] | None,
) -> dict[str, Rows]:
    """The notes after a replay of the slots."""
    if not state.notes:
        return {}
    once, place = last_of_equals(slots, parts.storage.capacity)
    fresh = {"last_replayed": jnp.full(slots.shape, state.num_updates)}
    if td_error is not None:
        fresh["last_td_error"] = td_error[place]
    notes = dict(state.notes)
    for name in notes:
        if name == "times_replayed":
            notes[name] = parts.rows.increment(notes[name], slots)
        else:
            notes[name] = parts.rows.put(notes[name], once, fresh[name])
    return notes


def reprioritize(
    parts: Parts,
    state: ReplayState,
    rule: Callable[..., Float[Array, " N"]],
    *,
    axis_name: str | None = None,
) -> ReplayState:
    """Sets all priorities anew; see `Replay`.

    Args:
      parts: of the replay.
      state: of this device's shard.
      rule: ``rule(priority [N], age [N], notes) -> priority [N]``; what can't be stored
        is not.
      axis_name: the device axis, if any.
    """
    rows = parts.rows
    before = parts.sampler.priority(state.sampler, None)
    age = state.added - rows.all(state.serial)
    priority = rule(before, age, {name: rows.all(x) for name, x in state.notes.items()})
    priority = jnp.where(is_acceptable(parts, priority), priority, before)
    return _rebuilt(parts, state, state.sampler, priority, axis_name)


def set_exponent(
    parts: Parts,
    state: ReplayState,
    exponent: float | Float[Array, ""],
    *,
    axis_name: str | None = None,
) -> ReplayState:
    """Draws with another exponent from now on; see `Replay`.

    Args:
      parts: of the replay.
      state: of this device's shard.
      exponent: alpha, at least 0.
      axis_name: the device axis, if any.

    Raises:
      ValueError: if it is out of range, or the sampler has none.
    """
    checks.number("exponent", exponent, 0)
    if not hasattr(state.sampler, "exponent"):
        raise ValueError(f"exponent {exponent} must be None: this sampler has none.")
    priority = parts.sampler.priority(state.sampler, None)
    sampler = state.sampler._replace(exponent=jnp.asarray(exponent, jnp.float32))
    return _rebuilt(parts, state, sampler, priority, axis_name)


def _rebuilt(
    parts: Parts,
    state: ReplayState,
    sampler: Any,
    priority: Float[Array, " N"],
    axis_name: str | None,
) -> ReplayState:
    together = axis_name if parts.exchange else None
    pool = pool_of(parts, state, together)
    is_usable = parts.rows.all(state.is_usable)
    return state._replace(
        sampler=parts.sampler.rebuild(sampler, pool, priority, is_usable, together)
    )


def can_sample(
    parts: Parts, state: ReplayState, batch_size: int, *, axis_name: str | None = None
) -> Bool[Array, ""]:
    """Whether something may be drawn; see `Replay`.

    Args:
      parts: of the replay.
      state: of this device's shard.
      batch_size: B, of each device.
      axis_name: the device axis, if any.
    """
    is_there = sharding.add_up(state.num_usable, axis_name) > 0
    if parts.limiter is None:
        return is_there
    size = state.cursor.size
    return is_there & parts.limiter.may_sample(state.balance, size, batch_size)


def can_add(parts: Parts, state: ReplayState) -> Bool[Array, ""]:
    """Whether the limiter lets items in; see `Replay`.

    As long as nothing can be drawn it always does: those that wait for the steps which
    follow them have been counted.

    Args:
      parts: of the replay.
      state: of this device's shard.
    """
    if parts.limiter is None:
        return jnp.bool_(True)
    may_add = parts.limiter.may_add(state.balance, state.cursor.size)
    return may_add | (state.num_usable == 0)
