"""The Blind Cliffwalk, and Q-learning on it (Schaul et al., 2016, appendix B.1).

States 0 ... n - 1 and two actions: the right one leads to the next state, from the last
one to a reward of 1 and the end; the wrong one ends the episode with nothing. Which
action is right alternates with the state. Values are ``Q(s, a) = theta^T phi(s, a)``,
where phi is the one-hot of (s, a), and with linear values the one-hot of a beside it, a
bias of each action. (Theta has an entry for the bias in any case, as `Problem.bias`
makes of it a feature of 1 or 0: both kinds of values are one program.)

Maths is for one transition, whose arrays are scalars. arXiv:1511.05952.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from fps_jax.types import Step

STEP_SIZE, THRESHOLD, INITIAL_STD = 0.25, 1e-3, 0.1
"""Of an update; of the mean squared error of what has been learned; of theta."""
BIAS = {"tabular": 0.0, "linear": 1.0}
"""The bias feature of each representation."""

Theta = Float[Array, "n+1 2"]


class Problem(NamedTuple):
    """A Cliffwalk of n states, and how its values are represented.

    Attributes:
      discount: gamma, ``1 - 1 / n``.
      bias: the bias feature, 0 or 1.
      true_values: of the best policy, ``[n, 2]``.
    """

    discount: Float[Array, ""]
    bias: Float[Array, ""]
    true_values: Float[Array, "n 2"]


def problem(n: int, representation: str) -> Problem:
    """Makes a Cliffwalk.

    Args:
      n: states, at least 2.
      representation: a key of `BIAS`.
    """
    return Problem(
        jnp.float32(1.0 - 1.0 / n),
        jnp.float32(BIAS[representation]),
        jnp.asarray(true_values(n), jnp.float32),
    )


def right_action(states: Any) -> Any:
    """The action that leads on: 0, 1, 0, 1, ...

    Args:
      states: numbers of states.
    """
    return states % 2


def true_values(n: int) -> np.ndarray:
    """Values of the best policy, ``[n, 2]``, in float64.

        Q(s, right) = gamma^(n - 1 - s)      Q(s, wrong) = 0      gamma = 1 - 1 / n

    Args:
      n: states, at least 2.
    """
    states = np.arange(n)
    values = np.zeros((n, 2))
    values[states, right_action(states)] = (1.0 - 1.0 / n) ** (n - 1 - states)
    return values


def memory(n: int, seed: int) -> Step:
    """The replay memory: every sequence of n actions, executed until the episode ends.

    These are ``2^n`` episodes, in random order, of ``2^(n + 1) - 2`` transitions.
    State s is left ``2^(n - s)`` times, by each action half of them.

    Args:
      n: states, at least 2.
      seed: of the order.

    Returns:
      Steps whose behaviour tells the ``next_state``, 0 after an end, and the ``return``
      of the episode.
    """
    # Bit s of a sequence is whether it takes the right action in state s.
    sequences = np.random.default_rng(seed).permutation(2**n)
    right_steps = np.zeros(2**n, int)
    for s in range(n):
        right_steps += (sequences + 1) % 2 ** (s + 1) == 0
    lengths = np.minimum(right_steps + 1, n)
    episode = np.repeat(np.arange(2**n), lengths)
    state = np.arange(episode.size) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return _steps(n, state, state < right_steps[episode], right_steps[episode] == n)


def distinct(n: int) -> Step:
    """The 2n different transitions, each once; see `memory`.

    Args:
      n: states, at least 2.
    """
    state = np.repeat(np.arange(n), 2)
    is_right = np.arange(2 * n) % 2 == 1
    return _steps(n, state, is_right, is_right & (state == n - 1))


def _steps(n: int, state: Any, is_right: Any, is_of_success: Any) -> Step:
    """Transitions in numpy, by their state and whether their action is right."""
    is_end: Any = ~is_right | (state == n - 1)
    array: Any = np.asarray  # Steps are of numpy here, until a program takes them.
    integers = lambda x: array(x, np.int32)
    floats = lambda x: array(x, np.float32)
    return Step(
        observation=integers(state),
        action=integers(np.where(is_right, right_action(state), 1 - state % 2)),
        reward=floats(is_right & (state == n - 1)),
        terminated=is_end,
        truncated=np.zeros_like(is_end),
        is_valid=np.ones_like(is_end),
        behaviour={
            "next_state": integers(np.where(is_end, 0, state + 1)),
            "return": floats(is_of_success),
        },
    )


def initial_theta(key: Key[Array, ""], n: int) -> Theta:
    """Parameters at first, from ``N(0, 0.1)``, 0.1 being the standard deviation.

    Args:
      key: spent here.
      n: states.
    """
    return INITIAL_STD * jax.random.normal(key, (n + 1, 2))


def values(of: Problem, theta: Theta) -> Float[Array, "n 2"]:
    """Q of every state and action.

    Args:
      of: the problem.
      theta: parameters.
    """
    return theta[:-1] + of.bias * theta[-1:]


def td_error(of: Problem, theta: Theta, step: Step) -> Float[Array, ""]:
    """Equation 2: ``delta = R + gamma max_a Q(S', a) - Q(S, A)``, gamma 0 at an end.

    Args:
      of: the problem.
      theta: parameters.
      step: one transition.
    """
    q = values(of, theta)
    following = jnp.max(q[step.behaviour["next_state"]])
    onwards = jnp.where(step.terminated, 0.0, of.discount * following)
    return step.reward + onwards - q[step.observation, step.action]


def change(of: Problem, step: Step, error: Float[Array, ""], n: int) -> Theta:
    """Equation 3: what an update adds to theta, ``eta delta phi(S, A)``.

    Args:
      of: the problem.
      step: one transition.
      error: delta, or that times its importance weight.
      n: states.
    """
    place = jnp.arange(n + 1)
    is_its = (place == step.observation).astype(jnp.float32)
    phi = jnp.where(place < n, is_its, of.bias)
    is_taken = (jnp.arange(2) == step.action).astype(jnp.float32)
    return STEP_SIZE * error * phi[:, None] * is_taken[None, :]


def loss(of: Problem, theta: Theta) -> Float[Array, ""]:
    """Mean squared error of the values of all states and actions.

    Args:
      of: the problem.
      theta: parameters.
    """
    return jnp.mean(jnp.square(values(of, theta) - of.true_values))


def ratio(of: Problem, theta: Theta, step: Step) -> Float[Array, ""]:
    """rho, of the greedy policy and a behaviour that takes either action alike: 0 or 2.

    Args:
      of: the problem.
      theta: parameters.
      step: one transition.
    """
    best: Int[Array, ""] = jnp.argmax(values(of, theta)[step.observation])
    return jnp.where(best == step.action, 2.0, 0.0)
