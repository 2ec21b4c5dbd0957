"""Gradient steps that every agent takes: minibatches, optimiser, schedule."""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, Key

from fps_jax.types import Metrics

Scalar = Float[Array, ""] | float
Optimizer = Literal["adam", "sgd"]
Carry = tuple[Any, optax.OptState]


def gradient_transform(
    optimizer: Optimizer, *, max_grad_norm: Scalar, adam_epsilon: float
) -> optax.GradientTransformation:
    """From a gradient to a direction of unit step size; the limit may be traced.

    Args:
      optimizer: adam, or sgd for the gradient as it is.
      max_grad_norm: longest gradient, in its global Euclidean norm, above 0.
      adam_epsilon: added to Adam's root mean square.
    """
    adam = optax.scale_by_adam(eps=adam_epsilon)
    return optax.chain(
        optax.clip_by_global_norm(max_grad_norm),  # pyright: ignore[reportArgumentType]
        adam if optimizer == "adam" else optax.identity(),
    )


def gradient_step(
    loss_fn: Callable[[Any, Any], tuple[Float[Array, ""], Metrics]],
    transform: optax.GradientTransformation,
    *,
    learning_rate: Scalar,
    axis_name: str | None,
) -> Callable[[Carry, Any], tuple[Carry, Metrics]]:
    """Makes one descent step on a minibatch that the devices share.

    Args:
      loss_fn: ``loss_fn(params, minibatch) -> (loss, metrics)``, both this device's
        shares of means over all devices; see `masked.share_of_mean`.
      transform: see `gradient_transform`.
      learning_rate: step size.
      axis_name: the device axis, if any.

    Returns:
      ``step((params, optimizer), minibatch) -> ((params, optimizer), metrics)``.
    """

    def step(carry: Carry, minibatch: Any) -> tuple[Carry, Metrics]:
        params, optimizer = carry
        gradient, metrics = jax.grad(loss_fn, has_aux=True)(params, minibatch)
        if axis_name is not None:
            gradient, metrics = jax.lax.psum((gradient, metrics), axis_name)
        metrics["grad_norm"] = optax.tree.norm(gradient)
        # Optax mixes counts and floats, which strict JAX refuses.
        with jax.numpy_dtype_promotion("standard"):
            direction, optimizer = transform.update(gradient, optimizer)
        params = jax.tree.map(lambda p, d: p - learning_rate * d, params, direction)
        return (params, optimizer), metrics

    return step


def minibatch_epochs(
    step: Callable[[Carry, Any], tuple[Carry, Metrics]],
    carry: Carry,
    batch_of: Callable[[Any], Any],
    key: Key[Array, ""],
    *,
    rows: int,
    num_epochs: int,
    num_minibatches: int,
) -> tuple[Carry, Metrics]:
    """Passes over a batch several times, each in minibatches of a new random order.

    Args:
      step: see `gradient_step`.
      carry: parameters and the optimiser's state.
      batch_of: ``batch_of(params)`` gives an epoch's batch, each leaf ``[rows, ...]``.
      key: of this device and this update alone.
      rows: of the batch on this device.
      num_epochs: passes over it.
      num_minibatches: of each pass; they divide the rows.

    Returns:
      The new carry, and the mean of each metric over all steps.
    """

    def one_epoch(carry: Carry, epoch: Int[Array, ""]):
        order = jax.random.permutation(jax.random.fold_in(key, epoch), rows)
        split = lambda x: x[order].reshape(num_minibatches, -1, *x.shape[1:])
        return jax.lax.scan(step, carry, jax.tree.map(split, batch_of(carry[0])))

    # Folded and not split: JAX's check of keys takes a scan over split keys, once
    # vmapped, for their second use.
    carry, metrics = jax.lax.scan(one_epoch, carry, jnp.arange(num_epochs))
    return carry, jax.tree.map(jnp.mean, metrics)


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
    return jnp.asarray(
        start * (1.0 - (1.0 - final_fraction) * jnp.clip(progress, 0.0, 1.0))
    )


def num_minibatches(minibatch_size: int, rows: int, devices: int) -> int:
    """How many minibatches a batch is split into.

    Args:
      minibatch_size: rows of one gradient step, over all devices.
      rows: rows of the batch on one device.
      devices: how many there are.

    Raises:
      ValueError: if either does not divide.
    """
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
    """A key of this device alone.

    Args:
      key: the same on every device.
      axis_name: the device axis, if any.
    """
    if axis_name is None:
        return key
    return jax.random.fold_in(key, jax.lax.axis_index(axis_name))
