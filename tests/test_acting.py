"""Rollouts row by row, and the lag protocol under threads, against naive twins."""

import threading
import time
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chex import assert_trees_all_equal
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_env import ScriptedEnv

from fps_jax.runtime.acting import Actor, Crew
from fps_jax.runtime.exchange import (
    Episode,
    NonFiniteError,
    StalledError,
    Stopped,
)
from fps_jax.runtime.parallel import learner_mesh
from fps_jax.runtime.program import compile_agent
from fps_jax.types import Agent, Continuous

LENGTH, ENVS = 5, 6
LOGITS = np.zeros(3, np.float32)
PATIENCE_S = 30.0
NEVER = lambda: False


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    left = [t.name for t in threading.enumerate() if t.name.startswith("actor-")]
    assert not left


def compiled(policy):
    """A policy's `act` as a run compiles it."""
    agent = Agent(init=None, actor_params=None, act=policy, update=None)
    return compile_agent(agent, learner_mesh(jax.devices()[:1]), mapping="pmap").act


@compiled
def act(params, observation, key, *, explore):
    """A random policy of all that an observation holds."""
    seen = 7 * jnp.sum(observation, axis=1, keepdims=True)
    logits = jnp.sin(seen + jnp.arange(3.0)[None]) + params[None]
    action = jax.random.categorical(key, logits)
    return action, {"log_prob": logits[:, 0], "features": 2 * observation}


def make_actor(env=None, *, key=0, act=act, length=LENGTH, **options):
    # Not the default device, so that what is left behind on that one is seen.
    options = {"device": jax.devices()[1]} | options
    env = env or ScriptedEnv(ENVS)
    return Actor(env, act, jax.random.key(key), rollout_steps=length, **options)


def rollouts(actor, numbers, params=LOGITS):
    return [actor.rollout(params, rollout=k, version=10 + k) for k in numbers]


def naive_rows(env, numbers, key=0):
    """One dict a step, in one row over all rollouts, as plainly as can be."""
    observation, rows = env.reset(), []
    for k in numbers:
        for t in range(LENGTH):
            count = np.uint32(k * LENGTH + t)
            seen = np.nan_to_num(observation, nan=0, posinf=0, neginf=0)
            chosen = act(LOGITS, seen, jax.random.key(key), count)
            action, behaviour = jax.device_get(chosen)
            step = env.step(action)
            rows.append(
                {
                    "observation": observation,
                    "action": action,
                    "behaviour": behaviour,
                    "reward": step.reward,
                    "terminated": step.terminated,
                    "truncated": step.truncated,
                    "is_valid": ~step.is_reset,
                    "policy_version": np.full(env.num_envs, 10 + k),
                    "led_to": step.observation,
                }
            )
            observation = step.observation
    return rows


def naive_episodes(rows):
    """Every finished episode, by the rollout that it ended in."""
    found = [[] for _ in range(len(rows) // LENGTH)]
    envs = len(rows[0]["reward"])
    total, length = [0.0] * envs, [0] * envs
    for number, row in enumerate(rows):
        for i in range(envs):
            if row["is_valid"][i]:
                total[i] += float(row["reward"][i])
                length[i] += 1
            if row["terminated"][i] or row["truncated"][i]:
                found[number // LENGTH].append(Episode(total[i], length[i], i))
                total[i], length[i] = 0.0, 0
    return found


# ------------------------------------------------------------------------ rollouts


@pytest.fixture(scope="module")
def six():
    """Six rollouts in a row, and the twin's rows."""
    return rollouts(make_actor(), range(6)), naive_rows(ScriptedEnv(ENVS), range(6))


def test_every_row_is_what_the_twin_wrote_down(six):
    segments, rows = six
    for k, segment in enumerate(segments):
        trajectory = segment.trajectory
        assert (segment.rollout, segment.version) == (k, 10 + k)
        assert not segment.nonfinite.any()
        for t in range(LENGTH):
            row = dict(rows[k * LENGTH + t])
            led_to = row.pop("led_to")
            np.testing.assert_array_equal(trajectory.observation[t + 1], led_to)
            for name, expected in row.items():
                actual = jax.tree.map(lambda x, t=t: x[t], getattr(trajectory, name))
                assert_trees_all_equal(actual, expected)


def test_a_done_row_leads_to_the_true_final_observation(six):
    segments, _ = six
    seen = 0
    for segment in segments:
        trajectory = segment.trajectory
        done = trajectory.terminated | trajectory.truncated
        before, after = trajectory.observation[:-1], trajectory.observation[1:]
        # The scripted observation counts the steps of its episode.
        np.testing.assert_array_equal(after[done][:, 2], before[done][:, 2] + 1)
        reset = ~trajectory.is_valid
        np.testing.assert_array_equal(after[reset][:, 2], 0)
        np.testing.assert_array_equal(trajectory.reward[reset], 0)
        np.testing.assert_array_equal(reset[1:], done[:-1])
        seen += done.sum()
    assert seen > 20


def test_episodes_are_counted_once_also_across_the_borders_of_rollouts(six):
    segments, rows = six
    dones = [s.trajectory.terminated | s.trajectory.truncated for s in segments]
    assert any(done[-1].any() for done in dones)
    assert any((~segment.trajectory.is_valid[0]).any() for segment in segments)
    assert [s.episodes for s in segments] == naive_episodes(rows)


def test_where_the_time_went_is_told(six):
    segments, _ = six
    assert set(segments[0].seconds) == {"inference", "env"}
    assert min(segments[0].seconds.values()) > 0


def test_the_raw_action_is_stored_and_not_the_scaled_one():
    space = Continuous((0.0,), (10.0,))

    def far(params, observation, key, count):
        return jnp.full((ENVS, 1), 3.0), {"log_prob": jnp.zeros(ENVS)}

    (segment,) = rollouts(make_actor(ScriptedEnv(ENVS, action=space), act=far), [0])
    np.testing.assert_array_equal(segment.trajectory.action, 3.0)


def test_random_numbers_are_named_by_actor_rollout_and_step():
    first, again, other = (
        rollouts(make_actor(key=key), [0, 1])[1].trajectory for key in (3, 3, 4)
    )
    assert_trees_all_equal(first, again)
    assert (first.action != other.action).any()


@pytest.mark.parametrize("number", [0, 7, 2**32 // LENGTH])
def test_acts_are_counted_and_the_count_wraps(number):
    def counting(params, observation, key, count):
        return np.zeros(ENVS, np.int32), {"count": jnp.full(ENVS, count)}

    (segment,) = rollouts(make_actor(act=counting), [number])
    expected = (number * LENGTH + np.arange(LENGTH)) % 2**32
    np.testing.assert_array_equal(segment.trajectory.behaviour["count"][:, 0], expected)
    assert segment.trajectory.behaviour["count"].dtype == np.uint32


def test_acting_happens_on_the_actors_own_device():
    devices = []

    def watching(params, observation, key, count):
        acted = act(params, observation, key, count)
        devices.extend(x.device for x in jax.tree.leaves((key, acted)))
        return acted

    rollouts(make_actor(act=watching, device=jax.devices()[2]), [0])
    assert set(devices) == {jax.devices()[2]}


def test_a_restored_actor_goes_on_bit_by_bit():
    straight = make_actor()
    segments = rollouts(straight, range(4))
    kept = jax.tree.map(np.copy, segments[1].carry)
    for actor in (make_actor(), straight):
        actor.restore(segments[1].carry)
        assert_trees_all_equal(actor.carry(), kept)
        for again, segment in zip(rollouts(actor, [2, 3]), segments[2:]):
            assert_trees_all_equal(again.trajectory, segment.trajectory)
            assert_trees_all_equal(again.carry, segment.carry)
            assert again.episodes == segment.episodes
    assert_trees_all_equal(segments[1].carry, kept)
    assert sum(len(s.episodes) for s in segments[2:]) > 0


class Unrestorable:
    """A scripted environment of which only the `VectorEnv` half is left."""

    def __init__(self):
        env = ScriptedEnv(ENVS)
        self.spec, self.num_envs, self.closed = env.spec, ENVS, False
        self.reset, self.step = env.reset, env.step

    def close(self):
        self.closed = True


def test_environments_that_cannot_be_restored_say_so():
    actor = make_actor(env := Unrestorable())
    (segment,) = rollouts(actor, [0])
    assert not actor.is_restorable
    assert make_actor().is_restorable
    assert segment.carry.env_state == ()
    with pytest.raises(TypeError, match="Scripted-v0 cannot be restored"):
        actor.restore(segment.carry)
    actor.close()
    assert env.closed


# -------------------------------------------------------------- NaNs and infinities


class BrokenEnv(ScriptedEnv):
    """Returns given values at given calls: ``{call: (field, environment, value)}``."""

    def __init__(self, bad, **options):
        self.bad = bad
        super().__init__(ENVS, **options)

    def step(self, action):
        call = int(self._state.num_calls)
        step = super().step(action)
        if call in self.bad:
            field, env, value = self.bad[call]
            getattr(step, field)[env] = value
        return step


FAULTS = st.dictionaries(
    st.integers(0, 3 * LENGTH - 1),
    st.tuples(
        st.sampled_from(["reward", "observation"]),
        st.integers(0, ENVS - 1),
        st.sampled_from([np.nan, np.inf, -np.inf]),
    ),
    max_size=6,
)


def is_finite(x):
    return np.isfinite(x).reshape(ENVS, -1).all(axis=1)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(FAULTS)
def test_masking_masks_the_rows_that_a_bad_number_touches(bad):
    actor = make_actor(BrokenEnv(bad), masks_nonfinite=True)
    segments = rollouts(actor, range(3))
    rows = naive_rows(BrokenEnv(bad), range(3))
    good = [
        is_finite(r["observation"]) & is_finite(r["led_to"]) & is_finite(r["reward"])
        for r in rows
    ]
    for k, segment in enumerate(segments):
        trajectory = segment.trajectory
        of_rollout = slice(k * LENGTH, (k + 1) * LENGTH)
        was_valid = np.stack([r["is_valid"] for r in rows[of_rollout]])
        expected = was_valid & np.stack(good[of_rollout])
        np.testing.assert_array_equal(trajectory.is_valid, expected)
        masked = (was_valid & ~expected).sum(axis=0)
        np.testing.assert_array_equal(segment.nonfinite, masked)
        zeroed = lambda x: np.where(np.isfinite(x), x, 0)
        for t, row in enumerate(rows[of_rollout]):
            observation, led_to = trajectory.observation[t : t + 2]
            np.testing.assert_array_equal(observation, zeroed(row["observation"]))
            np.testing.assert_array_equal(led_to, zeroed(row["led_to"]))
            np.testing.assert_array_equal(trajectory.reward[t], zeroed(row["reward"]))
            np.testing.assert_array_equal(trajectory.action[t], row["action"])
        assert all(np.isfinite(e.total_reward) for e in segment.episodes)


def test_a_bad_number_in_the_last_row_masks_the_first_of_the_next_rollout():
    bad = {LENGTH - 1: ("observation", 5, np.nan)}
    actor = make_actor(BrokenEnv(bad), masks_nonfinite=True)
    first, second = rollouts(actor, range(2))
    for segment, t in ((first, LENGTH - 1), (second, 0)):
        assert segment.nonfinite.tolist() == [0] * 5 + [1] + [0] * (ENVS - 6)
        assert not segment.trajectory.is_valid[t, 5]


@pytest.mark.parametrize("field", ["reward", "observation"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_otherwise_a_bad_number_ends_the_run_and_says_where(field, value):
    actor = make_actor(BrokenEnv({LENGTH + 2: (field, 4, value)}))
    rollouts(actor, [0])
    message = "environment 4 of Scripted-v0 .* at step 2 of its rollout"
    with pytest.raises(NonFiniteError, match=message):
        rollouts(actor, [1])


def test_the_observation_is_blamed_and_not_the_action_that_it_led_to():
    env = BrokenEnv({1: ("observation", 0, np.nan)}, action=Continuous((-1.0,), (1.0,)))

    @compiled
    def follow(params, observation, key, *, explore):
        return observation[:, :1], {"log_prob": observation[:, 0]}

    with pytest.raises(NonFiniteError):
        rollouts(make_actor(env, act=follow), [0])


# ---------------------------------------------------------------- the lag protocol


class SleepyEnv(ScriptedEnv):
    """Takes its time, now more, now less."""

    def __init__(self, *args, seed, **options):
        self.random = np.random.default_rng(seed)
        super().__init__(*args, **options)

    def step(self, action):
        time.sleep(self.random.choice([0, 0, 0.001, 0.004]))
        return super().step(action)


def learn(params, segments):
    """A learner whose parameters show all that they were made of."""
    means = [np.mean(s.trajectory.action * s.trajectory.reward) for s in segments]
    step = np.asarray([1, -2, 1], np.float32) * np.float32(np.sum(means))
    return np.float32(0.5) * params + step


def start_crew(envs, *, max_lag=1, first=0, last=100, stall_limit_s=PATIENCE_S):
    actors = [make_actor(env, key=i) for i, env in enumerate(envs)]
    return Crew(
        actors,
        max_lag=max_lag,
        first_rollout=first,
        num_rollouts=last,
        stall_limit_s=stall_limit_s,
    )


def ends(crew):
    """Stops a crew; a thread may compile for a while before it sees that."""
    return crew.stop(join_limit_s=PATIENCE_S)


def two_envs(seed=None):
    if seed is None:
        return [ScriptedEnv(3), ScriptedEnv(3, first=3)]
    return [SleepyEnv(3, first=3 * i, seed=(seed, i)) for i in range(2)]


def run_crew(seed, *, max_lag, first, last):
    """The segments of a run of two actors and a learner, all of whom are sleepy."""
    random = np.random.default_rng(seed)
    crew = start_crew(two_envs(seed), max_lag=max_lag, first=first, last=last)
    params, taken = LOGITS, []
    try:
        crew.exchange.publish(first, [params] * 2)
        for k in range(first, last):
            taken.append(crew.exchange.take(is_interrupted=NEVER))
            time.sleep(random.choice([0, 0.01]))
            params = learn(params, taken[-1])
            crew.exchange.publish(k + 1, [params] * 2)
    finally:
        assert ends(crew)
    return taken


def run_in_turns(*, max_lag, first, last):
    """The same without threads: the protocol, read aloud."""
    actors = [make_actor(env, key=i) for i, env in enumerate(two_envs())]
    versions, taken = {first: LOGITS}, []
    for k in range(first, last):
        version = max(first, k - max_lag)
        taken.append(
            [a.rollout(versions[version], rollout=k, version=version) for a in actors]
        )
        versions[k + 1] = learn(versions[k], taken[-1])
    return taken


@pytest.mark.parametrize("first", [0, 5])
@pytest.mark.parametrize("max_lag", [0, 1, 3])
def test_threads_do_what_turns_do_however_long_each_takes(max_lag, first):
    span = {"max_lag": max_lag, "first": first, "last": first + 7}
    expected = run_in_turns(**span)
    assert (
        len({float(s.trajectory.reward.sum()) for pair in expected for s in pair}) > 4
    )
    for seed in range(3):
        for k, (actual, wanted) in enumerate(zip(run_crew(seed, **span), expected)):
            for a, w in zip(actual, wanted):
                assert a.rollout == first + k
                assert a.version == max(first, first + k - max_lag)
                np.testing.assert_array_equal(a.trajectory.policy_version, a.version)
                assert_trees_all_equal(a.trajectory, w.trajectory)
                assert a.episodes == w.episodes
                assert "queue_wait" in a.seconds


@pytest.mark.parametrize("max_lag", [0, 1, 3])
def test_acting_runs_ahead_of_a_slow_learner_by_the_lag_and_no_more(max_lag):
    crew = start_crew(two_envs(), max_lag=max_lag)
    crew.exchange.publish(0, [LOGITS] * 2)
    for k in range(max_lag + 1):
        segments = crew.exchange.take(is_interrupted=NEVER)
        assert [s.rollout for s in segments] == [k, k]
    asked = iter([False, False])
    with pytest.raises(Stopped):
        crew.exchange.take(is_interrupted=lambda: next(asked, True))
    assert ends(crew)


def test_a_crew_without_rollouts_left_ends_by_itself():
    crew = start_crew(two_envs(), first=4, last=4)
    assert ends(crew)


def test_stopping_does_not_wait_for_the_end_of_a_rollout():
    env = ScriptedEnv(3, sleep_s=0.02)
    actor = make_actor(env, length=10**6)
    crew = Crew(
        [actor], max_lag=0, first_rollout=0, num_rollouts=1, stall_limit_s=PATIENCE_S
    )
    crew.exchange.publish(0, [LOGITS])
    while env.get_state().num_calls < 3:
        time.sleep(0.01)
    assert ends(crew)


def take_forever(crew):
    while True:
        crew.exchange.take(is_interrupted=NEVER)


class FailingEnv(ScriptedEnv):
    """Raises in its eighth step."""

    def __init__(self, error):
        super().__init__(3)
        self.error = error

    def step(self, action):
        if self._state.num_calls == 7:
            raise self.error
        return super().step(action)


@pytest.mark.parametrize("kind", [RuntimeError, NonFiniteError, SystemExit])
def test_an_actors_failure_reaches_the_learner_with_its_traceback(kind):
    crew = start_crew([ScriptedEnv(3), FailingEnv(kind("the mast broke"))])
    crew.exchange.publish(0, [LOGITS] * 2)
    with pytest.raises(kind, match="the mast broke") as caught:
        take_forever(crew)
    names = [f.name for f in traceback.extract_tb(caught.value.__traceback__)]
    place = [names.index(name) for name in ("take", "_run", "rollout", "step")]
    assert place == sorted(place)
    assert caught.value.__cause__ is None
    assert ends(crew)


def test_a_learner_that_fails_stops_its_actors_wherever_they_wait():
    for max_lag in (0, 3):
        crew = start_crew(two_envs(), max_lag=max_lag)
        if max_lag:
            crew.exchange.publish(0, [LOGITS] * 2)
        time.sleep(0.05)
        assert ends(crew)


def test_an_environment_that_hangs_fails_the_run_and_is_reported():
    release = threading.Event()
    env = ScriptedEnv(3)
    env.step = lambda action: release.wait(PATIENCE_S) and None
    crew = start_crew([env], stall_limit_s=0.1)
    crew.exchange.publish(0, [LOGITS])
    try:
        with pytest.raises(StalledError, match="a rollout of every actor"):
            crew.exchange.take(is_interrupted=NEVER)
        assert not crew.stop(join_limit_s=0.1)
    finally:
        release.set()
        assert ends(crew)


def test_a_slow_learner_is_waited_for_as_long_as_it_needs():
    def idle(params, observation, key, count):
        return np.zeros(len(observation), np.int32), {"log_prob": np.zeros(3)}

    actor = make_actor(ScriptedEnv(3), act=idle)
    crew = Crew([actor], max_lag=0, first_rollout=0, num_rollouts=9, stall_limit_s=0.3)
    crew.exchange.publish(0, [LOGITS])
    time.sleep(1.0)
    assert len(crew.exchange.take(is_interrupted=NEVER)) == 1
    assert ends(crew)
