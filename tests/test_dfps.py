"""DFPS's iteration: what moves, in which order, and from what."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chex import assert_tree_all_finite
from dfps_twin import ENVS, LENGTH, ROWS, experience_of, frozen_of, small
from probes import CONTINUOUS, DISCRETE

from fps_jax.agents import dfps_critic
from fps_jax.agents.dfps import DFPSConfig

LITERAL = {"noise_scale": 0.05}
FAST = {
    "trust_region": "clip",
    "kl_stop": None,
    "num_epochs": 2,
    "minibatch_size": 12,
    "control_variate": "zero",
    "dpg_phase": "separate",
    "dpg_states": "replay",
    "dpg_batch_size": 8,
    "num_critics": 2,
    "critic_n_step": 3,
    "recent_fraction": 0.5,
    "recent_steps": 16,
    "value_data": "queue",
    "value_target": "precomputed",
    "noise": "none",
    "average_decay": 0.5,
    "learns_log_std": False,
}
REST = {
    "critic_trace": "vtrace",
    "critic_n_step": 2,
    "target_action": "expected",
    "target_samples": 2,
    "priority_exponent": 0.6,
    "policy_data": "mixed",
    "noise": "actions",
    "value_first": True,
    "value_data": "queue",
    "squash": "tanh",
    "adapts_nu": True,
    "control_variate": "optimal",
    "kl_reference": "behaviour",
    "entropy_coef": 0.01,
}
VARIANTS = {"literal": LITERAL, "fast": FAST, "rest": REST}


@functools.cache
def compiled(name):
    """A small agent, compiled, after one update: its replay is filled."""
    this = small(**VARIANTS[name])
    update = jax.jit(this.agent.update)
    state, _ = update(this.state, experience_of(this, 0, 0.3))
    return this._replace(state=state), update


def updated(name, seed=1, **numbers):
    """The state after one more update, with other numbers; and its metrics."""
    this, update = compiled(name)
    hyper = this.state.learner.hyper
    hyper = hyper._replace(**{k: jnp.float32(x) for k, x in numbers.items()})
    learner = this.state.learner._replace(hyper=hyper)
    state = this.state._replace(learner=learner)
    return update(state, experience_of(this, seed, 0.3))


def moved(before, after):
    """How far each leaf is from what it was."""
    distance = lambda a, b: float(jnp.abs(a - b).max())
    return jax.tree.leaves(jax.tree.map(distance, before, after))


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize("name", VARIANTS)
def test_everything_that_learns_moves_and_stays_finite(name):
    this, _ = compiled(name)
    state, metrics = updated(name)
    before, after = this.state.learner, state.learner
    assert_tree_all_finite((after.policy, after.value, after.critics, metrics))
    still = 0 if this.config.learns_log_std else 1
    assert sorted(moved(before.policy.params, after.policy.params))[still] > 0
    for part in ("value", "critics"):
        a, b = getattr(before, part).params, getattr(after, part).params
        assert min(moved(a, b)) > 0, part
    for part in ("target_policy", "target_critics"):
        assert max(moved(getattr(before, part), getattr(after, part))) > 0
    assert after.update == before.update + 1
    assert metrics["critic_loss"] > 0
    assert all(np.ndim(x) == 0 for x in metrics.values())


def test_the_value_is_fitted_after_the_policy_to_the_new_policys_targets():
    state, _ = updated("literal")
    other, _ = updated("literal", value_learning_rate=0.1)
    # Its fit does not change what the policy is told in the same iteration.
    same(state.learner.policy, other.learner.policy)
    assert max(moved(state.learner.value.params, other.learner.value.params)) > 0
    # A policy that stays has other ratios, and so other targets.
    still, _ = updated("literal", learning_rate=0.0)
    assert max(moved(state.learner.value.params, still.learner.value.params)) > 1e-7


def test_precomputed_targets_are_those_of_the_old_policy():
    state, _ = updated("fast")
    still, _ = updated("fast", learning_rate=0.0)
    assert max(moved(state.learner.policy.params, still.learner.policy.params)) > 0
    still = still.learner.value.params
    # The value learns at its own rate, whatever the policy's.
    same(state.learner.value.params, still)


def test_fitted_first_the_value_changes_what_the_policy_is_told():
    state, _ = updated("rest")
    other, _ = updated("rest", value_learning_rate=0.1)
    assert max(moved(state.learner.policy.params, other.learner.policy.params)) > 0


def test_targets_follow_at_their_rate():
    this, _ = compiled("literal")
    before = this.state.learner
    # Critics that stand still: after k steps (1 - tau)^k of the distance is left.
    state, _ = updated("literal", critic_learning_rate=0.0, target_rate=0.2)
    left = (1 - 0.2) ** round(this.config.critic_utd * ROWS)
    expected = jax.tree.map(
        lambda w, t: w + left * (t - w), before.critics.params, before.target_critics
    )
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    jax.tree.map(close, state.learner.target_critics, expected)
    state, _ = updated("literal", policy_target_rate=1.0)
    jax.tree.map(close, state.learner.target_policy, state.learner.policy.params)


def test_what_is_evaluated_is_the_average_and_what_acts_the_policy_itself():
    this, update = compiled("fast")
    first = this.state.learner
    second, _ = updated("fast")
    third, _ = update(second, experience_of(this, 2, 0.3))
    policies = [x.policy.params for x in (first, second.learner, third.learner)]
    start = small(**FAST).state.learner.average.value
    # The newest weighs 1, each before half as much; the parameters at the start too.
    weights = np.array([1 / 8, 1 / 4, 1 / 2, 1])
    expected = jax.tree.map(
        lambda *xs: np.average(np.stack(xs), axis=0, weights=weights), start, *policies
    )
    evaluated = this.agent.actor_params(third.learner, None).policy
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(lambda a, b: close(a[0], b), evaluated, expected)
    acting = this.agent.actor_params(third.learner, jax.random.key(0)).policy
    jax.tree.map(lambda a, b: same(a[0], b), acting, policies[-1])
    # Nothing learns from the average.
    elsewhere = jax.tree.map(lambda x: x + 1.0, first.average)
    state = this.state._replace(learner=first._replace(average=elsewhere))
    other, _ = update(state, experience_of(this, 1, 0.3))
    unaveraged = lambda state: state.learner._replace(average=None, key=None)
    same(unaveraged(other), unaveraged(second))


def test_separate_steps_climb_the_critic():
    this, _ = compiled("fast")
    numbers = {"learning_rate": 0.0, "critic_learning_rate": 0.0}
    before = this.state.learner.policy.params
    still, _ = updated("fast", **numbers, dpg_learning_rate=0.0)
    same(still.learner.policy.params, before)
    state, _ = updated("fast", **numbers, dpg_learning_rate=3e-3)
    observation = experience_of(this, 1).observation.reshape(-1, 3)

    networks, learner = this.parts.networks, this.state.learner
    observed = frozen_of(this, learner).observe(jnp.asarray(observation))

    def value(params):
        action = networks.reach(networks.policy(params, observed).mean)
        return float(networks.critic(learner.critics.params, observed, action).mean())

    assert value(state.learner.policy.params) > value(before) + 1e-3


WITHOUT = {
    "noise": "none",
    "critic_utd": 0.0,
    "dpg_coef": 0.0,
    "control_variate": "zero",
    "value_data": "queue",
    "replay_capacity": 0,
    "learning_rate": 0.05,
}


@functools.cache
def without_a_critic(epochs):
    """A small agent that only has a policy and a value, with its update compiled."""
    this = small(**WITHOUT, num_epochs=epochs)
    return this, jax.jit(this.agent.update)


def test_the_epochs_stop_once_the_policy_has_gone_far_enough():
    after, told = {}, {}
    for epochs in (1, 3):
        this, update = without_a_critic(epochs)
        learner = this.state.learner
        for kl_stop in (1e-6, 1e9):
            hyper = learner.hyper._replace(kl_stop=jnp.float32(kl_stop))
            state = this.state._replace(learner=learner._replace(hyper=hyper))
            state, metrics = update(state, experience_of(this, 3))
            after[epochs, kl_stop] = state.learner.policy.params
            told[epochs, kl_stop] = float(metrics["is_stopped"])
    assert told == {(1, 1e-6): 1, (1, 1e9): 0, (3, 1e-6): 1, (3, 1e9): 0}
    # The two epochs after the first are as if they had not been.
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, after[3, 1e-6], after[1, 1e9])
    assert max(moved(after[3, 1e9], after[1, 1e9])) > 1e-3


def test_devices_that_share_the_rows_agree_with_one():
    this, update = without_a_critic(3)
    trajectory = experience_of(this, 4, 0.4)
    one, metrics = update(this.state, trajectory)

    split = lambda x: jnp.moveaxis(
        jnp.asarray(x).reshape(x.shape[0], 2, 2, *x.shape[2:]), 1, 0
    )
    local = jax.tree.map(lambda x: x.reshape(2, 2), this.state.local)
    state = this.state._replace(local=local)
    mapped = functools.partial(this.agent.update, axis_name="d")
    axes = type(state)(None, 0)
    many, told = jax.jit(
        jax.vmap(mapped, axis_name="d", in_axes=(axes, 0), out_axes=(axes, None))
    )(state, jax.tree.map(split, trajectory))
    close = functools.partial(np.testing.assert_allclose, rtol=2e-3, atol=2e-5)
    for part in ("policy", "value", "trust_region", "return_moments"):
        jax.tree.map(close, getattr(many.learner, part), getattr(one.learner, part))
    for name in metrics:
        close(told[name], metrics[name], err_msg=name)


def test_critic_targets_are_those_of_a_naive_twin():
    this, _ = compiled("fast")
    learner, memory = this.state.learner, this.state.local.memory
    parts, gamma = this.parts, 0.9

    @jax.jit
    def draw(memory, learner):
        frozen = frozen_of(this, learner)
        _, items = parts.experience.critic_items(memory, jax.random.key(3), gamma, 1.0)
        batch = dfps_critic.prepared(parts, learner, items, frozen, jax.random.key(4))
        target = dfps_critic.target_of(parts, learner, learner.target_critics, batch)
        following = frozen.observe(items.items.next_observation)
        action = jnp.clip(
            parts.networks.policy(learner.target_policy, following).mean, -1, 1
        )
        q = parts.networks.critics(learner.target_critics, following, action)
        return items.items, target, q, frozen.scale

    items, target, q, scale = draw(memory, learner)
    expected = items.reward / scale + items.discount * np.min(q, axis=0)
    np.testing.assert_allclose(target, expected, rtol=1e-5)
    assert q.shape == (2, 8)
    assert (np.diff(q, axis=0) != 0).all()


def test_a_stream_that_does_not_go_on_is_cut():
    this, _ = compiled("fast")
    experience, memory = this.parts.experience, this.parts.experience.init()
    first, second = experience_of(this, 5), experience_of(this, 6)
    # Stream 0 and 2 go on; 1 and 3 are new episodes of a resumed run.
    follows = np.isin(np.arange(ENVS), [0, 2])
    start = np.where(follows[:, None], first.observation[-1], second.observation[0])
    observation = second.observation.copy()
    observation[0] = start
    add = jax.jit(experience.add)
    memory = add(memory, first)
    memory = add(memory, second._replace(observation=observation))
    kept = memory.replay.memory.is_valid
    margin = LENGTH * ENVS
    newest = np.asarray(kept[margin + (LENGTH - 1) * ENVS :][:ENVS])
    np.testing.assert_array_equal(newest, follows & first.is_valid[-1])
    before = np.asarray(kept[margin : margin + (LENGTH - 1) * ENVS])
    np.testing.assert_array_equal(before, first.is_valid[:-1].reshape(-1))
    assert memory.replay.num_usable < 2 * ROWS


def test_noise_is_an_actors_own_and_travels_with_what_it_does():
    this = small(noise_groups=2)
    params_of = jax.jit(this.agent.actor_params)
    learner, observation = this.state.learner, jnp.ones((ENVS, 3))
    act = jax.jit(functools.partial(this.agent.act, explore=False))
    noisy = [params_of(learner, jax.random.key(k)) for k in (0, 0, 1)]
    quiet = this.agent.actor_params(learner, None)
    means, behaviour = zip(
        *(act(p, observation, jax.random.key(9)) for p in (*noisy, quiet)), strict=True
    )
    same(means[0], means[1])
    assert (means[0] != means[2]).all()
    # Two groups of two environments; all four see the same.
    np.testing.assert_array_equal(means[0][0], means[0][1])
    assert (means[0][1] != means[0][2]).all()
    np.testing.assert_array_equal(means[3][0], means[3][3])
    # The log-probability is that of the policy that acted: its mean has the largest.
    largest = -np.sum(learner.policy.params["params"]["layers_1"]["log_std"])
    np.testing.assert_allclose(
        behaviour[0]["log_prob"], largest - np.log(2 * np.pi), rtol=1e-5
    )
    words = jax.random.key_data(jax.random.key(0))
    same(behaviour[0]["noise_key"], np.tile(words, (ENVS, 1)))
    np.testing.assert_allclose(behaviour[0]["noise_scale"], learner.noise_scale)
    np.testing.assert_array_equal(behaviour[3]["noise_scale"], 0)


def test_shared_noise_is_the_same_for_every_actor_and_changes_with_every_push():
    this = small(shares_noise=True)
    learner, params_of = this.state.learner, jax.jit(this.agent.actor_params)
    params = [params_of(learner, jax.random.key(k)).policy for k in (0, 1)]
    same(*params)
    later = learner._replace(update=learner.update + 1)
    after = params_of(later, jax.random.key(0)).policy
    assert max(moved(params[0], after)) > 0


def test_the_scale_of_the_noise_follows_the_distance():
    this, _ = compiled("literal")
    before = this.state.learner.noise_scale
    for wanted, factor in ((1e-6, 1 / 1.01), (10.0, 1.01)):
        state, metrics = updated("literal", noise_distance=wanted)
        np.testing.assert_allclose(
            state.learner.noise_scale, before * factor, rtol=1e-5
        )
        assert metrics["noise_distance"] > 0


def test_action_noise_widens_the_behaviour_alone():
    this, _ = compiled("rest")
    params = this.agent.actor_params(this.state.learner, jax.random.key(0))
    quiet = this.agent.actor_params(this.state.learner, None)
    assert params.action_noise > 0 == quiet.action_noise
    observation = jnp.zeros((ENVS, 3))
    act = functools.partial(this.agent.act, explore=False)
    _, wide = act(params, observation, jax.random.key(0))
    _, plain = act(quiet, observation, jax.random.key(0))
    assert (wide["log_prob"] < plain["log_prob"]).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rho_bar": 0.5, "c_bar": 1.0}, "rho_bar 0.5 must be at least c_bar 1.0"),
        ({"kl_target": 0.0}, "kl_target 0.0 must be above 0"),
        ({"noise_scale": -1.0}, "noise_scale -1.0 must be at least 0"),
        ({"activation": "sine"}, "activation 'sine' must be one of tanh"),
        ({"replay_capacity": 0}, "critic_utd 0.25 needs a replay"),
        (
            {"replay_capacity": 0, "critic_utd": 0.0, "dpg_coef": 0.0},
            "value_data replay needs a replay",
        ),
        ({"critic_utd": 0.0}, "without a critic"),
        ({"trust_region": "clip", "surrogate": "R1"}, "needs surrogate R3, not R1"),
        ({"recent_fraction": 1.0, "priority_exponent": 0.6}, "recent_fraction 1.0"),
        ({"hidden_sizes": (0,)}, "hidden_sizes"),
        ({"name": "a/b"}, "name 'a/b'"),
    ],
)
def test_an_impossible_option_is_named_with_its_value(options, message):
    with pytest.raises(ValueError, match=message):
        DFPSConfig(**options)


def test_what_does_not_fit_the_environment_is_refused():
    plan = {"total_env_steps": 100, "num_envs": 4, "rollout_steps": 8}
    with pytest.raises(ValueError, match="Probe-v0 has discrete actions"):
        DFPSConfig().make(DISCRETE, **plan)
    frames = dataclasses.replace(CONTINUOUS, observation_shape=(4, 84, 84))
    with pytest.raises(ValueError, match="needs vectors"):
        DFPSConfig().make(frames, **plan)
    with pytest.raises(ValueError, match="noise_groups 3 must divide the 4"):
        DFPSConfig(noise_groups=3).make(CONTINUOUS, **plan)
    with pytest.raises(ValueError, match="replay_capacity 40 must be at least two"):
        DFPSConfig(replay_capacity=40).make(CONTINUOUS, **plan)
