"""Replays: a storage, a sampler and what is said of priorities, in one pytree.

    storage = ring.transitions(1_000_000, num_streams=8, n_step=3)
    of = replay.proportional(storage, exponent=0.6)
    state = of.init(example)                        # one Step, without the axis B
    state = of.add(state, ring.steps(trajectory))
    state, sample = of.sample(state, key, batch_size=256, discount=0.99)
    state = of.update(state, sample.ticket, priorities.absolute(td_error, epsilon=1e-3))

All functions are pure. Compile the step that calls them and donate the state: nothing
of the buffer's size is allocated, if in one program adds come before draws. (A write
must not overtake a read: XLA copies what is added to after it was drawn from.)
Schaul et al., 2016, arXiv:1511.05952.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from jaxtyping import Array, Bool, Float

from fps_jax import checks
from fps_jax.replay import adding, drawing, priorities, queue, ranks, samplers
from fps_jax.replay.limiter import Limiter
from fps_jax.replay.ring import Storage
from fps_jax.replay.samplers import Sampler
from fps_jax.replay.states import NOTES, Parts, ReplayState, Sample
from fps_jax.replay.wrap import wrap


class Replay(NamedTuple):
    """Functions of a replay. Under `axis_name` the devices' shards are one replay.

    Attributes:
      init: ``init(example) -> state``, from one item without its axis B.
      add: ``add(state, items [B, ...], priority=None, *, axis_name=None) -> state``;
        without priorities the items get the one for new items.
      cut: ``cut(state, streams [E]) -> state``, before an add: the newest step of these
        streams is not valid, as what comes next does not follow from it (a resumed run
        starts new episodes). The steps before it stay, with its observation as their
        next one.
      sample: ``sample(state, key, *, batch_size, importance_exponent=1.0,
        axis_name=None, **reading) -> (state, Sample)``. `reading` is for the storage's
        ``get``, such as ``discount``. Under `axis_name` the key is the same on every
        device, and `batch_size` what each device gets.
      update: ``update(state, ticket, priority [B], *, td_error=None,
        predecessor_boost=None, axis_name=None) -> state``. Items that were overwritten
        since the draw keep what they have. The boost ``[B]`` is added to the priority
        of the step before each, in the same episode.
      reprioritize: ``reprioritize(state, rule, *, axis_name=None) -> state``, in O(N):
        ``rule(priority [N], age [N], notes) -> priority [N]``, age in items added.
      set_exponent: ``set_exponent(state, exponent, *, axis_name=None) -> state``, in
        O(N); an exponent of 0 forgets the priorities.
      can_sample: ``can_sample(state, batch_size, *, axis_name=None) -> bool``, whether
        there is enough to draw from, and the limiter agrees.
      can_add: ``can_add(state) -> bool``, whether the limiter agrees.
    """

    init: Callable[[Any], ReplayState]
    add: Callable[..., ReplayState]
    cut: Callable[[ReplayState, Bool[Array, " E"]], ReplayState]
    sample: Callable[..., tuple[ReplayState, Sample]]
    update: Callable[..., ReplayState]
    reprioritize: Callable[..., ReplayState]
    set_exponent: Callable[..., ReplayState]
    can_sample: Callable[..., Bool[Array, ""]]
    can_add: Callable[[ReplayState], Bool[Array, ""]]


def replay(
    storage: Storage,
    sampler: Sampler,
    *,
    normalize: str = "batch",
    new_priority: str | float = "running",
    decay: float = 1.0,
    eviction: Callable[..., Float[Array, " N"]] | None = None,
    limiter: Limiter | None = None,
    notes: tuple[str, ...] = (),
    exchange: bool = True,
) -> Replay:
    """Puts a storage and a sampler together.

    Args:
      storage: what is kept.
      sampler: how it is drawn.
      normalize: what importance weights are divided by: "batch" or "buffer", the
        largest there, or "none"; see `priorities.importance_weights`.
      new_priority: of items added without one: "running", the largest ever seen, from 1
        on (Algorithm 1); "highest", the largest of the buffer; or a number.
      decay: the share of the running maximum that every update leaves, in [0, 1].
      eviction: ``eviction(priority [N], age [N]) -> score [N]``, instead of the oldest
        item the one with the largest score goes, in O(N) an add; age in items added.
        For storages of single items.
      limiter: of samples for each item; None allows any number.
      notes: what is noted of each slot, some of `NOTES`.
      exchange: over several devices: whether all draw together, as from one replay, and
        send each other what they drew; or each from its own shard, and nothing is sent.
        Then a draw's probability is ``p_i / (D sum of the shard)``.

    Raises:
      ValueError: if an option is not what it may be, or does not fit the storage.
    """
    checks.choice("normalize", normalize, priorities.NORMALIZATIONS)
    if isinstance(new_priority, str):
        checks.choice("new_priority", new_priority, ("running", "highest"))
    checks.number("new_priority", new_priority, 0, ends="()")
    checks.number("decay", decay, 0, 1)
    for note in notes:
        checks.choice("notes", note, NOTES)
    if eviction is not None and storage.put is None:
        raise ValueError("eviction must be None for a storage of steps that follow.")
    if eviction is not None and sampler.sort_period not in (None, 1):
        raise ValueError(f"sort_period {sampler.sort_period} must be 1 with eviction.")
    if limiter is not None:
        checks.number("min_size", limiter.min_size, 1, storage.capacity)
    parts = Parts(
        storage=storage,
        sampler=sampler,
        rows=wrap(storage.capacity, largest_write(storage)),
        normalize=normalize,
        new_priority=new_priority,
        decay=decay,
        eviction=eviction,
        limiter=limiter,
        notes=notes,
        exchange=exchange,
    )
    return Replay(
        init=partial(adding.init, parts),
        add=partial(adding.add, parts),
        cut=partial(adding.cut, parts),
        sample=partial(drawing.sample, parts),
        update=partial(drawing.update, parts),
        reprioritize=partial(drawing.reprioritize, parts),
        set_exponent=partial(drawing.set_exponent, parts),
        can_sample=partial(drawing.can_sample, parts),
        can_add=partial(drawing.can_add, parts),
    )


def uniform(storage: Storage, **options: Any) -> Replay:
    """Every item alike; all importance weights are 1.

    Args:
      storage: what is kept.
      **options: see `replay`.

    Raises:
      ValueError: if an option is not what it may be.
    """
    return replay(storage, samplers.uniform(storage.capacity), **options)


def proportional(
    storage: Storage,
    *,
    exponent: float | Float[Array, ""] = 0.6,
    spread: str = "stratified",
    uniform_fraction: float = 0.0,
    fan_out: int = 16,
    **options: Any,
) -> Replay:
    """Items in proportion to ``priority^exponent`` (section 3.3).

    Args:
      storage: what is kept.
      exponent: alpha, at least 0, kept in the state.
      spread: see `samplers.proportional`.
      uniform_fraction: see `samplers.proportional`.
      fan_out: K, children of a node of the sum-tree.
      **options: see `replay`.

    Raises:
      ValueError: if an option is not what it may be.
    """
    sampler = samplers.proportional(
        storage.capacity,
        exponent=exponent,
        spread=spread,
        uniform_fraction=uniform_fraction,
        fan_out=fan_out,
        keeps_lowest=options.get("normalize") == "buffer",
        keeps_highest=options.get("new_priority") == "highest",
    )
    return replay(storage, sampler, **options)


def rank_based(
    storage: Storage,
    *,
    exponent: float | Float[Array, ""] = 0.7,
    sort_period: int | None = None,
    spread: str = "stratified",
    num_shards: int = 1,
    **options: Any,
) -> Replay:
    """Items by the rank of their priority, ``P ~ rank^-exponent`` (section 3.3).

    Args:
      storage: what is kept.
      exponent: alpha, at least 0, kept in the state.
      sort_period: see `ranks.rank_based`.
      spread: see `ranks.rank_based`.
      num_shards: D, the devices that draw together.
      **options: see `replay`.

    Raises:
      ValueError: if an option is not what it may be.
    """
    sampler = ranks.rank_based(
        storage.capacity,
        exponent=exponent,
        largest_write=largest_write(storage),
        sort_period=sort_period,
        spread=spread,
        num_shards=num_shards,
    )
    return replay(storage, sampler, **options)


def greedy(storage: Storage, *, fan_out: int = 16, **options: Any) -> Replay:
    """The items of the largest priorities, each once (section 3.2).

    Importance weights are 1: nothing is drawn by chance.

    Args:
      storage: what is kept.
      fan_out: K, children of a node of the priority queue.
      **options: see `replay`.

    Raises:
      ValueError: if an option is not what it may be.
    """
    return replay(storage, queue.greedy(storage.capacity, fan_out=fan_out), **options)


def largest_write(storage: Storage) -> int:
    """The most slots that one add changes: its items, and those that still wait.

    Args:
      storage: what is kept.
    """
    waiting = storage.lookahead * storage.num_streams
    return min(storage.largest_add + waiting, storage.capacity)
