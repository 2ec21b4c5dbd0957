"""Storage in a ring: the newest steps take the place of the oldest.

E streams of experience (environments) are interleaved: step t of stream e is in slot
``(t E + e) mod N``, so a rollout ``[T, E]`` is one contiguous write and the step after
the one in slot s is in slot ``s + E``. A storage does not know where its ring begins:
the `Cursor`, which is small, stands beside it, so that the large arrays are written
in place and otherwise left alone.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fps_jax import checks
from fps_jax.replay.wrap import Wrap, wrap
from fps_jax.types import Step, Trajectory, Transition


class Cursor(NamedTuple):
    """Where a ring begins and ends; both are multiples of E.

    Attributes:
      head: the slot that is written next, int32.
      size: the number of slots filled, int32, at most N.
    """

    head: Int[Array, ""]
    size: Int[Array, ""]


class Storage(NamedTuple):
    """Functions of the arrays that hold experience: their sizes, and how they are read.

    Attributes:
      capacity: N, the number of slots.
      num_streams: E, a divisor of N.
      lookahead: how many steps after its slot a sample reads: the newest ones can't be
        drawn until those have come.
      largest_add: the most items of one `add`.
      init: ``init(example) -> memory``, from one item, without the axis B; shapes and
        dtypes are enough.
      add: ``add(memory, cursor, items [B, ...]) -> memory``, at the cursor's head; the
        items are time-major, all E streams of a step together.
      put: ``put(memory, slots [B], items [B, ...]) -> memory``, anywhere; for storages
        whose slots do not depend on each other, else None.
      usable: ``usable(items [B, ...]) -> [B]``, which items may be drawn at all.
      get: ``get(memory, cursor, slots [B], **options) -> sample``, what is replayed.
      is_last: ``is_last(memory, slots [B]) -> [B]``, whether an episode ends there.
      batch_axis: where B is in a sample's arrays.
      cut: ``cut(memory, slots [B]) -> memory``: the steps there are not valid any more;
        slots below 0 are left out. None for single items.
      is_intact: ``is_intact(memory, cursor, slots [B]) -> [B]``, whether a sample there
        is what was added; it is known once the steps that it reads have come. None if
        it always is.
    """

    capacity: int
    num_streams: int
    lookahead: int
    largest_add: int
    init: Callable[[Any], Any]
    add: Callable[[Any, Cursor, Any], Any]
    put: Callable[[Any, Int[Array, " B"], Any], Any] | None
    usable: Callable[[Any], Bool[Array, " B"]]
    get: Callable[..., Any]
    is_last: Callable[[Any, Int[Array, " B"]], Bool[Array, " B"]]
    cut: Callable[[Any, Int[Array, " B"]], Any] | None = None
    is_intact: Callable[[Any, Cursor, Int[Array, " B"]], Bool[Array, " B"]] | None = (
        None
    )
    batch_axis: int = 0


class Window(NamedTuple):
    """Steps that follow each other.

    Attributes:
      items: a pytree, ``[L, B, ...]``.
      is_valid: ``[L, B]``, which of them are there, of the same episode if that was
        asked for, and not themselves invalid.
    """

    items: Any
    is_valid: Bool[Array, "L B"]


def advance(cursor: Cursor, count: int, capacity: int) -> Cursor:
    """The cursor after an add.

    Args:
      cursor: before it.
      count: the items added.
      capacity: N.
    """
    return Cursor(
        (cursor.head + count) % capacity, jnp.minimum(cursor.size + count, capacity)
    )


def age(cursor: Cursor, slots: Int[Array, "*B"], capacity: int) -> Int[Array, "*B"]:
    """How many items are newer than those in the slots; at least `size` if empty.

    Args:
      cursor: of the ring.
      slots: in ``[0, N)``.
      capacity: N.
    """
    return (cursor.head - 1 - slots) % capacity


def steps(trajectory: Trajectory) -> Step:
    """The rows of a trajectory as items, time-major.

    The last observation is left out: it is the first one of the stream's next rows.

    Args:
      trajectory: ``[T, E]``.
    """
    observation = trajectory.observation[:-1]
    rows = Step(
        observation=observation,
        action=trajectory.action,
        reward=trajectory.reward,
        terminated=trajectory.terminated,
        truncated=trajectory.truncated,
        is_valid=trajectory.is_valid,
        behaviour=trajectory.behaviour,
    )
    return jax.tree.map(lambda x: x.reshape(math.prod(x.shape[:2]), *x.shape[2:]), rows)


def items(
    capacity: int, *, num_streams: int = 1, largest_add: int | None = None
) -> Storage:
    """Single items, whatever they are: transitions, labelled images, segments.

    Args:
      capacity: N, at least 1.
      num_streams: E, a divisor of N.
      largest_add: the most items of one add, in ``[E, N]``; None is 2,048, or what
        comes closest of what there is room for.

    Raises:
      ValueError: if a number is out of range.
    """
    rows, common = _common(capacity, num_streams, 0, largest_add)
    everything = lambda batch: jnp.ones(jax.tree.leaves(batch)[0].shape[0], bool)
    return Storage(
        **common,
        put=lambda memory, slots, batch: jax.tree.map(
            lambda x, v: rows.put(x, slots, v), memory, batch
        ),
        usable=everything,
        get=lambda memory, cursor, slots: _read(rows, memory, slots),
        is_last=lambda memory, slots: jnp.ones(slots.shape, bool),
    )


def windows(
    capacity: int,
    *,
    length: int,
    num_streams: int = 1,
    crosses_episodes: bool = False,
    largest_add: int | None = None,
) -> Storage:
    """Sequences of steps: each sample is a `Window` of `Step`s, ``[L, B]``.

    No window reaches past the newest step. Where an episode ends within it, the steps
    after that are not valid, unless windows may cross from an episode into the next.

    Args:
      capacity: N, at least ``L E``.
      length: L, steps of a window, at least 1.
      num_streams: E, a divisor of N.
      crosses_episodes: whether steps of the next episode count.
      largest_add: the most items of one add, in ``[E, N]``; None is 2,048, or what
        comes closest of what there is room for.

    Raises:
      ValueError: if a number is out of range.
    """
    checks.number("length", length, 1)
    rows, common = _common(capacity, num_streams, length - 1, largest_add)
    checks.number("length * num_streams", length * num_streams, 1, capacity)

    def get(memory: Step, cursor: Cursor, slots: Int[Array, " B"]) -> Window:
        window = _read(rows, memory, _following(slots, length, num_streams, capacity))
        is_valid = _is_there(cursor, slots, length, num_streams, capacity)
        is_valid &= window.is_valid
        if not crosses_episodes:
            is_valid &= _before_the_end(window)
        return Window(window, is_valid)

    return Storage(
        **common,
        batch_axis=1,
        cut=partial(_cut, rows),
        put=None,
        usable=lambda batch: batch.is_valid,
        get=get,
        is_last=lambda memory, slots: _ends(_read(rows, memory, slots)),
    )


def transitions(
    capacity: int,
    *,
    num_streams: int = 1,
    n_step: int = 1,
    largest_add: int | None = None,
) -> Storage:
    """Steps, each stored once; a sample is a `Transition` over n of them.

    Its `get` takes ``discount``, a number in ``[0, 1]`` that may be traced. n steps end
    early where the episode does. The next observation is that of the following row,
    which after a finished episode is the true final one: what was cut by a time limit
    is bootstrapped from where it was cut.

    Args:
      capacity: N, at least ``(n + 1) E``.
      num_streams: E, a divisor of N.
      n_step: n, at least 1.
      largest_add: the most items of one add, in ``[E, N]``; None is 2,048, or what
        comes closest of what there is room for.

    Raises:
      ValueError: if a number is out of range.
    """
    checks.number("n_step", n_step, 1)
    rows, common = _common(capacity, num_streams, n_step, largest_add)
    checks.number("(n_step + 1) * num_streams", (n_step + 1) * num_streams, 1, capacity)

    def get(
        memory: Step,
        cursor: Cursor,
        slots: Int[Array, " B"],
        *,
        discount: float | Float[Array, ""],
    ) -> Transition:
        read = lambda x, slots: jax.tree.map(lambda x: rows.read(x, slots), x)
        place = _following(slots, n_step, num_streams, capacity)
        outcome = read(memory._replace(observation=(), action=(), behaviour={}), place)
        reward, scale, count = n_step_return(outcome, discount)
        first = read((memory.observation, memory.action, memory.behaviour), slots)
        following = (slots + count * num_streams) % capacity
        return Transition(
            observation=first[0],
            action=first[1],
            reward=reward,
            discount=scale,
            next_observation=rows.read(memory.observation, following),
            behaviour=first[2],
        )

    return Storage(
        **common,
        cut=partial(_cut, rows),
        put=None,
        usable=lambda batch: batch.is_valid,
        get=get,
        is_last=lambda memory, slots: _ends(_read(rows, memory, slots)),
    )


def n_step_return(
    outcome: Any, discount: float | Float[Array, ""]
) -> tuple[Float[Array, " B"], Float[Array, " B"], Int[Array, " B"]]:
    """Rewards of up to n steps, what their bootstrap is worth, and how many they are.

        reward = sum_{k < m} discount^k r_k      scale = discount^m (1 - terminated)

    Args:
      outcome: with ``reward``, ``terminated``, ``truncated`` and ``is_valid``, each
        ``[n, B]``; the steps end with the episode, or before one that is not valid.
      discount: in ``[0, 1]``.

    Returns:
      reward, scale, and m, the steps made, at least 1; each ``[B]``.

    Raises:
      ValueError: if the discount is out of range.
    """
    checks.number("discount", discount, 0, 1)
    is_made = _before_the_end(outcome) & _all_so_far(outcome.is_valid)
    is_made = is_made.at[0].set(True)
    reward = jnp.zeros_like(outcome.reward[0])
    scale = jnp.ones_like(reward)
    for k in range(is_made.shape[0]):
        reward += scale * jnp.where(is_made[k], outcome.reward[k], 0.0)
        onwards = jnp.where(outcome.terminated[k], 0.0, scale * discount)
        scale = jnp.where(is_made[k], onwards, scale)
    return reward, scale, jnp.sum(is_made, axis=0, dtype=jnp.int32)


def _common(
    capacity: int, num_streams: int, lookahead: int, largest_add: int | None
) -> tuple[Wrap, dict[str, Any]]:
    """The ring's rows, and what all storages of plain rows share."""
    checks.number("capacity", capacity, 1)
    checks.number("num_streams", num_streams, 1, capacity)
    if capacity % num_streams:
        raise ValueError(
            f"capacity {capacity} must be a multiple of num_streams {num_streams}."
        )
    checks.number("largest_add", largest_add, num_streams, capacity)
    if largest_add is None:
        room = capacity - lookahead * num_streams
        largest_add = max(min(2048, room), num_streams)
    rows = wrap(capacity, largest_add)

    def add(memory: Any, cursor: Cursor, batch: Any) -> Any:
        count = jax.tree.leaves(batch)[0].shape[0]
        if count % num_streams:
            raise ValueError(
                f"items of an add {count} must be a multiple of num_streams "
                f"{num_streams}."
            )
        chex.assert_tree_shape_prefix(batch, (count,))
        return jax.tree.map(lambda x, v: rows.write(x, cursor.head, v), memory, batch)

    return rows, {
        "capacity": capacity,
        "num_streams": num_streams,
        "lookahead": lookahead,
        "largest_add": largest_add,
        "init": lambda example: jax.tree.map(rows.init, example),
        "add": add,
    }


def _read(rows: Wrap, memory: Any, slots: Int[Array, "*B"]) -> Any:
    return jax.tree.map(lambda x: rows.read(x, slots), memory)


def _cut(rows: Wrap, memory: Step, slots: Int[Array, " B"]) -> Step:
    fresh = jnp.zeros(slots.shape, bool)
    return memory._replace(is_valid=rows.put(memory.is_valid, slots, fresh))


def _following(
    slots: Int[Array, " B"], length: int, num_streams: int, capacity: int
) -> Int[Array, "L B"]:
    """The slots of windows."""
    later = num_streams * jnp.arange(length, dtype=jnp.int32)
    return (slots[None] + later[:, None]) % capacity


def _is_there(
    cursor: Cursor,
    slots: Int[Array, " B"],
    length: int,
    num_streams: int,
    capacity: int,
) -> Bool[Array, "L B"]:
    """Which steps of windows are filled, and not past the newest one."""
    newer = age(cursor, slots, capacity)[None]
    later = num_streams * jnp.arange(length, dtype=jnp.int32)[:, None]
    return (newer < cursor.size) & (later <= newer)


def _ends(step: Any) -> Bool[Array, "*B"]:
    return step.terminated | step.truncated


def _before_the_end(window: Any) -> Bool[Array, "L B"]:
    """Steps of windows up to the first that ends an episode, which is among them."""
    ends = _ends(window)
    has_ended = jnp.cumsum(ends, axis=0, dtype=jnp.int32) - ends.astype(jnp.int32)
    return has_ended == 0


def _all_so_far(flags: Bool[Array, "L B"]) -> Bool[Array, "L B"]:
    return jnp.cumsum(~flags, axis=0, dtype=jnp.int32) == 0
