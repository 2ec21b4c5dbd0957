"""Running statistics of a stream, exact on one device and on many."""

from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Shaped


class MomentsState(NamedTuple):
    """Mean and variance of all rows seen so far.

    Attributes:
      count: rows seen; a float, since it weighs the moments. It stops growing at
        about 2^24 times the rows of one update, 1.3e8 rows by eights; from there on
        the moments forget as a moving average does.
      mean: ``[*shape]``, 0 before the first row.
      variance: ``[*shape]``, the population's; 1 before the first row, so that
        `normalize` starts as the identity.
    """

    count: Float[Array, ""]  # pyright: ignore[reportIncompatibleMethodOverride]
    mean: Float[Array, "*shape"]
    variance: Float[Array, "*shape"]


class RunningMoments(NamedTuple):
    """Mean and variance of a stream of arrays.

    Attributes:
      init: ``init() -> MomentsState``.
      update: ``update(state, x, is_valid, *, axis_name=None) -> MomentsState``, with
        rows ``x [*rows, *shape]`` of which those count where ``is_valid [*rows]``.
    """

    init: Callable[[], MomentsState]
    update: Callable[..., MomentsState]


def running_moments(shape: tuple[int, ...]) -> RunningMoments:
    """Makes the moments of a stream of arrays of one shape.

        n = n_a + n_b,  d = mean_b - mean_a
        mean     = mean_a + d n_b / n
        variance = (n_a variance_a + n_b variance_b + d^2 n_a n_b / n) / n

    Chan, Golub & LeVeque (1983). Counts and sums are reduced over `axis_name` before
    they are divided, so several devices agree with one that sees every row. A second
    pass corrects each update's moments for the rounding of the first, so that the mean
    is good to a few float32 roundings of its magnitude, however many rows it took. A
    deviation below 1e-6 of the mean is lost in those.

    Args:
      shape: shape of one row.
    """

    def init() -> MomentsState:
        zero, one = jnp.zeros(shape, jnp.float32), jnp.ones(shape, jnp.float32)
        return MomentsState(jnp.zeros((), jnp.float32), zero, one)

    def update(
        state: MomentsState,
        x: Shaped[Array, "*any"],
        is_valid: Bool[Array, "*rows"],
        *,
        axis_name: str | None = None,
    ) -> MomentsState:
        chex.assert_shape(x, (*is_valid.shape, *shape))
        x = x.astype(jnp.float32).reshape(-1, *shape)
        is_valid = is_valid.reshape(-1, *(1 for _ in shape))

        def total(*values):
            sums = [jnp.sum(jnp.where(is_valid, v, 0.0), axis=0) for v in values]
            return sums if axis_name is None else jax.lax.psum(sums, axis_name)

        count, sums = total(jnp.ones_like(is_valid, jnp.float32), x)
        count = count.reshape(())
        divisor = jnp.maximum(count, 1.0)
        mean = sums / divisor
        residual = x - jnp.expand_dims(mean, 0)
        left, squares = total(residual, jnp.square(residual))
        correction = left / divisor
        variance = jnp.maximum(squares / divisor - jnp.square(correction), 0.0)
        return _merge(state, MomentsState(count, mean + correction, variance))

    return RunningMoments(init, update)


def _merge(a: MomentsState, b: MomentsState) -> MomentsState:
    count = a.count + b.count
    weight_b = b.count / jnp.maximum(count, 1.0)
    weight_a = 1.0 - weight_b
    difference = b.mean - a.mean
    mean = a.mean + difference * weight_b
    variance = (
        weight_a * a.variance
        + weight_b * b.variance
        + jnp.square(difference) * weight_a * weight_b
    )
    return MomentsState(count, mean, variance)


def normalize(
    state: MomentsState,
    x: Shaped[Array, "*batch_and_shape"],
    *,
    clip: float = 10.0,
    epsilon: float = 1e-8,
) -> Float[Array, "*batch_and_shape"]:
    """Standardises by running moments: ``clip((x - mean) / sqrt(variance + epsilon))``.

    Args:
      state: moments over the trailing axes of x.
      x: ``[*batch, *shape]``, any real dtype.
      clip: largest magnitude of the result, in deviations.
      epsilon: added to the variance.
    """
    lead = tuple(range(x.ndim - state.mean.ndim))
    mean = jnp.expand_dims(state.mean, lead)
    scale = jnp.expand_dims(jax.lax.rsqrt(state.variance + epsilon), lead)
    return jnp.clip((x.astype(jnp.float32) - mean) * scale, -clip, clip)
