"""The smallest agent that learns: a linear policy that compiles in a moment.

It has what a run must keep (parameters, a running mean, a key, a counter) and can be
told to go wrong.
"""

import dataclasses
import os
import signal
import sys
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from fps_jax.types import Agent, AgentState, EnvSpec


class TinyHyper(NamedTuple):
    """Numeric hyper-parameters."""

    learning_rate: Float[Array, ""]


class TinyState(NamedTuple):
    """What the agent learns; the same on every device.

    Attributes:
      params: ``[5, A]``, of the policy; the last row is its bias.
      baseline: running mean of the reward.
      hyper: the numbers.
      key: root of its noise; folded with `update`.
      update: updates made.
    """

    params: Float[Array, "5 A"]
    baseline: Float[Array, ""]
    hyper: TinyHyper
    key: Key[Array, ""]
    update: Int[Array, ""]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TinyConfig:
    """Options of the tiny agent.

    Attributes:
      learning_rate: step size.
      nan_at_update: this update, counted from 0, has a loss of NaN.
      fail_at_trace: this tracing of `update`, counted from 0, raises: the first is the
        check of the options, the second the compilation.
      signal_at_trace: this one raises SIGTERM in the process instead.
    """

    learning_rate: float = 1.0
    nan_at_update: int = -1
    fail_at_trace: int = -1
    signal_at_trace: int = -1

    @property
    def name(self) -> str:
        return "tiny"

    def hyper(self, total_env_steps: int) -> "TinyHyper":
        del total_env_steps
        return TinyHyper(jnp.asarray(self.learning_rate, jnp.float32))

    def make(self, spec: EnvSpec, **plan: int) -> Agent:
        del plan
        return make_agent(self, spec)


def announce() -> None:
    """Says on stdout that now something goes wrong, and when."""
    sys.stdout.write(f"FAULT {time.time()}\n")
    sys.stdout.flush()


def make_agent(config: TinyConfig, spec: EnvSpec) -> Agent:
    """Composes the agent: the score-function gradient with a baseline, plain SGD."""
    traces = iter(range(1000))

    def log_probs(params, observation):
        ones = jnp.ones((*observation.shape[:-1], 1), jnp.float32)
        inputs = jnp.concatenate([jnp.tanh(observation / 8.0), ones], axis=-1)
        return jax.nn.log_softmax(inputs @ params)

    def init(key) -> AgentState:
        key_params, key_noise = jax.random.split(key)
        shape = spec.observation_shape[0] + 1, spec.action.num_actions
        return AgentState(
            TinyState(
                params=jax.random.normal(key_params, shape),
                baseline=jnp.zeros(()),
                hyper=config.hyper(0),
                key=key_noise,
                update=jnp.zeros((), jnp.int32),
            )
        )

    def actor_params(learner: TinyState, key) -> Any:
        del key
        return learner.params

    def act(params, observation, key, *, explore: bool):
        log_prob = log_probs(params, observation)
        best = jnp.argmax(log_prob, axis=-1)
        action = jax.random.categorical(key, log_prob) if explore else best
        return action, {"log_prob": picked(log_prob, action)}

    def picked(log_prob, action):
        return jnp.take_along_axis(log_prob, action[..., None], axis=-1)[..., 0]

    def update(state: AgentState, trajectory, *, axis_name=None):
        trace = next(traces)
        if trace == config.fail_at_trace:
            announce()
            raise RuntimeError("The tiny agent fails as it was told to.")
        if trace == config.signal_at_trace:
            announce()
            os.kill(os.getpid(), signal.SIGTERM)
        learner: TinyState = state.learner
        average = lambda x: jax.lax.pmean(x, axis_name) if axis_name else x

        def loss_fn(params):
            log_prob = log_probs(params, trajectory.observation[:-1])
            advantage = trajectory.reward - learner.baseline
            weight = jnp.where(trajectory.is_valid, advantage, 0.0)
            return -jnp.mean(picked(log_prob, trajectory.action) * weight)

        loss, gradient = jax.value_and_grad(loss_fn)(learner.params)
        loss, gradient, reward = average((loss, gradient, trajectory.reward.mean()))
        key = jax.random.fold_in(learner.key, learner.update)
        noise = 0.01 * jax.random.normal(key, gradient.shape)
        step = learner.hyper.learning_rate * (gradient + noise)
        is_told = learner.update == config.nan_at_update
        learner = learner._replace(
            params=learner.params - step,
            baseline=0.9 * learner.baseline + 0.1 * reward,
            update=learner.update + 1,
        )
        return AgentState(learner), {"loss": jnp.where(is_told, jnp.nan, loss)}

    return Agent(init, actor_params, act, update)
