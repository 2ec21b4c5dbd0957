"""Running statistics of a stream, exact on one device and on many."""

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Shaped

from fps_jax import checks

Scalar = Float[Array, ""] | float


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


class AverageState(NamedTuple):
    """A moving average of a tree, such as a network's parameters.

    Attributes:
      weight: of all that was averaged, in units of the newest, scalar; 1 at the start.
      value: the average.
    """

    weight: Float[Array, ""]
    value: Any


class MovingAverage(NamedTuple):
    """A moving average of trees.

    Attributes:
      init: ``init(x) -> AverageState``, of `x` alone; also how an average is reset.
      update: ``update(state, x) -> AverageState``.
    """

    init: Callable[[Any], AverageState]
    update: Callable[[AverageState, Any], AverageState]


def moving_average(decay: Scalar, *, is_debiased: bool = True) -> MovingAverage:
    """Makes an exponentially weighted moving average that starts from its first tree.

        W <- decay W + 1,  m <- m + (x - m) / W         with W = 1 at the start
        m <- m + (1 - decay) (x - m)                    without debiasing

    Debiased, every tree weighs ``decay^age``, the first one like any other (Hilton et
    al., 2021, arXiv:2110.00641, whose proximal policy it is); otherwise the first one
    weighs ``1 / (1 - decay)`` times as much. Its centre of mass is
    ``decay / (1 - decay)`` updates old.

    Args:
      decay: weight of each tree over that of the next, in [0, 1); may be traced.
      is_debiased: let the first tree weigh no more than the others.

    Raises:
      ValueError: if the decay is known to be outside.
    """
    checks.number("decay", decay, 0, 1, ends="[)")

    def init(x: Any) -> AverageState:
        return AverageState(jnp.ones((), jnp.float32), x)

    def update(state: AverageState, x: Any) -> AverageState:
        weight = decay * state.weight + 1.0
        share = 1.0 / weight if is_debiased else 1.0 - decay
        closer = lambda m, new: m + jnp.asarray(share, m.dtype) * (new - m)
        return AverageState(weight, jax.tree.map(closer, state.value, x))

    return MovingAverage(init, update)


class PercentileState(NamedTuple):
    """Moving averages of two percentiles, scalars.

    Attributes:
      weight: share of the averages that is not their first value of 0.
      low: average of the lower percentile, 0 before the first update.
      high: average of the upper one.
    """

    weight: Float[Array, ""]
    low: Float[Array, ""]
    high: Float[Array, ""]


class PercentileScale(NamedTuple):
    """The range of a stream of numbers, without its tails.

    Attributes:
      init: ``init() -> PercentileState``.
      update: ``update(state, x, is_valid, *, axis_name=None) -> PercentileState``.
      scale: ``scale(state) -> scalar``, what to divide by.
    """

    init: Callable[[], PercentileState]
    update: Callable[..., PercentileState]
    scale: Callable[[PercentileState], Float[Array, ""]]


def percentile_scale(
    rate: Scalar,
    *,
    low: float = 0.05,
    high: float = 0.95,
    min_scale: float = 1.0,
    is_debiased: bool = False,
) -> PercentileScale:
    """Makes the scale of returns that outliers do not move.

        l <- l + rate (P_low - l),  h <- h + rate (P_high - h),  w <- w + rate (1 - w)
        scale = max(h - l, min_scale)            from l = h = w = 0
        scale = max((h - l) / w, min_scale)      debiased

    with percentiles, interpolated linearly, of the valid items of every device; without
    any, nothing changes. Hafner et al. (2023), arXiv:2301.04104, section "Actor loss".
    At its rate of 0.01 it takes hundreds of updates to reach the true range unless it
    is debiased.

    Args:
      rate: share of the newest percentiles in the averages, in [0, 1]; may be traced.
      low: the lower percentile, as a share of the items below it.
      high: the upper one.
      min_scale: smallest scale, above 0: small returns are not blown up.
      is_debiased: leave out the first value of 0.

    Raises:
      ValueError: if a number is known to be out of range.
    """
    checks.number("rate", rate, 0, 1)
    checks.number("low", low, 0, 1, ends="[)")
    checks.number("high", high, low, 1, ends="(]")
    checks.number("min_scale", min_scale, 0, ends="(]")

    def init() -> PercentileState:
        zero = jnp.zeros((), jnp.float32)
        return PercentileState(zero, zero, zero)

    def update(
        state: PercentileState,
        x: Float[Array, "*items"],
        is_valid: Bool[Array, "*items"],
        *,
        axis_name: str | None = None,
    ) -> PercentileState:
        if axis_name is not None:
            x, is_valid = jax.lax.all_gather((x, is_valid), axis_name)
        x = jnp.where(is_valid, x, jnp.inf).reshape(-1)
        count = jnp.sum(is_valid)
        found = _quantiles(jnp.sort(x), count, jnp.asarray((low, high), x.dtype))
        target = PercentileState(jnp.ones(()), *found)
        move = lambda old, new: jnp.where(count > 0, old + rate * (new - old), old)
        return jax.tree.map(move, state, target)

    def scale(state: PercentileState) -> Float[Array, ""]:
        spread = state.high - state.low
        if is_debiased:
            spread = spread / jnp.where(state.weight > 0.0, state.weight, 1.0)
        return jnp.maximum(spread, min_scale)

    return PercentileScale(init, update, scale)


def _quantiles(ascending, count, shares):
    """Quantiles of the first `count` items, interpolated linearly; of none, anything.

    `jnp.quantile` knows no mask.
    """
    place = shares * jnp.maximum(count - 1, 0).astype(shares.dtype)
    below = jnp.floor(place).astype(jnp.int32)
    above = jnp.minimum(below + 1, jnp.maximum(count - 1, 0))
    share = place - below.astype(shares.dtype)
    lower, upper = ascending[below], ascending[above]
    apart = jnp.where(lower == upper, 0.0, upper - lower)
    return lower + share * apart
