"""PPO on frames, and on two problems with known answers."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from chex import assert_tree_all_finite, assert_trees_all_equal
from ppo_twin import LENGTH, Compiled
from probes import EndlessEnv, TwoStepEnv, random_trajectory

from fps_jax.agents.ppo import PPOConfig
from fps_jax.runtime.acting import Actor
from fps_jax.types import Discrete, EnvSpec


def test_stacks_of_frames_are_learned_from_as_bytes(monkeypatch):
    # Orthogonal matrices of this size take seconds.
    monkeypatch.setattr(
        nn.initializers, "orthogonal", lambda scale: nn.initializers.normal(0.05)
    )
    spec = EnvSpec("Frames-v0", (4, 84, 84), np.dtype(np.uint8), Discrete(3))
    config = PPOConfig(num_epochs=1, minibatch_size=4)
    agent = config.make(spec, total_env_steps=100)
    state = jax.jit(agent.init)(jax.random.key(0))
    trajectory = random_trajectory(0, spec, length=2, envs=2)
    after, metrics = jax.jit(agent.update)(state, trajectory)
    assert_tree_all_finite((after.learner.params, metrics))
    change = jax.tree.map(
        lambda a, b: float(jnp.abs(a - b).max()),
        state.learner.params,
        after.learner.params,
    )
    assert min(jax.tree.leaves(change)) > 0
    assert_trees_all_equal(
        state.learner.observation_moments, after.learner.observation_moments
    )


def learn(env, config, updates):
    """Trains in turns; returns the last segment and the values of observations."""
    this = Compiled(config, env.spec)
    act = jax.jit(
        lambda params, observation, key, count: this.agent.act(
            params, observation, jax.random.fold_in(key, count), explore=True
        )
    )
    actor = Actor(
        env, act, jax.random.key(1), device=jax.devices()[0], rollout_steps=LENGTH
    )
    state = jax.jit(this.agent.init)(jax.random.key(0))
    for k in range(updates):
        params = this.agent.actor_params(state.learner, None)
        segment = actor.rollout(params, rollout=k, version=k)
        state, _ = this.update(state, segment.trajectory)
    learner = state.learner

    def value(observation):
        scale = jnp.sqrt(learner.return_moments.variance)
        return scale * this.network.apply(learner.params, observation, method="value")

    def greedy(observation):
        params = this.agent.actor_params(learner, None)
        return this.agent.act(params, observation, jax.random.key(0), explore=False)[0]

    return segment, value, greedy


QUICK = PPOConfig(
    learning_rate=0.02,
    final_learning_rate_fraction=0.1,
    num_epochs=4,
    minibatch_size=48,
    hidden_sizes=(8,),
    normalize_observations=False,
)


def test_it_learns_to_wait_for_the_larger_reward():
    config = dataclasses.replace(QUICK, gamma=0.9)
    _, value, greedy = learn(TwoStepEnv(16), config, updates=40)
    observations = jnp.stack([TwoStepEnv.first, TwoStepEnv.rich])
    np.testing.assert_array_equal(greedy(observations), 1)
    np.testing.assert_allclose(value(observations), [0.9, 1.0], atol=0.08)


def test_it_values_what_lies_beyond_a_cut():
    config = dataclasses.replace(QUICK, gamma=0.5, init_log_std=-1.0)
    segment, value, greedy = learn(EndlessEnv(16), config, updates=60)
    observation = jnp.ones((1, 1))
    np.testing.assert_allclose(greedy(observation)[0], [0.5], atol=0.1)
    trajectory = segment.trajectory
    reward = trajectory.reward[trajectory.is_valid].mean()
    np.testing.assert_allclose(value(observation)[0], reward / 0.5, rtol=0.05)
