"""Adding to a replay: what goes where, what has to go, and what new items are worth."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

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
    rows, waiting = parts.rows, parts.waiting
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
        pending=(jnp.zeros(waiting), jnp.zeros(waiting, bool)) if waiting else (),
        sampler=parts.sampler.init(),
        maximum=jnp.float32(1.0),
        num_updates=jnp.uint32(0),
        num_rejected=jnp.uint32(0),
        balance=() if parts.limiter is None else parts.limiter.init(),
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
    checks.number("an add, with largest_add, of", count, 0, parts.storage.largest_add)
    room = parts.storage.capacity - parts.waiting
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
    return alone(lambda state: _put(parts, state, items, new), state)


def _put(
    parts: Parts, state: ReplayState, items: Any, new: Float[Array, " B"]
) -> ReplayState:
    """Writes the items at the head, or where eviction says."""
    count, head, usable = new.size, state.cursor.head, parts.storage.usable(items)
    if parts.eviction is None:
        memory = parts.storage.add(state.memory, state.cursor, items)
        write = lambda kept, fresh: parts.rows.write(kept, head, fresh)
        state = _at_the_head(parts, state, new, usable)
    else:
        assert parts.storage.put is not None
        slots = _worst(parts, state, count)
        memory = parts.storage.put(state.memory, slots, items)
        write = lambda kept, fresh: parts.rows.put(kept, slots, fresh)
        state = _at_slots(parts, state, slots, new, usable)
    serial = state.added + jnp.arange(count, dtype=jnp.uint32)
    return state._replace(
        memory=memory,
        cursor=ring.advance(state.cursor, count, parts.storage.capacity),
        added=state.added + jnp.uint32(count),
        serial=write(state.serial, serial),
        notes=_of_fresh(state, write, count),
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


def _at_the_head(
    parts: Parts, state: ReplayState, new: Float[Array, " B"], usable: Bool[Array, " B"]
) -> ReplayState:
    """What has waited long enough may be drawn from now on, and the oldest no more."""
    ready, is_ready, pending = _after_waiting(state.pending, new, usable)
    start = (state.cursor.head - parts.waiting) % parts.storage.capacity
    is_usable, replaced = parts.rows.flag(state.is_usable, start, is_ready)
    return state._replace(
        is_usable=is_usable,
        num_usable=state.num_usable + _count(is_ready) - replaced,
        pending=pending,
        sampler=parts.sampler.write(state.sampler, start, ready, is_ready),
    )


def _after_waiting(
    pending: Any, new: Float[Array, " B"], usable: Bool[Array, " B"]
) -> tuple[Float[Array, " _"], Bool[Array, " _"], Any]:
    """What is known of the slots that change, and what waits now."""
    if not pending:
        return new, usable, ()
    priority, is_usable = (jnp.concatenate(x) for x in zip(pending, (new, usable)))
    ready = jnp.zeros_like(priority).at[: new.size].set(priority[: new.size])
    is_ready = is_usable & (jnp.arange(is_usable.size) < new.size)
    return ready, is_ready, (priority[new.size :], is_usable[new.size :])


def _worst(parts: Parts, state: ReplayState, count: int) -> Int[Array, " B"]:
    """Slots where nothing is yet, and then those that eviction says."""
    assert parts.eviction is not None
    age = state.added - parts.rows.all(state.serial)
    score = parts.eviction(parts.sampler.priority(state.sampler, None), age)
    is_empty = jnp.arange(parts.storage.capacity) >= state.cursor.size
    return jax.lax.top_k(jnp.where(is_empty, jnp.inf, score), count)[1]


def _at_slots(
    parts: Parts,
    state: ReplayState,
    slots: Int[Array, " B"],
    new: Float[Array, " B"],
    usable: Bool[Array, " B"],
) -> ReplayState:
    """What is new may be drawn at once, and what was in its slots no more."""
    replaced = parts.rows.read(state.is_usable, slots)
    return state._replace(
        is_usable=parts.rows.put(state.is_usable, slots, usable),
        num_usable=state.num_usable + _count(usable) - _count(replaced),
        sampler=parts.sampler.update(state.sampler, slots, new),
    )


def _count(flags: Bool[Array, " B"]) -> Int[Array, ""]:
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
