"""Replays of four libraries behind one face, for ``bench_replay``.

Each takes items of its own kind, as its users would have them: arrays of jax, of numpy,
or of torch. What is timed is what a learner calls, until its results are there:

* ``ours``: `fps_jax.replay.replay`, jitted, the state donated;
* ``flashbax``: the prioritised flat buffer, which stores each observation once and
  replays pairs of rows; ``flashbax, items``: its prioritised item buffer, of whole
  transitions. Both jitted, the state donated; importance weights, which are left to
  users, are part of the program that samples;
* ``cpprb``: ``PrioritizedReplayBuffer``, of numpy arrays;
* ``torchrl``: ``ReplayBuffer`` of a dict of tensors in ``LazyTensorStorage``, with
  ``PrioritizedSampler``: faster than its buffers of tensordicts. With as many threads
  as torch takes by itself, or with one, which is faster where others use the cores.

All draw with exponent 0.6, ours by ranks with 0.7, and importance exponent 0.4.
"""

import functools
import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

EXPONENT, RANK_EXPONENT, IMPORTANCE_EXPONENT = 0.6, 0.7, 0.4
POOL = 64
"""Keys and priorities that are there beforehand; calls take them in turn."""
PACKAGES: dict[str, tuple[str, ...]] = {
    "ours": (),
    "flashbax": ("flashbax",),
    "cpprb": ("cpprb",),
    "torchrl": ("torchrl", "torch", "tensordict"),
}
"""Families of systems, and what each needs beside this package."""
CHUNK = {"cartpole": 2048, "atari": 64}
"""Items of an add while a replay is filled."""
Items = Mapping[str, np.ndarray]


class Peer(NamedTuple):
    """A replay to be measured. B is a batch's size, ``call`` the number of a call.

    Attributes:
      own: ``own(items) -> items``, as this library has them.
      add: ``add(items)``, its own.
      put: ``put(slots, priority)``, to begin with.
      sample: ``sample(B, call) -> sample``: items, importance weights, and what their
        update needs.
      update: ``update(sample, B, call)``, of priorities that were drawn beforehand.
      turn: ``turn(B, call)``, both, as two calls.
      fused: ``fused(B, call)``, both as one program, whose priorities depend on what
        was sampled; None where that cannot be.
      sort: ``sort()``, what a rank-based replay does every 1,000 updates, or N / 1,000
        if that is less, and no median of turns shows; None where there is no such.
      state: ``state()``, of a jitted replay; it is no more once another call is made.
    """

    own: Callable[[Items], dict[str, Any]]
    add: Callable[[Any], Any]
    put: Callable[[np.ndarray, np.ndarray], Any]
    sample: Callable[[int, int], Any]
    update: Callable[[Any, int, int], None]
    turn: Callable[[int, int], None]
    fused: Callable[[int, int], None] | None = None
    sort: Callable[[], None] | None = None
    state: Callable[[], Any] | None = None


def systems(families: Sequence[str], fan_outs: Sequence[int] = ()) -> list[str]:
    """The systems of some families, by name.

    Args:
      families: keys of `PACKAGES`.
      fan_outs: of our sum-tree, beside its default.
    """
    variants = {
        "ours": [
            "",
            ", uniform",
            ", rank-based",
            *(f", fan-out {k}" for k in fan_outs),
        ],
        "flashbax": ["", ", items"],
        "cpprb": [""],
        "torchrl": ["", ", 1 thread"],
    }
    return [family + variant for family in families for variant in variants[family]]


def make_items(kind: str, count: int) -> dict[str, np.ndarray]:
    """Random transitions.

    Args:
      kind: "cartpole", 41 bytes each, or "atari", 56,457 bytes.
      count: how many.
    """
    rng = np.random.default_rng(0)

    def observations() -> np.ndarray:
        if kind == "cartpole":
            return rng.standard_normal((count, 4), np.float32)
        return rng.integers(0, 256, (count, 84, 84, 4), np.uint8)

    return {
        "observation": observations(),
        "next_observation": observations(),
        "action": rng.integers(0, 2, count, np.int32),
        "reward": rng.standard_normal(count, np.float32),
        "done": rng.random(count) < 0.02,
    }


def make_priorities(count: int, seed: int) -> np.ndarray:
    """Heavy-tailed ones, ``|Cauchy| + 1e-3``, of float32.

    Args:
      count: how many.
      seed: of these.
    """
    draws = np.random.default_rng(seed).standard_cauchy(count)
    return (np.abs(draws) + 1e-3).astype(np.float32)


def _pool(own: Callable[[np.ndarray], Any]) -> Callable[[int, int], Any]:
    """``priority(B, call)``, arrays of a library's own."""
    drawn = functools.cache(
        lambda batch: [own(make_priorities(batch, seed)) for seed in range(POOL)]
    )
    return lambda batch, call: drawn(batch)[call % POOL]


class _Pure(NamedTuple):
    """A replay of pure functions.

    Attributes:
      init: ``init(example) -> state``.
      add: ``add(state, items) -> state``.
      draw: ``draw(B)(state, key) -> (state, ticket, (items, weights))``; a state that
        is None is as it was before.
      change: ``change(state, ticket, priority) -> state``.
      put: ``put(state, slots, priority) -> state``.
      draws_in_place: whether the state is another one after a draw.
      sort: ``sort(state) -> state``, if there is such.
    """

    init: Callable[..., Any]
    add: Callable[..., Any]
    draw: Callable[[int], Callable[..., Any]]
    change: Callable[..., Any]
    put: Callable[..., Any]
    draws_in_place: bool
    sort: Callable[..., Any] | None = None


def _jitted(pure: _Pure, example: Items, without: Sequence[str] = ()) -> Peer:
    """A replay whose programs take the state for their own."""
    wait, priority = jax.block_until_ready, _pool(jnp.asarray)
    own = lambda items: {
        name: jnp.asarray(x) for name, x in items.items() if name not in without
    }
    keys = list(jax.random.split(jax.random.key(0), POOL))
    add, change = (jax.jit(f, donate_argnums=0) for f in (pure.add, pure.change))
    put_ = jax.jit(pure.put, donate_argnums=0)
    sort_ = jax.jit(pure.sort, donate_argnums=0) if pure.sort else None
    state = jax.jit(pure.init)(own(example))

    @functools.cache
    def drawing(batch: int) -> Callable[..., Any]:
        donated = (0,) if pure.draws_in_place else ()
        return jax.jit(pure.draw(batch), donate_argnums=donated)

    @functools.cache
    def fusing(batch: int) -> Callable[..., Any]:
        def both(state, key, scale):
            after, ticket, sample = pure.draw(batch)(state, key)
            after = state if after is None else after
            return pure.change(after, ticket, scale * sample[1]), sample

        return jax.jit(both, donate_argnums=0)

    def grow(items: Any) -> None:
        nonlocal state
        state = wait(add(state, items))

    def put(slots: np.ndarray, values: np.ndarray) -> None:
        nonlocal state
        state = put_(state, jnp.asarray(slots), jnp.asarray(values))

    def sort() -> None:
        nonlocal state
        assert sort_ is not None
        state = wait(sort_(state))

    def draw(batch: int, call: int) -> tuple[Any, Any]:
        nonlocal state
        after, *drawn = drawing(batch)(state, keys[call % POOL])
        state = state if after is None else after
        return drawn[0], drawn[1]

    def update(sample: Any, batch: int, call: int) -> None:
        nonlocal state
        state = change(state, sample[0], priority(batch, call))
        wait(state)

    def turn(batch: int, call: int) -> None:
        # The update is on its way before the sample is there.
        sample = draw(batch, call)
        update(sample, batch, call)
        wait(sample)

    def fused(batch: int, call: int) -> None:
        nonlocal state
        done = fusing(batch)(state, keys[call % POOL], priority(batch, call))
        state, _ = wait(done)

    return Peer(
        own=own,
        add=grow,
        put=put,
        sample=lambda batch, call: wait(draw(batch, call)),
        update=update,
        turn=turn,
        fused=fused,
        sort=sort if sort_ else None,
        state=lambda: state,
    )


def ours(capacity: int, variant: str) -> Any:
    """Our replay: its functions.

    Args:
      capacity: N.
      variant: "", "uniform", "rank-based" or "fan-out K".
    """
    from fps_jax.replay import replay, ring

    storage = ring.items(capacity)
    if variant == "uniform":
        return replay.uniform(storage)
    if variant == "rank-based":
        return replay.rank_based(storage, exponent=RANK_EXPONENT)
    if variant:
        fan_out = int(variant.split()[1])
        return replay.proportional(storage, exponent=EXPONENT, fan_out=fan_out)
    return replay.proportional(storage, exponent=EXPONENT)


def _ours(example: Items, capacity: int, variant: str) -> Peer:
    from fps_jax.replay import states

    replay = ours(capacity, variant)

    def draw(batch: int) -> Callable[..., Any]:
        def draw(state, key):
            state, sample = replay.sample(
                state, key, batch_size=batch, importance_exponent=IMPORTANCE_EXPONENT
            )
            return state, sample.ticket, (sample.items, sample.importance_weights)

        return draw

    def put(state, slots, priority):
        age = (state.cursor.head - 1 - slots) % capacity
        serial = state.added - 1 - age.astype(jnp.uint32)
        ticket = states.Ticket(
            jnp.zeros_like(slots), slots, serial, jnp.ones_like(slots, bool)
        )
        return replay.update(state, ticket, priority)

    # Nothing changes but the order.
    sort = lambda state: replay.reprioritize(state, lambda priority, *_: priority)
    sort = sort if variant == "rank-based" else None
    pure = _Pure(replay.init, replay.add, draw, replay.update, put, True, sort)
    return _jitted(pure, example)


def _flashbax(example: Items, capacity: int, variant: str) -> Peer:
    # Of the extra `bench-replay` alone.
    import flashbax  # pyright: ignore

    make = functools.partial(
        flashbax.make_prioritised_item_buffer
        if variant
        else flashbax.make_prioritised_flat_buffer,
        max_length=capacity,
        min_length=2,
        add_sequences=True,
        priority_exponent=EXPONENT,
        device="cpu",
    )
    buffer = make(sample_batch_size=1)

    def draw(batch: int) -> Callable[..., Any]:
        sized = make(sample_batch_size=batch)

        def draw(state, key):
            sample = sized.sample(state, key)
            weight = sample.probabilities**-IMPORTANCE_EXPONENT
            weight = weight / jnp.max(weight)
            return None, sample.indices, (sample.experience, weight)

        return draw

    def put(state, slots, priority):
        if not variant:  # No pair begins in the newest row.
            priority = jnp.where(slots == capacity - 1, 0.0, priority)
        return buffer.set_priorities(state, slots, priority)

    pure = _Pure(buffer.init, buffer.add, draw, buffer.set_priorities, put, False)
    return _jitted(pure, example, () if variant else ("next_observation",))


def _cpprb(example: Items, capacity: int, variant: str) -> Peer:
    # Of the extra `bench-replay` alone.
    import cpprb  # pyright: ignore

    del variant
    fields = {k: {"shape": x.shape or 1, "dtype": x.dtype} for k, x in example.items()}
    buffer = cpprb.PrioritizedReplayBuffer(capacity, fields, alpha=EXPONENT)
    priority = _pool(lambda x: x)

    def sample(batch: int, call: int) -> Any:
        return buffer.sample(batch, beta=IMPORTANCE_EXPONENT)

    def update(sample: Any, batch: int, call: int) -> None:
        buffer.update_priorities(sample["indexes"], priority(batch, call))

    return Peer(
        own=dict,
        add=lambda items: buffer.add(**items),
        put=buffer.update_priorities,
        sample=sample,
        update=update,
        turn=lambda batch, call: update(sample(batch, call), batch, call),
    )


def _torchrl(example: Items, capacity: int, variant: str) -> Peer:
    # Of the extra `bench-replay` alone.
    import torch  # pyright: ignore
    from torchrl.data import LazyTensorStorage, ReplayBuffer  # pyright: ignore
    from torchrl.data.replay_buffers import PrioritizedSampler  # pyright: ignore

    del example  # The storage is allocated at the first add.
    if variant:
        torch.set_num_threads(1)
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(capacity),
        sampler=PrioritizedSampler(capacity, EXPONENT, IMPORTANCE_EXPONENT),
    )
    own, priority = torch.from_numpy, _pool(torch.from_numpy)

    def sample(batch: int, call: int) -> Any:
        return buffer.sample(batch, return_info=True)

    def update(sample: Any, batch: int, call: int) -> None:
        buffer.update_priority(sample[1]["index"], priority(batch, call))

    return Peer(
        own=lambda items: {name: own(x) for name, x in items.items()},
        add=buffer.extend,
        put=lambda slots, values: buffer.update_priority(own(slots), own(values)),
        sample=sample,
        update=update,
        turn=lambda batch, call: update(sample(batch, call), batch, call),
    )


def load(system: str) -> None:
    """Imports what a system needs, and starts its device.

    Args:
      system: one of `systems`.
    """
    os.environ.setdefault("RL_LOGGING_LEVEL", "WARNING")
    family = system.partition(", ")[0]
    for name in PACKAGES[family]:
        importlib.import_module(name)
    if family in ("ours", "flashbax"):
        jax.block_until_ready(jnp.zeros(()))


def filled(system: str, kind: str, capacity: int) -> Peer:
    """The replay of a system, with N items that all have a priority.

    Args:
      system: one of `systems`.
      kind: of the items.
      capacity: N.
    """
    family, _, variant = system.partition(", ")
    makers = {
        "ours": _ours,
        "flashbax": _flashbax,
        "cpprb": _cpprb,
        "torchrl": _torchrl,
    }
    chunk = make_items(kind, CHUNK[kind])
    example = {name: x[0] for name, x in chunk.items()}
    peer = makers[family](example, capacity, variant)
    items = peer.own(chunk)
    for _ in range(0, capacity, CHUNK[kind]):
        peer.add(items)
    priority = make_priorities(capacity, 0)
    for start in range(0, capacity, 2048):
        slots = np.arange(start, min(start + 2048, capacity), dtype=np.int32)
        peer.put(slots, priority[slots])
    if peer.sort is not None:
        peer.sort()
    return peer
