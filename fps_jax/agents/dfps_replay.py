"""What DFPS remembers: one replay of steps, read in three ways."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Key

from fps_jax.agents import memory as memories
from fps_jax.agents.dfps_options import DFPSOptions
from fps_jax.agents.memory import Memory
from fps_jax.replay import priorities, replay, ring, samplers
from fps_jax.replay.states import Sample, Ticket
from fps_jax.types import Continuous, EnvSpec, Trajectory, Transition

KEPT = ("log_prob", "drawn")
"""What is kept of a row's behaviour."""


class Experience(NamedTuple):
    """Functions of a device's memory; several devices draw each from their own.

    Attributes:
      init: ``init() -> Memory``.
      add: ``add(memory, trajectory) -> Memory``.
      size: ``size(memory)``, env steps that are there, int32.
      critic_items: ``critic_items(memory, key, gamma, beta, steps=1) -> (memory,
        CriticItems)``, gamma the discount and beta that of the importance weights. The
        items of several steps, which know nothing of each other, alternate.
      prioritize: ``prioritize(memory, ticket, error [B]) -> memory``; only the first
        errors, those of the ticket, are used.
      states: ``states(memory, key, size) -> (observation [B, ...], is_valid [B])``, of
        the newest steps.
      segments: ``segments(memory, key, size) -> Window``, ``[T + 1, B]``, of which the
        last row only follows.
    """

    init: Callable[[], Memory]
    add: Callable[[Memory, Trajectory], Memory]
    size: Callable[[Memory], Array]
    critic_items: Callable[..., Any]
    prioritize: Callable[..., Memory]
    states: Callable[..., Any]
    segments: Callable[..., ring.Window]


class CriticItems(NamedTuple):
    """What a critic step learns from.

    Attributes:
      items: a `Transition` ``[B, ...]``; with corrected targets a `ring.Window`.
      importance_weights: ``[B]``.
      is_valid: ``[B]``.
      ticket: of the first of them, which were drawn by priority.
    """

    items: Transition | ring.Window
    importance_weights: Float[Array, " B"]
    is_valid: Bool[Array, " B"]
    ticket: Ticket


def make_experience(
    options: DFPSOptions, spec: EnvSpec, *, num_envs: int, rollout_steps: int
) -> Experience:
    """Makes the memory of a device.

    The steps are stored once. One replay writes them and draws what critics learn from;
    two more read the same state: the newest steps, and whole segments.

    Args:
      options: of the replay and of the critic.
      spec: the environment.
      num_envs: E, environments of a device.
      rollout_steps: T, length of a segment.

    Raises:
      ValueError: if it can't hold two segments.
    """
    capacity = options.replay_capacity // num_envs * num_envs
    if capacity < 2 * rollout_steps * num_envs:
        raise ValueError(
            f"replay_capacity {options.replay_capacity} must be at least two segments, "
            f"{2 * rollout_steps * num_envs} env steps."
        )
    ring_of = {
        "capacity": capacity,
        "num_streams": num_envs,
        "largest_add": rollout_steps * num_envs,
    }
    n = options.critic_n_step
    corrects = options.critic_trace == "vtrace"
    if corrects:
        storage = ring.windows(**ring_of, length=n + 1, crosses_episodes=True)
    else:
        storage = ring.transitions(**ring_of, n_step=n)
    own: Any = {"exchange": False}
    if options.priority_exponent is None:
        all_steps = replay.uniform(storage, **own)
    else:
        exponent = options.priority_exponent
        all_steps = replay.proportional(storage, exponent=exponent, **own)
    newest = samplers.uniform(capacity, newest=options.recent_steps)
    recent = replay.replay(storage, newest, **own)
    whole = ring.windows(**ring_of, length=rollout_steps + 1, crosses_episodes=True)
    segments = replay.uniform(whole, **own)

    def init() -> Memory:
        assert isinstance(spec.action, Continuous)
        of: Any = jax.ShapeDtypeStruct
        kept = {"log_prob": of((), np.float32)}
        if options.squash == "tanh":
            kept["drawn"] = of((spec.action.size,), np.float32)
        return memories.init(all_steps, spec, num_envs=num_envs, behaviour=kept)

    def add(memory: Memory, trajectory: Trajectory) -> Memory:
        return memories.remember(all_steps, memory, trajectory, kept=KEPT)

    def critic_items(
        memory: Memory, key: Key[Array, ""], gamma: Any, beta: Any, steps: int = 1
    ) -> tuple[Memory, CriticItems]:
        reading = {} if corrects else {"discount": gamma}
        size = options.critic_batch_size * steps
        num_recent = round(options.recent_fraction * options.critic_batch_size) * steps
        key_all, key_recent = jax.random.split(key)
        state, parts = memory.replay, []
        if size > num_recent:
            state, sample = all_steps.sample(
                state,
                key_all,
                batch_size=size - num_recent,
                importance_exponent=beta,
                **reading,
            )
            parts.append(sample)
        if num_recent:
            _, sample = recent.sample(
                state, key_recent, batch_size=num_recent, **reading
            )
            parts.append(sample)
        items = _joined(parts, axis=storage.batch_axis)
        return memory._replace(replay=state), items

    def prioritize(memory: Memory, ticket: Ticket, error: Float[Array, " B"]):
        size = ticket.slot.size
        state = all_steps.update(
            memory.replay, ticket, priorities.absolute(error[:size], epsilon=1e-3)
        )
        return memory._replace(replay=state)

    def states(memory: Memory, key: Key[Array, ""], size: int):
        reading = {} if corrects else {"discount": 1.0}
        _, sample = recent.sample(memory.replay, key, batch_size=size, **reading)
        items: Any = sample.items
        if corrects:
            items = jax.tree.map(lambda x: x[0], items.items)
        return items.observation, sample.is_valid

    def read_segments(memory: Memory, key: Key[Array, ""], size: int) -> ring.Window:
        _, sample = segments.sample(memory.replay, key, batch_size=size)
        is_valid = sample.items.is_valid & sample.is_valid[None]
        return sample.items._replace(is_valid=is_valid)

    return Experience(
        init=init,
        add=add,
        size=lambda memory: memory.replay.cursor.size,
        critic_items=critic_items,
        prioritize=prioritize,
        states=states,
        segments=read_segments,
    )


def _joined(parts: list[Sample], *, axis: int) -> CriticItems:
    """Several draws as one; the ticket is that of the first."""
    join: Any = lambda axis, *xs: jnp.concatenate(xs, axis) if xs[1:] else xs[0]
    weights = [sample.importance_weights for sample in parts]
    return CriticItems(
        items=jax.tree.map(
            lambda *xs: join(axis, *xs), *(sample.items for sample in parts)
        ),
        importance_weights=join(0, *weights),
        is_valid=join(0, *(sample.is_valid for sample in parts)),
        ticket=parts[0].ticket,
    )
