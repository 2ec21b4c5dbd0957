"""How many samples an item may pay for: the ratio of replaying to acting, as state.

    balance = samples_per_insert * (items since there were enough) - samples

A balance that stays within the tolerance of 0 replays every item so often on average,
whatever acts or learns faster. Only the balance is kept, so nothing overflows.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fps_jax import checks


class Limiter(NamedTuple):
    """Functions of a balance, in samples.

    Attributes:
      min_size: items that must be there before any is drawn.
      init: ``init() -> balance``.
      added: ``added(balance, size, count) -> balance``, after `count` items came to the
        `size` that were there.
      sampled: ``sampled(balance, count) -> balance``.
      may_sample: ``may_sample(balance, size, count) -> bool``; raises ValueError for
        more at a time than twice the tolerance.
      may_add: ``may_add(balance, size) -> bool``.
    """

    min_size: int | Int[Array, ""]
    init: Callable[[], Float[Array, ""]]
    added: Callable[[Float[Array, ""], Int[Array, ""], int], Float[Array, ""]]
    sampled: Callable[[Float[Array, ""], int], Float[Array, ""]]
    may_sample: Callable[[Float[Array, ""], Int[Array, ""], int], Bool[Array, ""]]
    may_add: Callable[[Float[Array, ""], Int[Array, ""]], Bool[Array, ""]]


def limiter(
    samples_per_insert: float | Float[Array, ""],
    *,
    min_size: int | Int[Array, ""] = 1,
    tolerance: float | Float[Array, ""] | None = None,
) -> Limiter:
    """Makes the functions; the numbers may be traced.

    Args:
      samples_per_insert: how often an item is drawn on average, above 0.
      min_size: items that must be there before any is drawn; they pay for no samples.
      tolerance: samples that either side may be ahead, above 0; None is ten times
        `samples_per_insert`. A learner that draws B at a time needs at least B / 2, or
        adding might wait for sampling while sampling waits for adding.

    Raises:
      ValueError: if a number is out of range.
    """
    checks.number("samples_per_insert", samples_per_insert, 0, ends="()")
    checks.number("min_size", min_size, 1)
    checks.number("tolerance", tolerance, 0, ends="()")
    slack = 10 * samples_per_insert if tolerance is None else tolerance

    def added(balance: Float[Array, ""], size: Int[Array, ""], count: int):
        paying = jnp.clip(size + count - min_size, 0, count)
        return balance + samples_per_insert * paying.astype(jnp.float32)

    def may_sample(balance: Float[Array, ""], size: Int[Array, ""], count: int):
        checks.number("tolerance", slack, count / 2)
        return (size >= min_size) & (balance - count >= -slack)

    return Limiter(
        min_size=min_size,
        init=lambda: jnp.float32(0.0),
        added=added,
        sampled=lambda balance, count: balance - count,
        may_sample=may_sample,
        may_add=lambda balance, size: (size < min_size) | (balance <= slack),
    )
