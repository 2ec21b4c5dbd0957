"""DFPS on a problem with a known answer, by its two gradients and by each alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from probes import EndlessEnv

from fps_jax.agents.dfps import DFPSConfig
from fps_jax.runtime.acting import Actor

LENGTH, ENVS = 6, 16
QUICK = DFPSConfig(
    gamma=0.5,
    trust_region="clip",
    kl_stop=None,
    num_epochs=4,
    minibatch_size=48,
    learning_rate=0.02,
    value_learning_rate=0.02,
    critic_learning_rate=0.01,
    critic_batch_size=32,
    target_rate=0.05,
    learning_starts=200,
    replay_capacity=2_000,
    normalize_observations=False,
    hidden_sizes=(8,),
    critic_hidden_sizes=(16,),
    layer_norm=False,
    init_log_std=-1.0,
    noise_scale=0.02,
    noise_distance=0.05,
)


@functools.cache
def compiled():
    """The agent, and its functions compiled: params_of, act, update."""
    spec = EndlessEnv(ENVS).spec
    plan = {"total_env_steps": 10**4, "num_envs": ENVS, "rollout_steps": LENGTH}
    agent = QUICK.make(spec, **plan)

    def act(params, observation, key, count):
        key = jax.random.fold_in(key, count)
        return agent.act(params, observation, key, explore=True)

    update = jax.jit(agent.update, donate_argnums=0)
    return agent, jax.jit(agent.actor_params), jax.jit(act), update


@pytest.mark.parametrize("nu", [0.0, 1.0], ids=["both gradients", "the critic alone"])
def test_it_finds_the_best_action(nu):
    agent, params_of, act, update = compiled()
    actor = Actor(
        EndlessEnv(ENVS),
        act,
        jax.random.key(1),
        device=jax.devices()[0],
        rollout_steps=LENGTH,
    )
    state = jax.jit(agent.init)(jax.random.key(0))
    hyper = state.learner.hyper._replace(ipg_nu=jnp.float32(nu))
    state = state._replace(learner=state.learner._replace(hyper=hyper))
    for k in range(60):
        params = params_of(state.learner, jax.random.fold_in(jax.random.key(2), k))
        segment = actor.rollout(params, rollout=k, version=k)
        state, _ = update(state, segment.trajectory)
    quiet = agent.actor_params(state.learner, None)
    observation = jnp.ones((1, 1))
    action, _ = agent.act(quiet, observation, jax.random.key(0), explore=False)
    np.testing.assert_allclose(action[0], [0.5], atol=0.1)
