"""Statistics under a mask, exact across devices: sums and counts, divided once."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def mean(
    x: Float[Array, "*items"],
    is_valid: Bool[Array, "*items"],
    *,
    axis_name: str | None = None,
) -> Float[Array, ""]:
    """Mean over the valid items of every device: sums and counts, divided once.

    An item that is not valid has no influence, whatever it holds, on the value or on
    the gradient with respect to `x`. Without any valid item the mean is 0.

    Args:
      x: the items of this device.
      is_valid: which of them count.
      axis_name: the device axis to reduce over, if any.
    """
    added, count = total(x, is_valid), jnp.sum(is_valid)
    if axis_name is not None:
        added, count = jax.lax.psum((added, count), axis_name)
    return added / jnp.maximum(count, 1).astype(x.dtype)


def total(
    x: Float[Array, "*items"], is_valid: Bool[Array, "*items"]
) -> Float[Array, ""]:
    """Sum over the valid items of this device.

    Args:
      x: the items of this device.
      is_valid: which of them count.
    """
    return jnp.sum(jnp.where(is_valid, x, 0.0))


def share_of_mean(
    is_valid: Bool[Array, "*items"], *, axis_name: str | None = None
) -> Callable[[Float[Array, "*items"]], Float[Array, ""]]:
    """This device's share of a mean over every device: its sum over the global count.

    The shares add up to the mean, and so do their gradients: differentiate the share,
    then ``psum``. (A loss that is itself reduced inside ``grad`` is counted once a
    device.)

    Args:
      is_valid: which items of this device count.
      axis_name: the device axis, if any.

    Returns:
      A function from the items to the share.
    """
    count = jnp.sum(is_valid)
    if axis_name is not None:
        count = jax.lax.psum(count, axis_name)
    count = jnp.maximum(count, 1)
    return lambda x: total(x, is_valid) / count.astype(x.dtype)


def deviations(
    x: Float[Array, "*items"],
    is_valid: Bool[Array, "*items"],
    *,
    exclude_axes: tuple[int, ...] = (),
    axis_name: str | None = None,
) -> Float[Array, "*items"]:
    """Deviations from the mean of every device's valid items; 0 where not valid.

    The largest item is subtracted first: a small spread about a large mean keeps its
    digits, and equal items deviate by exactly 0, not by what rounding left of them.

    Args:
      x: the items of this device.
      is_valid: which of them count.
      exclude_axes: axes whose items have each a mean of their own.
      axis_name: the device axis to reduce over, if any.

    Raises:
      ValueError: if an axis is not there or stands twice, or all are excluded.
    """
    axes = _reduced_axes(x.ndim, exclude_axes)
    lowest = jnp.finfo(x.dtype).min
    pivot = jnp.max(
        jax.lax.stop_gradient(x),
        axis=axes,
        where=is_valid,
        initial=lowest,
        keepdims=True,
    )
    if axis_name is not None:
        pivot = jax.lax.pmax(pivot, axis_name)
    x = jnp.where(is_valid, x - pivot, 0.0)
    added, count = _sums(x, is_valid, axes, axis_name)
    return jnp.where(is_valid, x - added / jnp.maximum(count, 1.0), 0.0)


def _sums(x, is_valid, axes, axis_name):
    """Sum and number of every device's valid items over some axes, which stay."""
    add = lambda x: jnp.sum(jnp.where(is_valid, x, 0.0), axis=axes, keepdims=True)
    sums = add(x), add(jnp.ones_like(x))
    return sums if axis_name is None else jax.lax.psum(sums, axis_name)


def _reduced_axes(rank: int, exclude_axes: tuple[int, ...]) -> tuple[int, ...]:
    """The axes that are left; refuses those that make no sense."""
    for axis in exclude_axes:
        if not -rank <= axis < rank:
            raise ValueError(f"exclude_axes {exclude_axes}: {axis} is not in {rank}.")
    excluded = {axis % rank for axis in exclude_axes}
    if len(excluded) < len(exclude_axes):
        raise ValueError(f"exclude_axes {exclude_axes} must name each axis once.")
    if excluded and len(excluded) == rank:
        raise ValueError(f"exclude_axes {exclude_axes} must leave an axis of {rank}.")
    return tuple(axis for axis in range(rank) if axis not in excluded)


def standardize(
    x: Float[Array, "*items"],
    is_valid: Bool[Array, "*items"],
    *,
    exclude_axes: tuple[int, ...] = (),
    correction: int = 0,
    epsilon: float = 1e-8,
    axis_name: str | None = None,
) -> Float[Array, "*items"]:
    """Centres and scales by the mean and deviation of every device's valid items.

        (x - mean) / (std + epsilon), 0 where not valid

    If all valid items are equal the result is 0, and so is its gradient. Items too few
    to have a deviation (no more than `correction`) are left as they are.

    Args:
      x: the items of this device.
      is_valid: which of them count.
      exclude_axes: axes that are standardised apart, such as those of agents or of
        objectives.
      correction: what the number of items is lessened by: 0 for the population's
        deviation, 1 for the sample's.
      epsilon: added to the deviation.
      axis_name: the device axis to reduce over, if any.

    Raises:
      ValueError: if an axis is not there or stands twice, or all are excluded.
    """
    centred = deviations(x, is_valid, exclude_axes=exclude_axes, axis_name=axis_name)
    axes = _reduced_axes(x.ndim, exclude_axes)
    squares, count = _sums(jnp.square(centred), is_valid, axes, axis_name)
    has_deviation = count > float(correction)
    variance = squares / jnp.where(has_deviation, count - correction, 1.0)
    is_varied = variance > 0.0
    deviation = jnp.sqrt(jnp.where(is_varied, variance, 1.0))
    scaled = jnp.where(is_varied, centred / (deviation + epsilon), 0.0)
    return jnp.where(has_deviation, scaled, jnp.where(is_valid, x, 0.0))
