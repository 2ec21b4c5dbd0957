"""What a replay knows, what a draw brings, and the parts that a replay is made of."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from fps_jax.replay import priorities, sharding
from fps_jax.replay.limiter import Limiter
from fps_jax.replay.ring import Cursor, Storage
from fps_jax.replay.samplers import Pool, Sampler
from fps_jax.replay.wrap import Rows, Wrap

NOTES = ("last_td_error", "times_replayed", "last_replayed")
"""What can be noted of each slot: the TD error of its last replay (NaN before it), how
often it was replayed, and the update at which it was replayed last, or added."""


class Ticket(NamedTuple):
    """Where a sample came from, so that its priorities can be told later.

    Attributes:
      shard: ``[B]``, the device that owns it.
      slot: ``[B]``, its slot there.
      serial: ``[B]``, the number of the item, modulo 2^32: a slot that was overwritten
        since holds another one.
      is_valid: ``[B]``.
    """

    shard: Int[Array, " B"]
    slot: Int[Array, " B"]
    serial: UInt32[Array, " B"]
    is_valid: Bool[Array, " B"]


class Sample(NamedTuple):
    """What was drawn.

    Attributes:
      items: what the storage's ``get`` reads, for B slots.
      importance_weights: ``[B]``, 0 where not valid.
      probability: ``[B]``, of each draw, among the items of all devices.
      is_valid: ``[B]``, whether there was something to draw.
      ticket: for `Replay.update`.
      notes: what is noted of each slot, by name, each ``[B]``.
    """

    items: Any
    importance_weights: Float[Array, " B"]
    probability: Float[Array, " B"]
    is_valid: Bool[Array, " B"]
    ticket: Ticket
    notes: dict[str, Array]


class ReplayState(NamedTuple):
    """A replay, or a device's shard of one. The large part stands apart from the small.

    Attributes:
      memory: the storage's arrays.
      cursor: where its ring begins and ends.
      added: how many items were ever added, modulo 2^32.
      serial: of each slot, the number of its item, modulo 2^32.
      is_usable: of each slot, whether it may be drawn.
      num_usable: how many may.
      pending: priority and usability of the newest items, which wait for the steps that
        follow them; each ``[lookahead E]``; () if none waits.
      sampler: the priorities.
      maximum: the priority of new items, if that is the largest seen.
      num_updates: how often priorities were updated, modulo 2^32.
      num_rejected: priorities that were not stored, being NaN, infinite or negative,
        modulo 2^32.
      balance: of the limiter; () without one.
      notes: of each slot, by name.
    """

    memory: Any
    cursor: Cursor
    added: UInt32[Array, ""]
    serial: Rows
    is_usable: Rows
    num_usable: Int[Array, ""]
    pending: Any
    sampler: Any
    maximum: Float[Array, ""]
    num_updates: UInt32[Array, ""]
    num_rejected: UInt32[Array, ""]
    balance: Any
    notes: dict[str, Rows]


class Parts(NamedTuple):
    """What a replay is made of; see `replay.replay` for the options.

    Attributes:
      storage: what is kept.
      sampler: how it is drawn.
      rows: functions of arrays with a row for each slot.
      normalize: what importance weights are divided by.
      new_priority: of items added without one.
      decay: of the running maximum.
      eviction: what goes instead of the oldest, if anything.
      limiter: of samples for each item, if any.
      notes: what is noted of each slot.
      exchange: whether several devices draw together.
    """

    storage: Storage
    sampler: Sampler
    rows: Wrap
    normalize: str
    new_priority: str | float
    decay: float
    eviction: Callable[..., Float[Array, " N"]] | None
    limiter: Limiter | None
    notes: tuple[str, ...]
    exchange: bool

    @property
    def waiting(self) -> int:
        """The newest slots, which wait for the steps that follow them."""
        return self.storage.lookahead * self.storage.num_streams


def is_acceptable(parts: Parts, priority: Float[Array, " B"]) -> Bool[Array, " B"]:
    """Which priorities can be stored: finite, and at least 0 unless only compared.

    Args:
      parts: of the replay.
      priority: ``[B]``.
    """
    if parts.sampler.only_orders:
        return jnp.isfinite(priority)
    return priorities.is_acceptable(priority)


def pool_of(parts: Parts, state: ReplayState, axis_name: str | None) -> Pool:
    """What may be drawn.

    Args:
      parts: of the replay.
      state: of this device's shard.
      axis_name: the device axis over which is drawn, if any.
    """
    return Pool(
        head=state.cursor.head,
        added=state.added,
        skipped=parts.waiting,
        span=jnp.maximum(state.cursor.size - parts.waiting, 0),
        is_usable=lambda slots: parts.rows.read(state.is_usable, slots),
        num_usable=sharding.add_up(state.num_usable, axis_name),
    )
