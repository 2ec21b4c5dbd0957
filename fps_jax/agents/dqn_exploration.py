"""How DQN explores: by a schedule, or by what of its experience was replayed most.

The feedback of Schaul et al. (2016), section 6: exploration parameters are drawn from a
distribution, and how often what they led to was replayed says how useful it was. Here a
parameter is one of a few levels, each environment has one for each segment that it acts
(acting has no memory from one to the next), and a level is the likelier, the more often
a transition that was made with it is replayed:

    u_k = (replays of level k) / (transitions of level k)
    p_k = (1 - f) u_k / sum_j u_j + f / K

with counts that decay. If all levels are as useful, all are as likely.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fps_jax.agents.dqn_options import DQNOptions, Hyper
from fps_jax.agents.gradient import linear

GOLDEN = 0.6180339887
"""Multiples of it, modulo 1, are spread evenly however many there are."""


class Feedback(NamedTuple):
    """What was made with each of K levels, and how often that was replayed; decayed.

    Attributes:
      transitions: ``[K]``.
      replays: ``[K]``.
    """

    transitions: Float[Array, " K"]
    replays: Float[Array, " K"]


def init(num_levels: int) -> Feedback:
    """One of each, so that all levels are as likely.

    Args:
      num_levels: K.
    """
    return Feedback(jnp.ones(num_levels), jnp.ones(num_levels))


def count(
    level: Int[Array, "*items"], is_valid: Bool[Array, "*items"], num_levels: int
) -> Float[Array, " K"]:
    """How many items there are of each level.

    Args:
      level: of each item.
      is_valid: which of them count.
      num_levels: K.
    """
    one_hot = jnp.where(is_valid[..., None], jax.nn.one_hot(level, num_levels), 0.0)
    return jnp.sum(one_hot.reshape(-1, num_levels), axis=0)


def tell(
    feedback: Feedback,
    transitions: Float[Array, " K"],
    replays: Float[Array, " K"],
    decay: Float[Array, ""],
) -> Feedback:
    """Adds an update's counts to those before it.

    Args:
      feedback: before it.
      transitions: that were made, by level.
      replays: of transitions, by their level.
      decay: share of the earlier counts that stays.
    """
    return Feedback(
        decay * feedback.transitions + transitions, decay * feedback.replays + replays
    )


def probabilities(feedback: Feedback, floor: Float[Array, ""]) -> Float[Array, " K"]:
    """How likely each level is; see above.

    Args:
      feedback: counts.
      floor: f, the share of the draws that are of any level.
    """
    # As if one more of each had been made and replayed: nothing is divided by 0.
    useful = (feedback.replays + 1.0) / (feedback.transitions + 1.0)
    share = useful / jnp.sum(useful)
    return (1.0 - floor) * share + floor / useful.size


def scheduled(
    options: DQNOptions, hyper: Hyper, env_steps: Int[Array, ""]
) -> Float[Array, ""]:
    """The epsilon, or the temperature, of the schedule.

    Args:
      options: say which of them.
      hyper: where it starts and ends.
      env_steps: made so far.
    """
    length = hyper.exploration_steps
    length = hyper.total_env_steps if length is None else length
    progress = env_steps.astype(jnp.float32) / length
    if options.exploration == "boltzmann":
        return linear(hyper.temperature, hyper.final_temperature, progress)
    return linear(hyper.epsilon, hyper.final_epsilon, progress)


def levels_of(
    probability: Float[Array, " K"], offset: Float[Array, ""], num_envs: int
) -> Int[Array, " E"]:
    """The level of each environment, whose marginal is the probability, spread evenly.

    Args:
      probability: of each level.
      offset: uniform in [0, 1), one for all environments.
      num_envs: E.
    """
    place = (offset + GOLDEN * jnp.arange(num_envs, dtype=jnp.float32)) % 1.0
    above: Any = place[:, None] >= jnp.cumsum(probability)[None, :-1]
    return jnp.sum(above, axis=1, dtype=jnp.int32)
