"""Which priorities replay the Blind Cliffwalk: those of the figures, and variants.

The variants are those of appendix A and section 6 of Schaul et al. (2016), by the rules
of `fps_jax.replay.priorities`. Each changes one thing of proportional replay without
importance weights; the coefficients are guesses, as the paper has none, or none for
this task. Rank-based and greedy replay stand beside them, as staleness by an offset
serves no other.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp

from experiments.cliffwalk_learning import Method, Seen, method
from fps_jax.replay import priorities, queue, ranks, samplers
from fps_jax.replay.samplers import Sampler

STALENESS_RATE, PASSES = 0.1, 10
"""Priority that staleness adds in N updates; and passes in as many."""
LARGEST = 1.0
"""Of sign-consistent priorities: that of what was not yet replayed."""


class Numbers(NamedTuple):
    """What the methods are told.

    Attributes:
      proportional: alpha of proportional replay.
      rank_based: alpha of rank-based replay.
      epsilon: added to the priorities of both.
    """

    proportional: float = 0.6
    rank_based: float = 0.7
    epsilon: float = 1e-3


Rule = Callable[[Seen, float], Any]
"""``rule(seen, epsilon) -> priority [1]``."""


def of_figures(name: str, capacity: int, *, numbers: Numbers) -> Method:
    """A method of figures 1 and 2.

    Importance weights are divided by the largest that the buffer could give: by the
    batch's own, that of a single transition, they would all be 1. Ranks are sorted anew
    after N / 100 updates.

    Args:
      name: "greedy", "rank_based" or "proportional".
      capacity: N.
      numbers: the exponents of the latter two, and what is added to their priorities.
    """
    if name == "greedy":
        queued = lambda seen: _plain(seen, 0.0)
        return method(capacity, queue.greedy(capacity), queued)
    if name == "rank_based":
        sampler = _ranks(capacity, numbers.rank_based)
    else:
        sampler = samplers.proportional(
            capacity,
            exponent=numbers.proportional,
            spread="independent",
            keeps_lowest=True,
        )
    priority = lambda seen: _plain(seen, numbers.epsilon)
    return method(capacity, sampler, priority, normalize="buffer")


def of_variant(name: str, capacity: int, *, numbers: Numbers) -> Method:
    """A variant of proportional replay, or another sampler to compare it with.

    Args:
      name: a key of `VARIANTS`.
      capacity: N.
      numbers: exponents, and what is added to priorities.
    """
    return VARIANTS[name](capacity, numbers)


def _ranks(capacity: int, alpha: float) -> Sampler:
    return ranks.rank_based(
        capacity,
        exponent=alpha,
        largest_write=capacity,
        sort_period=max(capacity // 100, 1),
        spread="independent",
    )


def _proportional(
    rule: Rule,
    capacity: int,
    numbers: Numbers,
    *,
    alpha: float | None = None,
    uniform_fraction: float = 0.0,
    **options: Any,
) -> Method:
    """Proportional replay by a rule."""
    sampler = samplers.proportional(
        capacity,
        exponent=numbers.proportional if alpha is None else alpha,
        spread="independent",
        uniform_fraction=uniform_fraction,
    )
    return method(
        capacity, sampler, lambda seen: rule(seen, numbers.epsilon), **options
    )


def _plain(seen: Seen, epsilon: float) -> Any:
    return priorities.absolute(seen.td_error, epsilon=epsilon)


def _derivative(seen: Seen, epsilon: float) -> Any:
    last = seen.notes["last_td_error"]
    return priorities.derivative(seen.td_error, last, epsilon=epsilon)


def _sign_consistent(seen: Seen, epsilon: float) -> Any:
    return priorities.sign_consistent(
        seen.priority,
        seen.td_error,
        seen.notes["last_td_error"],
        low=epsilon,
        high=LARGEST,
    )


def _signed(seen: Seen, epsilon: float) -> Any:
    return priorities.signed(seen.td_error, epsilon=epsilon)


def _weight_change(seen: Seen, epsilon: float) -> Any:
    # With this optimiser a multiple of |delta|, so only its size beside 1 differs.
    return priorities.weight_change_norm(seen.change) + epsilon


def _of_success(priority: Any, returns: Any) -> Any:
    return priorities.return_boost(priority, returns, low=0.0, high=1.0, coef=4.0)


def _return_boost(seen: Seen, epsilon: float) -> Any:
    return _of_success(_plain(seen, epsilon), seen.episode_return)


def _novelty(seen: Seen, epsilon: float) -> Any:
    times = seen.notes["times_replayed"] + 1  # This time is not noted yet.
    return priorities.novelty(_plain(seen, epsilon), times, coef=1.0)


def _off_policy(seen: Seen, epsilon: float) -> Any:
    return priorities.off_policy(seen.td_error, seen.ratio, epsilon=epsilon)


def _rejection(seen: Seen, epsilon: float) -> Any:
    del epsilon  # What is rejected is not drawn again.
    return priorities.rejection(seen.ratio)


def _staleness_bonus(capacity: int, numbers: Numbers) -> Method:
    def renewed(age: Any, notes: dict[str, Any]) -> Any:
        last = notes["last_td_error"]
        known = priorities.absolute(last, epsilon=numbers.epsilon)
        priority = jnp.where(jnp.isnan(last), 1.0, known)
        rate = STALENESS_RATE / capacity
        return priorities.staleness_bonus(priority, age, rate=rate)

    return _proportional(
        _plain,
        capacity,
        numbers,
        notes=("last_td_error", "last_replayed"),
        every=-(-capacity // PASSES),
        renewed=renewed,
    )


def _queue(sampler: str, rate: float, capacity: int, numbers: Numbers) -> Method:
    """Greedy or rank-based replay, perhaps with a staleness offset."""

    def priority(seen: Seen) -> Any:
        known = _plain(seen, 0.0 if sampler == "greedy" else numbers.epsilon)
        return priorities.staleness_offset(known, seen.updates, rate=rate / capacity)

    if sampler == "greedy":
        return method(capacity, queue.greedy(capacity), priority)
    return method(capacity, _ranks(capacity, numbers.rank_based), priority)


def _variant(rule: Rule, **options: Any) -> Any:
    return functools.partial(_proportional, rule, **options)


_LAST = ("last_td_error",)
VARIANTS: dict[str, Callable[[int, Numbers], Method]] = {
    "proportional": _variant(_plain),
    "derivative": _variant(_derivative, notes=_LAST),
    "sign_consistent": _variant(_sign_consistent, notes=_LAST),
    "weight_change_norm": _variant(_weight_change),
    "signed": _variant(_signed),
    "return_boost": _variant(
        _return_boost,
        of_new=lambda priority, steps: _of_success(priority, steps.behaviour["return"]),
    ),
    "novelty": _variant(
        _novelty,
        notes=("times_replayed",),
        of_new=lambda priority, steps: priorities.novelty(
            priority, jnp.zeros_like(priority), coef=1.0
        ),
    ),
    "uniform_mixture": _variant(_plain, uniform_fraction=0.1),
    "staleness_bonus": _staleness_bonus,
    "predecessor_boost": _variant(_plain, boosts_predecessors=True),
    "off_policy": _variant(_off_policy),
    "rejection": _variant(_rejection, alpha=1.0),
    "rank_based": functools.partial(_queue, "rank_based", 0.0),
    "rank_based_staleness_offset": functools.partial(
        _queue, "rank_based", STALENESS_RATE
    ),
    "greedy": functools.partial(_queue, "greedy", 0.0),
    "greedy_staleness_offset": functools.partial(_queue, "greedy", STALENESS_RATE),
}
"""Makes each of them, of N and the numbers."""
