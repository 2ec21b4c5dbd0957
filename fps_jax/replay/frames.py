"""Image storage that keeps each frame once, and stacks frames when they are read.

An observation is a stack of the newest frames, and all but one of them are in the
observation before it. Kept as they come, a million stacks of four 84 x 84 frames take
28 GB, and as much again if the next observations are kept too; here they take 7 GB:

    frames    ... f7 f8 f9 | g0 g1 g2 ...     one a step, the newest of its stack
    depth           3  3  3   0  1  2         earlier frames of that stack, up to 3
    stack of g1     g0 g0 g0 g1               what is missing repeats the earliest

Where a stack begins anew is read off the stacks, not off the ends of episodes: EnvPool
fills the first stack of an episode with its first frame, but after a lost life (Atari's
``episodic_life``) frames of the life before remain. So a stack goes on where the one
before it ended, or it repeats one frame. One that does neither, since steps are missing
before it, lacks frames that were not stored, and so do the next ones, until enough
frames have come: `Storage.is_intact` is False for samples with such stacks. All others
are what was added, exactly.

The ring of frames is longer than that of steps by ``(stack - 1) E``, so the oldest
steps have all of their frames too.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from fps_jax import checks
from fps_jax.replay import ring
from fps_jax.replay.ring import Cursor, Storage, Window
from fps_jax.replay.wrap import Rows, wrap
from fps_jax.types import Step, Transition

LACKING = -1
"""The depth of a stack that lacks frames."""


class Frames(NamedTuple):
    """Steps, and the frames of their observations.

    Attributes:
      steps: a ring of `Step`s; the observation of each is ``(place, depth)``, int32:
        where its newest frame is, modulo the ring, and how many earlier ones its stack
        has, or `LACKING`.
      frames: rows of flat frames, in a ring of their own.
      head: the place of the next frame, int32.
      last: ``[E, ...]``, the newest observation of each stream.
      since_start: ``[E]``, steps since a stack began anew, int32, up to ``stack - 1``.
      since_gap: ``[E]``, since one did that lacks frames, likewise.
    """

    steps: Step
    frames: Rows
    head: Int[Array, ""]
    last: Shaped[Array, " E *observation"]
    since_start: Int[Array, " E"]
    since_gap: Int[Array, " E"]


Rebuild = Callable[[Int[Array, "*B 2"]], Shaped[Array, "*B_observation"]]
"""From places and depths to observations, ``[*B, ...]``."""


def transitions(
    capacity: int,
    *,
    num_streams: int = 1,
    stack: int = 4,
    stack_axis: int = 0,
    n_step: int = 1,
    largest_add: int | None = None,
) -> Storage:
    """As `ring.transitions`, for observations that are stacks of frames.

    Args:
      capacity: N, at least ``(n + 1) E``.
      num_streams: E, a divisor of N.
      stack: frames of an observation, at least 1, the oldest first.
      stack_axis: the axis of an observation that they lie along; EnvPool's is the
        first. Frames of several channels have them side by side there, ``stack C``.
      n_step: n, at least 1.
      largest_add: the most items of one add, see `ring.items`.

    Raises:
      ValueError: if a number is out of range; in `init`, if observations have no such
        axis or it is not a multiple of the stack.
    """
    steps = ring.transitions(
        capacity, num_streams=num_streams, n_step=n_step, largest_add=largest_add
    )

    def restore(sample: Transition, rebuild: Rebuild) -> Transition:
        return sample._replace(
            observation=rebuild(sample.observation),
            next_observation=rebuild(sample.next_observation),
        )

    def is_intact(
        memory: Frames, cursor: Cursor, slots: Int[Array, " B"]
    ) -> Bool[Array, " B"]:
        sample = steps.get(memory.steps, cursor, slots, discount=1.0)
        return _is_whole(sample.observation) & _is_whole(sample.next_observation)

    return _stacked(steps, stack, stack_axis, restore, is_intact)


def windows(
    capacity: int,
    *,
    length: int,
    num_streams: int = 1,
    stack: int = 4,
    stack_axis: int = 0,
    crosses_episodes: bool = False,
    largest_add: int | None = None,
) -> Storage:
    """As `ring.windows`, for observations that are stacks of frames.

    Steps whose stacks lack frames are not valid.

    Args:
      capacity: N, at least ``L E``.
      length: L, steps of a window, at least 1.
      num_streams: E, a divisor of N.
      stack: frames of an observation, see `transitions`.
      stack_axis: the axis that they lie along, see `transitions`.
      crosses_episodes: whether steps of the next episode count.
      largest_add: the most items of one add, see `ring.items`.

    Raises:
      ValueError: as `transitions`.
    """
    steps = ring.windows(
        capacity,
        length=length,
        num_streams=num_streams,
        crosses_episodes=crosses_episodes,
        largest_add=largest_add,
    )

    def restore(sample: Window, rebuild: Rebuild) -> Window:
        marks = sample.items.observation
        items = sample.items._replace(observation=rebuild(marks))
        return Window(items, sample.is_valid & _is_whole(marks))

    def is_intact(
        memory: Frames, cursor: Cursor, slots: Int[Array, " B"]
    ) -> Bool[Array, " B"]:
        sample = steps.get(memory.steps, cursor, slots)
        return _is_whole(sample.items.observation[0])

    return _stacked(steps, stack, stack_axis, restore, is_intact)


def _stacked(
    steps: Storage,
    stack: int,
    stack_axis: int,
    restore: Callable[[Any, Rebuild], Any],
    is_intact: Callable[[Any, Cursor, Int[Array, " B"]], Bool[Array, " B"]],
) -> Storage:
    """Keeps frames beside a storage of steps, which has marks for observations.

    ``restore(sample, rebuild)`` puts the observations into one of its samples.
    """
    checks.number("stack", stack, 1)
    streams = steps.num_streams
    places = steps.capacity + (stack - 1) * streams
    rows = wrap(places, steps.largest_add)

    def init(example: Step) -> Frames:
        shape, dtype = example.observation.shape, example.observation.dtype
        _check_stack(shape, stack, stack_axis)
        mark = jax.ShapeDtypeStruct((2,), jnp.int32)
        frame = jax.ShapeDtypeStruct((math.prod(shape) // stack,), dtype)
        return Frames(
            steps=steps.init(example._replace(observation=mark)),
            frames=rows.init(frame),
            head=jnp.zeros((), jnp.int32),
            last=jnp.zeros((streams, *shape), dtype),
            # As if every stream came from black frames, which is what its ring holds.
            since_start=jnp.full(streams, stack - 1, jnp.int32),
            since_gap=jnp.full(streams, stack - 1, jnp.int32),
        )

    def add(memory: Frames, cursor: Cursor, items: Step) -> Frames:
        count = items.observation.shape[0]
        if count % streams:
            raise ValueError(f"{count} items are not a multiple of {streams}.")
        if not count:
            return memory
        seen = jnp.concatenate([memory.last, items.observation])
        seen = _to_frames(seen, stack, stack_axis)
        seen = seen.reshape(-1, streams, *seen.shape[1:])
        depth, since_start, since_gap = _depths(memory, seen[:-1], seen[1:])
        place = memory.head + jnp.arange(count, dtype=jnp.int32)
        marks = jnp.stack([place, depth.reshape(count)], axis=-1)
        newest = seen[1:, :, -1].reshape(count, -1)
        return Frames(
            steps=steps.add(memory.steps, cursor, items._replace(observation=marks)),
            frames=rows.write(memory.frames, memory.head, newest),
            head=(memory.head + count) % places,
            last=items.observation[-streams:],
            since_start=since_start,
            since_gap=since_gap,
        )

    def rebuild(
        memory: Frames, marks: Int[Array, "*B 2"]
    ) -> Shaped[Array, "*B_observation"]:
        place, depth = jnp.split(marks.reshape(-1, 2), 2, axis=1)
        back = jnp.arange(stack - 1, -1, -1, dtype=jnp.int32)[None]
        place = (place - streams * jnp.minimum(back, depth)) % places
        shape = memory.last.shape[1:]
        found = _from_frames(rows.read(memory.frames, place), shape, stack_axis)
        return found.reshape(*marks.shape[:-1], *shape)

    def get(memory: Frames, cursor: Cursor, slots: Int[Array, " B"], **options) -> Any:
        sample = steps.get(memory.steps, cursor, slots, **options)
        return restore(sample, functools.partial(rebuild, memory))

    def cut(memory: Frames, slots: Int[Array, " B"]) -> Frames:
        assert steps.cut is not None
        return memory._replace(steps=steps.cut(memory.steps, slots))

    return steps._replace(
        init=init,
        add=add,
        get=get,
        cut=cut,
        is_last=lambda memory, slots: steps.is_last(memory.steps, slots),
        is_intact=is_intact,
    )


def _depths(
    memory: Frames,
    before: Shaped[Array, "T E stack frame"],
    now: Shaped[Array, "T E stack frame"],
) -> tuple[Int[Array, "T E"], Int[Array, " E"], Int[Array, " E"]]:
    """How many frames before its newest each stack has, or that it lacks some.

    Given those of the steps before, too. Returns the new counts of `Frames` as well.
    """
    stack = now.shape[2]
    before, now = _words(before), _words(now)
    goes_on = jnp.all(now[:, :, :-1] == before[:, :, 1:], axis=(2, 3))
    repeats = jnp.all(now == now[:, :, -1:], axis=(2, 3))
    start = _since(~goes_on, memory.since_start, stack - 1)
    gap = _since(~(goes_on | repeats), memory.since_gap, stack - 1)
    is_whole = (gap > start) | (start == stack - 1)
    depth = jnp.where(is_whole, start, LACKING)
    return depth, start[-1], gap[-1]


def _since(
    flags: Bool[Array, "T E"], before: Int[Array, " E"], most: int
) -> Int[Array, "T E"]:
    """Steps since the last flag, up to `most`; the step before all had `before`."""
    now = jnp.arange(flags.shape[0], dtype=jnp.int32)[:, None]
    last = jax.lax.cummax(jnp.where(flags, now, -1 - before[None]))
    return jnp.minimum(now - last, most)


def _to_frames(
    observation: Shaped[Array, " B *observation"], stack: int, stack_axis: int
) -> Shaped[Array, " B stack frame"]:
    """Flat frames, the oldest first."""
    axis = stack_axis % (observation.ndim - 1)
    first = jnp.moveaxis(observation, axis + 1, 1)
    return first.reshape(len(first), stack, math.prod(first.shape[1:]) // stack)


def _from_frames(
    frames: Shaped[Array, " B stack frame"], shape: tuple[int, ...], stack_axis: int
) -> Shaped[Array, " B *observation"]:
    """Observations of a shape."""
    axis = stack_axis % len(shape)
    first = (shape[axis], *shape[:axis], *shape[axis + 1 :])
    return jnp.moveaxis(frames.reshape(len(frames), *first), 1, axis + 1)


def _words(frames: Shaped[Array, "*B frame"]) -> Shaped[Array, "*B words"]:
    """Four bytes as one number, if they come in fours: so they are compared faster."""
    if frames.dtype != jnp.uint8 or frames.shape[-1] % 4:
        return frames
    fours = frames.reshape(*frames.shape[:-1], -1, 4)
    return jax.lax.bitcast_convert_type(fours, jnp.uint32)


def _is_whole(marks: Int[Array, "*B 2"]) -> Bool[Array, "*B"]:
    return marks[..., 1] != LACKING


def _check_stack(shape: tuple[int, ...], stack: int, stack_axis: int) -> None:
    """Refuses observations that are not stacks of frames."""
    checks.number("stack_axis", stack_axis, -len(shape), len(shape) - 1)
    if shape[stack_axis] % stack:
        raise ValueError(
            f"stack {stack} must divide axis {stack_axis} of observations {shape}."
        )
