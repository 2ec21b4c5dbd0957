"""The critic's term: the policy follows the slope of the critic at its mean.

In the joint loss, as equation 14 has it, or in separate steps after it.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Key

from fps_jax.agents.dfps_networks import Params
from fps_jax.agents.dfps_state import DFPSState, Frozen, Parts
from fps_jax.agents.gradient import Learned, gradient_step
from fps_jax.agents.memory import Memory
from fps_jax.objectives import masked
from fps_jax.types import Metrics


def is_joint(parts: Parts) -> bool:
    """Whether the critic's term is a part of the policy's loss.

    Args:
      parts: of the agent.
    """
    options = parts.options
    return follows_critic(parts) and options.dpg_phase == "joint"


def follows_critic(parts: Parts) -> bool:
    """Whether the policy follows the critic at all.

    Args:
      parts: of the agent.
    """
    return parts.options.has_critic and parts.options.dpg_coef > 0


def critic_share(
    parts: Parts,
    state: DFPSState,
    mean: Float[Array, "B A"],
    observation: Float[Array, "B features"],
    coef: Float[Array, " B"],
    is_valid: Bool[Array, " B"],
    frozen: Frozen,
) -> Float[Array, ""]:
    """This device's share of the mean of ``coef Q(s, mu(s))``; 0 before Q may be used.

    Args:
      parts: of the agent.
      state: gives the critic, as a constant.
      mean: of the policy, which the gradient is with respect to.
      observation: the states.
      coef: of each of them.
      is_valid: which of them count.
      frozen: the numbers of this iteration.
    """
    networks, critics = parts.networks, state.critics
    assert critics is not None
    q = networks.critic(critics.params, observation, networks.reach(mean))
    share = masked.share_of_mean(is_valid, axis_name=frozen.axis_name)
    return jnp.where(frozen.is_ready, share(coef * q), 0.0)


def is_separate(parts: Parts) -> bool:
    """Whether the policy takes steps of their own along the critic.

    Args:
      parts: of the agent.
    """
    return follows_critic(parts) and parts.options.dpg_phase == "separate"


def follow_critic(
    parts: Parts,
    state: DFPSState,
    memory: Memory,
    weight: Float[Array, ""],
    frozen: Frozen,
    key: Key[Array, ""],
    *,
    steps: int,
) -> tuple[DFPSState, Metrics]:
    """Takes separate steps along the critic, on states of the replay.

    Args:
      parts: of the agent.
      state: its policy moves.
      memory: gives the states.
      weight: of the critic's term.
      frozen: the numbers of this iteration.
      key: of this device and this phase.
      steps: how many.

    Returns:
      The state, and metrics over all devices.
    """
    options, networks, critics = parts.options, parts.networks, state.critics
    assert parts.experience is not None
    assert critics is not None
    size = options.dpg_batch_size
    drawn, is_valid = parts.experience.states(memory, key, size * steps)
    deal = lambda x: x.reshape(steps, size, *x.shape[1:])
    drawn, is_valid = deal(frozen.observe(drawn)), deal(is_valid)
    weight = state.hyper.dpg_coef * weight

    def loss_fn(params: Params, average: Any, batch: tuple[Array, Array]):
        observation, is_valid = batch
        action = networks.reach(networks.policy(params, observation).mean)
        q = networks.critic(critics.params, observation, action)
        share = masked.share_of_mean(is_valid, axis_name=frozen.axis_name)
        return -weight * share(q), share(jax.lax.stop_gradient(q))

    step = gradient_step(
        loss_fn,
        parts.transform(state.hyper),
        learning_rate=frozen.dpg_learning_rate,
        averaging=None,
        axis_name=frozen.axis_name,
    )

    def one(index: Array, carry: Any):
        learned, total = carry
        learned, (q, _) = step(learned, (drawn[index], is_valid[index]))
        return learned, total + q

    start = Learned(state.policy.params, state.dpg_optimizer, None)
    count = jnp.where(frozen.is_ready, steps, 0)
    learned, total = jax.lax.fori_loop(0, count, one, (start, jnp.zeros(())))
    mean = total / jnp.maximum(count, 1).astype(total.dtype)
    if frozen.axis_name is not None:
        mean = jax.lax.psum(mean, frozen.axis_name)
    policy = state.policy._replace(params=learned.params)
    state = state._replace(policy=policy, dpg_optimizer=learned.optimizer)
    return state, {"dpg_q": mean}
