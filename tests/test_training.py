"""Whole runs in one process: what they compile, move, repeat, count and resume."""

import collections
import dataclasses
import functools
import os
import time

import jax
import numpy as np
import pytest
from scripted_env import ScriptedEnv
from tiny_agent import TinyConfig

from fps_jax.agents.ppo import PPOConfig
from fps_jax.runtime import envs
from fps_jax.runtime.checkpoints import CheckpointError, open_checkpoints
from fps_jax.runtime.journal import History
from fps_jax.runtime.metrics import read_jsonl
from fps_jax.runtime.options import TrainConfig
from fps_jax.runtime.training import Run, train

ENVS, LENGTH = 4, 8
ROWS = ENVS * LENGTH
PPO = PPOConfig(hidden_sizes=(8,), minibatch_size=16, num_epochs=1)
TINY = TinyConfig()


def config(**options) -> TrainConfig:
    """Options of a run of ten updates on one device that writes nothing."""
    defaults = {
        "env": "Scripted-v0",
        "total_env_steps": 10 * ROWS,
        "num_envs": ENVS,
        "rollout_steps": LENGTH,
        "learner_devices": 1,
        "eval_every": 0,
        "eval_episodes": 0,
        "checkpoint_every": 0,
        "directory": None,
        "tensorboard": False,
        "show_progress": False,
    }
    return TrainConfig(**defaults | options)


def make_scripted(env_id, *, num_envs, seeds, **_):
    """Makes environments that differ by their seeds, and only by them."""
    del env_id
    return ScriptedEnv(num_envs, first=seeds[0] % 1000)


class Wrapped:
    """Environments that cannot be restored, slow down by chance, and may fail."""

    def __init__(self, env, *, max_sleep_s=0.0, fail_at_step=None):
        self._env, self.spec, self.num_envs = env, env.spec, env.num_envs
        self._rng = np.random.default_rng()
        self._max_sleep_s, self._fail_at_step = max_sleep_s, fail_at_step
        self._steps = 0
        self.reset, self.close = env.reset, env.close

    def step(self, action):
        time.sleep(self._max_sleep_s * self._rng.random())
        if self._steps == self._fail_at_step:
            raise RuntimeError("The environment fails as it was told to.")
        self._steps += 1
        return self._env.step(action)


def make_slow(env_id, **options):
    return Wrapped(make_scripted(env_id, **options), max_sleep_s=0.002)


def make_slow_cartpole(env_id, **options):
    return Wrapped(envs.make_env(env_id, **options), max_sleep_s=0.002)


def make_ageing(fail_at_step):
    """Makes restorable environments, always the same, whose `step` fails in time."""

    def make(env_id, *, num_envs, **_):
        del env_id
        return ScriptedEnv(num_envs, fail_at_step=fail_at_step)

    return make


@functools.cache
def plain(**options) -> History:
    """The history of a run of the tiny agent where nothing is special."""
    return train(TINY, config(**options), make_env=make_scripted)


def leaves(state):
    """The leaves of a state as numpy arrays, keys as their words."""
    is_key = lambda x: jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    words = lambda x: jax.random.key_data(x) if is_key(x) else x
    return [np.asarray(words(x)) for x in jax.tree.leaves(state)]


def assert_same(one, other):
    """Bit for bit."""
    one, other = leaves(one), leaves(other)
    assert len(one) == len(other) > 3
    for x, y in zip(one, other, strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


def untimed(records):
    """Records without what the clock has a part in."""
    return [
        {k: v for k, v in r.items() if not k.startswith(("seconds/", "steps_per_s"))}
        | {"wall_s": None}
        for r in records
    ]


# ------------------------------------------------------------------ compiled, moved


@pytest.fixture
def compilations():
    """Counts by name what XLA compiles."""
    counts = collections.Counter()

    def listen(event, seconds, *, fun_name="", **_):
        del seconds
        if event.endswith("backend_compile_duration"):
            counts[fun_name] += 1

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield counts
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.fixture
def no_unasked_transfer():
    """Lets only explicit transfers pass, in every thread."""

    def forbid():
        jax.config.update("jax_transfer_guard", "disallow")

    yield forbid
    jax.config.update("jax_transfer_guard", "allow")


def test_fifty_updates_compile_once_and_move_nothing_unasked(
    compilations, no_unasked_transfer
):
    options = {"eval_every": 5 * ROWS, "eval_episodes": 2}
    run = Run(PPO, config(total_env_steps=50 * ROWS, **options), make_env=make_scripted)
    compilations.clear()
    no_unasked_transfer()
    history = run.train()
    assert len(history.records) == 50
    assert len(history.column("eval/return")[0]) > 5
    by_name = {name: n for name, n in compilations.items() if n and name}
    # `act` with and without exploration; `actor_params` with a key and without; the
    # update, which pmap names so.
    expected = {"jit(act)": 2, "jit(actor_params)": 2, "jit(_fun)": 1}
    assert {name: by_name.pop(name, 0) for name in expected} == expected
    # What is left are JAX's own small operations, such as a fold of a key.
    assert set(by_name.values()) <= {1}
    assert not {name for name in by_name if "update" in name}


# ------------------------------------------------------------------------ repeated


@pytest.mark.parametrize("num_actors", [1, 2])
@pytest.mark.parametrize("max_lag", [0, 1, 3])
def test_two_runs_are_the_same_however_their_threads_are_timed(max_lag, num_actors):
    options = {"max_lag": max_lag, "num_actors": num_actors}
    slow = train(TINY, config(**options), make_env=make_slow)
    assert_same(slow.state, plain(**options).state)
    assert untimed(slow.records) == untimed(plain(**options).records)
    _, lags = slow.column("learn/lag")
    assert len(lags) == 10 // num_actors
    assert lags.tolist() == [min(k, max_lag) for k in range(len(lags))]


def test_two_runs_on_envpool_are_the_same():
    options = config(env="CartPole-v1", num_actors=2, eval_episodes=2)
    first = train(TINY, options, make_env=make_slow_cartpole)
    second = train(TINY, options)
    assert_same(first.state, second.state)
    assert untimed(first.records) == untimed(second.records)


@pytest.mark.parametrize("other", [{"seed": 1, "max_lag": 1}, {"max_lag": 0}])
def test_what_may_change_a_run_does(other):
    one, other = plain(max_lag=1, num_actors=1), plain(num_actors=1, **other)
    assert not np.array_equal(one.state.learner.params, other.state.learner.params)


def test_both_maps_train_the_same():
    options = {"learner_devices": 2, "max_lag": 0}
    one, other = (plain(mapping=name, **options) for name in ("pmap", "shard_map"))
    np.testing.assert_allclose(
        one.state.learner.params, other.state.learner.params, rtol=1e-6
    )


# ------------------------------------------------------------------------- counted


@pytest.mark.parametrize("log_every", [0, 100])
def test_every_episode_and_every_step_is_counted_once(log_every):
    made = []

    def make(env_id, **options):
        made.append(make_scripted(env_id, **options))
        return made[-1]

    updates = 12
    options = {"num_actors": 2, "log_every": log_every, "max_lag": 1}
    history = train(
        TINY, config(total_env_steps=updates * 2 * ROWS, **options), make_env=make
    )
    episodes = env_steps = total_length = 0
    for env in made[1:]:  # The first is made for evaluations.
        env.reset()
        running = np.zeros(ENVS, int)
        for _ in range(updates * LENGTH):  # No action changes how long they last.
            step = env.step(np.zeros(ENVS, np.int32))
            running += ~step.is_reset
            env_steps += int((~step.is_reset).sum())
            ended = step.terminated | step.truncated
            episodes += int(ended.sum())
            total_length += int(running[ended].sum())
            running[ended] = 0
    assert episodes > 50
    counts = history.column("train/episodes")[1]
    lengths = history.column("train/length")[1]
    assert counts.sum() == episodes
    assert (counts * lengths).sum() == pytest.approx(total_length)
    steps = [record["env_steps"] for record in history.records]
    assert steps[-1] == env_steps
    assert (len(steps) == updates) == (log_every == 0)
    assert steps == sorted(set(steps))


def test_a_metric_that_no_record_has_is_an_error_that_names_what_there_is():
    history = plain(max_lag=1, num_actors=1)
    steps, losses = history.column("learn/loss")
    assert len(steps) == len(losses) == 10
    with pytest.raises(KeyError, match=r"'eval/return'.*'learn/loss'"):
        history.column("eval/return")


def test_an_evaluation_is_of_as_many_full_episodes_as_were_asked_for():
    options = config(eval_every=3 * ROWS, eval_episodes=3)
    history = train(TINY, options, make_env=make_scripted)
    steps, lengths = history.column("eval/length")
    assert len(steps) >= 3
    assert steps[-1] == history.records[-1]["env_steps"]
    # They start anew each time, and no policy changes how long they last.
    assert len(set(lengths)) == 1
    assert 3 <= lengths[0] <= 8


def test_a_run_without_a_directory_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    history = train(TINY, config(tensorboard=True), make_env=make_scripted)
    assert history.directory is None
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"num_envs": 3, "learner_devices": 2},
            "3 is not a multiple of the 2",
        ),
        ({"learner_devices": 9}, "learner_devices 9 is more than the 4"),
        ({"resume": True, "resume_step": 3}, "resume_step 3: there is no run"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    tmp_path, options, message
):
    runs = tmp_path / "runs"
    with pytest.raises(ValueError, match=message):
        train(TINY, config(directory=str(runs), **options), make_env=make_scripted)
    assert not runs.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_lag": -1}, "max_lag -1 must be at least 0"),
        ({"total_env_steps": 0}, "total_env_steps 0 must be at least 1"),
        ({"stall_limit_s": 0.0}, r"stall_limit_s 0\.0 must be above 0"),
        ({"resume_step": 3}, "resume_step 3 needs resume"),
        ({"resume": True}, "resume needs a directory"),
        ({"num_processes": 2}, "need distributed"),
    ],
)
def test_an_impossible_option_is_named_with_its_value(options, message):
    with pytest.raises(ValueError, match=message):
        config(**options)


# ------------------------------------------------------------------------- resumed


def stop_at(update, agent, options, *, make_env=make_ageing, **changes):
    """Trains until the environments fail, after so many updates; returns the error."""
    step = update * LENGTH
    options = dataclasses.replace(options, **changes)
    with pytest.raises(RuntimeError) as error:
        train(agent, options, make_env=make_env(step))
    return error.value


def test_a_run_that_failed_goes_on_as_if_nothing_had_been(tmp_path):
    options = config(directory=str(tmp_path / "a"), max_lag=0, log_every=100)
    whole = train(TINY, options, make_env=make_ageing(None))
    options = dataclasses.replace(options, directory=str(tmp_path / "b"))
    stop_at(6, TINY, options)
    options = dataclasses.replace(options, resume=True)
    rest = train(TINY, options, make_env=make_ageing(None))
    assert_same(whole.state, rest.state)
    steps, counts = rest.column("train/episodes")
    assert counts.sum() == whole.column("train/episodes")[1].sum()
    assert steps[-1] == whole.records[-1]["env_steps"]
    assert read_jsonl(rest.directory / "metrics.jsonl") == rest.records


def test_a_resumed_run_takes_the_numbers_that_it_is_given(tmp_path):
    options = config(directory=str(tmp_path), max_lag=0)
    stop_at(4, TINY, options)
    options = dataclasses.replace(options, resume=True)
    run = Run(TinyConfig(learning_rate=0.0), options, make_env=make_ageing(None))
    before = np.asarray(run.state.learner.params)
    history = run.train()
    assert history.state.learner.update == 10
    assert history.state.learner.hyper.learning_rate == 0.0
    np.testing.assert_array_equal(before, history.state.learner.params)


def test_a_run_goes_on_with_another_number_of_devices(tmp_path):
    options = config(directory=str(tmp_path / "a"), max_lag=0, learner_devices=1)
    whole = train(TINY, options, make_env=make_ageing(None))
    options = dataclasses.replace(options, directory=str(tmp_path / "b"))
    stop_at(3, TINY, options, learner_devices=2)
    stop_at(7, TINY, options, learner_devices=1, resume=True)
    rest = train(
        TINY,
        dataclasses.replace(options, learner_devices=4, resume=True),
        make_env=make_ageing(None),
    )
    assert rest.state.learner.update == 10
    np.testing.assert_allclose(
        whole.state.learner.params, rest.state.learner.params, rtol=1e-4
    )
    assert untimed(rest.records)[-1]["env_steps"] == whole.records[-1]["env_steps"]


def test_on_envpool_a_run_goes_on_with_new_episodes(tmp_path):
    seeds = []

    def make_cartpole(fail_at_step):
        def make(env_id, **keywords):
            seeds.append(keywords["seeds"])
            env = envs.make_env(env_id, **keywords)
            return Wrapped(env, fail_at_step=fail_at_step)

        return make

    options = config(
        env="CartPole-v1", directory=str(tmp_path), log_every=70, max_lag=0
    )
    stop_at(6, TINY, options, make_env=make_cartpole)
    options = dataclasses.replace(options, resume=True)
    run = Run(TINY, options, make_env=make_cartpole(None))
    kept = read_jsonl(run.directory / "metrics.jsonl")
    assert run.update == run.state.learner.update == 6
    assert kept[-1]["env_steps"] == run.env_steps
    past = list(run.journal.recent_returns)
    assert len(past) == sum(record.get("train/episodes", 0) for record in kept)
    history = run.train()
    assert history.state.learner.update == 10
    records = read_jsonl(run.directory / "metrics.jsonl")
    assert records[: len(kept)] == kept
    assert records == history.records
    steps = [record["env_steps"] for record in records]
    assert steps == sorted(set(steps))
    every_seed = [seed for of_one_env in seeds for seed in of_one_env]
    assert len(set(every_seed)) == len(every_seed)


def test_a_resumed_run_that_was_done_stays_done(tmp_path):
    options = config(directory=str(tmp_path), eval_episodes=2)
    first = train(TINY, options, make_env=make_scripted)
    options = dataclasses.replace(options, resume=True)
    second = train(TINY, options, make_env=make_scripted)
    assert second.directory == first.directory
    assert second.records == first.records
    assert_same(first.state, second.state)


def test_without_a_run_to_go_on_with_resume_starts_one(tmp_path):
    options = config(directory=str(tmp_path), resume=True)
    assert train(TINY, options, make_env=make_scripted).state.learner.update == 10


def test_a_damaged_checkpoint_is_refused_and_the_one_before_is_offered(tmp_path):
    options = config(directory=str(tmp_path), max_lag=0, checkpoint_every=60)
    whole = train(TINY, options, make_env=make_ageing(None))
    newest = whole.directory / "checkpoints" / f"{10:010d}"
    files = [file for file in newest.rglob("*") if file.is_file()]
    largest = max(files, key=lambda file: file.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    options = dataclasses.replace(options, resume=True)
    with pytest.raises(CheckpointError, match="is whole") as error:
        train(TINY, options, make_env=make_ageing(None))
    assert str(newest) in str(error.value)
    assert "--resume-step 9" in str(error.value)
    options = dataclasses.replace(options, resume_step=9)
    again = train(TINY, options, make_env=make_ageing(None))
    assert_same(whole.state, again.state)
    assert untimed(again.records) == untimed(whole.records)
    # What it saves takes the place of what was damaged.
    assert open_checkpoints(newest.parent).meta(10)["resumes"] == 1


def test_a_checkpoint_of_another_network_is_refused(tmp_path):
    class WideEnv(ScriptedEnv):
        def __init__(self, num_envs):
            super().__init__(num_envs)
            self.spec = dataclasses.replace(self.spec, observation_shape=(5,))

        def _observe(self):
            return np.pad(super()._observe(), [(0, 0), (0, 1)])

    def make_wide(env_id, *, num_envs, **_):
        del env_id
        return WideEnv(num_envs)

    options = config(directory=str(tmp_path))
    stop_at(4, TINY, options)
    options = dataclasses.replace(options, resume=True)
    with pytest.raises(CheckpointError, match="does not fit"):
        train(TINY, options, make_env=make_wide)
