"""Torsos that read observations and heads that act or value, in flax.linen."""

import functools
from collections.abc import Callable, Sequence

import distrax
import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from fps_jax import checks
from fps_jax.models import distributions
from fps_jax.types import Discrete, EnvSpec

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "tanh": nn.tanh,
    "relu": nn.relu,
    "elu": nn.elu,
    "swish": nn.swish,
}
SMALLEST_FRAME = 36
"""Height and width below which `NatureCNN` has nothing left to convolve."""


class MLP(nn.Module):
    """Dense layers, each followed by an optional layer norm and an activation.

    Attributes:
      hidden_sizes: width of each layer.
      activation: name of the activation, a key of `ACTIVATIONS`.
      layer_norm: normalise each layer before its activation.
    """

    hidden_sizes: Sequence[int]
    activation: str = "tanh"
    layer_norm: bool = False

    @nn.compact
    def __call__(self, x: Float[Array, "*batch features"]) -> Float[Array, "*batch H"]:
        """Maps features to the last hidden layer."""
        for size in self.hidden_sizes:
            x = nn.Dense(size, kernel_init=nn.initializers.orthogonal(2**0.5))(x)
            x = nn.LayerNorm()(x) if self.layer_norm else x
            x = ACTIVATIONS[self.activation](x)
        return x


class Conv(nn.Module):
    """A square convolution without padding, whose stride divides its kernel.

    On CPUs it is one product of matrices: XLA's own convolutions are slow there within
    loops, where agents take their steps.

    Attributes:
      features: channels of its output, F.
      kernel: its height and width, k.
      stride: s, a divisor of k.
    """

    features: int
    kernel: int
    stride: int = 1

    @nn.compact
    def __call__(
        self, x: Float[Array, "*batch height width C"]
    ) -> Float[Array, "*batch rows columns F"]:
        """Maps images, channels last, to features."""
        k, channels = self.kernel, x.shape[-1]
        init = nn.initializers.orthogonal(2**0.5)
        kernel = self.param("kernel", init, (k, k, channels, self.features))
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        images = x.reshape(-1, *x.shape[-3:])
        strides = (self.stride, self.stride)
        y = jax.lax.platform_dependent(
            images,
            kernel,
            cpu=functools.partial(convolved_by_product, stride=self.stride),
            default=lambda x, kernel: jax.lax.conv_general_dilated(
                x, kernel, strides, "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
            ),
        )
        y = y + bias.reshape(1, 1, 1, -1)
        return y.reshape(*x.shape[:-3], *y.shape[1:])


def convolved_by_product(
    x: Float[Array, "B height width C"], kernel: Float[Array, "k k C F"], *, stride: int
) -> Float[Array, "B rows columns F"]:
    """A convolution without padding, as one product of matrices.

    Blocks of s x s pixels become channels, so that the kernel is one of k/s x k/s
    blocks and the stride is 1; its k^2/s^2 shifted copies are put side by side.

    Args:
      x: images, channels last.
      kernel: of an odd or even height and width k, a multiple of the stride.
      stride: s.

    Raises:
      ValueError: if the stride does not divide k.
    """
    k, _, channels, features = kernel.shape
    if k % stride:
        raise ValueError(f"stride {stride} must divide the kernel's {k}.")
    batch, height, width, _ = x.shape
    rows, columns = (height - k) // stride + 1, (width - k) // stride + 1
    reach = k // stride
    down, across = rows - 1 + reach, columns - 1 + reach
    x = x[:, : down * stride, : across * stride]
    x = x.reshape(batch, down, stride, across, stride, channels)
    x = jnp.moveaxis(x, 3, 2).reshape(batch, down, across, -1)
    patches = [
        x[:, i : i + rows, j : j + columns] for i in range(reach) for j in range(reach)
    ]
    blocks = kernel.reshape(reach, stride, reach, stride, channels, features)
    weights = jnp.moveaxis(blocks, 2, 1).reshape(-1, features)
    return jnp.concatenate(patches, axis=-1) @ weights


class NatureCNN(nn.Module):
    """The convolutional torso of Mnih et al. (2015), for stacks of 84 x 84 frames.

    Attributes:
      hidden_sizes: width of each dense layer after the convolutions.
    """

    hidden_sizes: Sequence[int] = (512,)

    @nn.compact
    def __call__(
        self, x: Shaped[Array, "*batch C H W"]
    ) -> Float[Array, "*batch features"]:
        """Maps frames of bytes, channels first as EnvPool's, to the last layer."""
        x = jnp.moveaxis(x.astype(jnp.float32) / 255.0, -3, -1)
        init = nn.initializers.orthogonal(2**0.5)
        for features, kernel, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
            x = nn.relu(Conv(features, kernel, stride)(x))
        x = x.reshape(*x.shape[:-3], -1)
        for size in self.hidden_sizes:
            x = nn.relu(nn.Dense(size, kernel_init=init)(x))
        return x


class GaussianHead(nn.Module):
    """A diagonal Gaussian whose log standard deviation does not depend on the state.

    Attributes:
      size: number of action dimensions, A.
      init_log_std: log standard deviation at the start, in units of an action whose
        range is [-1, 1].
      learns_log_std: whether it moves from there.
      bounds_mean: keep the mean in that range by a tanh.
    """

    size: int
    init_log_std: float = -0.5
    learns_log_std: bool = True
    bounds_mean: bool = False

    @nn.compact
    def __call__(self, h: Float[Array, "*batch H"]) -> distrax.Distribution:
        """Maps features to a distribution over ``[*batch, A]``."""
        mean = nn.Dense(self.size, kernel_init=nn.initializers.orthogonal(0.01))(h)
        mean = nn.tanh(mean) if self.bounds_mean else mean
        init = nn.initializers.constant(self.init_log_std)
        log_std = self.param("log_std", init, (self.size,))
        if not self.learns_log_std:
            log_std = jax.lax.stop_gradient(log_std)
        return distributions.diagonal_gaussian(
            mean, jnp.broadcast_to(log_std, mean.shape)
        )


class CategoricalHead(nn.Module):
    """A distribution over discrete actions.

    Attributes:
      num_actions: how many there are.
    """

    num_actions: int

    @nn.compact
    def __call__(self, h: Float[Array, "*batch H"]) -> distrax.Distribution:
        """Maps features to a distribution over ``0 .. num_actions - 1``."""
        init = nn.initializers.orthogonal(0.01)
        logits = nn.Dense(self.num_actions, kernel_init=init)(h)
        return distributions.categorical(logits)


class ValueHead(nn.Module):
    """One linear unit."""

    @nn.compact
    def __call__(self, h: Float[Array, "*batch H"]) -> Float[Array, "*batch"]:
        """Maps features to a value."""
        return nn.Dense(1, kernel_init=nn.initializers.orthogonal(1.0))(h).squeeze(-1)


class DuelingHead(nn.Module):
    """The values of discrete actions, from a state's and what each action adds to it.

        Q(s, a) = V(s) + A(s, a) - mean_a A(s, a)

    Wang et al. (2016), equation 9, arXiv:1511.06581.

    Attributes:
      num_actions: how many there are.
      hidden_size: width of the hidden layer that V and A each have.
      activation: of it, a key of `ACTIVATIONS`.
    """

    num_actions: int
    hidden_size: int
    activation: str = "relu"

    @nn.compact
    def __call__(self, h: Float[Array, "*batch H"]) -> Float[Array, "*batch A"]:
        """Maps features to the values of all actions."""
        stream = lambda: MLP((self.hidden_size,), self.activation)
        advantage = nn.Dense(self.num_actions)(stream()(h))
        value = nn.Dense(1)(stream()(h))
        return value + advantage - jnp.mean(advantage, axis=-1, keepdims=True)


class Critic(nn.Module):
    """The value of an action in a state.

    Attributes:
      torso: reads an observation and an action, one after the other.
    """

    torso: nn.Module

    @nn.compact
    def __call__(
        self,
        observation: Float[Array, "*batch features"],
        action: Float[Array, "*batch A"],
    ) -> Float[Array, "*batch"]:
        """Maps both to a value."""
        inputs = jnp.concatenate([observation, action], axis=-1)
        return ValueHead()(self.torso(inputs))


class ActorCritic(nn.Module):
    """A policy and a value function, on torsos of their own or on one they share.

    Attributes:
      policy_torso: reads observations for the policy.
      policy_head: maps the torso's features to a distribution.
      value_torso: reads observations for the value; None shares the policy's torso.
      separates_losses: only the policy trains a torso that is shared: the value's
        gradient ends at its features (torchrl's ``separate_losses``).
    """

    policy_torso: nn.Module
    policy_head: nn.Module
    value_torso: nn.Module | None = None
    separates_losses: bool = False

    def setup(self):
        """Names the value's head."""
        self.value_head = ValueHead()

    def policy(
        self, observation: Shaped[Array, "*batch_and_shape"]
    ) -> distrax.Distribution:
        """The distribution of actions."""
        return self.policy_head(self.policy_torso(observation))

    def value(
        self, observation: Shaped[Array, "*batch_and_shape"]
    ) -> Float[Array, "*batch"]:
        """The value of each observation."""
        features = (self.value_torso or self.policy_torso)(observation)
        if self.value_torso is None and self.separates_losses:
            features = jax.lax.stop_gradient(features)
        return self.value_head(features)

    def __call__(
        self, observation: Shaped[Array, "*batch_and_shape"]
    ) -> tuple[distrax.Distribution, Float[Array, "*batch"]]:
        """Both at once; initialises every parameter."""
        return self.policy(observation), self.value(observation)


def actor_critic(
    spec: EnvSpec,
    *,
    hidden_sizes: Sequence[int],
    activation: str,
    init_log_std: float,
    shares_torso: bool = False,
    separates_losses: bool = False,
) -> ActorCritic:
    """Makes the policy and the value function that fit an environment.

    Vectors are read by an `MLP` each, or by one; frames by one `NatureCNN`.

    Args:
      spec: the environment.
      hidden_sizes: width of each hidden layer of the MLPs.
      activation: a key of `ACTIVATIONS`.
      init_log_std: see `GaussianHead`; unused for discrete actions.
      shares_torso: one torso reads vectors for both; frames are always read so.
      separates_losses: see `ActorCritic`; needs a torso that is shared.

    Raises:
      ValueError: if the observations are neither vectors nor stacks of frames, the
        activation is unknown, or there are no shared parameters to separate.
    """
    checks.choice("activation", activation, ACTIVATIONS)
    if isinstance(spec.action, Discrete):
        head = CategoricalHead(spec.action.num_actions)
    else:
        head = GaussianHead(spec.action.size, init_log_std)
    if not _reads_vectors(spec):
        return ActorCritic(NatureCNN(), head, separates_losses=separates_losses)
    torso = MLP(hidden_sizes, activation)
    if not shares_torso and separates_losses:
        raise ValueError(
            f"separates_losses {separates_losses} needs shares_torso: nothing is "
            "shared otherwise."
        )
    value_torso = None if shares_torso else MLP(hidden_sizes, activation)
    return ActorCritic(torso, head, value_torso, separates_losses)


def q_network(
    spec: EnvSpec, *, hidden_sizes: Sequence[int], activation: str, dueling: bool
) -> nn.Module:
    """Makes the network that values all actions: ``[*batch, ...]`` to ``[*batch, A]``.

    Vectors are read by an `MLP`, frames by a `NatureCNN` with its own 512 units.

    Args:
      spec: the environment.
      hidden_sizes: width of each hidden layer of the MLP, at least one.
      activation: a key of `ACTIVATIONS`, for vectors; frames have relu.
      dueling: the last hidden layer is twofold, see `DuelingHead`.

    Raises:
      ValueError: if the actions are continuous, the observations neither vectors nor
        stacks of frames, or the activation is unknown.
    """
    checks.choice("activation", activation, ACTIVATIONS)
    if not isinstance(spec.action, Discrete):
        raise ValueError(f"{spec.env_id} has continuous actions; discrete are needed.")
    is_vector = _reads_vectors(spec)
    sizes = tuple(hidden_sizes) if is_vector else (512,)
    shared = sizes[:-1] if dueling else sizes
    torso = MLP(shared, activation) if is_vector else NatureCNN(shared)
    if dueling:
        name = activation if is_vector else "relu"
        head: nn.Module = DuelingHead(spec.action.num_actions, sizes[-1], name)
    else:
        head = nn.Dense(spec.action.num_actions)
    return nn.Sequential([torso, head])


def _reads_vectors(spec: EnvSpec) -> bool:
    """Whether observations are vectors; refuses all but those and stacks of frames."""
    shape = spec.observation_shape
    if len(shape) == 3 and min(shape[1:]) >= SMALLEST_FRAME:
        return False
    if len(shape) == 1:
        return True
    raise ValueError(
        f"observations of {spec.env_id} have shape {shape}; a vector is needed, or a "
        f"stack of frames [C, H, W] of at least {SMALLEST_FRAME} x {SMALLEST_FRAME}."
    )
