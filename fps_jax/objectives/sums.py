"""Sums in which each row decays what follows it, over a trajectory or over windows."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fps_jax import checks

ASSOCIATIVE_FROM = 10**9
"""Rows from which "auto" takes the associative scan: never.

On a CPU it takes 5 times as long to compile at 1,024 rows and 6 to 22 times as long to
run, and at no length that ``experiments/bench_returns.py`` measures is it faster. On an
accelerator it has not been measured: there, pass the method.
"""


def discounted(
    x_t: Float[Array, " T"], decay_t: Float[Array, " T"], *, method: str = "auto"
) -> Float[Array, " T"]:
    """``s_t = x_t + decay_t s_{t+1}``, with 0 after the last row.

    Args:
      x_t: terms.
      decay_t: factor of what follows row t.
      method: "scan" from row to row; "associative", more work in fewer steps; "auto"
        chooses by `ASSOCIATIVE_FROM`.

    Raises:
      ValueError: if the method is unknown.
    """
    checks.choice("method", method, ("auto", "scan", "associative"))
    if method == "auto":
        method = "associative" if x_t.size >= ASSOCIATIVE_FROM else "scan"
    if method == "associative":
        later_first = lambda late, early: _follow(early, late)
        rows = decay_t, x_t
        return jax.lax.associative_scan(later_first, rows, reverse=True)[1]

    def backward(following, row):
        x, decay = row
        total = x + decay * following
        return total, total

    initial = jnp.zeros((), x_t.dtype)
    return jax.lax.scan(backward, initial, (x_t, decay_t), reverse=True)[1]


def _follow(early, late):
    """Joins two stretches ``s -> total + decay s``, of which the first comes first."""
    (early_decay, early_total), (late_decay, late_total) = early, late
    return early_decay * late_decay, early_total + early_decay * late_total


def windowed(
    x_t: Float[Array, " T"], decay_t: Float[Array, " T"], n: int
) -> Float[Array, " T"]:
    """The sums of `discounted`, each over its own next n rows alone.

    Stretches of 1, 2, 4, ... rows are joined as n's binary digits say: nothing is
    subtracted, so nothing cancels.

    Args:
      x_t: terms.
      decay_t: factor of what follows row t.
      n: rows of a window, at least 1.
    """

    def after(rows, stretch):
        decay, total = stretch
        return (
            jnp.concatenate([decay[rows:], jnp.zeros_like(decay[:rows])]),
            jnp.concatenate([total[rows:], jnp.zeros_like(total[:rows])]),
        )

    power, length = (decay_t, x_t), 1
    window, covered = (jnp.ones_like(decay_t), jnp.zeros_like(x_t)), 0
    while True:
        if n & length:
            window = _follow(window, after(covered, power))
            covered += length
        if covered == n:
            return window[1]
        power, length = _follow(power, after(length, power)), 2 * length
