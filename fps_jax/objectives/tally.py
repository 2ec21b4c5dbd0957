"""Sums and counts that metrics are made of: they add up, then are divided once.

A mean of means over microbatches or devices weighs their items unevenly. A `Tally` does
not: `merge` those of microbatches, add them up `across` devices, and take the `metrics`
of the result.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Shaped

from fps_jax.objectives import masked


class Moments(NamedTuple):
    """Mean of some items, and the sum of their squared deviations from it; scalars."""

    mean: Float[Array, ""]
    squares: Float[Array, ""]


class Tally(NamedTuple):
    """What `metrics` needs of some items.

    Attributes:
      count: of valid items; a float, since it divides.
      sums: of each counted quantity, by name.
      largest: logarithm of the largest importance ratio; the lowest float if none.
      weight: sum of the ratios, each over the largest one.
      weight_squares: sum of their squares.
      target: moments of the value targets; None without values.
      error: moments of targets less values; None without values.
    """

    count: Float[Array, ""]  # pyright: ignore[reportIncompatibleMethodOverride]
    sums: dict[str, Float[Array, ""]]
    largest: Float[Array, ""]
    weight: Float[Array, ""]
    weight_squares: Float[Array, ""]
    target: Moments | None
    error: Moments | None


def of(
    counted: Mapping[str, Shaped[Array, "*items"]],
    log_ratio: Float[Array, "*items"],
    value_errors: tuple[Float[Array, "*items"], Float[Array, "*items"]] | None,
    is_valid: Bool[Array, "*items"],
) -> Tally:
    """Tallies the valid items of one batch on one device.

    Args:
      counted: quantities whose means are wanted: floats, or flags.
      log_ratio: logarithm of the importance ratio that the data weighs by.
      value_errors: value targets, and targets less values; None without values.
      is_valid: which items count.
    """
    dtype = log_ratio.dtype
    add = lambda x: masked.total(x.astype(dtype), is_valid)
    log_ratio = jnp.where(is_valid, log_ratio, 0.0)
    lowest = jnp.finfo(dtype).min
    largest = jnp.max(log_ratio, where=is_valid, initial=lowest)
    weight = jnp.exp(jnp.where(is_valid, log_ratio - largest, 0.0))
    count = add(jnp.ones_like(log_ratio))

    def moments(x):
        mean = add(x) / jnp.maximum(count, 1.0)
        return Moments(mean, add(jnp.square(masked.deviations(x, is_valid))))

    target, error = (None, None) if value_errors is None else map(moments, value_errors)
    return Tally(
        count=count,
        sums={name: add(x) for name, x in counted.items()},
        largest=largest,
        weight=add(weight),
        weight_squares=add(jnp.square(weight)),
        target=target,
        error=error,
    )


def merge(parts: Tally) -> Tally:
    """The tally of all items of several batches, as if they had been one.

    Args:
      parts: of the batches, stacked: every leaf has a leading axis over them.
    """
    return _join(
        parts,
        total=lambda x: jnp.sum(x, axis=0),
        most=lambda x: jnp.max(x, axis=0),
    )


def across(tally: Tally, axis_name: str) -> Tally:
    """The tally of all devices' items, the same on each of them.

    Args:
      tally: of this device.
      axis_name: the device axis.
    """
    return _join(
        tally,
        total=lambda x: jax.lax.psum(x, axis_name),
        most=lambda x: jax.lax.pmax(x, axis_name),
    )


def _join(parts: Tally, *, total, most) -> Tally:
    """Joins parts along an axis, over which two functions reduce."""
    count, largest = total(parts.count), most(parts.largest)
    scale = jnp.exp(parts.largest - largest)

    def moments(part):
        if part is None:
            return None
        mean = total(parts.count * part.mean) / jnp.maximum(count, 1.0)
        apart = parts.count * jnp.square(part.mean - mean)
        return Moments(mean, total(part.squares + apart))

    return Tally(
        count=count,
        sums={name: total(x) for name, x in parts.sums.items()},
        largest=largest,
        weight=total(scale * parts.weight),
        weight_squares=total(jnp.square(scale) * parts.weight_squares),
        target=moments(parts.target),
        error=moments(parts.error),
    )


def metrics(tally: Tally) -> dict[str, Any]:
    """Metrics of all items that were tallied.

    ========================= ========================================================
    by its name               mean of a counted quantity
    ESS                       ``(sum w)^2 / (N sum w^2)`` of the importance ratios
    max_ratio, mean_ratio     of the importance ratios
    explained_variance        ``1 - Var(G - v) / Var(G)``; 0 if all targets are equal
    explained_error           ``1 - mean (G - v)^2 / Var(G)``: a bias counts as well
    ========================= ========================================================

    Without any valid item all are 0.

    Args:
      tally: over all microbatches and devices.
    """
    count = jnp.maximum(tally.count, 1.0)
    found: dict[str, Any] = {name: x / count for name, x in tally.sums.items()}
    is_any = tally.count > 0.0
    dtype = tally.largest.dtype
    limit = jnp.log(jnp.finfo(dtype).max) - 0.1
    share = jnp.where(is_any, tally.weight / count, 1.0)
    ratio = lambda x: jnp.where(is_any, jnp.exp(jnp.minimum(x, limit)), 0.0)
    squares = count * tally.weight_squares
    squares = jnp.where(squares > 0.0, squares, 1.0)  # 0 if no ratio is above 0.
    found |= {
        "ESS": jnp.square(tally.weight) / squares,
        "max_ratio": ratio(tally.largest),
        "mean_ratio": ratio(tally.largest + jnp.log(share)),
    }
    if tally.target is not None and tally.error is not None:
        whole = tally.target.squares
        # What rounding of the mean leaves of equal targets is no variance.
        rounding = 4.0 * jnp.finfo(dtype).eps * tally.target.mean
        is_varied = whole > tally.count * jnp.square(rounding)
        explained = lambda left: jnp.where(
            is_varied, 1.0 - left / jnp.where(is_varied, whole, 1.0), 0.0
        )
        bias = tally.count * jnp.square(tally.error.mean)
        found |= {
            "explained_variance": explained(tally.error.squares),
            "explained_error": explained(tally.error.squares + bias),
        }
    return found


def explained_variance(
    value: Float[Array, "*items"],
    target: Float[Array, "*items"],
    is_valid: Bool[Array, "*items"],
    *,
    axis_name: str | None = None,
) -> dict[str, Any]:
    """How much of the targets' variance the values explain, over every device's items.

    Args:
      value: predicted returns.
      target: returns.
      is_valid: which items count.
      axis_name: the device axis to reduce over, if any.

    Returns:
      ``explained_variance`` and ``explained_error``; see `metrics`.
    """
    told = of({}, jnp.zeros_like(value), (target, target - value), is_valid)
    found = metrics(told if axis_name is None else across(told, axis_name))
    return {name: found[name] for name in ("explained_variance", "explained_error")}
