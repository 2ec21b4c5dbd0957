"""Gradient steps that every agent takes: minibatches, optimiser, schedule."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, Key

from fps_jax.models.normalize import AverageState, MovingAverage

Scalar = Float[Array, ""] | float
Optimizer = Literal["adam", "rmsprop", "sgd"]


class Learned(NamedTuple):
    """What gradient steps move.

    Attributes:
      params: of the network.
      optimizer: of optax.
      average: moving average of the parameters over gradient steps; None without one.
    """

    params: Any
    optimizer: optax.OptState
    average: AverageState | None


def gradient_transform(
    optimizer: Optimizer, *, max_grad_norm: Scalar, adam_epsilon: float
) -> optax.GradientTransformation:
    """From a gradient to a direction of unit step size; the limit may be traced.

    Args:
      optimizer: adam; rmsprop, divided by the gradient's deviation (centred, decay
        0.95, as Mnih et al., 2015, have it); or sgd for the gradient as it is.
      max_grad_norm: longest gradient, in its global Euclidean norm, above 0.
      adam_epsilon: added to Adam's root mean square, or to the deviation.
    """
    directions = {
        "adam": lambda: optax.scale_by_adam(eps=adam_epsilon),
        "rmsprop": lambda: optax.scale_by_stddev(decay=0.95, eps=adam_epsilon),
        "sgd": optax.identity,
    }
    return optax.chain(
        optax.clip_by_global_norm(max_grad_norm),  # pyright: ignore[reportArgumentType]
        directions[optimizer](),
    )


def gradient_step(
    loss_fn: Callable[[Any, Any, Any], tuple[Float[Array, ""], Any]],
    transform: optax.GradientTransformation,
    *,
    learning_rate: Scalar,
    averaging: MovingAverage | None,
    axis_name: str | None,
) -> Callable[[Learned, Any], tuple[Learned, tuple[Any, Float[Array, ""]]]]:
    """Makes one descent step on a minibatch that the devices share.

    Args:
      loss_fn: ``loss_fn(params, average, minibatch) -> (loss, aux)``, this device's
        share of a loss over all devices; see `masked.share_of_mean`. The average is
        that of the parameters so far, None without one.
      transform: see `gradient_transform`.
      learning_rate: step size.
      averaging: keeps the average; None keeps none.
      axis_name: the device axis, if any.

    Returns:
      ``step(learned, minibatch) -> (learned, (aux, norm))``, the norm being that of the
      gradient.
    """

    def step(learned: Learned, minibatch: Any):
        params, optimizer, average = learned
        kept = None if average is None else average.value
        gradient, aux = jax.grad(loss_fn, has_aux=True)(params, kept, minibatch)
        if axis_name is not None:
            gradient = jax.lax.psum(gradient, axis_name)
        norm = optax.tree.norm(gradient)
        # Optax mixes counts and floats, which strict JAX refuses.
        with jax.numpy_dtype_promotion("standard"):
            direction, optimizer = transform.update(gradient, optimizer)
        params = jax.tree.map(lambda p, d: p - learning_rate * d, params, direction)
        if averaging is not None and average is not None:
            average = averaging.update(average, params)
        return Learned(params, optimizer, average), (aux, norm)

    return step


def minibatch_epochs(
    step: Callable[[Any, Any], tuple[Any, Any]],
    learned: Any,
    batch_of: Callable[[Any], Any],
    report: Callable[[Any, Any], Any],
    key: Key[Array, ""],
    *,
    rows: int,
    num_epochs: int,
    num_minibatches: int,
    after_epoch: Callable[[Any], Any] = lambda learned: learned,
) -> tuple[Any, Any]:
    """Passes over a batch several times, each in minibatches of a new random order.

    Args:
      step: see `gradient_step`.
      learned: what it moves, `Learned` or what else has `params`.
      batch_of: ``batch_of(params)`` gives an epoch's batch, each leaf ``[rows, ...]``.
      report: ``report(out, minibatches)`` sums up an epoch, from what its steps gave
        beside `learned` and what they were given, both stacked: what is reported costs
        the steps nothing.
      key: of this device and this update alone.
      rows: of the batch on this device.
      num_epochs: passes over it.
      num_minibatches: of each pass; they divide the rows.
      after_epoch: ``after_epoch(learned) -> learned``, after each pass.

    Returns:
      What was learned, and the reports of all epochs, stacked.
    """

    def one_epoch(learned: Any, epoch: Int[Array, ""]):
        order = jax.random.permutation(jax.random.fold_in(key, epoch), rows)
        split = lambda x: x[order].reshape(num_minibatches, -1, *x.shape[1:])
        minibatches = jax.tree.map(split, batch_of(learned.params))
        learned, out = jax.lax.scan(step, learned, minibatches)
        return after_epoch(learned), report(out, minibatches)

    # Folded and not split: JAX's check of keys takes a scan over split keys, once
    # vmapped, for their second use.
    return jax.lax.scan(one_epoch, learned, jnp.arange(num_epochs))


def linear_decay(
    start: Scalar, final_fraction: Scalar, progress: Scalar
) -> Float[Array, ""]:
    """A number that moves linearly from `start` to a fraction of it.

        start (1 - (1 - final_fraction) clip(progress, 0, 1))

    Args:
      start: its value at the start.
      final_fraction: its value at the end over that at the start.
      progress: how far the run is, 0 at the start and 1 at the end.
    """
    return linear(start, start * final_fraction, progress)


def linear(start: Scalar, end: Scalar, progress: Scalar) -> Float[Array, ""]:
    """A number that moves linearly from one value to another, and stays there.

    Args:
      start: its value at the start.
      end: its value at the end.
      progress: how far the run is, 0 at the start and 1 at the end.
    """
    return jnp.asarray(start + (end - start) * jnp.clip(progress, 0.0, 1.0))


def num_minibatches(minibatch_size: int | None, rows: int, devices: int) -> int:
    """How many minibatches a batch is split into.

    Args:
      minibatch_size: rows of one gradient step, over all devices; None is all of them.
      rows: rows of the batch on one device.
      devices: how many there are.

    Raises:
      ValueError: if either does not divide.
    """
    if minibatch_size is None:
        return 1
    if minibatch_size % devices or (rows * devices) % minibatch_size:
        raise ValueError(
            f"minibatch_size {minibatch_size} must be a multiple of {devices} learner "
            f"devices and divide the batch of {rows * devices} rows "
            "(num_envs x rollout_steps x actors)."
        )
    return rows * devices // minibatch_size


def axis_size(axis_name: str | None) -> int:
    """Number of devices on the axis; 1 without one.

    Args:
      axis_name: the device axis, if any.
    """
    return 1 if axis_name is None else jax.lax.axis_size(axis_name)


def device_key(key: Key[Array, ""], axis_name: str | None) -> Key[Array, ""]:
    """A key of this device alone: without an axis, that of the one there is.

    Args:
      key: the same on every device.
      axis_name: the device axis, if any.
    """
    index = 0 if axis_name is None else jax.lax.axis_index(axis_name)
    return jax.random.fold_in(key, index)
