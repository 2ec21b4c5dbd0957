"""A population: each member is what a run of its own would be."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_agent import TinyConfig

from fps_jax.agents.dfps import DFPSConfig
from fps_jax.agents.dqn import DQNConfig
from fps_jax.agents.ppo import PPOConfig
from fps_jax.runtime import envs, parallel, stacking
from fps_jax.runtime.layout import Stacked, Turns
from fps_jax.runtime.metrics import read_jsonl
from fps_jax.runtime.options import TrainConfig
from fps_jax.runtime.population import FAILURE, Member, Population, train_population
from fps_jax.runtime.training import train
from fps_jax.types import Trajectory

PPO = PPOConfig(num_epochs=2, minibatch_size=32, hidden_sizes=(8,))
TINY = TinyConfig()
RUN = TrainConfig(
    env="CartPole-v1",
    total_env_steps=512,
    num_envs=4,
    rollout_steps=16,
    eval_every=256,
    eval_episodes=2,
    max_episode_steps=40,
    checkpoint_every=128,
    directory=None,
    learner_devices=1,
    show_progress=False,
    tensorboard=False,
)


def members(*rates, agent=TINY, first_seed=3):
    return [
        Member(f"m{i}", dataclasses.replace(agent, learning_rate=rate), first_seed + i)
        for i, rate in enumerate(rates)
    ]


def columns(history, *names):
    return {name: history.column(name)[1] for name in names}


LEARNED = "learn/loss", "train/return"


@functools.cache
def single_run(member):
    config = dataclasses.replace(RUN, seed=member.seed)
    return train(member.agent, config)


def assert_same_start(history, alone, updates=3):
    """The first updates agree to float32 rounding."""
    for name, values in columns(alone, *LEARNED).items():
        got = columns(history, name)[name]
        np.testing.assert_allclose(got[:updates], values[:updates], rtol=2e-4)


# ------------------------------------------------------------------ a member alone


def test_a_member_starts_as_a_run_of_its_own_does():
    of = members(0.1, 1.0, 0.3)
    for member, outcome in zip(of, train_population(of, RUN)):
        assert (outcome.member, outcome.failure) == (member, None)
        assert_same_start(outcome.history, single_run(member))


def test_members_of_ppo_start_as_runs_of_their_own_do():
    of = members(1e-3, 1e-2, agent=PPO)
    outcomes = train_population(of, RUN)
    assert_same_start(outcomes[1].history, single_run(of[1]))
    losses = [columns(o.history, "learn/loss")["learn/loss"] for o in outcomes]
    assert not np.allclose(*losses)


def test_members_that_take_turns_are_runs_of_their_own_to_the_last_bit():
    # An agent with a replay is compiled once, as in a single run.
    config, env = AGENTS["dqn"]
    run = dataclasses.replace(RUN, env=env, eval_episodes=0, total_env_steps=256)
    of = members(1e-3, 1e-2, agent=config)
    outcomes = train_population(of, run)
    alone = train(of[1].agent, dataclasses.replace(run, seed=of[1].seed))
    for name in ("learn/loss", "train/return", "env_steps"):
        values = columns(alone, name)[name]
        np.testing.assert_array_equal(columns(outcomes[1].history, name)[name], values)


def test_a_member_that_learns_nothing_sees_all_that_a_run_of_its_own_sees():
    # With a step size of 0 the policy stays, so that no rounding grows.
    member = Member("still", dataclasses.replace(TINY, learning_rate=0.0), 5)
    outcome, *_ = train_population([member, member._replace(name="b", seed=6)], RUN)
    alone = columns(single_run(member), "train/return", "learn/lag", "eval/return")
    together = columns(outcome.history, *alone)
    # Environments of an evaluation go on until all members' are done, so that later
    # evaluations begin with other episodes.
    alone["eval/return"], together["eval/return"] = (
        curve["eval/return"][:1] for curve in (alone, together)
    )
    for name, values in alone.items():
        np.testing.assert_allclose(together[name], values, rtol=1e-5)


def test_two_actors_share_the_members_as_they_share_a_run():
    config = dataclasses.replace(RUN, num_actors=2, num_envs=2, total_env_steps=256)
    of = members(0.1, 1.0)
    for member, outcome in zip(of, train_population(of, config)):
        alone = train(member.agent, dataclasses.replace(config, seed=member.seed))
        assert_same_start(outcome.history, alone)


def test_members_differ_in_distribution_no_more_than_seeds_do():
    # After many updates rounding has grown; 12 members and 12 runs of other seeds are
    # drawn from one distribution: a rank sum of theirs is within 4 deviations.
    still = dataclasses.replace(RUN, eval_episodes=0, total_env_steps=1024)
    together = train_population(members(*[0.3] * 12, first_seed=100), still)
    apart = train_population(members(*[0.3] * 12, first_seed=300), still)
    last = lambda outs: [np.mean(o.history.column("train/return")[1]) for o in outs]
    x, y = last(together), last(apart)
    ranks = np.argsort(np.argsort(np.array(x + y))) + 1
    n = len(x)
    deviation = np.sqrt(n * n * (2 * n + 1) / 12)
    assert abs(ranks[:n].sum() - n * (2 * n + 1) / 2) < 4 * deviation


# ---------------------------------------------------------------- what may differ


AGENTS = {
    "ppo": (PPO, "CartPole-v1"),
    "dqn": (
        DQNConfig(hidden_sizes=(8,), batch_size=4, learning_starts=8),
        "CartPole-v1",
    ),
    "dfps": (
        DFPSConfig(hidden_sizes=(8,), replay_capacity=64, learning_starts=0),
        "Pendulum-v1",
    ),
}


def rows(agent, spec, state, steps, num_envs):
    """A segment of zeros, in the shapes that the agent acts in."""
    key = jax.random.key(0)
    seen = jnp.zeros((num_envs, *spec.observation_shape))
    act = functools.partial(agent.act, explore=True)
    params = lambda learner, key: agent.actor_params(learner, key)
    acted = jax.eval_shape(act, jax.eval_shape(params, state.learner, key), seen, key)
    zeros = jax.tree.map(lambda x: jnp.zeros((steps, *x.shape), x.dtype), acted)
    flags = jnp.zeros((steps, num_envs), bool)
    return Trajectory(
        observation=jnp.zeros((steps + 1, *seen.shape)),
        action=zeros[0],
        reward=jnp.zeros((steps, num_envs)),
        terminated=flags,
        truncated=flags,
        is_valid=~flags,
        behaviour=zeros[1],
        policy_version=jnp.zeros((steps, num_envs), jnp.int32),
    )


def other_values(name, value):
    """A number that is neither as it was nor 0, and that the option allows."""
    if value is None or value == 0:
        return None
    return value - 1 if isinstance(value, int) else value * 0.9375


@pytest.mark.parametrize("name", AGENTS)
def test_a_number_that_members_may_vary_is_no_part_of_the_program(name):
    config, env = AGENTS[name]
    spec = envs.env_spec(env)

    def programs(config):
        agent = config.make(spec, total_env_steps=100, num_envs=4, rollout_steps=8)
        key = jax.random.key(0)
        state = jax.jit(agent.init)(key)
        segment = rows(agent, spec, state, 8, 4)
        update = str(jax.make_jaxpr(agent.update)(state, segment))
        params = lambda learner: agent.actor_params(learner, key)
        return state, update, str(jax.make_jaxpr(params)(state.learner))

    state, *program = programs(config)
    changed = {
        option: other
        for option in sorted(stacking.hyper_names(config) - {"total_env_steps"})
        if hasattr(config, option)
        and (other := other_values(option, getattr(config, option))) is not None
    }
    assert len(changed) > 5
    altered = config
    for option, other in changed.items():
        try:
            altered = dataclasses.replace(altered, **{option: other})
        except ValueError:  # Goes with another that has not changed yet.
            continue
    assert stacking.static_part(altered) == stacking.static_part(config)
    other_state, *other_program = programs(altered)
    assert program == other_program
    # Nor does anything that `init` makes depend on it, but for the numbers themselves.
    plain = lambda state: state._replace(learner=state.learner._replace(hyper=()))
    for one, other in zip(
        jax.tree.leaves(plain(state)), jax.tree.leaves(plain(other_state))
    ):
        if jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("hidden_sizes", (4,)),
        ("num_epochs", 3),
        ("entropy_coef", 0.1),
        ("dual_clip", 3.0),
    ],
)
def test_members_that_need_different_programs_are_refused(option, value):
    of = members(1e-3, 1e-3, agent=PPO)
    other = dataclasses.replace(PPO, learning_rate=1e-3, **{option: value})
    with pytest.raises(ValueError, match=f"differ in .*{option}"):
        Population([of[0], of[1]._replace(agent=other)], RUN)


@pytest.mark.parametrize(
    ("of", "config", "message"),
    [
        ([], {}, "at least one"),
        ([Member("m", PPO, 0), Member("m", PPO, 1)], {}, "'m' names two"),
        ([Member("m", PPO, 0)], {"distributed": True}, "distributed True"),
        (
            [Member("m", PPO, 0)],
            {"resume": True, "directory": "runs", "resume_step": 3},
            "resume_step 3",
        ),
    ],
)
def test_a_population_refuses_what_it_cannot_be(of, config, message):
    with pytest.raises(ValueError, match=message):
        Population(of, dataclasses.replace(RUN, **config))


# ------------------------------------------------------------------------- failures


def folder_config(directory, **more):
    return dataclasses.replace(RUN, directory=str(directory), **more)


def test_a_member_that_is_not_finite_stops_and_the_others_do_not_notice(tmp_path):
    good = members(0.1, 1.0)
    # A step so large that the parameters overflow.
    bad = Member("bad", dataclasses.replace(TINY, learning_rate=1e38), 9)
    told = []
    population = Population(
        [good[0], bad, good[1]],
        folder_config(tmp_path),
        on_failure=lambda member, reason: told.append((member.name, reason)),
    )
    first, failed, second = population.train()
    assert failed.failure is not None
    assert "NaN or infinite at update" in failed.failure
    assert told == [("bad", failed.failure)]
    about = json.loads((tmp_path / "bad" / FAILURE).read_text())
    assert about["reason"] == failed.failure
    assert len(failed.history.records) < len(first.history.records)
    for member, outcome in zip(good, (first, second)):
        assert outcome.failure is None
        assert_same_start(outcome.history, single_run(member))
    alone = train_population(good, RUN)  # The same axis P without it.
    for outcome, other in zip((first, second), alone):
        for name, values in columns(other.history, *LEARNED, "eval/return").items():
            got = columns(outcome.history, name)[name]
            np.testing.assert_allclose(got[:3], values[:3], rtol=2e-4)


class BrokenEnv:
    """An environment of which one observation is NaN once; else what it wraps."""

    def __init__(self, env, which, at):
        self._env, self._which, self._at, self._steps = env, which, at, 0
        self.spec, self.num_envs = env.spec, env.num_envs

    def reset(self):
        return self._env.reset()

    def step(self, action):
        step = self._env.step(action)
        self._steps += 1
        if self._steps == self._at:
            observation = step.observation.copy()
            observation[self._which] = np.nan
            step = step._replace(observation=observation)
        return step

    def close(self):
        self._env.close()


@pytest.mark.parametrize("on_nonfinite", ["stop", "mask"])
def test_an_environment_that_is_not_finite_is_its_members_alone(on_nonfinite):
    def make_env(env_id, *, num_envs, **more):
        env = envs.make_env(env_id, num_envs=num_envs, **more)
        return BrokenEnv(env, which=5, at=20) if num_envs == 8 else env

    # Records are rare, so that the one of what a member did before it stopped is seen.
    of = {"on_nonfinite": on_nonfinite, "eval_episodes": 1, "log_every": 512}
    config = dataclasses.replace(RUN, **of)
    first, second = train_population(members(0.1, 1.0), config, make_env=make_env)
    assert first.failure is None  # Environment 5 of 8 is the second member's.
    assert first.history.records[-1]["nonfinite_rows"] == 0
    if on_nonfinite == "stop":
        assert second.failure is not None
        assert "CartPole-v1 returned a NaN or an infinity" in second.failure
        assert len(second.history.records) == 1
    else:
        assert second.failure is None
        assert second.history.records[-1]["nonfinite_rows"] == 2


def test_a_population_without_a_living_member_ends():
    config = dataclasses.replace(TINY, learning_rate=1e38)
    of = [Member(f"bad{i}", config, i) for i in range(2)]
    outcomes = train_population(of, dataclasses.replace(RUN, total_env_steps=10**6))
    assert all(outcome.failure for outcome in outcomes)


# ----------------------------------------------------------------- what is on disk


def test_members_live_in_folders_that_single_runs_can_go_on_with(tmp_path):
    of = members(0.1, 1.0)
    outcomes = train_population(of, folder_config(tmp_path))
    for member, outcome in zip(of, outcomes):
        folder = tmp_path / member.name
        assert outcome.history.directory == folder
        config = json.loads((folder / "config.json").read_text())["config"]
        assert config["seed"] == member.seed
        assert config["agent"]["learning_rate"] == member.agent.learning_rate
        records = read_jsonl(folder / "metrics.jsonl")
        assert [r["env_steps"] for r in records] == [
            r["env_steps"] for r in outcome.history.records
        ]
    # The single run's own place for such a folder.
    place = tmp_path / "single" / "CartPole-v1" / "tiny"
    place.mkdir(parents=True)
    (tmp_path / "m1").rename(place / "20260101-000000_s4")
    config = folder_config(
        tmp_path / "single", seed=4, resume=True, total_env_steps=640
    )
    history = train(of[1].agent, config)
    assert history.directory == place / "20260101-000000_s4"
    resumed = [r["env_steps"] for r in history.records]
    assert resumed == sorted(set(resumed))
    assert len(resumed) == 10


def test_a_population_goes_on_at_the_last_update_that_all_have_saved(tmp_path):
    of = members(0.1, 1.0)
    config = folder_config(tmp_path, eval_episodes=0)
    whole = train_population(of, config)
    # As a crash between the two members' last checkpoints leaves it.
    checkpoints = sorted((tmp_path / "m1" / "checkpoints").iterdir())
    for path in checkpoints[-1].glob("*.json"):
        path.unlink()
    for path in sorted(checkpoints[-1].rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    checkpoints[-1].rmdir()
    again = Population(of, dataclasses.replace(config, resume=True))
    assert again.update == 6
    outcomes = again.train()
    for outcome, before in zip(outcomes, whole):
        steps, _ = outcome.history.column("learn/loss")
        assert len(steps) == 8
        first = lambda o: o.history.column("learn/loss")[1][:6]
        np.testing.assert_array_equal(first(outcome), first(before))


def test_a_resumed_population_leaves_a_failed_member_as_it_was(tmp_path):
    bad = Member("bad", dataclasses.replace(TINY, learning_rate=1e38), 9)
    of = [*members(0.1), bad]
    half = folder_config(tmp_path, total_env_steps=256, eval_episodes=0)
    _, failed = train_population(of, half)
    config = folder_config(tmp_path, resume=True, eval_episodes=0)
    first, still = train_population(of, config)
    assert first.failure is None
    assert len(first.history.records) == 8
    assert still.failure == failed.failure
    keep = lambda outcome: [r["env_steps"] for r in outcome.history.records]
    assert keep(still) == keep(failed)


def test_a_population_does_not_write_over_another(tmp_path):
    of = members(0.1)
    train_population(of, folder_config(tmp_path))
    with pytest.raises(ValueError, match="is there; resume goes on"):
        Population(of, folder_config(tmp_path))


def test_a_start_that_saved_nothing_is_begun_anew(tmp_path):
    of = members(0.1, 1.0)
    whole = train_population(of, folder_config(tmp_path / "a"))
    train_population(of, folder_config(tmp_path / "b"))
    for path in (tmp_path / "b").glob("*/checkpoints"):
        path.rename(path.with_name("gone"))
    (tmp_path / "b" / "m0" / FAILURE).write_text(
        json.dumps({"reason": "x", "update": 3, "env_steps": 100})
    )
    again = train_population(of, folder_config(tmp_path / "b", resume=True))
    for outcome, before in zip(again, whole):
        assert outcome.failure is None
        loss = lambda o: o.history.column("learn/loss")[1]
        np.testing.assert_array_equal(loss(outcome), loss(before))
    assert not (tmp_path / "b" / "m0" / FAILURE).exists()


# ------------------------------------------------------------------ several devices


@pytest.mark.parametrize(("count", "layout"), [(4, Stacked), (3, Turns)])
def test_devices_change_nothing_whether_they_split_members_or_batches(count, layout):
    config = dataclasses.replace(RUN, eval_episodes=0, total_env_steps=256)
    of = members(*np.linspace(0.1, 0.4, count).tolist())
    one = train_population(of, config)
    two = Population(of, dataclasses.replace(config, learner_devices=2))
    assert isinstance(two._layout, layout)
    for outcome, alone in zip(two.train(), one):
        params = lambda o: o.history.state.learner.params
        np.testing.assert_allclose(params(outcome), params(alone), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layout", [Stacked, Turns])
def test_a_layout_gives_members_back_as_it_was_given_them(layout):
    spec = envs.env_spec("CartPole-v1")
    mesh = parallel.learner_mesh(jax.devices()[:2])
    of = layout(4, mesh)
    agent = TINY.make(spec)
    rates = np.linspace(0.1, 0.4, 4, dtype=np.float32)
    of.build(agent, spec, TINY.hyper(0)._replace(learning_rate=rates), mapping="pmap")
    keys = lambda: jax.random.split(jax.random.key(0), 4)
    states = of.of_members(of.init(keys()))
    for i, state in enumerate(states):
        alone = agent.init(keys()[i]).learner
        np.testing.assert_array_equal(state.learner.params, alone.params)
        assert state.learner.hyper.learning_rate == rates[i]
    again = of.of_members(of.place(states[::-1]))[::-1]
    for state, other in zip(states, again):
        np.testing.assert_array_equal(state.learner.params, other.learner.params)
        assert state.learner.key == other.learner.key
