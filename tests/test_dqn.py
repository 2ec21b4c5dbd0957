"""DQN against Algorithm 1 in plain numpy, its laws, and its options."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chex import assert_tree_all_finite
from devices import AXIS, over_devices
from dqn_twin import CAPACITY, ENVS, LENGTH, ROWS, SMALL, Twin, layers, segment, small
from probes import CONTINUOUS, DISCRETE, TwoStepEnv

from fps_jax.agents import dqn_exploration as exploration
from fps_jax.agents.dqn import DQNConfig, make_agent, make_replay
from fps_jax.agents.dqn_state import Parts
from fps_jax.models.networks import q_network
from fps_jax.replay import samplers
from fps_jax.runtime.acting import Actor
from fps_jax.types import EnvSpec

TWINS = {
    "double, proportional": {"replay": "proportional", "td_error_clip": 0.7},
    "target's choice, clipped reward": {
        "replay": "proportional",
        "double": False,
        "reward_clip": 0.5,
        "td_error_clip": None,
    },
    "n steps, uniform": {"n_step": 2},
}


@pytest.mark.parametrize("name", TWINS)
def test_updates_are_those_of_the_twin(name):
    this = small(**TWINS[name])
    state = this.init(jax.random.key(3))
    twin = Twin(this, state)
    alpha, first_beta = this.config.exponents
    steps = ROWS // this.config.replay_period
    limit = this.config.reward_clip or np.inf
    for k in range(4):  # The ring wraps.
        rows = segment(k)
        twin.add(rows)
        progress = float(state.learner.env_steps) / (5 * ROWS)
        beta = first_beta + (1.0 - first_beta) * progress
        clipped = rows._replace(reward=np.clip(rows.reward, -limit, limit))
        replayed = this.remember(state.local, clipped).replay
        key = jax.random.fold_in(state.learner.key, state.learner.update)
        for index in range(steps):
            key_draw = jax.random.fold_in(key, index)
            sample = this.draw(replayed, key_draw, jnp.float32(beta))
            slots = np.asarray(sample.ticket.slot)
            assert sample.is_valid.all()
            twin.gradient_step(slots, alpha, beta)
            # The agent's next draws depend on the priorities of these.
            now = [twin.priority[slot] for slot in slots]
            told = jnp.asarray(now, jnp.float32)
            replayed = this.prioritize(replayed, sample.ticket, told)
        state, metrics = this.update(state, rows)
        assert_close(state.learner.q.params, twin.params)
        assert_close(state.learner.target, twin.target)
        if this.config.is_prioritized:
            slots = jnp.asarray(sorted(twin.priority), jnp.int32)
            found = priority_of(this, state.local.replay.sampler, slots)
            expected = [twin.priority[int(slot)] for slot in slots]
            np.testing.assert_allclose(found, expected, rtol=1e-3)
    assert metrics["gradient_steps"] == 4 * steps
    assert metrics["env_steps"] == rows.is_valid.sum()


def assert_close(params, expected):
    for ours, theirs in zip(layers(params), expected):
        for a, b in zip(ours, theirs):
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)


def priority_of(this, sampler, slots):
    alpha, _ = this.config.exponents
    same = samplers.proportional(CAPACITY, exponent=alpha)
    return same.priority(sampler, slots)


OPTIONS = {
    "rank-based": {
        "replay": "rank_based",
        "sort_period": 1,
        "dueling": True,
        "priority_exponent": 0.5,
        "importance_exponent": 0.0,
        "final_importance_exponent": 0.0,
        "final_priority_exponent": 0.1,
    },
    "greedy": {
        "replay": "greedy",
        "clips_priority": True,
        "learning_starts": ROWS + 1,
    },
    "levels": {
        "replay": "proportional",
        "exploration": "boltzmann",
        "exploration_levels": (0.5, 0.1),
        "predecessor_coef": 0.5,
        "normalize_observations": True,
        "optimizer": "rmsprop",
        "adam_epsilon": 1e-2,
    },
}


@functools.cache
def updated(name):
    """An agent with these options after two updates."""
    this = small(**OPTIONS[name])
    state, told = this.init(jax.random.key(3)), []
    num_levels = len(this.config.exploration_levels)
    for k in range(2):
        state, metrics = this.update(state, segment(k, levels=num_levels))
        told.append(metrics)
    return this, state, told


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_learns_and_stays_finite(name):
    this, state, told = updated(name)
    before = this.init(jax.random.key(3))
    assert_tree_all_finite((state.learner.q, state.learner.target, told))
    moved = jax.tree.map(
        lambda a, b: float(jnp.abs(a - b).max()),
        before.learner.q.params,
        state.learner.q.params,
    )
    assert min(jax.tree.leaves(moved)) > 0
    assert all(np.ndim(x) == 0 for x in told[-1].values())
    assert told[-1]["loss"] > 0
    assert told[-1]["rejected_priorities"] == 0


def test_the_exponent_moves_with_the_run():
    _, state, _ = updated("rank-based")
    seen = segment(0).is_valid.sum()
    alpha = 0.5 + (0.1 - 0.5) * seen / (5 * ROWS)
    np.testing.assert_allclose(state.local.replay.sampler.exponent, alpha, rtol=1e-5)


def test_a_clipped_error_makes_a_clipped_priority():
    _, state, told = updated("greedy")
    assert told[-1]["td_error"] > 0.5
    np.testing.assert_allclose(state.local.replay.maximum, 1.0 + 1e-3, rtol=1e-6)


def test_nothing_is_learned_before_it_may_be():
    this, _, (first, second) = updated("greedy")
    assert (first["gradient_steps"], first["loss"]) == (0, 0.0)
    assert first["replay_size"] == ROWS
    assert second["gradient_steps"] == ROWS // this.config.replay_period


def test_devices_share_what_they_learn_and_keep_what_they_saw():
    this = small(replay="proportional", batch_size=8)
    state = this.init(jax.random.key(3))
    segments = [segment(k) for k in range(4)]
    stacked = jax.tree.map(lambda *xs: np.stack(xs), *segments)
    each = jax.tree.map(lambda x: jnp.stack([x] * 4), state)
    mapped = over_devices(
        lambda state, rows: this.agent.update(state, rows, axis_name=AXIS), "pmap"
    )
    after, metrics = mapped(each, stacked)
    first = lambda tree: jax.tree.map(lambda x: x[0], tree)
    for learner in (after.learner.q, after.learner.target, metrics):
        for k in range(1, 4):
            other = jax.tree.map(lambda x, k=k: x[k], learner)
            jax.tree.map(np.testing.assert_array_equal, first(learner), other)
    assert_tree_all_finite(after.learner.q)
    observed = after.local.replay.memory.observation
    assert np.abs(np.diff(np.asarray(observed, np.float64), axis=0)).max() > 0
    assert metrics["replay_size"][0] == 4 * ROWS
    assert metrics["gradient_steps"][0] == 4 * ROWS // this.config.replay_period


# ---------------------------------------------------------------------- exploration


def acts(this, learner, *, explore=True, envs=8):
    """Actions and what came beside them, of many keys."""
    params = this.agent.actor_params(learner, jax.random.key(9))
    observation = jnp.asarray(
        np.random.default_rng(0).normal(size=(envs, 3)), jnp.float32
    )
    act = jax.jit(
        jax.vmap(lambda key: this.agent.act(params, observation, key, explore=explore))
    )
    return act(jax.random.split(jax.random.key(1), 400))


def test_actions_are_greedy_but_for_the_share_that_the_schedule_says():
    this = small(epsilon=0.8, final_epsilon=0.2, exploration_steps=100)
    learner = this.init(jax.random.key(3)).learner
    greedy = np.asarray(acts(this, learner, explore=False)[0])
    assert (greedy == greedy[0]).all()
    for env_steps, epsilon in ((0, 0.8), (50, 0.5), (1_000, 0.2)):
        now = learner._replace(env_steps=jnp.int32(env_steps))
        action, behaviour = acts(this, now)
        rate = np.mean(np.asarray(action) == np.asarray(greedy[0]))
        expected = 1.0 - epsilon * 2 / 3
        sigma = np.sqrt(expected * (1 - expected) / action.size)
        assert abs(rate - expected) < 5 * sigma
        chance = np.exp(behaviour["log_prob"])
        is_best = np.asarray(action) == np.asarray(greedy[0])
        np.testing.assert_allclose(chance[is_best], expected, rtol=1e-5)
        np.testing.assert_allclose(chance[~is_best], epsilon / 3, rtol=1e-5)


def test_evaluation_has_an_epsilon_of_its_own():
    this = small(eval_epsilon=0.6)
    learner = this.init(jax.random.key(3)).learner
    hyper = learner.hyper._replace(eval_epsilon=jnp.float32(0.0))
    greedy, _ = acts(this, learner._replace(hyper=hyper), explore=False)
    action, _ = acts(this, learner, explore=False)
    rate = np.mean(np.asarray(action) == np.asarray(greedy[0]))
    assert abs(rate - 0.6) < 5 * np.sqrt(0.24 / action.size)


def test_levels_are_drawn_as_often_as_they_should_be():
    probability = jnp.array([0.5, 0.2, 0.3])
    offsets = jnp.asarray((np.arange(1_000) + 0.5) / 1_000, jnp.float32)
    levels = jax.vmap(lambda u: exploration.levels_of(probability, u, 6))(offsets)
    for env in range(6):
        share = np.bincount(np.asarray(levels[:, env]), minlength=3) / 1_000
        np.testing.assert_allclose(share, probability, atol=2e-3)
    # Many environments have all levels at once, in their shares.
    levels = exploration.levels_of(probability, jnp.float32(0.3), 200)
    share = np.bincount(np.asarray(levels), minlength=3) / 200
    np.testing.assert_allclose(share, probability, atol=0.02)


def test_what_is_replayed_more_is_explored_more():
    equal = exploration.Feedback(jnp.array([30.0, 60.0]), jnp.array([15.5, 30.5]))
    floor = jnp.float32(0.2)
    share = exploration.probabilities(equal, floor)
    expected = np.array([16.5 / 31, 31.5 / 61])
    expected = 0.8 * expected / expected.sum() + 0.1
    np.testing.assert_allclose(share, expected, rtol=1e-6)
    told = exploration.tell(
        equal, jnp.array([1.0, 2.0]), jnp.array([9.0, 0.0]), jnp.float32(0.5)
    )
    np.testing.assert_allclose(told.transitions, [16.0, 32.0])
    np.testing.assert_allclose(told.replays, [16.75, 15.25])
    assert exploration.probabilities(told, floor)[0] > share[0]


def test_replays_are_counted_by_the_level_that_acted():
    this, state, _ = updated("levels")
    decay = this.config.feedback_decay
    made = np.array([1.0, 1.0])
    for k in range(2):
        rows = segment(k, levels=2)
        counted = np.bincount(rows.behaviour["level"][rows.is_valid], minlength=2)
        made = decay * made + counted
    np.testing.assert_allclose(state.learner.feedback.transitions, made, rtol=1e-5)
    replays = np.sum(state.learner.feedback.replays)
    draws_of_one = 3 * this.config.batch_size
    expected = decay * (decay * 2.0 + draws_of_one) + draws_of_one
    np.testing.assert_allclose(replays, expected, rtol=1e-5)


# ------------------------------------------------------------- frames and learning


class Flat(nn.Module):
    """Reads frames without convolutions, to compile soon."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(x.reshape(x.shape[0], -1).astype(jnp.float32) / 255.0)


def test_frames_are_kept_once_and_learned_from_as_stacks():
    spec = EnvSpec("Frames-v0", (4, 6, 6), np.dtype(np.uint8), DISCRETE.action)
    config = DQNConfig(**(SMALL | {"replay": "proportional"}))
    plan = {"num_envs": ENVS, "rollout_steps": LENGTH}
    of_replay = make_replay(config, spec, **plan)
    parts = Parts(config, Flat(), of_replay)
    agent = make_agent(parts, spec, 100, num_envs=ENVS)
    state = jax.jit(agent.init)(jax.random.key(0))
    frames = state.local.replay.memory.frames
    kept = sum(x.nbytes for x in jax.tree.leaves(frames))
    assert kept < 0.6 * CAPACITY * state.local.following[0].nbytes
    newest = np.random.default_rng(0).integers(0, 256, (LENGTH + 4, ENVS, 6, 6))
    stacks = np.stack([newest[t : t + 4] for t in range(LENGTH + 1)], axis=0)
    observation = np.moveaxis(stacks, 1, 2).astype(np.uint8)
    rows = segment(0)
    never = np.zeros((LENGTH, ENVS), bool)
    rows = rows._replace(
        observation=observation, terminated=never, truncated=never, is_valid=~never
    )
    state, metrics = jax.jit(agent.update)(state, rows)
    assert_tree_all_finite((state.learner.q, metrics))
    assert metrics["gradient_steps"] == 3


def test_it_learns_to_wait_for_the_larger_reward():
    config = DQNConfig(
        replay="proportional",
        learning_rate=0.02,
        gamma=0.9,
        batch_size=32,
        replay_period=8,
        target_period=160,
        learning_starts=96,
        replay_capacity=1_000,
        hidden_sizes=(8,),
        normalize_observations=False,
        final_epsilon=0.3,
        exploration_steps=2_000,
    )
    envs, length = 16, 6
    env = TwoStepEnv(envs)
    plan = {"total_env_steps": 6_000, "num_envs": envs, "rollout_steps": length}
    agent = config.make(env.spec, **plan)
    act = jax.jit(
        lambda params, observation, key, count: agent.act(
            params, observation, jax.random.fold_in(key, count), explore=True
        )
    )
    actor = Actor(
        env, act, jax.random.key(1), device=jax.devices()[0], rollout_steps=length
    )
    update, params_of = (
        jax.jit(agent.update, donate_argnums=0),
        jax.jit(agent.actor_params),
    )
    state = jax.jit(agent.init)(jax.random.key(0))
    for k in range(60):
        params = params_of(state.learner, jax.random.fold_in(jax.random.key(2), k))
        segment_ = actor.rollout(params, rollout=k, version=k)
        state, _ = update(state, segment_.trajectory)
    network = q_network(env.spec, hidden_sizes=(8,), activation="relu", dueling=False)
    observations = jnp.stack([TwoStepEnv.first, TwoStepEnv.rich])
    q = network.apply(state.learner.q.params, observations)
    np.testing.assert_allclose(q[0], [0.4, 0.9], atol=0.08)
    np.testing.assert_allclose(q[1, 1], 1.0, atol=0.08)


# -------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replay_period": 3, "target_period": 10}, "target_period 10"),
        ({"learning_starts": 10**6}, "learning_starts 1000000"),
        ({"clips_priority": True, "td_error_clip": None}, "clips_priority True"),
        ({"priority_exponent": 0.5}, "priority_exponent 0.5 needs replay"),
        ({"sort_period": 3, "replay": "proportional"}, "sort_period 3"),
        ({"predecessor_coef": 0.5}, "predecessor_coef 0.5"),
        ({"epsilon": 1.5}, r"epsilon 1.5 must be in \[0, 1\]"),
        ({"exploration_levels": (0.1, 2.0)}, "exploration_levels 2.0"),
        ({"final_temperature": 0.0}, "final_temperature 0.0 must be above 0"),
        ({"hidden_sizes": ()}, "hidden_sizes"),
        ({"feedback_floor": 0.0}, "feedback_floor 0.0"),
        ({"name": "a/b"}, "name 'a/b'"),
    ],
)
def test_an_impossible_option_is_named_with_its_value(options, message):
    with pytest.raises(ValueError, match=message):
        DQNConfig(**options)


def test_what_does_not_fit_the_environment_is_refused():
    plan = {"total_env_steps": 100, "num_envs": ENVS, "rollout_steps": LENGTH}
    with pytest.raises(ValueError, match="continuous actions"):
        DQNConfig().make(CONTINUOUS, **plan)
    few = DQNConfig(replay_capacity=20, learning_starts=0)
    with pytest.raises(ValueError, match="replay_capacity 20 must be at least"):
        few.make(DISCRETE, **plan)
    image = EnvSpec("Small-v0", (4, 10, 10), np.dtype(np.uint8), DISCRETE.action)
    with pytest.raises(ValueError, match="observations of Small-v0"):
        DQNConfig().make(image, **plan)
    odd = small(replay_period=7, target_period=7)
    with pytest.raises(ValueError, match="replay_period 7 must divide the 24 rows"):
        jax.eval_shape(odd.agent.update, odd.init(jax.random.key(0)), segment(0))
