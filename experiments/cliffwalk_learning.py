"""Q-learning on the Blind Cliffwalk until it has converged, a transition an update.

What is replayed is chosen uniformly, by an oracle, or by priorities (a `Method`). Each
`learn...` is one program. Seeds that need no priorities learn together: the loop goes
on until all have converged, and notes when each had. Those that need them learn one
after the other: without `vmap` updates are in place, with it XLA copies the memory.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from experiments import cliffwalk_problem as cliffwalk
from experiments.cliffwalk_problem import Problem, Theta
from fps_jax.replay import replay, ring
from fps_jax.replay.replay import Replay
from fps_jax.replay.samplers import Sampler
from fps_jax.replay.states import ReplayState, Sample
from fps_jax.types import Step

BLOCK = 1024
"""Uniform draws made at once; no update has an influence on them."""
LEAST_GAIN = 1e-5
"""Of the loss: an oracle that finds no more is in a dead end. Rounding gains less."""


class Seen(NamedTuple):
    """What is known of the transition that was replayed, each with an axis of one.

    Attributes:
      td_error: delta before the update.
      change: what the update adds to theta.
      ratio: rho of `cliffwalk_problem.ratio`, before the update.
      episode_return: of its episode.
      priority: what it had.
      notes: of the replay, before this update.
      updates: until now, without this one; a number.
    """

    td_error: Float[Array, " 1"]
    change: Float[Array, "1 n+1 2"]
    ratio: Float[Array, " 1"]
    episode_return: Float[Array, " 1"]
    priority: Float[Array, " 1"]
    notes: dict[str, Array]
    updates: Int[Array, ""]


class Method(NamedTuple):
    """A prioritized replay of transitions; see `method`.

    Attributes:
      replay: its functions.
      sampler: how transitions are drawn.
      priority: ``priority(seen) -> [1]``, of what was replayed.
      of_new: ``of_new(priority [N], steps) -> [N]``, of what was not yet replayed.
      boosts_predecessors: whether the step before gets |delta| more.
      every: updates between passes over all priorities; 0 for none.
      renewed: ``renewed(age [N], notes) -> priority [N]``, what a pass makes of them;
        age in updates since the last replay.
    """

    replay: Replay
    sampler: Sampler
    priority: Callable[[Seen], Float[Array, " 1"]]
    of_new: Callable[[Float[Array, " N"], Step], Float[Array, " N"]]
    boosts_predecessors: bool
    every: int
    renewed: Callable[..., Float[Array, " N"]] | None


def method(
    capacity: int,
    sampler: Sampler,
    priority: Callable[[Seen], Float[Array, " 1"]],
    *,
    of_new: Callable[..., Float[Array, " N"]] = lambda priority, steps: priority,
    boosts_predecessors: bool = False,
    every: int = 0,
    renewed: Callable[..., Float[Array, " N"]] | None = None,
    **options: Any,
) -> Method:
    """Makes a replay of steps one by one, which one add fills.

    Args:
      capacity: N.
      sampler: how transitions are drawn.
      priority: see `Method`, as are the next four.
      of_new: by default what is known before, or 1.
      boosts_predecessors: see `Method`.
      every: see `Method`.
      renewed: see `Method`.
      **options: see `replay.replay`.
    """
    storage = ring.windows(capacity, length=1, largest_add=capacity)
    made = replay.replay(storage, sampler, **options)
    return Method(made, sampler, priority, of_new, boosts_predecessors, every, renewed)


class Learner(NamedTuple):
    """What an update changes.

    Attributes:
      theta: parameters.
      replay: the replay's state.
      updates: how many were made.
      is_converged: whether the loss is below `cliffwalk_problem.THRESHOLD`.
    """

    theta: Theta
    replay: ReplayState
    updates: Int[Array, ""]
    is_converged: Bool[Array, ""]


def learn(
    method: Method,
    of: Problem,
    theta: Theta,
    memory: Step,
    key: Key[Array, ""],
    *,
    beta: Float[Array, ""],
    knows_errors: Bool[Array, ""],
    max_updates: Int[Array, ""],
) -> tuple[Int[Array, ""], Bool[Array, ""]]:
    """Replays by priorities until the values have converged.

    Args:
      method: how.
      of: the problem.
      theta: parameters at first.
      memory: see `cliffwalk_problem.memory`.
      key: spent here.
      beta: exponent of the importance weights.
      knows_errors: see `start`.
      max_updates: after which it gives up.

    Returns:
      The updates made, and whether the values have converged.
    """

    def goes_on(learner: Learner) -> Bool[Array, ""]:
        return ~learner.is_converged & (learner.updates < max_updates)

    def body(learner: Learner) -> Learner:
        key_draw = jax.random.fold_in(key, learner.updates)
        return update(method, of, learner, key_draw, beta=beta)[0]

    first = start(method, of, theta, memory, knows_errors=knows_errors)
    last = jax.lax.while_loop(goes_on, body, first)
    return last.updates, last.is_converged


def start(
    method: Method,
    of: Problem,
    theta: Theta,
    memory: Step,
    *,
    knows_errors: Bool[Array, ""],
) -> Learner:
    """A learner before its first update, whose replay is full.

    Args:
      method: how it replays.
      of: the problem.
      theta: parameters at first.
      memory: see `cliffwalk_problem.memory`.
      knows_errors: whether priorities start from |delta|, or all at 1, the largest that
        Algorithm 1 knows then.
    """
    errors = jax.vmap(cliffwalk.td_error, in_axes=(None, None, 0))(of, theta, memory)
    priority = jnp.where(knows_errors, jnp.abs(errors), 1.0)
    state = method.replay.init(jax.tree.map(lambda x: x[0], memory))
    state = method.replay.add(state, memory, method.of_new(priority, memory))
    is_converged = cliffwalk.loss(of, theta) < cliffwalk.THRESHOLD
    return Learner(theta, state, jnp.int32(0), is_converged)


def update(
    method: Method,
    of: Problem,
    learner: Learner,
    key: Key[Array, ""],
    *,
    beta: Float[Array, ""],
) -> tuple[Learner, tuple[Sample, Seen]]:
    """Draws one transition, learns from it, and tells its priority.

    Args:
      method: how it replays.
      of: the problem.
      learner: before.
      key: spent here.
      beta: exponent of the importance weights.

    Returns:
      The learner after it; what was drawn, and what it was worth.
    """
    theta, state = learner.theta, learner.replay
    state, sample = method.replay.sample(
        state, key, batch_size=1, importance_exponent=beta
    )
    step = jax.tree.map(lambda x: x[0, 0], sample.items.items)
    error = cliffwalk.td_error(of, theta, step)
    weighted = sample.importance_weights[0] * error
    change = cliffwalk.change(of, step, weighted, theta.shape[0] - 1)
    seen = Seen(
        td_error=error[None],
        change=change[None],
        ratio=cliffwalk.ratio(of, theta, step)[None],
        episode_return=step.behaviour["return"][None],
        priority=method.sampler.priority(state.sampler, sample.ticket.slot),
        notes=sample.notes,
        updates=learner.updates,
    )
    boost = jnp.abs(seen.td_error) if method.boosts_predecessors else None
    state = method.replay.update(
        state,
        sample.ticket,
        method.priority(seen),
        td_error=seen.td_error,
        predecessor_boost=boost,
    )
    theta, updates = theta + change, learner.updates + 1
    if method.every:
        is_due = updates % method.every == 0
        renew = lambda state: _renewed(method, state)
        state = jax.lax.cond(is_due, renew, lambda state: state, state)
    is_converged = cliffwalk.loss(of, theta) < cliffwalk.THRESHOLD
    return Learner(theta, state, updates, is_converged), (sample, seen)


def _renewed(method: Method, state: ReplayState) -> ReplayState:
    """The replay after a pass over all priorities."""
    assert method.renewed is not None
    now, renewed = state.num_updates, method.renewed
    rule = lambda priority, age, notes: renewed(now - notes["last_replayed"], notes)
    return method.replay.reprioritize(state, rule)


def learn_uniformly(
    of: Problem,
    theta: Float[Array, "S n+1 2"],
    memory: Step,
    key: Key[Array, ""],
    *,
    max_updates: Int[Array, ""],
) -> tuple[Int[Array, " S"], Bool[Array, " S"]]:
    """Replays uniformly until the values of all seeds have converged.

    Draws depend on no update, so that a block of them is made at once; what is learned
    from them is learned one by one. All seeds draw from one memory, whose order makes
    no difference here.

    Args:
      of: the problem.
      theta: parameters at first, of every seed.
      memory: see `cliffwalk_problem.memory`.
      key: spent here.
      max_updates: after which it gives up.

    Returns:
      The updates each seed made, and whether its values have converged.
    """
    seeds, capacity = theta.shape[0], memory.reward.size
    uniform = replay.uniform(ring.windows(capacity, length=1, largest_add=capacity))
    full = uniform.add(uniform.init(jax.tree.map(lambda x: x[0], memory)), memory)

    def one(carry, steps: Step):
        theta, progress = carry
        errors = jax.vmap(cliffwalk.td_error, in_axes=(None, 0, 0))(of, theta, steps)
        changes = jax.vmap(cliffwalk.change, in_axes=(None, 0, 0, None))
        theta = theta + changes(of, steps, errors, theta.shape[1] - 1)
        return (theta, _progress(of, theta, progress)), None

    def block(carry):
        key_draws = jax.random.fold_in(key, carry[1][0])
        sample = uniform.sample(full, key_draws, batch_size=BLOCK * seeds)[1]
        each = lambda x: x[0].reshape(BLOCK, seeds)
        return jax.lax.scan(one, carry, jax.tree.map(each, sample.items.items))[0]

    return _until_converged(theta, block, max_updates)


def learn_by_oracle(
    of: Problem,
    theta: Float[Array, "S n+1 2"],
    *,
    never_rests: Bool[Array, ""],
    max_updates: Int[Array, ""],
) -> tuple[Int[Array, " S"], Bool[Array, " S"]]:
    """Replays what an oracle chooses, until the values of all seeds have converged.

    Args:
      of: the problem.
      theta: parameters at first, of every seed.
      never_rests: see `oracle`.
      max_updates: after which it gives up.

    Returns:
      The updates each seed made, and whether its values have converged.
    """
    choose = jax.vmap(oracle, in_axes=(None, 0, None))

    def one(carry):
        theta = choose(of, carry[0], never_rests)[0]
        return theta, _progress(of, theta, carry[1])

    return _until_converged(theta, one, max_updates)


def oracle(
    of: Problem, theta: Theta, never_rests: Bool[Array, ""]
) -> tuple[Theta, Int[Array, ""]]:
    """Learns from the transition after whose update the loss is least (section 3.1).

    It is one of 2n, however many there are of each in the memory. With linear values
    there are dead ends, where every update that changes anything makes the loss larger:
    there the oracle rests for ever on a transition without error, unless it must not.

    Args:
      of: the problem.
      theta: parameters before.
      never_rests: whether it takes the largest |delta| where none makes the loss less.

    Returns:
      The parameters after it; and which of `cliffwalk_problem.distinct` it was, the
      first of those that are as good.
    """
    n = theta.shape[0] - 1
    steps = jax.tree.map(jnp.asarray, cliffwalk.distinct(n))
    errors = jax.vmap(cliffwalk.td_error, in_axes=(None, None, 0))(of, theta, steps)
    changes = jax.vmap(cliffwalk.change, in_axes=(None, 0, 0, None))
    thetas = theta[None] + changes(of, steps, errors, n)
    losses = jax.vmap(cliffwalk.loss, in_axes=(None, 0))(of, thetas)
    best = jnp.argmin(losses)
    is_dead_end = losses[best] > (1.0 - LEAST_GAIN) * cliffwalk.loss(of, theta)
    best = jnp.where(never_rests & is_dead_end, jnp.argmax(jnp.abs(errors)), best)
    return thetas[best], best


def _progress(of: Problem, theta: Float[Array, "S n+1 2"], progress: Any) -> Any:
    """Counts an update, and notes it for the seeds that have just converged."""
    updates, converged_at = progress
    losses = jax.vmap(cliffwalk.loss, in_axes=(None, 0))(of, theta)
    is_first = (losses < cliffwalk.THRESHOLD) & (converged_at == 0)
    return updates + 1, jnp.where(is_first, updates + 1, converged_at)


def _until_converged(
    theta: Float[Array, "S n+1 2"],
    body: Callable[[Any], Any],
    max_updates: Int[Array, ""],
) -> tuple[Int[Array, " S"], Bool[Array, " S"]]:
    """Runs updates until all seeds have converged; those that have go on as well."""
    goes_on = lambda carry: jnp.any(carry[1][1] == 0) & (carry[1][0] < max_updates)
    none = jnp.zeros(theta.shape[0], jnp.int32)
    converged_at = jax.lax.while_loop(goes_on, body, (theta, (jnp.int32(0), none)))[1][
        1
    ]
    is_converged = (converged_at > 0) & (converged_at <= max_updates)
    return jnp.where(is_converged, converged_at, max_updates), is_converged
