"""The contract of `VectorEnv`, kept by EnvPool's tasks and by the scripted one."""

import functools
import itertools
from types import SimpleNamespace

import envpool
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_env import LONGEST, SHORTEST, ScriptedEnv

from fps_jax.runtime.envs import (
    MAX_ENVS_PER_STREAM,
    MAX_STREAMS,
    EnvStep,
    RestorableEnv,
    VectorEnv,
    env_seeds,
    env_spec,
    make_env,
    to_env_action,
)
from fps_jax.types import Continuous, Discrete, EnvSpec

NUM_ENVS = 3
NUM_STEPS = 60
BOX = Continuous((-2.0, 0.0), (2.0, 1.0))


def pool(env_id, num_envs=NUM_ENVS, **options):
    seeds = env_seeds(0, stream=0, first=0, count=num_envs)
    return make_env(env_id, num_envs=num_envs, seeds=seeds, num_threads=1, **options)


MAKERS = {
    "CartPole-v1": lambda: pool("CartPole-v1"),
    "Pendulum-v1": lambda: pool("Pendulum-v1", max_episode_steps=17),
    "HalfCheetah-v4": lambda: pool("HalfCheetah-v4", max_episode_steps=13),
    "Pong-v5": lambda: pool("Pong-v5", max_episode_steps=19),
    "scripted, discrete": lambda: ScriptedEnv(NUM_ENVS),
    "scripted, continuous": lambda: ScriptedEnv(NUM_ENVS, action=BOX),
}


def random_actions(spec, num_steps, num_envs=NUM_ENVS, seed=0):
    rng = np.random.default_rng(seed)
    if isinstance(spec.action, Discrete):
        return rng.integers(spec.action.num_actions, size=(num_steps, num_envs))
    # Beyond [-1, 1], as a Gaussian policy acts.
    shape = (num_steps, num_envs, spec.action.size)
    return rng.normal(size=shape).astype(np.float32)


def play(env, actions):
    """Steps through `actions`; returns the steps stacked in time."""
    return EnvStep(*map(np.stack, zip(*[env.step(action) for action in actions])))


@functools.cache
def recorded(name):
    env = MAKERS[name]()
    first = env.reset()
    steps = play(env, random_actions(env.spec, NUM_STEPS))
    env.close()
    return env.spec, first, steps


every_env = pytest.mark.parametrize("name", MAKERS)


@every_env
def test_a_reset_row_follows_every_end_and_nothing_else(name):
    _, _, steps = recorded(name)
    is_done = steps.terminated | steps.truncated
    assert is_done[:-1].sum(axis=0).min() >= 2
    assert not steps.is_reset[0].any()
    np.testing.assert_array_equal(steps.is_reset[1:], is_done[:-1])


@every_env
def test_a_reset_row_has_no_reward_and_no_end(name):
    _, _, steps = recorded(name)
    assert not steps.reward[steps.is_reset].any()
    assert not (steps.terminated | steps.truncated)[steps.is_reset].any()
    if name != "Pong-v5":  # Nobody scores in nineteen steps.
        assert steps.reward[~steps.is_reset].any()


@every_env
def test_an_end_is_terminated_or_truncated_and_never_both(name):
    _, _, steps = recorded(name)
    assert (steps.terminated | steps.truncated).any()
    assert not (steps.terminated & steps.truncated).any()


@every_env
def test_the_final_observation_is_not_that_of_the_next_episode(name):
    _, _, steps = recorded(name)
    for t, i in np.argwhere(steps.is_reset):
        assert not np.array_equal(steps.observation[t - 1, i], steps.observation[t, i])


@every_env
def test_shapes_and_dtypes_are_those_of_the_spec(name):
    spec, first, steps = recorded(name)
    assert first.dtype == steps.observation.dtype == spec.observation_dtype
    assert first.shape == (NUM_ENVS, *spec.observation_shape)
    assert steps.observation.shape == (NUM_STEPS, *first.shape)
    assert steps.reward.dtype == np.float32
    for field in steps[1:]:
        assert field.shape == (NUM_STEPS, NUM_ENVS)
    for field in steps[2:]:
        assert field.dtype == bool


@every_env
def test_the_same_seeds_and_actions_give_the_same_episodes(name):
    spec, first, steps = recorded(name)
    env = MAKERS[name]()
    np.testing.assert_array_equal(env.reset(), first)
    again = play(env, random_actions(spec, 20))
    for field, field_again in zip(steps, again):
        np.testing.assert_array_equal(field[:20], field_again)


@every_env
def test_environments_with_different_seeds_differ_under_the_same_actions(name):
    env = MAKERS[name]()
    env.reset()
    actions = random_actions(env.spec, 30)
    actions[:] = actions[:, :1]
    seen = play(env, actions).observation
    for i, j in itertools.combinations(range(NUM_ENVS), 2):
        assert not np.array_equal(seen[:, i], seen[:, j])


@every_env
def test_every_env_keeps_the_protocol(name):
    env = MAKERS[name]()
    assert isinstance(env, VectorEnv)
    assert isinstance(env, RestorableEnv) == name.startswith("scripted")
    assert env.num_envs == NUM_ENVS


@every_env
def test_the_action_of_a_reset_row_is_ignored(name):
    spec, _, steps = recorded(name)
    actions = random_actions(spec, 40)
    others = random_actions(spec, 40, seed=1)
    actions[steps.is_reset[:40]] = others[steps.is_reset[:40]]
    env = MAKERS[name]()
    env.reset()
    for field, field_again in zip(steps, play(env, actions)):
        np.testing.assert_array_equal(field[:40], field_again)


@every_env
def test_the_given_actions_are_left_alone(name):
    env = MAKERS[name]()
    env.reset()
    actions = random_actions(env.spec, 2)
    before = actions.copy()
    actions.flags.writeable = False
    play(env, actions)
    np.testing.assert_array_equal(actions, before)


@pytest.mark.filterwarnings("ignore:.*precision lowered by casting")
@pytest.mark.parametrize(
    ("env_id", "scale", "limit"),
    [("Pendulum-v1", 2.0, 9), ("HalfCheetah-v4", 1.0, 9), ("Humanoid-v4", 0.4, 60)],
)
def test_envpool_is_given_scaled_and_clipped_actions(env_id, scale, limit):
    env = pool(env_id, max_episode_steps=limit)
    native = envpool.make(
        env_id,
        env_type="gymnasium",
        num_envs=NUM_ENVS,
        seed=env_seeds(0, stream=0, first=0, count=NUM_ENVS),
        max_episode_steps=limit,
    )
    first, _ = native.reset()
    np.testing.assert_array_equal(env.reset(), first.astype(np.float32))
    for action in random_actions(env.spec, 30):
        step = env.step(action)
        observation, reward, terminated, truncated, info = native.step(
            scale * np.clip(action.astype(np.float64), -1, 1)
        )
        np.testing.assert_array_equal(step.observation, observation.astype(np.float32))
        np.testing.assert_array_equal(step.reward, reward)
        np.testing.assert_array_equal(step.terminated, terminated)
        np.testing.assert_array_equal(step.truncated, truncated)
        np.testing.assert_array_equal(step.is_reset, info["elapsed_step"] == 0)


def test_actions_are_scaled_to_the_box_and_clipped():
    spec = EnvSpec("Box-v0", (1,), np.dtype(np.float32), BOX)
    action = np.array([[1, -1], [5, -5], [0, 0], [0.5, 0.5]], np.float32)
    scaled = to_env_action(action, spec, num_envs=4, dtype=np.dtype(np.float64))
    np.testing.assert_array_equal(scaled, [[2, 0], [2, 0], [0, 0.5], [1, 0.75]])
    assert scaled.dtype == np.float64


def test_a_fallen_cartpole_is_seen_fallen_and_then_upright():
    _, _, steps = recorded("CartPole-v1")
    position, angle = steps.observation[..., 0], steps.observation[..., 2]
    has_fallen = (np.abs(position) > 2.4) | (np.abs(angle) > 12 * np.pi / 180)
    np.testing.assert_array_equal(has_fallen, steps.terminated)
    assert np.abs(steps.observation[steps.is_reset]).max() <= 0.05


def test_the_time_limit_truncates():
    _, _, steps = recorded("Pendulum-v1")
    # Seventeen steps and the reset of the next episode make eighteen rows.
    is_end = np.arange(NUM_STEPS) % 18 == 16
    np.testing.assert_array_equal(steps.truncated, is_end[:, None].repeat(3, axis=1))
    assert not steps.terminated.any()


def test_a_fall_in_the_last_step_that_the_limit_allows_counts_once():
    actions = np.zeros((30, 1), np.int32)
    free = pool("CartPole-v1", num_envs=1)
    free.reset()
    fall = int(np.argmax(play(free, actions).terminated))
    limited = pool("CartPole-v1", num_envs=1, max_episode_steps=fall + 1)
    limited.reset()
    steps = play(limited, actions)
    is_done = steps.terminated | steps.truncated
    assert int(np.argmax(is_done)) == fall > 0
    assert not (steps.terminated & steps.truncated).any()


def test_a_lost_life_ends_an_episode_and_is_followed_by_a_reset_row():
    env = pool("Breakout-v5", num_envs=2, env_options={"episodic_life": True})
    env.reset()
    steps = play(env, random_actions(env.spec, 200, num_envs=2))
    assert steps.terminated.sum() >= 4
    np.testing.assert_array_equal(steps.is_reset[1:], steps.terminated[:-1])


def test_the_first_step_of_a_pool_without_a_reset_is_a_reset_row():
    env = pool("CartPole-v1")
    steps = play(env, random_actions(env.spec, 2))
    np.testing.assert_array_equal(steps.is_reset, [[True] * 3, [False] * 3])
    assert not steps.reward[0].any()


def test_environments_do_not_depend_on_how_they_are_split():
    seeds = env_seeds(0, stream=0, first=0, count=NUM_ENVS)
    _, first, steps = recorded("CartPole-v1")
    alone = make_env("CartPole-v1", num_envs=1, seeds=seeds[2:])
    np.testing.assert_array_equal(alone.reset(), first[2:])
    actions = random_actions(alone.spec, NUM_STEPS)[:, 2:]
    np.testing.assert_array_equal(
        play(alone, actions).observation, steps.observation[:, 2:]
    )


def test_a_spec_tells_spaces_and_limit_without_an_environment():
    float32, uint8 = np.dtype(np.float32), np.dtype(np.uint8)
    unit = Continuous((-1.0,) * 6, (1.0,) * 6)
    assert env_spec("CartPole-v1") == EnvSpec(
        "CartPole-v1", (4,), float32, Discrete(2), 500
    )
    assert env_spec("HalfCheetah-v4", max_episode_steps=7) == EnvSpec(
        "HalfCheetah-v4", (17,), float32, unit, 7
    )
    assert env_spec("Pong-v5", env_options={"stack_num": 2}) == EnvSpec(
        "Pong-v5", (2, 84, 84), uint8, Discrete(6), 27000
    )
    assert env_spec("Blackjack-v1").max_episode_steps is None
    assert env_spec("BipedalWalker-v3").action == Continuous((-1.0,) * 4, (1.0,) * 4)


def test_integer_actions_that_do_not_begin_at_0_are_refused(monkeypatch):
    native = envpool.make_spec("CartPole-v1")
    action = SimpleNamespace(shape=[-1], dtype=np.int32, minimum=1, maximum=3)
    strange = SimpleNamespace(
        config=native.config,
        state_array_spec=native.state_array_spec,
        action_array_spec={"action": action},
    )
    monkeypatch.setattr(envpool, "make_spec", lambda env_id, **options: strange)
    with pytest.raises(ValueError, match="minimum=1, maximum=3"):
        env_spec("CartPole-v1")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"env_id": "CartPol-v1"}, "no env_id 'CartPol-v1'.*CartPole-v1"),
        ({"env_id": "CliffWalking-v0"}, "CliffWalking-v0: observations .*obs.*int32"),
        ({"env_id": "CheetahRun-v1"}, "CheetahRun-v1: observations .*velocity"),
        ({"env_id": "Go9x9-v1"}, "Go9x9-v1: observations .*-1, 9, 9"),
        ({"env_id": "TakeCover-v1"}, "TakeCover-v1: actions .*finite bounds"),
        ({"env_options": {"frame_skp": 2}}, "no env_options 'frame_skp'.*frame_skip"),
        ({"env_options": {"num_envs": 2}}, "no env_options 'num_envs'"),
        ({"env_options": {"frame_skip": "two"}}, "frame_skip.*wrong type"),
        ({"max_episode_steps": 0}, "max_episode_steps 0"),
        ({"num_envs": 0, "seeds": []}, "num_envs 0"),
        ({"num_threads": 0}, "num_threads 0"),
        ({"seeds": [1, 2, 3]}, "3 seeds .* num_envs 2"),
        ({"seeds": [5, 2**31]}, "seeds: 2147483648 must be an int32"),
        ({"seeds": [5, -(2**31) - 1]}, "seeds: -2147483649 must be an int32"),
    ],
)
def test_make_env_refuses_what_it_cannot_make(options, message):
    options = {"env_id": "HalfCheetah-v4", "num_envs": 2, "seeds": [1, 2]} | options
    with pytest.raises(ValueError, match=message):
        make_env(**options)


@pytest.mark.parametrize(
    ("name", "action", "message"),
    [
        ("CartPole-v1", np.array([0, 1, 2]), "action 2 of environment 2 .*0, 2"),
        ("CartPole-v1", np.array([0, -1, 1]), "action -1 of environment 1 .*0, 2"),
        ("CartPole-v1", np.array([0.0, 1.0, 1.0]), "float64 actions must be integers"),
        ("CartPole-v1", np.array([0, 1]), r"actions \(2,\) must be \(3,\)"),
        ("Pendulum-v1", np.array([[0], [1], [np.nan]]), "environment 2 .* finite"),
        ("Pendulum-v1", np.array([[0], [np.inf], [0]]), "environment 1 .* finite"),
        ("Pendulum-v1", np.zeros(3), r"actions \(3,\) must be \(3, 1\)"),
        ("scripted, discrete", np.array([3, 0, 0]), "action 3 of environment 0"),
    ],
)
def test_step_refuses_what_is_no_action(name, action, message):
    env = MAKERS[name]()
    env.reset()
    with pytest.raises(ValueError, match=message):
        env.step(action)


streams = st.integers(0, MAX_STREAMS - 1)


@given(st.integers(0, 2**40), streams, st.integers(0, 9000), st.integers(1, 99))
def test_seeds_do_not_depend_on_how_indices_are_split(seed, stream, first, size):
    seeds_of = functools.partial(env_seeds, seed, stream=stream)
    whole = seeds_of(first=first, count=2 * size)
    left = seeds_of(first=first, count=size)
    right = seeds_of(first=first + size, count=size)
    assert left + right == whole
    assert all(0 <= seed < 2**31 for seed in whole)


@given(st.integers(0, 2**40), streams, streams, st.integers(0, 9000))
def test_streams_share_no_seed(seed, one, other, first):
    seeds = env_seeds(seed, stream=one, first=0, count=2000)
    others = env_seeds(seed, stream=other, first=first, count=2000)
    expected = max(0, 2000 - first) if one == other else 0
    assert len(set(seeds) & set(others)) == expected


@pytest.mark.parametrize("seed", [0, 1])
def test_all_seeds_of_two_neighbouring_streams_differ(seed):
    seeds = set()
    for stream in (3, 4):
        count = MAX_ENVS_PER_STREAM
        seeds.update(env_seeds(seed, stream=stream, first=0, count=count))
    assert len(seeds) == 2 * MAX_ENVS_PER_STREAM


def test_seeds_are_spread_and_other_runs_have_others():
    seeds = np.array(env_seeds(0, stream=0, first=0, count=4096))
    others = env_seeds(1, stream=0, first=0, count=4096)
    # Two random sets of this size meet with probability 0.008.
    assert not set(seeds) & set(others)
    counts = np.bincount(seeds >> 27, minlength=16)
    sigma = np.sqrt(4096 * (1 / 16) * (15 / 16))
    np.testing.assert_allclose(counts, 4096 / 16, atol=5 * sigma)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": -1}, "seed -1"),
        ({"stream": -1}, "stream -1"),
        ({"stream": MAX_STREAMS}, "stream 2048"),
        ({"first": -1}, "first -1"),
        ({"first": MAX_ENVS_PER_STREAM}, "= 1048577 at most 1048576"),
        ({"count": 0}, "count 0"),
    ],
)
def test_env_seeds_refuses_what_is_out_of_range(options, message):
    options = {"seed": 0, "stream": 0, "first": 0, "count": 1} | options
    with pytest.raises(ValueError, match=message):
        env_seeds(**options)


@pytest.mark.parametrize("action", [Discrete(3), BOX])
@pytest.mark.parametrize("saved_at", [0, 5, 23])
def test_a_scripted_env_continues_exactly_from_a_saved_state(action, saved_at):
    env = ScriptedEnv(NUM_ENVS, first=7, action=action)
    actions = random_actions(env.spec, 40)
    before = [env.reset(), *[env.step(a).observation for a in actions[:saved_at]]]
    state = env.get_state()
    expected = play(env, actions[saved_at:])
    other = ScriptedEnv(NUM_ENVS, first=7, action=action)
    np.testing.assert_array_equal(other.set_state(state), before[-1])
    for field, field_again in zip(expected, play(other, actions[saved_at:])):
        np.testing.assert_array_equal(field, field_again)


def test_a_scripted_env_never_forgets_an_action():
    actions = random_actions(ScriptedEnv().spec, 60)
    changed = actions.copy()
    changed[0, 1] = (changed[0, 1] + 1) % 3
    seen = play(ScriptedEnv(NUM_ENVS), actions).observation[..., 3]
    seen_changed = play(ScriptedEnv(NUM_ENVS), changed).observation[..., 3]
    np.testing.assert_array_equal(seen[:, [0, 2]], seen_changed[:, [0, 2]])
    assert (seen[:, 1] != seen_changed[:, 1]).all()


def test_scripted_episodes_vary_in_length_and_end_both_ways():
    steps = play(ScriptedEnv(), random_actions(ScriptedEnv().spec, 400, num_envs=4))
    is_done = steps.terminated | steps.truncated
    lengths = steps.observation[is_done][:, 2]
    assert set(lengths) == set(range(SHORTEST, LONGEST + 1))
    assert abs(int(steps.terminated.sum()) - int(steps.truncated.sum())) <= 4
    assert steps.reward.min() == 0
    assert steps.reward.max() == 1


def test_a_scripted_env_fails_when_told_to():
    env = ScriptedEnv(fail_at_step=2)
    action = np.zeros(4, np.int32)
    env.step(action)
    env.step(action)
    with pytest.raises(RuntimeError, match="step 2"):
        env.step(action)


@pytest.mark.parametrize("field", ["reward", "observation"])
def test_a_scripted_env_returns_nan_once_when_told_to(field):
    env = ScriptedEnv(nan_at_step=2, nan_field=field)
    steps = play(env, np.zeros((5, 4), np.int32))
    is_nan = np.isnan(getattr(steps, field)).reshape(5, 4, -1).any(axis=2)
    np.testing.assert_array_equal(np.argwhere(is_nan), [[2, 0]])
