"""One device, two and four learn the same; what a device owns stays its own."""

import functools
import inspect
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chex import assert_trees_all_close, assert_trees_all_equal
from probes import DISCRETE, random_trajectory

from fps_jax.agents.ppo import PPOConfig
from fps_jax.runtime import parallel
from fps_jax.runtime.program import check, compile_agent
from fps_jax.types import Agent, AgentState, Trajectory

LENGTH, ENVS, UPDATES = 6, 8, 3
BACKENDS = ("pmap", "shard_map")
MACHINES = [(n, backend) for n in (1, 2, 4) for backend in BACKENDS]
on_every_machine = pytest.mark.parametrize(("devices", "backend"), MACHINES)
on_both_backends = pytest.mark.parametrize("backend", BACKENDS)


def make_mesh(devices):
    return parallel.learner_mesh(jax.devices()[:devices])


def make_batches() -> list[Trajectory]:
    """Batches of eight environments, two of which have no valid row at all."""
    batches = [random_trajectory(i, DISCRETE, LENGTH, ENVS) for i in range(UPDATES)]
    is_valid = np.arange(ENVS)[None, :] // 2 != 1
    return [b._replace(is_valid=b.is_valid & is_valid) for b in batches]


BATCHES = make_batches()


def place(batch, mesh):
    parts = parallel.shard_environments([batch], mesh.local_mesh.size)
    return parallel.shard(parts, mesh)


# ----------------------------------------------------------- the same on every machine


@pytest.fixture(scope="module")
def ppo():
    """PPO without Adam, which would hide a gradient of the wrong length."""
    config = PPOConfig(
        optimizer="sgd",
        hidden_sizes=(8,),
        num_epochs=2,
        minibatch_size=LENGTH * ENVS,
        learning_rate=0.3,
        max_grad_norm=2.0,
        entropy_coef=0.1,
    )
    return config.make(DISCRETE, total_env_steps=10 * LENGTH * ENVS)


@pytest.fixture(scope="module")
def alone(ppo):
    """States and metrics of a device that never heard of others."""
    update = jax.jit(ppo.update)
    state = jax.jit(ppo.init)(jax.random.key(1))
    outcomes = []
    for batch in BATCHES:
        state, metrics = update(state, jax.tree.map(jnp.asarray, batch))
        outcomes.append((state, metrics))
    return outcomes


@functools.cache
def compiled_program(agent, devices, backend):
    return compile_agent(agent, make_mesh(devices), mapping=backend)


def assert_agree(actual, expected):
    without_key = lambda learner: learner._replace(key=0)
    assert_trees_all_close(
        without_key(actual), without_key(expected), rtol=1e-6, atol=1e-6
    )


@on_every_machine
def test_several_devices_learn_what_one_learns(ppo, alone, devices, backend):
    program = compiled_program(ppo, devices, backend)
    state = program.init(jax.random.key(1))
    start = parallel.read(state.learner.params)
    for batch, (expected, expected_metrics) in zip(BATCHES, alone):
        state, metrics = program.learn(state, place(batch, program.mesh))
        # On forced CPU devices two updates in flight may lock each other out.
        jax.block_until_ready(state)
        assert_agree(parallel.read(state.learner), jax.device_get(expected.learner))
        metrics = parallel.read(metrics)
        assert metrics.pop("env_steps") == batch.is_valid.sum()
        assert_trees_all_close(metrics, dict(expected_metrics), rtol=1e-5, atol=1e-6)
        for leaf in jax.tree.leaves(state.learner):
            replicas = [part.data for part in leaf.addressable_shards]
            assert len(replicas) == devices
            for replica in replicas[1:]:
                assert_trees_all_equal(parallel.read(leaf), parallel.read(replica))
    moved = jax.tree.map(
        lambda a, b: np.abs(a - b).max(), start, expected.learner.params
    )
    assert min(jax.tree.leaves(moved)) > 1e-3


@on_both_backends
def test_published_parameters_outlive_the_donated_state(ppo, backend):
    program = compiled_program(ppo, 4, backend)
    state = program.init(jax.random.key(1))
    view = parallel.first_replica(state.learner)
    published = jax.device_put(
        program.actor_params(view, jax.random.key(0)), jax.devices()[0]
    )
    before = jax.tree.map(np.array, published)
    old = jax.tree.leaves(state.learner.params)
    state, _ = program.learn(state, place(BATCHES[0], program.mesh))
    jax.block_until_ready(state)
    assert all(leaf.is_deleted() for leaf in old)
    assert_trees_all_equal(published, before)


def test_replicas_share_no_memory_with_their_source_or_each_other():
    memory = np.zeros(4096 + 64, np.uint8)
    start = -memory.ctypes.data % 64  # JAX would share memory that is aligned so.
    source = memory[start : start + 4096].view(np.float32)
    # The copies' own alignment is chance: many are made, so that some are shareable.
    many = [parallel.replicate(source, make_mesh(2)) for _ in range(64)]
    parts = [part.data for replicas in many for part in replicas.addressable_shards]
    places = {source.ctypes.data, *(part.unsafe_buffer_pointer() for part in parts)}
    assert len(places) == 1 + 2 * 64
    source[:] = 1
    for replicas in many:
        np.testing.assert_array_equal(parallel.read(replicas), 0)


def test_what_was_read_outlives_the_donated_source():
    mesh = make_mesh(2)
    state = parallel.replicate(np.zeros(1024, np.float32), mesh)
    kept = parallel.read(state)
    jax.block_until_ready(jax.jit(lambda x: x + 1, donate_argnums=0)(state))
    np.testing.assert_array_equal(kept, 0)
    assert kept.flags.owndata


# --------------------------------------------------------- environments on devices


def test_the_first_devices_learn_and_no_more_than_there_are():
    assert parallel.learner_devices(None) == jax.devices()
    assert parallel.learner_devices(3) == jax.devices()[:3]
    with pytest.raises(ValueError, match="learner_devices 5 is more than the 4"):
        parallel.learner_devices(5)


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("actors", [1, 2])
def test_global_environment_e_lands_on_device_e_over_its_share(actors, parts):
    each = ENVS // actors
    rows = np.arange(LENGTH)[:, None] * 100
    number = lambda first: rows + np.arange(first, first + each)[None, :]
    trajectories = [
        random_trajectory(0, DISCRETE, LENGTH, each)._replace(
            reward=number(i * each).astype(np.float32),
            behaviour={"number": number(i * each)},
        )
        for i in range(actors)
    ]
    joined = parallel.shard_environments(trajectories, parts)
    share = ENVS // parts
    assert joined.observation.shape == (parts, LENGTH + 1, share, 3)
    for e in range(ENVS):
        there = joined.behaviour["number"][e // share, :, e % share]
        np.testing.assert_array_equal(there, rows[:, 0] + e)
        np.testing.assert_array_equal(joined.reward[e // share, :, e % share], there)
    on_devices = parallel.shard(joined, make_mesh(parts))
    for part in on_devices.reward.addressable_shards:
        device = jax.devices().index(part.device)
        np.testing.assert_array_equal(part.data[0], joined.reward[device])


# ---------------------------------------------------------- what a device has alone


class Shared(NamedTuple):
    """Of every device: rows of all of them, and a key."""

    rows: jax.Array
    key: jax.Array


class Own(NamedTuple):
    """Of one device: its rows, a sum of its random numbers, and its key."""

    rows: jax.Array
    drawn: jax.Array
    key: jax.Array


def toy_init(key):
    key_shared, key_own = jax.random.split(key)
    nothing = jnp.zeros((), jnp.int32)
    own = Own(nothing, jnp.zeros(2), key_own)
    return AgentState(Shared(nothing, key_shared), own)


def toy_update(state, trajectory, *, axis_name=None):
    rows = jnp.sum(trajectory.is_valid, dtype=jnp.int32)
    shared, own = state.learner, state.local
    key_draw, key_next = jax.random.split(own.key)
    key_draw = jax.random.fold_in(key_draw, jax.lax.axis_index(axis_name))
    own = Own(own.rows + rows, own.drawn + jax.random.normal(key_draw, (2,)), key_next)
    total = shared.rows + jax.lax.psum(rows, axis_name)
    return AgentState(shared._replace(rows=total), own), {}


def toy_act(params, observation, key, *, explore):
    return jax.random.randint(key, observation.shape[:1], 0, 3), {"rows": params.rows}


TOY = Agent(toy_init, lambda learner, key: learner, toy_act, toy_update)


@on_every_machine
def test_local_state_goes_from_update_to_update_on_its_own_device(devices, backend):
    mesh = make_mesh(devices)
    learn = parallel.parallelize(TOY, mesh, backend=backend)
    state = parallel.init_state(TOY, jax.random.key(3), mesh)
    for batch in BATCHES:
        state, _ = learn(state, place(batch, mesh))
        jax.block_until_ready(state)
    own, shared = state.local, state.learner
    valid = np.stack([b.is_valid for b in BATCHES]).reshape(
        UPDATES * LENGTH, devices, -1
    )
    np.testing.assert_array_equal(own.rows, valid.sum((0, 2)))
    assert shared.rows == valid.sum()
    assert shared.rows.sharding.is_fully_replicated
    assert [part.data.shape for part in own.drawn.addressable_shards] == [
        (1, 2)
    ] * devices
    # The twin draws device by device.
    for device in range(devices):
        drawn, key = 0.0, toy_init(jax.random.key(3)).local.key
        for _ in BATCHES:
            key_draw, key = jax.random.split(key)
            key_draw = jax.random.fold_in(key_draw, device)
            drawn += np.asarray(jax.random.normal(key_draw, (2,)))
        np.testing.assert_allclose(own.drawn[device], drawn, rtol=1e-6)


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_a_state_comes_back_from_the_host_as_it_was(devices):
    mesh = make_mesh(devices)
    learn = parallel.parallelize(TOY, mesh)
    state = parallel.init_state(TOY, jax.random.key(3), mesh)
    state, _ = learn(state, place(BATCHES[0], mesh))
    jax.block_until_ready(state)
    saved = parallel.read_state(state)
    assert saved.local.key.shape == (devices,)
    assert isinstance(saved.local.rows, np.ndarray)
    assert isinstance(saved.learner.rows, np.ndarray)
    placed = parallel.place_state(saved, mesh)
    assert_trees_all_equal(parallel.read_state(placed), saved)
    shardings = lambda tree: [x.sharding.device_set for x in jax.tree.leaves(tree)]
    assert shardings(placed) == shardings(state)
    # Both go on alike, and neither is the other's memory.
    again, _ = learn(placed, place(BATCHES[1], mesh))
    jax.block_until_ready(again)
    state, _ = learn(state, place(BATCHES[1], mesh))
    jax.block_until_ready(state)
    assert_trees_all_equal(parallel.read_state(again), parallel.read_state(state))


@on_every_machine
def test_every_function_is_compiled_once(devices, backend, caplog):
    program = compile_agent(TOY, make_mesh(devices), mapping=backend)
    state = program.init(jax.random.key(3))
    key = jax.random.key(4)
    with jax.log_compiles():
        for count in range(3):
            params = program.actor_params(parallel.first_replica(state.learner), key)
            observation = BATCHES[0].observation[count]
            program.act(params, observation, key, np.uint32(count))
            state, _ = program.learn(state, place(BATCHES[count], program.mesh))
            jax.block_until_ready(state)
    compiled = re.findall(r"Finished XLA compilation of (\S+)", caplog.text)
    assert len(compiled) == len(set(compiled)) == 3


def test_an_unknown_backend_is_refused():
    # Without the type checker of the tests, which would be first.
    parallelize = inspect.unwrap(parallel.parallelize)
    with pytest.raises(ValueError, match=r"backend 'xmap' .* \('pmap', 'shard_map'\)"):
        parallelize(TOY, make_mesh(1), backend="xmap")


# --------------------------------------------------------- shapes that do not fit


def checked(minibatch_size, devices, envs=ENVS):
    config = PPOConfig(hidden_sizes=(8,), minibatch_size=minibatch_size)
    agent = config.make(DISCRETE, total_env_steps=100)
    program = compile_agent(agent, make_mesh(devices), mapping="pmap")
    check(program, agent, DISCRETE, rollout_steps=LENGTH, num_envs=envs)


@pytest.mark.parametrize(
    ("minibatch_size", "devices"), [(LENGTH * ENVS, 4), (12, 4), (3, 1), (1, 1), (6, 2)]
)
def test_minibatches_that_fit_pass(minibatch_size, devices):
    checked(minibatch_size, devices)


@pytest.mark.parametrize(
    ("minibatch_size", "devices"), [(64, 1), (7, 1), (2 * LENGTH * ENVS, 4), (6, 4)]
)
def test_a_minibatch_that_does_not_fit_is_refused_before_the_run(
    minibatch_size, devices
):
    message = f"minibatch_size {minibatch_size} .*{devices} .*{LENGTH * ENVS} rows"
    with pytest.raises(ValueError, match=message):
        checked(minibatch_size, devices)
