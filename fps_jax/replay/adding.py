"""Adding to a replay: what goes where, what has to go, and what new items are worth."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from fps_jax import checks
from fps_jax.replay import priorities, ring, sharding
from fps_jax.replay.ring import Cursor
from fps_jax.replay.states import Parts, ReplayState, is_acceptable
from fps_jax.replay.wrap import Rows, alone


def init(parts: Parts, example: Any) -> ReplayState:
    """A replay without any item.

    Args:
      parts: of the replay.
      example: one item, without the axis B; shapes and dtypes are enough.
    """
    rows = parts.rows
    noted = {
        "last_td_error": rows.init(jnp.float32(0), jnp.nan),
        "times_replayed": rows.init(jnp.int32(0)),
        "last_replayed": rows.init(jnp.uint32(0)),
    }
    return ReplayState(
        memory=parts.storage.init(example),
        cursor=Cursor(jnp.int32(0), jnp.int32(0)),
        added=jnp.uint32(0),
        serial=rows.init(jnp.uint32(0)),
        is_usable=rows.init(jnp.bool_(False)),
        num_usable=jnp.int32(0),
        pending=(jnp.zeros(parts.waiting), jnp.zeros(parts.waiting, bool)),
        sampler=parts.sampler.init(),
        maximum=jnp.float32(1.0),
        num_updates=jnp.uint32(0),
        num_rejected=jnp.uint32(0),
        balance=jnp.float32(0.0),
        notes={name: noted[name] for name in parts.notes},
    )


def add(
    parts: Parts,
    state: ReplayState,
    items: Any,
    priority: Float[Array, " B"] | None = None,
    *,
    axis_name: str | None = None,
) -> ReplayState:
    """Adds items; see `Replay`.

    Args:
      parts: of the replay.
      state: of this device's shard.
      items: ``[B, ...]``.
      priority: ``[B]``, raw; one that can't be stored is counted, and replaced by the
        one for new items.
      axis_name: the device axis, if any.

    Raises:
      ValueError: if there are too many items.
    """
    count = jax.tree.leaves(items)[0].shape[0]
    capacity = parts.storage.capacity
    checks.number("an add, with largest_add, of", count, 0, parts.storage.largest_add)
    room = capacity - parts.waiting
    checks.number("an add, beside the steps that wait, of", count, 0, room)
    new = jnp.full(count, _of_new(parts, state, axis_name))
    if priority is not None:
        is_given = is_acceptable(parts, priority)
        new = jnp.where(is_given, priority, new)
        rejected = jnp.sum(~is_given, dtype=jnp.uint32)
        state = state._replace(
            maximum=priorities.new_maximum(
                state.maximum, jnp.where(is_given, priority, 0.0), axis_name=axis_name
            ),
            num_rejected=state.num_rejected + rejected,
        )
    if parts.limiter is not None:
        balance = parts.limiter.added(state.balance, state.cursor.size, count)
        state = state._replace(balance=balance)
    put = _in_place_of_the_oldest if parts.eviction is None else _in_place_of_the_worst
    usable = parts.storage.usable(items)
    state = alone(lambda state: put(parts, state, items, new, usable), state)
    return state._replace(
        cursor=ring.advance(state.cursor, count, capacity),
        added=state.added + jnp.uint32(count),
    )


def cut(parts: Parts, state: ReplayState, streams: Bool[Array, " E"]) -> ReplayState:
    """Ends streams whose next step does not follow from their last; see `Replay`.

    Args:
      parts: of the replay.
      state: of this device's shard.
      streams: which of them.

    Raises:
      ValueError: if the storage has no steps that follow each other.
    """
    storage = parts.storage
    checks.number("streams", streams.size, storage.num_streams, storage.num_streams)
    if storage.cut is None or parts.waiting == 0:
        raise ValueError("a storage of single items has no streams to cut.")
    stream = jnp.arange(streams.size, dtype=jnp.int32)
    slots = (state.cursor.head - streams.size + stream) % storage.capacity
    slots = jnp.where(streams & (state.cursor.size > 0), slots, -1)
    priority, is_ready = state.pending
    is_ready = is_ready.at[-streams.size :].min(~streams)
    return state._replace(
        memory=storage.cut(state.memory, slots), pending=(priority, is_ready)
    )


def _of_new(
    parts: Parts, state: ReplayState, axis_name: str | None
) -> Float[Array, ""]:
    """The priority of an item that nothing is known of."""
    if parts.new_priority == "running":
        return state.maximum
    if parts.new_priority != "highest":
        return jnp.float32(parts.new_priority)
    highest = parts.sampler.largest(state.sampler)[None]
    highest = jnp.max(sharding.gather(highest, axis_name))
    return jnp.where(highest > 0.0, highest, 1.0)


def _in_place_of_the_oldest(
    parts: Parts,
    state: ReplayState,
    items: Any,
    new: Float[Array, " B"],
    usable: Bool[Array, " B"],
) -> ReplayState:
    """Writes at the head; what has waited long enough may be drawn from now on."""
    rows, waiting = parts.rows, parts.waiting
    count = new.size
    ready, is_ready = (
        jnp.concatenate(pair) for pair in zip(state.pending, (new, usable))
    )
    pending = ready[count:], is_ready[count:]
    ready = jnp.append(ready[:count], jnp.zeros(waiting))
    is_ready = jnp.append(is_ready[:count], jnp.zeros(waiting, bool))
    start = (state.cursor.head - waiting) % parts.storage.capacity
    is_usable, replaced = rows.flag(state.is_usable, start, is_ready)
    write = lambda kept, fresh: rows.write(kept, state.cursor.head, fresh)
    return state._replace(
        memory=parts.storage.add(state.memory, state.cursor, items),
        serial=write(state.serial, _serials(state, count)),
        is_usable=is_usable,
        num_usable=state.num_usable + _count(is_ready) - replaced,
        pending=pending,
        sampler=parts.sampler.write(state.sampler, start, ready, is_ready),
        notes=_of_fresh(state, write, count),
    )


def _in_place_of_the_worst(
    parts: Parts,
    state: ReplayState,
    items: Any,
    new: Float[Array, " B"],
    usable: Bool[Array, " B"],
) -> ReplayState:
    """Writes where nothing is yet, and then where eviction says."""
    assert parts.eviction is not None
    assert parts.storage.put is not None
    rows, capacity = parts.rows, parts.storage.capacity
    age = state.added - rows.all(state.serial)
    score = parts.eviction(parts.sampler.priority(state.sampler, None), age)
    is_empty = jnp.arange(capacity) >= state.cursor.size
    _, slots = jax.lax.top_k(jnp.where(is_empty, jnp.inf, score), new.size)
    replaced = rows.read(state.is_usable, slots)
    write = lambda kept, fresh: rows.put(kept, slots, fresh)
    return state._replace(
        memory=parts.storage.put(state.memory, slots, items),
        serial=write(state.serial, _serials(state, new.size)),
        is_usable=write(state.is_usable, usable),
        num_usable=state.num_usable + _count(usable) - _count(replaced),
        sampler=parts.sampler.update(state.sampler, slots, new),
        notes=_of_fresh(state, write, new.size),
    )


def _serials(state: ReplayState, count: int) -> Array:
    return state.added + jnp.arange(count, dtype=jnp.uint32)


def _count(flags: Bool[Array, " B"]) -> Array:
    return jnp.sum(flags, dtype=jnp.int32)


def _of_fresh(
    state: ReplayState, write: Callable[[Rows, Array], Rows], count: int
) -> dict[str, Rows]:
    """Nothing is noted of new items but when they came."""
    fresh = {
        "last_td_error": jnp.full(count, jnp.nan),
        "times_replayed": jnp.zeros(count, jnp.int32),
        "last_replayed": jnp.full(count, state.num_updates),
    }
    return {name: write(kept, fresh[name]) for name, kept in state.notes.items()}
