"""Supervised learning from a replay, many steps in one jitted program.

One step of `imbalanced_mnist`, of B examples:

    draw i ~ P with replacement, with importance weights w_i
    l_i = -log p_theta(y_i | x_i)
    theta <- theta - eta grad mean_i(w_i c_i l_i)
        c_i = rare_weight of a digit 0 to 4, 1 of another one
    priority of i: l_i + epsilon, or 1 - p_theta(y_i | x_i) + epsilon

Errors are those before the step, as an example's last-seen error costs nothing then.
The source is Schaul et al. (2016), arXiv:1511.05952, section 6 and appendix B.3.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, UInt8

from experiments import mnist
from fps_jax.replay import priorities, replay, ring
from fps_jax.replay.replay import Replay
from fps_jax.replay.states import ReplayState

PRIORITIES = ("loss", "error")
CHUNK = 250
"""Images that are evaluated at a time."""


KERNEL = 5


class Convolution(nn.Module):
    """A convolution of 5 x 5 without padding, as one product of matrices.

    XLA's own takes several times as long on CPUs within a loop, and channels that come
    last twice as long.

    Attributes:
      features: channels of its output, F.
    """

    features: int

    @nn.compact
    def __call__(self, x: Float[Array, "C B H W"]) -> Float[Array, "F B H-4 W-4"]:
        """Maps images to features; its kernel is ``[25 C, F]``."""
        channels, batch, height, width = x.shape
        height, width = height - KERNEL + 1, width - KERNEL + 1
        init = nn.initializers.lecun_normal()
        kernel = self.param("kernel", init, (KERNEL**2 * channels, self.features))
        bias = self.param("bias", nn.initializers.zeros, (self.features, 1))
        beside = [x[..., j : j + width] for j in range(KERNEL)]
        x = jnp.concatenate(beside)
        below = [x[:, :, i : i + height] for i in range(KERNEL)]
        patches = jnp.concatenate(below).reshape(len(kernel), -1)
        return (kernel.T @ patches + bias).reshape(-1, batch, height, width)


class LeNet(nn.Module):
    """A small LeNet-5: two convolutions and two dense layers.

    Each convolution is followed by a ReLU and the maximum of 2 x 2, the first dense
    layer by a ReLU.

    Attributes:
      channels: of the two convolutions, of 5 x 5.
      hidden_size: of the first dense layer.
    """

    channels: tuple[int, int] = (6, 16)
    hidden_size: int = 84

    @nn.compact
    def __call__(self, images: UInt8[Array, "B 28 28"]) -> Float[Array, "B 10"]:
        """Maps images to log-probabilities of the digits."""
        x = images[None].astype(jnp.float32) / 255.0
        for features in self.channels:
            x = max_pool(nn.relu(Convolution(features)(x)))
        x = jnp.moveaxis(x, 1, 0).reshape(len(images), -1)
        x = nn.relu(nn.Dense(self.hidden_size)(x))
        return nn.log_softmax(nn.Dense(mnist.NUM_DIGITS)(x))


def max_pool(x: Float[Array, "*batch H W"]) -> Float[Array, "*batch H/2 W/2"]:
    """The maximum of each 2 x 2; what is equal shares its gradient.

    Args:
      x: of even height and width.
    """
    x = jnp.maximum(x[..., ::2, :], x[..., 1::2, :])
    return jnp.maximum(x[..., ::2], x[..., 1::2])


class Learner(NamedTuple):
    """What a step changes.

    Attributes:
      params: of the network.
      replay: the training set and its priorities.
    """

    params: Any
    replay: ReplayState


class Rates(NamedTuple):
    """Numbers of a run, traced: another value is not compiled again.

    Attributes:
      step_size: eta, of SGD.
      rare_weight: what the losses of digits 0 to 4 are multiplied by.
    """

    step_size: Float[Array, ""]
    rare_weight: Float[Array, ""]


def make_replay(
    capacity: int, *, is_prioritized: bool, priority_exponent: float = 1.0
) -> Replay:
    """A replay that holds a training set, one item an example.

    Args:
      capacity: N, the examples.
      is_prioritized: whether draws are proportional to priorities, or uniform.
      priority_exponent: alpha.
    """
    storage = ring.items(capacity)
    if is_prioritized:
        return replay.proportional(storage, exponent=priority_exponent)
    return replay.uniform(storage)


def filled(of: Replay, digits: mnist.Digits, *, largest_add: int = 2048) -> ReplayState:
    """A replay with a whole training set; all of its priorities are maximal, 1.

    Args:
      of: functions of the replay.
      digits: the examples.
      largest_add: examples that are added at a time.
    """
    add = jax.jit(of.add, donate_argnums=0)
    state = of.init({"image": digits.images[0], "label": digits.labels[0]})
    for start in range(0, len(digits.labels), largest_add):
        images, labels = (x[start : start + largest_add] for x in digits)
        state = add(state, {"image": images, "label": labels})
    return state


def make_step(
    network: nn.Module,
    of: Replay,
    *,
    batch_size: int,
    importance_exponent: float,
    priority: str,
    epsilon: float,
) -> Callable[[Learner, Rates, Key[Array, ""]], tuple[Learner, Float[Array, ""]]]:
    """Makes the step, to be compiled.

    Args:
      network: maps images to log-probabilities.
      of: functions of the replay.
      batch_size: B.
      importance_exponent: beta of the importance weights.
      priority: of an example: one of `PRIORITIES`, its loss or 1 - p of its label.
      epsilon: what is added to it.

    Returns:
      ``step(learner, rates, key) -> (learner, loss)``; the loss is the plain mean over
      what was drawn, without any weight.
    """

    apply: Callable[..., Any] = network.apply

    def loss(params, rates, sample):
        labels = sample.items["label"].astype(jnp.int32)
        log_probability = apply(params, sample.items["image"])
        losses = -jnp.take_along_axis(log_probability, labels[:, None], axis=1)[:, 0]
        weights = jnp.where(labels < mnist.RARE, rates.rare_weight, 1.0)
        return jnp.mean(sample.importance_weights * weights * losses), losses

    def step(learner, rates, key):
        state, sample = of.sample(
            learner.replay,
            key,
            batch_size=batch_size,
            importance_exponent=importance_exponent,
        )
        gradient, losses = jax.grad(loss, has_aux=True)(learner.params, rates, sample)
        descend = lambda x, g: x - rates.step_size * g
        params = jax.tree.map(descend, learner.params, gradient)
        error = losses if priority == "loss" else -jnp.expm1(-losses)
        error = priorities.absolute(error, epsilon=epsilon)
        state = of.update(state, sample.ticket, error)
        return Learner(params, state), jnp.mean(losses)

    return step


def make_training(
    step: Callable[..., tuple[Learner, Float[Array, ""]]], updates: int
) -> Callable[[Learner, Rates, Key[Array, ""]], tuple[Learner, Float[Array, ""]]]:
    """Compiles many steps into one program, which takes the learner it is given.

    Args:
      step: see `make_step`.
      updates: how many.

    Returns:
      ``train(learner, rates, key) -> (learner, loss)``, the mean of the steps' losses.
    """

    def train(learner, rates, key):
        one = lambda learner, key: step(learner, rates, key)
        learner, losses = jax.lax.scan(one, learner, jax.random.split(key, updates))
        return learner, jnp.mean(losses)

    return jax.jit(train, donate_argnums=0)


def make_evaluation(
    network: nn.Module,
) -> Callable[[Any, mnist.Digits], tuple[int, float]]:
    """Makes ``evaluate(params, digits) -> (errors, loss)``.

    Errors are the images whose most probable digit is another one, the loss is the mean
    negative log-likelihood.

    Args:
      network: maps images to log-probabilities.
    """
    apply: Callable[..., Any] = network.apply

    @jax.jit
    def of_chunk(params, images, labels):
        labels = labels.astype(jnp.int32)
        log_probability = apply(params, images)
        losses = -jnp.take_along_axis(log_probability, labels[:, None], axis=1)
        is_wrong = jnp.argmax(log_probability, axis=1).astype(jnp.int32) != labels
        return jnp.sum(is_wrong, dtype=jnp.int32), jnp.sum(losses)

    def evaluate(params, digits):
        errors, loss = 0, 0.0
        for start in range(0, len(digits.labels), CHUNK):
            images, labels = (x[start : start + CHUNK] for x in digits)
            of_these = of_chunk(params, images, labels)
            errors, loss = errors + int(of_these[0]), loss + float(of_these[1])
        return errors, loss / len(digits.labels)

    return evaluate
