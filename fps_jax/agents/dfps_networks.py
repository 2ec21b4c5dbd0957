"""The networks of DFPS: a Gaussian policy, its value, and critics of its actions."""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from fps_jax.agents.dfps_options import DFPSOptions
from fps_jax.models import distributions
from fps_jax.models.networks import MLP, Critic, GaussianHead, ValueHead
from fps_jax.types import Continuous, EnvSpec

Params = Any


class Gaussian(NamedTuple):
    """A policy in some states.

    Attributes:
      mean: ``[*batch, A]``.
      log_std: ``[*batch, A]``.
    """

    mean: Float[Array, "*batch A"]
    log_std: Float[Array, "*batch A"]

    def log_prob(self, drawn: Float[Array, "*batch A"]) -> Float[Array, "*batch"]:
        """Of what was drawn.

        Args:
          drawn: before it is squashed.
        """
        policy: Any = distributions.diagonal_gaussian(*self)
        return policy.log_prob(drawn)

    def entropy(self) -> Float[Array, "*batch"]:
        """Of what is drawn."""
        policy: Any = distributions.diagonal_gaussian(*self)
        return policy.entropy()

    def sample(self, key: Key[Array, ""]) -> Float[Array, "*batch A"]:
        """Draws.

        Args:
          key: spent here.
        """
        noise = jax.random.normal(key, self.mean.shape)
        return self.mean + jnp.exp(self.log_std) * noise


class Networks(NamedTuple):
    """Functions of parameters; observations are as the networks read them.

    Attributes:
      init: ``init(key) -> (policy, value, critics)``, their parameters; no critics
        are None.
      policy: ``policy(params, observation) -> Gaussian``.
      value: ``value(params, observation) -> [*batch]``.
      critics: ``critics(params, observation, action) -> [C, *batch]``.
      execute: ``execute(drawn) -> action``, what the environment does, in [-1, 1].
      reach: ``reach(drawn) -> action``, the same where a gradient is taken: a Gaussian
        mean beyond the range is not clipped.
    """

    init: Callable[[Key[Array, ""]], tuple[Params, Params, Params]]
    policy: Callable[[Params, Array], Gaussian]
    value: Callable[[Params, Array], Float[Array, "*batch"]]
    critics: Callable[[Params, Array, Array], Array]
    execute: Callable[[Array], Array]
    reach: Callable[[Array], Array]

    def critic(
        self,
        params: Params,
        observation: Float[Array, "*batch features"],
        action: Float[Array, "*batch A"],
    ) -> Float[Array, "*batch"]:
        """The first critic, whose gradient the policy follows.

        Args:
          params: of all critics.
          observation: the states.
          action: what is done there.
        """
        first = jax.tree.map(lambda x: x[:1], params)
        return self.critics(first, observation, action)[0]


def make_networks(options: DFPSOptions, spec: EnvSpec) -> Networks:
    """Makes the networks that fit an environment.

    Args:
      options: their sizes.
      spec: the environment.

    Raises:
      ValueError: if its actions are discrete or its observations no vectors.
    """
    if not isinstance(spec.action, Continuous):
        raise ValueError(
            f"{spec.env_id} has discrete actions; {options.name} needs continuous ones."
        )
    if len(spec.observation_shape) != 1:
        raise ValueError(
            f"observations of {spec.env_id} have shape {spec.observation_shape}; "
            f"{options.name} needs vectors."
        )
    sizes = options.hidden_sizes, options.activation
    head = GaussianHead(
        spec.action.size,
        options.init_log_std,
        learns_log_std=options.learns_log_std,
        bounds_mean=options.bounds_mean,
    )
    policy_net: Any = nn.Sequential([MLP(*sizes, layer_norm=options.layer_norm), head])
    value_net: Any = nn.Sequential([MLP(*sizes), ValueHead()])
    critic: Any = Critic(MLP(options.critic_hidden_sizes, "relu", layer_norm=True))

    def init(key: Key[Array, ""]):
        key_policy, key_value, key_critic = jax.random.split(key, 3)
        observation = jnp.zeros((1, *spec.observation_shape), jnp.float32)
        action = jnp.zeros((1, spec.action.size), jnp.float32)  # pyright: ignore
        critics = None
        if options.has_critic:
            keys = jax.random.split(key_critic, options.num_critics)
            # Not `vmap`: XLA's batched QR can hang on a CPU of few cores.
            critics = jax.lax.map(lambda k: critic.init(k, observation, action), keys)
        policy = policy_net.init(key_policy, observation)
        return policy, value_net.init(key_value, observation), critics

    return Networks(
        init=init,
        policy=lambda params, observation: Gaussian(
            *distributions.gaussian_parameters(policy_net.apply(params, observation))
        ),
        value=value_net.apply,
        critics=jax.vmap(critic.apply, in_axes=(0, None, None)),
        execute=(
            jnp.tanh
            if options.squash == "tanh"
            else lambda drawn: jnp.clip(drawn, -1.0, 1.0)
        ),
        reach=jnp.tanh if options.squash == "tanh" else lambda drawn: drawn,
    )
