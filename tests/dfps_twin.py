"""DFPS made small, in the middle of a run, and its gradient in plain numpy, float64."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import reference
from probes import CONTINUOUS, acted, random_trajectory

from fps_jax.agents.dfps import DFPSConfig
from fps_jax.agents.dfps_networks import make_networks
from fps_jax.agents.dfps_replay import make_experience
from fps_jax.agents.dfps_state import Parts, freeze
from fps_jax.models.normalize import MomentsState

LENGTH, ENVS = 6, 4
ROWS = LENGTH * ENVS
SMALL = {
    "hidden_sizes": (5,),
    "critic_hidden_sizes": (6,),
    "replay_capacity": 60,
    "learning_starts": 0,
    "critic_batch_size": 8,
    "critic_utd": 0.25,
    "num_epochs": 1,
    "max_grad_norm": 1e6,
}


class Small(NamedTuple):
    """An agent of few numbers, and a state in the middle of its run."""

    config: DFPSConfig
    parts: Parts
    agent: object
    state: object


@functools.cache
def small(**options) -> Small:
    """Builds it.

    Args:
      **options: of DFPS, beside `SMALL`.
    """
    config = DFPSConfig(**(SMALL | options))
    plan = {"num_envs": ENVS, "rollout_steps": LENGTH}
    agent = config.make(CONTINUOUS, total_env_steps=10 * ROWS, **plan)
    experience = None
    if config.has_replay:
        experience = make_experience(config, CONTINUOUS, **plan)
    parts = Parts(config, make_networks(config, CONTINUOUS), experience)
    state = jax.jit(agent.init)(jax.random.key(1))
    rng = np.random.default_rng(2)
    draw = lambda x: jnp.asarray(x + 0.3 * rng.normal(size=x.shape), jnp.float32)
    shake = lambda learned: learned._replace(params=jax.tree.map(draw, learned.params))
    learner = state.learner._replace(
        policy=shake(state.learner.policy),
        value=shake(state.learner.value),
        observation_moments=moments(50.0, np.full(3, 0.8), np.array([2.0, 3.0, 5.0])),
        return_moments=moments(50.0, 0.5, 4.0),
        update=jnp.asarray(3, jnp.int32),
    )
    if learner.critics is not None:
        learner = learner._replace(critics=shake(learner.critics))
    return Small(config, parts, agent, state._replace(learner=learner))


def moments(*numbers) -> MomentsState:
    """Moments from plain numbers."""
    return MomentsState(*(jnp.asarray(x, jnp.float32) for x in numbers))


def experience_of(this: Small, seed: int, off_policy: float = 0.0):
    """What the small agent did, or what somebody did who is nearly like it.

    Args:
      this: the agent.
      seed: of everything.
      off_policy: deviation of the log ratios.
    """
    trajectory = acted(
        this.agent, this.state, random_trajectory(seed, CONTINUOUS, LENGTH, ENVS)
    )
    noise = off_policy * np.random.default_rng(seed).normal(size=(LENGTH, ENVS))
    behaviour = dict(trajectory.behaviour)
    behaviour["log_prob"] = np.float32(behaviour["log_prob"] + noise)
    return trajectory._replace(behaviour=behaviour)


def frozen_of(this: Small, learner, is_ready=True):
    """The numbers of an iteration of the small agent."""
    ready = jnp.asarray(is_ready)
    return freeze(this.parts, learner, rows=ROWS, is_ready=ready, axis_name=None)


class Twin:
    """Equation 14 as it reads, item by item."""

    def __init__(self, this: Small, trajectory, **options):
        self.this, self.rows = this, trajectory
        numbers = {"gamma": 0.99, "lambda_": 1.0, "rho_bar": 1.0, "c_bar": 1.0}
        self.options = numbers | {"statistics": "residual"} | options
        learner, networks = this.state.learner, this.parts.networks
        scale = np.sqrt(float(learner.return_moments.variance))
        seen = learner.observation_moments
        centred = np.float64(trajectory.observation) - np.float64(seen.mean)
        self.observation = centred / np.sqrt(np.float64(seen.variance))
        observation = jnp.asarray(self.observation, jnp.float32)
        mean, log_std = networks.policy(learner.policy.params, observation[:-1])
        self.mean, self.log_std = np.float64(mean), np.float64(log_std)
        drawn = np.float64(trajectory.behaviour.get("drawn", trajectory.action))
        self.deviation = drawn - self.mean
        z = self.deviation / np.exp(self.log_std)
        self.log_prob = np.sum(
            -0.5 * z**2 - self.log_std - 0.5 * np.log(2 * np.pi), axis=-1
        )
        self.ratio = np.exp(self.log_prob - trajectory.behaviour["log_prob"])
        self.value = np.float64(networks.value(learner.value.params, observation))
        self.reward = np.float64(trajectory.reward) / scale
        self.is_valid = np.asarray(trajectory.is_valid)

        q = lambda mean: networks.critic(
            learner.critics.params, observation[:-1], networks.reach(mean)
        )
        self.q_slope = np.zeros_like(self.mean)
        if learner.critics is not None:
            slope = jax.grad(lambda mean: jnp.sum(q(mean)))(mean)
            self.q_slope = np.float64(slope)
        self._returns()

    def _returns(self):
        option = self.options
        shape = self.reward.shape
        self.target, self.advantage = np.zeros(shape), np.zeros(shape)
        for e in range(shape[1]):
            rows = reference.Rows(
                self.reward[:, e],
                *(
                    np.asarray(x[:, e])
                    for x in (self.rows.terminated, self.rows.truncated)
                ),
                self.is_valid[:, e],
                self.value[:, e],
            )
            bars = {k: option[k] for k in ("rho_bar", "c_bar", "lambda_")}
            targets = reference.truncated_is_targets(
                rows, self.ratio[:, e], option["gamma"], **bars
            )
            self.target[:, e] = targets
            full = reference.policy_advantages(rows, targets, option["gamma"])
            onwards = np.where(rows.terminated, 0.0, option["gamma"])
            short = rows.reward + onwards * rows.value[1:] - rows.value[:-1]
            mixed = short + option["lambda_"] * (full - short)
            self.advantage[:, e] = np.where(rows.is_valid, mixed, 0.0)

    @property
    def expansion(self):
        """The control variate."""
        bar = np.sum(self.q_slope * self.deviation, axis=-1)
        return np.where(self.is_valid, bar, 0.0)

    def signal(self, residual):
        """Centred and scaled, and the deviation."""
        kept = residual[self.is_valid]
        std = kept.std() if self.options["statistics"] == "residual" else 1.0
        mean = kept.mean() if self.options["statistics"] != "none" else 0.0
        return np.where(self.is_valid, (residual - mean) / std, 0.0), std

    def direction_of_mean(self, coef=1.0, weight=None, dpg_coef=1.0):
        """Equation 14 with respect to the means ``[T, E, A]``, a mean of items.

        Args:
          coef: eta, a number.
          weight: of the critic's term; None is 1 over the deviation.
          dpg_coef: of it too.
        """
        signal, std = self.signal(self.advantage - coef * self.expansion)
        rho = np.minimum(self.ratio, self.options["rho_bar"])
        score = self.deviation / np.exp(2 * self.log_std)
        weight = 1.0 / std if weight is None else weight
        terms = (rho * signal)[..., None] * score + dpg_coef * weight * self.q_slope
        return np.where(self.is_valid[..., None], terms, 0.0) / self.is_valid.sum()
