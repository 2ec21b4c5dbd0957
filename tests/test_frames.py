"""Frames kept once, against `ring`, which keeps every stack as it came."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fps_jax.replay import frames, ring
from fps_jax.replay.ring import Cursor
from fps_jax.runtime.envs import make_env
from fps_jax.types import Step

CAPACITY, STREAMS, LARGEST_ADD = 24, 2, 16
FRAME = (2, 3)
FULL_SIZE = Step(
    observation=jax.ShapeDtypeStruct((4, 84, 84), np.uint8),
    action=jax.ShapeDtypeStruct((), np.int32),
    reward=jax.ShapeDtypeStruct((), np.float32),
    terminated=jax.ShapeDtypeStruct((), np.bool_),
    truncated=jax.ShapeDtypeStruct((), np.bool_),
    is_valid=jax.ShapeDtypeStruct((), np.bool_),
    behaviour={"log_prob": jax.ShapeDtypeStruct((), np.float32)},
)


# -------------------------------------------------------------------------- experience


def one_stream(rng, length, stack, channels=1, colours=200, is_dark=False):
    """``[length]`` steps as EnvPool makes them, the channels of a stack first.

    Some episodes start as after a lost life: their first stack goes on from the last.
    Of frames that are dark only the last pixel is not black.
    """
    images = [np.zeros((channels, *FRAME), np.uint8)] * stack
    rows, left, is_final = [], 0, True
    for _ in range(length + 1):
        end, kind = False, rng.integers(2)
        if not is_final:
            left -= 1
            end = left == 0
        rows.append(
            Step(
                observation=np.concatenate(images),
                action=np.int32(rng.integers(5)),
                reward=np.float32(0 if is_final else rng.normal()),
                terminated=np.bool_(end and kind == 0),
                truncated=np.bool_(end and kind == 1),
                is_valid=np.bool_(not is_final),
                behaviour={"log_prob": np.float32(rng.normal())},
            )
        )
        image = rng.integers(1, 1 + colours, (channels, *FRAME)).astype(np.uint8)
        if is_dark:
            image[:, :-1], image[..., :-1] = 0, 0
        images = [*images[1:], image]
        if is_final:
            left = rng.integers(1, 8)
            if len(rows) == 1 or rng.random() < 0.7:
                images = [image] * stack
        is_final = end
    return jax.tree.map(lambda *xs: np.stack(xs), *rows[1:])


def experience(seed, length, stack, stack_axis=0, **kwargs):
    """``[length E]`` steps of all streams, time-major."""
    rng = np.random.default_rng(seed)
    streams = [one_stream(rng, length, stack, **kwargs) for _ in range(STREAMS)]
    items = flat(jax.tree.map(lambda *xs: np.stack(xs, axis=1), *streams))
    axis = stack_axis % 3 + 1
    return items._replace(observation=np.moveaxis(items.observation, 1, axis))


def flat(rows):
    """From ``[T, E, ...]`` to ``[T E, ...]``."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rows)


class Pair:
    """Both storages, compiled, and what is in them."""

    def __init__(self, kind="transitions", *, capacity=CAPACITY, **options):
        largest_add = options.pop("largest_add", LARGEST_ADD)
        stacking = {k: options.pop(k) for k in ("stack", "stack_axis") if k in options}
        options |= {"num_streams": STREAMS, "largest_add": largest_add}
        self.capacity = capacity
        self.mine = getattr(frames, kind)(capacity, **options, **stacking)
        self.ring = getattr(ring, kind)(capacity, **options)
        self.has_discount = kind == "transitions"
        self._add = jax.jit(
            lambda memory, cursor, items: (
                self.mine.add(memory[0], cursor, items),
                self.ring.add(memory[1], cursor, items),
                ring.advance(cursor, len(items.reward), capacity),
            )
        )
        self._read = jax.jit(self._read)

    def walk(self, items, sizes):
        """After each add: every sample of both, and which of them may be drawn.

        Those are usable and not too new: the frames' `is_intact` is apart.
        """
        one = jax.tree.map(lambda x: x[0], items)
        memory, start = (self.mine.init(one), self.ring.init(one)), 0
        cursor = Cursor(jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))
        newest = np.full(self.capacity, -1)
        for size in sizes:
            now = np.arange(start, start + size)
            newest[now % self.capacity] = now
            batch = jax.tree.map(lambda x, now=now: x[now], items)
            *memory, cursor = self._add(memory, cursor, batch)
            start += size
            read, intact = jax.device_get(self._read(memory, cursor))
            samples, is_last = zip(*read)
            np.testing.assert_array_equal(*is_last)
            reach = self.mine.lookahead * STREAMS
            drawable = (newest >= 0) & (newest + reach < start)
            drawable &= items.is_valid[newest]
            yield samples, drawable, intact, newest

    def _read(self, memory, cursor):
        slots = jnp.arange(self.capacity, dtype=jnp.int32)
        options = {"discount": 0.9} if self.has_discount else {}
        samples = [
            (this.get(own, cursor, slots, **options), this.is_last(own, slots))
            for this, own in zip((self.mine, self.ring), memory)
        ]
        return samples, self.mine.is_intact(memory[0], cursor, slots)


pair_of = functools.cache(Pair)


def expect_equal(samples, chosen, axis=0):
    """Both storages' samples are the same where chosen, bit for bit."""
    mine, theirs = jax.tree.map(lambda x: np.compress(chosen, x, axis=axis), samples)
    assert jax.tree.structure(mine) == jax.tree.structure(theirs)
    for x, y in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs)):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


def sizes_of(rng, length):
    """Sizes of adds that come to ``length E``, as far as they can."""
    sizes = rng.choice([STREAMS, LARGEST_ADD], size=length)
    return sizes[np.cumsum(sizes) <= length * STREAMS]


# --------------------------------------------------------------------- the same samples

OPTIONS = [
    {},
    {"n_step": 3},
    {"stack": 2, "n_step": 2},
    {"stack": 1},
    {"stack": 5, "stack_axis": -1},
    {"stack_axis": 1, "channels": 2},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    colours=st.sampled_from([1, 2, 200]),
    is_dark=st.booleans(),
)
def test_every_sample_is_what_the_ring_keeps(options, seed, colours, is_dark):
    options = dict(options)
    channels = options.pop("channels", 1)
    stack, axis = options.get("stack", 4), options.get("stack_axis", 0)
    looks = {"channels": channels, "colours": colours, "is_dark": is_dark}
    items = experience(seed, 60, stack, axis, **looks)
    sizes = sizes_of(np.random.default_rng(seed), 60)
    for samples, drawable, intact, _ in pair_of(**options).walk(items, sizes):
        assert np.all(intact[drawable])
        expect_equal(samples, drawable)
    assert np.sum(sizes) > 3 * CAPACITY


def test_the_experience_has_what_is_hard():
    items = experience(0, 500, 4)
    lengths, refilled = set(), set()
    for e in range(STREAMS):
        mine = jax.tree.map(lambda x, e=e: x[e::STREAMS], items)
        resets = np.flatnonzero(~mine.is_valid)
        lengths |= set(np.diff(resets) - 1)
        first = mine.observation[resets[:-1] + 1]
        refilled |= set(np.all(first == first[:, -1:], axis=(1, 2, 3)).tolist())
    assert lengths == set(range(1, 8))
    assert refilled == {True, False}
    assert items.terminated.any()
    assert items.truncated.any()


@pytest.mark.parametrize("crosses_episodes", [False, True])
def test_every_window_is_what_the_ring_keeps(crosses_episodes):
    pair = pair_of("windows", length=5, crosses_episodes=crosses_episodes)
    items = experience(1, 60, 4)
    for samples, drawable, intact, _ in pair.walk(items, sizes_of(np.random, 60)):
        assert np.all(intact[drawable])
        expect_equal(samples, drawable, axis=1)


def test_atari_is_rebuilt_lives_and_time_limits_and_all():
    env = make_env(
        "Breakout-v5",
        num_envs=STREAMS,
        seeds=[3, 4],
        max_episode_steps=60,
        env_options={"episodic_life": True},
    )
    rng, rows, refilled = np.random.default_rng(0), [], []
    observation = env.reset()
    for _ in range(150):
        action = rng.integers(0, env.spec.action.num_actions, STREAMS, np.int32)
        step = env.step(action)
        for e in np.flatnonzero(step.is_reset):
            refilled.append(bool(np.all(step.observation[e] == step.observation[e, 3])))
        rows.append(
            Step(
                observation=observation,
                action=action,
                reward=step.reward,
                terminated=step.terminated,
                truncated=step.truncated,
                is_valid=~step.is_reset,
                behaviour={},
            )
        )
        observation = step.observation
    assert set(refilled) == {True, False}
    assert any(row.truncated.any() for row in rows)
    items = flat(jax.tree.map(lambda *xs: np.stack(xs), *rows))
    pair = Pair(capacity=80, n_step=3, largest_add=50)
    for samples, drawable, intact, _ in pair.walk(items, [50] * 6):
        assert np.all(intact[drawable])
        expect_equal(samples, drawable)


# ---------------------------------------------------------------------- missing frames


def can_be_rebuilt(items, number, stack):
    """Whether newest frames of the stream's steps make up a step's stack."""
    own = items.observation[number]
    for depth in range(stack):
        rows = number - STREAMS * np.arange(depth, -1, -1)
        if rows[0] < 0:
            break
        found = items.observation[rows, -1]
        found = np.concatenate([found[:1].repeat(stack - 1 - depth, 0), found])
        if np.array_equal(found, own):
            return True
    return False


@pytest.mark.parametrize("seed", range(6))
def test_stacks_that_lack_frames_are_told_apart(seed):
    # The first steps are in the middle of an episode, and some in between are missing.
    rng = np.random.default_rng(seed)
    kept = np.flatnonzero(rng.random(90) < 0.85)[2:]
    items = jax.tree.map(
        lambda x: x.reshape(-1, STREAMS, *x.shape[1:])[kept], experience(seed, 90, 4)
    )
    items = flat(items)
    is_whole = np.array([can_be_rebuilt(items, i, 4) for i in range(len(items.reward))])
    found = []
    walk = pair_of().walk(items, sizes_of(rng, len(kept)))
    for samples, drawable, intact, newest in walk:
        following = np.where(drawable, newest + STREAMS, 0)
        np.testing.assert_array_equal(
            intact[drawable], (is_whole[newest] & is_whole[following])[drawable]
        )
        expect_equal(samples, drawable & intact)
        found.extend(intact[drawable])
    assert 0.2 < np.mean(found) < 0.9


def test_a_stream_may_come_from_black_frames():
    items = experience(4, 40, 1)
    items = items._replace(is_valid=np.ones(40 * STREAMS, bool))
    shown = np.concatenate([np.zeros((3 * STREAMS, 1, *FRAME)), items.observation])
    shown = [shown[i * STREAMS :][: 40 * STREAMS] for i in range(4)]
    items = items._replace(observation=np.concatenate(shown, axis=1).astype(np.uint8))
    for samples, drawable, intact, _ in pair_of().walk(items, [STREAMS] * 40):
        assert np.all(intact[drawable])
        expect_equal(samples, drawable)


def test_steps_of_windows_that_lack_frames_are_not_valid():
    items = experience(3, 60, 4)
    items = jax.tree.map(lambda x: x[5 * STREAMS :], items)
    pair = pair_of("windows", length=5, crosses_episodes=True)
    is_whole = np.array([can_be_rebuilt(items, i, 4) for i in range(len(items.reward))])
    assert not np.all(is_whole)
    for (mine, theirs), drawable, intact, newest in pair.walk(items, [16, 6]):
        within = newest + STREAMS * np.arange(5)[:, None]
        expected = theirs.is_valid & is_whole[within]
        np.testing.assert_array_equal(mine.is_valid[:, drawable], expected[:, drawable])
        np.testing.assert_array_equal(intact[drawable], is_whole[newest][drawable])
        for x, y in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs)):
            chosen = expected & drawable
            np.testing.assert_array_equal(x[chosen], y[chosen])


# -------------------------------------------------------------------------- the memory


def nbytes(tree):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def test_a_million_stacks_of_four_take_the_memory_of_a_million_frames():
    million = frames.transitions(1_000_000, num_streams=8)
    assert nbytes(jax.eval_shape(million.init, FULL_SIZE)) <= 7.2e9
    assert 2 * 1_000_000 * nbytes(FULL_SIZE.observation) > 56e9


def test_a_hundred_thousand_frames_stay_where_they_are():
    storage = frames.transitions(100_000, num_streams=8, largest_add=64)
    memory = jax.jit(lambda: storage.init(FULL_SIZE))()
    assert 0.70e9 < nbytes(memory) < 0.72e9
    add = jax.jit(storage.add, donate_argnums=0)
    items = jax.tree.map(lambda x: jnp.ones((64, *x.shape), x.dtype), FULL_SIZE)
    place = memory.frames.unsafe_buffer_pointer()
    for head in (0, 64, 99_968):
        cursor = Cursor(jnp.int32(head), jnp.int32(head))
        memory = add(memory, cursor, items)
    assert memory.frames.unsafe_buffer_pointer() == place
    get = jax.jit(functools.partial(storage.get, discount=0.9))
    sample = get(memory, cursor, jnp.array([0, 99_968]))
    np.testing.assert_array_equal(sample.observation, 1)


@pytest.mark.parametrize("size", [8, 64])
def test_nothing_of_the_buffers_size_is_allocated(size):
    storage = frames.transitions(4000, num_streams=8, largest_add=64)
    memory = jax.eval_shape(storage.init, FULL_SIZE)
    number = jax.ShapeDtypeStruct((), jnp.int32)
    cursor = Cursor(number, number)
    batch = lambda x: jax.ShapeDtypeStruct((size, *x.shape), x.dtype)
    items = jax.tree.map(batch, FULL_SIZE)
    add = jax.jit(storage.add, donate_argnums=0).lower(memory, cursor, items)
    used = add.compile().memory_analysis()
    assert used.alias_size_in_bytes == nbytes(memory)
    small = 4 * (nbytes(items) + nbytes(memory.last))
    assert used.temp_size_in_bytes < small < nbytes(memory)
    get = jax.jit(functools.partial(storage.get, discount=0.9))
    used = get.lower(memory, cursor, batch(number)).compile().memory_analysis()
    assert used.temp_size_in_bytes < nbytes(items) / 4


def test_a_population_of_storages_is_each_of_them_alone():
    storage = frames.transitions(CAPACITY, num_streams=STREAMS, largest_add=LARGEST_ADD)
    members = [experience(seed, 8, 4) for seed in range(3)]
    cursor = Cursor(jnp.int32(20), jnp.int32(20))
    slots = jnp.array([20, 22, 0, 6])

    def run(items):
        memory = storage.init(jax.tree.map(lambda x: x[0], items))
        memory = storage.add(memory, cursor, items)
        return storage.get(memory, cursor, slots, discount=0.9)

    together = jax.jit(jax.vmap(run))(jax.tree.map(lambda *xs: np.stack(xs), *members))
    for i, items in enumerate(members):
        mine = jax.tree.map(lambda x, i=i: x[i], together)
        jax.tree.map(np.testing.assert_array_equal, mine, jax.jit(run)(items))
        np.testing.assert_array_equal(
            mine.observation, items.observation[[0, 2, 4, 10]]
        )


# ----------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stack": 0}, "stack 0 must be at least 1"),
        ({"n_step": 0}, "n_step 0 must be at least 1"),
        ({"capacity": 9}, "capacity 9 must be a multiple of num_streams 2"),
        ({"stack": 3}, r"stack 3 must divide axis 0 of observations \(4, 84, 84\)"),
        ({"stack_axis": 3}, r"stack_axis 3 must be in \[-3, 2\]"),
    ],
)
def test_an_impossible_storage_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        frames.transitions(**{"capacity": 8, "num_streams": 2} | options).init(
            FULL_SIZE
        )


def test_an_add_of_nothing_changes_nothing():
    items = jax.tree.map(jnp.asarray, experience(0, 3, 4))
    storage = frames.transitions(8, num_streams=STREAMS)
    memory = storage.init(jax.tree.map(lambda x: x[0], items))
    cursor = Cursor(jnp.int32(0), jnp.int32(0))
    add = jax.jit(storage.add)
    memory = add(memory, cursor, items)
    nothing = jax.tree.map(lambda x: x[:0], items)
    after = add(memory, ring.advance(cursor, 6, 8), nothing)
    jax.tree.map(np.testing.assert_array_equal, after, memory)


def test_an_impossible_add_is_refused():
    items = experience(0, 9, 4)
    storage = frames.transitions(16, num_streams=STREAMS, largest_add=16)
    memory = storage.init(jax.tree.map(lambda x: x[0], items))
    cursor = Cursor(jnp.int32(0), jnp.int32(0))
    add = functools.partial(jax.eval_shape, storage.add)
    with pytest.raises(ValueError, match="a write of 18 must be in"):
        add(memory, cursor, items)
    with pytest.raises(ValueError, match="3 items are not a multiple of 2"):
        add(memory, cursor, jax.tree.map(lambda x: x[:3], items))


def test_a_stream_that_is_cut_loses_its_last_step_as_in_the_ring():
    pair = Pair(stack=2)
    items = experience(0, 8, 2)
    one = jax.tree.map(lambda x: x[0], items)
    cursor = Cursor(jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))
    memory = pair.mine.init(one), pair.ring.init(one)
    *memory, cursor = pair._add(memory, cursor, items)
    slots = jnp.array([14, -1])  # The last step of the first stream alone.
    frames_cut, ring_cut = (
        pair.mine.cut(memory[0], slots),
        pair.ring.cut(memory[1], slots),
    )
    np.testing.assert_array_equal(frames_cut.steps.is_valid, ring_cut.is_valid)
    assert items.is_valid[14]
    assert jnp.sum(memory[1].is_valid) - jnp.sum(ring_cut.is_valid) == 1
