"""Rings of steps against the histories they hold: what may be drawn, and what it is.

A history is made of episodes; the oracles know those, and nothing of slots.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fps_jax.replay import replay, ring
from fps_jax.replay.ring import Cursor
from fps_jax.types import Step, Trajectory

LENGTHS = (1, 1, 2, 3, 4, 7)
"""Of episodes."""


# --------------------------------------------------------------------------- experience


class Episode(NamedTuple):
    """``r_1 ... r_n``, which of those steps were at fault, and if it terminated."""

    reward: list[float]
    is_fault: list[bool]
    is_terminated: bool


class History:
    """What E environments did: episodes, and the rows that an actor makes of them.

    The observation after j steps of episode i of stream e is ``(e, i, j)``. After each
    episode comes a row that resets, with the final observation. What must not be read
    is NaN.
    """

    def __init__(self, seed, num_streams, num_steps, faults=0.0):
        rng = np.random.default_rng(seed)
        self.num_streams, self.episodes = num_streams, {}
        self.streams = [
            self._stream(rng, e, num_steps, faults) for e in range(num_streams)
        ]
        stacked = [
            jax.tree.map(lambda *xs: np.stack(xs), *stream) for stream in self.streams
        ]
        self.rows = jax.tree.map(lambda *xs: np.stack(xs, axis=1), *stacked)

    def _stream(self, rng, stream, num_steps, faults):
        rows, i = [], 0
        while len(rows) < num_steps:
            n, kind = (
                rng.choice(LENGTHS),
                rng.choice(["terminated", "truncated", "both"]),
            )
            reward = rng.normal(size=n).astype(np.float32).tolist()
            is_fault = [*(rng.random(n - 1) < faults).tolist(), False]
            is_terminated = kind != "truncated"
            self.episodes[stream, i] = Episode(reward, is_fault, is_terminated)
            for j in range(n + 1):
                is_last, is_valid = j == n - 1, j < n and not is_fault[j]
                name = 10_000 * stream + 100 * i + j
                rows.append(
                    Step(
                        observation=np.array([stream, i, j], np.int32),
                        action=np.int32(name),
                        reward=np.float32(reward[j] if is_valid else np.nan),
                        terminated=np.bool_(is_last and is_terminated),
                        truncated=np.bool_(is_last and kind != "terminated"),
                        is_valid=np.bool_(is_valid),
                        behaviour={"log_prob": np.float32(-name)},
                    )
                )
            i += 1
        return rows[:num_steps]

    def items(self, start, stop):
        """Steps ``start ... stop - 1`` of all streams as items, time-major."""
        flat = lambda x: x[start:stop].reshape(-1, *x.shape[2:])
        return jax.tree.map(flat, self.rows)

    def trajectory(self, start, stop):
        """The same as a `Trajectory`."""
        rows = jax.tree.map(lambda x: jnp.array(x[start:stop]), self.rows)
        more = {"policy_version": jnp.zeros_like(rows.action)}
        more |= {"observation": jnp.array(self.rows.observation[start : stop + 1])}
        return Trajectory(**rows._asdict() | more)

    def outcome(self, observation, n, discount):
        """Return, worth of the bootstrap and next observation, in float64."""
        e, i, j = observation
        reward, is_fault, is_terminated = self.episodes[e, i]
        total, m = 0.0, 0
        while m < n and j + m < len(reward) and not (m > 0 and is_fault[j + m]):
            total, m = total + discount**m * reward[j + m], m + 1
        ends = j + m == len(reward) and is_terminated
        return total, 0.0 if ends else discount**m, (e, i, j + m)

    def usable(self, num_steps, capacity, lookahead):
        """Valid steps that are still there, and all that they need: ``{(e, t)}``.

        Args:
          num_steps: how many were added for each stream.
          capacity: N.
          lookahead: how many they need.
        """
        times = range(max(0, num_steps - capacity // self.num_streams), num_steps)
        return {
            (e, t)
            for e, stream in enumerate(self.streams)
            for t in times
            if stream[t].is_valid and t + lookahead < num_steps
        }

    def time_of(self, observation):
        """The stream and the step that had this observation."""
        return self._times[tuple(np.asarray(observation).tolist())]

    @functools.cached_property
    def _times(self):
        return {
            tuple(row.observation.tolist()): (e, t)
            for e, stream in enumerate(self.streams)
            for t, row in enumerate(stream)
        }


EXAMPLE = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), History(0, 1, 1).streams[0][0]
)


def nothing():
    return Cursor(jnp.int32(0), jnp.int32(0))


class Compiled:
    """A replay of steps, compiled, and the reading of all of its slots at once."""

    def __init__(self, kind, capacity, of=replay.uniform, others=(), **options):
        self.storage = getattr(ring, kind)(capacity, **options)
        self.others = [getattr(ring, kind)(capacity, **options | o) for o in others]
        self.of, self.capacity = of(self.storage), capacity
        self.streams = self.storage.num_streams
        self.init = jax.jit(lambda: self.of.init(EXAMPLE))
        self.add = jax.jit(self.of.add)
        self.sample = jax.jit(self.of.sample, static_argnames="batch_size")
        self.read = jax.jit(self._read)

    def _read(self, state, **reading):
        """Of all slots: what may be drawn, what is there, and where episodes end."""
        slots = jnp.arange(self.capacity, dtype=jnp.int32)
        found = [
            storage.get(state.memory, state.cursor, slots, **reading)
            for storage in (self.storage, *self.others)
        ]
        margin = (len(state.is_usable) - self.capacity) // 2
        is_usable = state.is_usable[margin : margin + self.capacity]
        return is_usable, found, self.storage.is_last(state.memory, slots)

    def walk(self, history, sizes):
        """The state after each add of so many steps, and how many there are by then."""
        state, num_steps = self.init(), 0
        for size in sizes:
            state = self.add(state, history.items(num_steps, num_steps + size))
            num_steps += size
            yield state, num_steps


def sizes_of_adds(seed, choices, wraps, capacity, num_streams):
    """Sizes in steps, of adds that fill a ring several times."""
    rng, sizes = np.random.default_rng(seed), []
    while sum(sizes) * num_streams < wraps * capacity:
        sizes.append(int(rng.choice(choices)))
    return sizes


# ------------------------------------------------------------------------ single items


def labelled(count, start=0):
    """Items of several shapes and dtypes, each of which knows its number."""
    number = np.arange(start, start + count)
    one = lambda *shape: number.reshape(-1, *(1 for _ in shape)) + np.zeros(shape)
    return {
        "image": one(2, 3).astype(np.uint8),
        "label": number.astype(np.int32),
        "is_odd": number % 2 == 1,
        "more": (one(4).astype(np.float32), one(1).astype(jnp.bfloat16)),
    }


@functools.cache
def compiled_items(capacity, num_streams=1):
    storage = ring.items(capacity, num_streams=num_streams)
    example = jax.tree.map(lambda x: x[0], labelled(1))
    get = jax.jit(storage.get)
    memory = jax.jit(lambda: storage.init(example))()
    return storage, memory, jax.jit(storage.add), get


@pytest.mark.parametrize(("capacity", "num_streams"), [(1, 1), (5, 1), (12, 3)])
def test_item_number_i_is_in_slot_i_modulo_n_unchanged(capacity, num_streams):
    _, memory, add, get = compiled_items(capacity, num_streams)
    choices = [1] if capacity == num_streams else [1, capacity // num_streams - 1]
    cursor, there, total = nothing(), np.full(capacity, -1), 0
    for size in sizes_of_adds(0, choices, 8, capacity, num_streams):
        now = np.arange(total, total + size * num_streams)
        memory = add(memory, cursor, labelled(now.size, total))
        cursor = ring.advance(cursor, now.size, capacity)
        there[now % capacity] = now
        total += now.size
        slots = np.flatnonzero(there >= 0).astype(np.int32)
        assert (cursor.head, cursor.size) == (total % capacity, slots.size)
        padded = np.resize(slots, capacity)
        found = jax.tree.map(lambda x, n=slots.size: x[:n], get(memory, cursor, padded))
        everything = jax.tree.map(lambda x, s=slots: x[there[s]], labelled(total))
        jax.tree.map(np.testing.assert_array_equal, found, everything)
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(everything)):
            assert x.dtype == y.dtype


def test_items_are_put_anywhere():
    storage, memory, add, get = compiled_items(5)
    memory = add(memory, nothing(), labelled(4))
    slots = jnp.array([3, -1, 4, 0])
    memory = storage.put(memory, slots, jax.tree.map(jnp.array, labelled(4, 70)))
    found = get(memory, nothing(), np.arange(5, dtype=np.int32))
    np.testing.assert_array_equal(found["label"], [73, 1, 2, 70, 72])
    np.testing.assert_array_equal(found["image"][:, 1, 2], [73, 1, 2, 70, 72])


def test_the_age_of_an_item_is_the_number_of_newer_ones():
    capacity, cursor = 6, nothing()
    for total in range(0, 20, 2):
        there = [i for i in range(total) if i >= total - capacity]
        age = ring.age(cursor, jnp.arange(capacity, dtype=jnp.int32), capacity)
        for i in there:
            assert age[i % capacity] == total - 1 - i
        assert np.sum(age >= cursor.size) == capacity - len(there)
        cursor = ring.advance(cursor, 2, capacity)


# ----------------------------------------------------------------------------- windows

# N, L, E and the sizes of adds in steps.
WINDOWS = [
    (1, 1, 1, (1,)),
    (6, 1, 2, (3,)),
    (5, 3, 1, (1, 3)),
    (6, 3, 2, (1,)),
    (12, 3, 2, (1, 4)),
    (24, 5, 3, (3,)),
]


@functools.cache
def compiled_windows(capacity, length, num_streams, of=replay.uniform):
    return Compiled(
        "windows",
        capacity,
        of,
        others=({"crosses_episodes": True},),
        length=length,
        num_streams=num_streams,
    )


def expect_window(history, num_steps, start, items, is_valid, crosses_episodes):
    """A window ``[L]`` is what follows the step at its start.

    Args:
      history: the truth.
      num_steps: how many were added for each stream.
      start: stream and time.
      items: of the window.
      is_valid: of the window.
      crosses_episodes: whether the next episode counts.
    """
    stream, time = start
    has_ended = False
    for k, flag in enumerate(is_valid):
        if time + k >= num_steps:
            assert not flag
            continue
        row = history.streams[stream][time + k]
        np.testing.assert_array_equal(items.observation[k], row.observation)
        np.testing.assert_array_equal(items.reward[k], row.reward)
        assert flag == (row.is_valid and (crosses_episodes or not has_ended))
        has_ended |= bool(row.terminated | row.truncated)


@pytest.mark.parametrize(("capacity", "length", "num_streams", "choices"), WINDOWS)
def test_windows_are_never_torn_and_all_that_can_be_drawn_may_be_drawn(
    capacity, length, num_streams, choices
):
    this = compiled_windows(capacity, length, num_streams)
    sizes = sizes_of_adds(capacity, choices, 6, capacity, num_streams)
    history = History(length, num_streams, sum(sizes), faults=0.1)
    for state, num_steps in this.walk(history, sizes):
        is_usable, found, is_last = jax.tree.map(np.asarray, this.read(state))
        expected = history.usable(num_steps, capacity, length - 1)
        assert state.num_usable == is_usable.sum() == len(expected)
        is_filled = np.arange(capacity) < min(num_steps * num_streams, capacity)
        for crosses_episodes, (items, is_valid) in enumerate(found):
            assert items.observation.shape == (length, capacity, 3)
            assert not is_valid[:, ~is_filled].any()
            assert is_valid[0, is_usable].all()
            starts = [history.time_of(x) for x in items.observation[0, is_filled]]
            chosen = np.flatnonzero(is_filled)
            assert {s for s, i in zip(starts, chosen) if is_usable[i]} == expected
            for start, i in zip(starts, chosen):
                window = jax.tree.map(lambda x, i=i: x[:, i], items)
                expect_window(
                    history, num_steps, start, window, is_valid[:, i], crosses_episodes
                )
                row = history.streams[start[0]][start[1]]
                assert is_last[i] == (row.terminated | row.truncated)


def test_what_is_drawn_in_proportion_is_all_that_may_be_drawn():
    # Of as many equal priorities as half the draws, a stratified draw misses none.
    this = compiled_windows(12, 3, 2, replay.proportional)
    history = History(3, 2, 40, faults=0.1)
    for state, num_steps in this.walk(history, [1] * 40):
        key = jax.random.key(num_steps)
        _, sample = this.sample(state, key, batch_size=24)
        expected = history.usable(num_steps, 12, 2)
        assert state.num_usable == len(expected)
        assert np.all(sample.is_valid == (len(expected) > 0))
        if expected:
            starts = sample.items.items.observation[0]
            assert {history.time_of(x) for x in starts} == expected


@pytest.mark.parametrize("of", [replay.uniform, replay.proportional])
def test_nothing_is_drawn_before_the_steps_that_it_needs(of):
    this = compiled_windows(12, 3, 2, of)
    history = History(1, 2, 3)
    for state, num_steps in this.walk(history, [1, 1]):
        _, sample = this.sample(state, jax.random.key(0), batch_size=24)
        assert not np.any(sample.is_valid)
        assert not np.any(sample.importance_weights)
        assert not this.of.can_sample(state, 1)
        assert state.cursor.size == 2 * num_steps


# ------------------------------------------------------------------------- transitions

# N, n, E and the sizes of adds in steps.
TRANSITIONS = [
    (2, 1, 1, (1,)),
    (13, 1, 1, (5,)),
    (12, 2, 3, (1,)),
    (8, 3, 2, (1,)),
    (20, 3, 2, (1, 4)),
    (36, 5, 3, (4,)),
]


@functools.cache
def compiled_transitions(capacity, n_step, num_streams, of=replay.uniform):
    return Compiled("transitions", capacity, of, n_step=n_step, num_streams=num_streams)


def expect_transitions(history, sample, n, discount):
    """Each is what the episodes say: ``[B]``, of valid first steps."""
    first = np.asarray(sample.observation).tolist()
    outcomes = [history.outcome(observation, n, discount) for observation in first]
    reward, scale, following = map(np.array, zip(*outcomes))
    np.testing.assert_allclose(sample.reward, reward, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(sample.discount, scale, rtol=1e-5)
    np.testing.assert_array_equal(sample.next_observation, following)
    name = np.array(first) @ np.array([10_000, 100, 1])
    np.testing.assert_array_equal(sample.action, name)
    np.testing.assert_array_equal(sample.behaviour["log_prob"], -name)


@pytest.mark.parametrize(("capacity", "n", "num_streams", "choices"), TRANSITIONS)
@pytest.mark.parametrize("faults", [0.0, 0.2])
def test_transitions_are_n_steps_of_the_true_episodes(
    capacity, n, num_streams, choices, faults
):
    this, rng = compiled_transitions(capacity, n, num_streams), np.random.default_rng(n)
    sizes = sizes_of_adds(n, choices, 6, capacity, num_streams)
    history = History(capacity, num_streams, sum(sizes), faults)
    for state, num_steps in this.walk(history, sizes):
        discount = float(rng.choice([0.0, 0.5, 0.97, 1.0]))
        is_usable, (sample,), is_last = jax.tree.map(
            np.asarray, this.read(state, discount=discount)
        )
        expected = history.usable(num_steps, capacity, n)
        assert state.num_usable == is_usable.sum() == len(expected)
        if not expected:
            continue
        sample = jax.tree.map(lambda x, flags=is_usable: x[flags], sample)
        times = [history.time_of(x) for x in sample.observation]
        assert set(times) == expected
        expect_transitions(history, sample, n, discount)
        ends = [history.streams[e][t] for e, t in times]
        ends = [bool(row.terminated | row.truncated) for row in ends]
        np.testing.assert_array_equal(is_last[is_usable], ends)
        assert sample.reward.dtype == sample.discount.dtype == np.float32


def test_histories_hold_what_the_oracle_is_for():
    # Else the test above would say less than it seems to.
    history = History(36, 3, 72, faults=0.2)
    kinds = {
        (len(e.reward) > 1, e.is_terminated, any(e.is_fault))
        for e in history.episodes.values()
    }
    assert kinds >= {(False, True, False), (False, False, False)}
    assert kinds >= {(True, True, True), (True, False, True), (True, False, False)}


def test_after_a_truncation_the_next_observation_is_the_final_and_not_the_reset_one():
    this = compiled_transitions(20, 3, 2)
    history = History(2, 2, 20)
    *_, (state, _) = this.walk(history, [4] * 5)
    is_usable, (sample,), _ = this.read(state, discount=0.5)
    count = 0
    for i in np.flatnonzero(is_usable):
        e, episode, j = sample.observation[i].tolist()
        reward, _, is_terminated = history.episodes[e, episode]
        if not is_terminated and len(reward) - j < 3:
            final = (e, episode, len(reward))
            assert tuple(sample.next_observation[i].tolist()) == final
            np.testing.assert_allclose(sample.discount[i], 0.5 ** (len(reward) - j))
            count += 1
    assert count > 0


@pytest.mark.parametrize("of", [replay.uniform, replay.proportional])
def test_what_a_replay_draws_is_what_the_episodes_say(of):
    this = compiled_transitions(20, 3, 2, of)
    history = History(5, 2, 23, faults=0.1)
    *_, (state, num_steps) = this.walk(history, [1] * 23)
    _, drawn = this.sample(state, jax.random.key(0), batch_size=64, discount=0.9)
    assert np.mean(drawn.is_valid) > 0.9
    items = jax.tree.map(lambda x: np.asarray(x)[drawn.is_valid], drawn.items)
    expect_transitions(history, items, 3, 0.9)
    expected = history.usable(num_steps, 20, 3)
    assert {history.time_of(x) for x in items.observation} <= expected


def test_a_discount_may_be_a_number_or_traced():
    this = compiled_transitions(20, 3, 2)
    *_, (state, _) = this.walk(History(0, 2, 20), [4] * 5)
    slots = jnp.arange(20, dtype=jnp.int32)
    get = functools.partial(this.storage.get, state.memory, state.cursor, slots)
    number = jax.jit(lambda: get(discount=0.9))()
    traced = jax.jit(lambda discount: get(discount=discount))(jnp.float32(0.9))
    same = functools.partial(np.testing.assert_allclose, rtol=1e-6)
    jax.tree.map(same, number, traced)


# ----------------------------------------------------------------------- n-step returns


class Outcome(NamedTuple):
    """Steps ``[n, B]``."""

    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    is_valid: np.ndarray


def random_outcome(seed, n, size=8):
    rng = np.random.default_rng(seed)
    flags = lambda p: rng.random((n, size)) < p
    return Outcome(
        rng.normal(size=(n, size)).astype(np.float32),
        flags(0.2),
        flags(0.2),
        flags(0.8),
    )


def naive_return(outcome, discount):
    """Reward, its derivative by the discount, scale and m of each, in float64."""
    found = []
    for reward, terminated, truncated, is_valid in zip(*(x.T for x in outcome)):
        total, slope, scale, m = 0.0, 0.0, 1.0, 0
        for k in range(len(reward)):
            if k > 0 and not (is_valid[: k + 1].all()):
                break
            total += float(discount) ** k * float(reward[k])
            slope += k * float(discount) ** max(k - 1, 0) * float(reward[k])
            scale, m = scale * discount, m + 1
            if terminated[k]:
                scale = 0.0
            if terminated[k] or truncated[k]:
                break
        found.append((total, slope, scale, m))
    return map(np.array, zip(*found))


compiled_return = jax.jit(ring.n_step_return)
compiled_slope = jax.jit(
    jax.grad(lambda discount, outcome: ring.n_step_return(outcome, discount)[0].sum())
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.sampled_from((1, 2, 3, 5)),
    st.sampled_from((0.0, 0.3, 0.99, 1.0)),
    st.integers(0, 10**6),
)
def test_an_n_step_return_is_the_naive_sum_and_so_is_its_gradient(n, discount, seed):
    outcome = random_outcome(seed, n)
    reward, slope, scale, count = naive_return(outcome, discount)
    # Rewards after the last step made are of another episode: they may be anything.
    is_made = np.arange(n)[:, None] < count
    outcome = outcome._replace(reward=np.where(is_made, outcome.reward, np.nan))
    found = compiled_return(outcome, jnp.float32(discount))
    np.testing.assert_allclose(found[0], reward, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found[1], scale, rtol=1e-5)
    np.testing.assert_array_equal(found[2], count)
    assert [x.dtype for x in found] == [jnp.float32, jnp.float32, jnp.int32]
    total = compiled_slope(jnp.float32(discount), outcome)
    np.testing.assert_allclose(total, slope.sum(), rtol=1e-4, atol=1e-4)


# ------------------------------------------------------------------------- trajectories


def test_rows_of_a_trajectory_are_items_in_the_order_of_time_and_then_of_streams():
    history = History(0, 3, 9)
    trajectory = history.trajectory(2, 6)
    found = ring.steps(trajectory)
    jax.tree.map(np.testing.assert_array_equal, found, history.items(2, 6))
    empty = trajectory._replace(behaviour={"carry": jnp.zeros((4, 3, 0))})
    assert ring.steps(empty).behaviour["carry"].shape == (12, 0)


def test_trajectories_that_follow_each_other_chain_their_observations():
    # Of n-step transitions that begin in one trajectory and end in the next, too.
    this = compiled_transitions(20, 3, 2)
    history = History(3, 2, 25)
    state = this.init()
    for start in range(0, 24, 4):
        state = this.add(state, ring.steps(history.trajectory(start, start + 4)))
    is_usable, (sample,), _ = this.read(state, discount=0.9)
    sample = jax.tree.map(lambda x: np.asarray(x)[is_usable], sample)
    times = {history.time_of(x) for x in sample.observation}
    assert times == history.usable(24, 20, 3)
    expect_transitions(history, sample, 3, 0.9)


# ----------------------------------------------------------------------------- programs


def test_a_scanned_population_is_each_replay_alone():
    this = compiled_transitions(8, 3, 2)
    histories = [History(seed, 2, 12) for seed in range(2)]
    stack = lambda *xs: np.stack(xs)
    each = [
        jax.tree.map(stack, *[history.items(t, t + 1) for t in range(12)])
        for history in histories
    ]
    members = jax.tree.map(stack, *each)

    def run(items):
        step = lambda state, batch: (this.of.add(state, batch), state.num_usable)
        return jax.lax.scan(step, this.of.init(EXAMPLE), items)

    together, counts = jax.jit(jax.vmap(run))(members)
    for i, history in enumerate(histories):
        *_, (alone, _) = this.walk(history, [1] * 12)
        mine = jax.tree.map(lambda x, i=i: x[i], together)
        for discount in (0.5, 1.0):
            jax.tree.map(
                np.testing.assert_array_equal,
                this.read(mine, discount=discount),
                this.read(alone, discount=discount),
            )
        expected = [len(history.usable(t, 8, 3)) for t in range(12)]
        np.testing.assert_array_equal(counts[i], expected)


@pytest.mark.parametrize("kind", ["items", "windows", "transitions"])
def test_a_donated_memory_is_written_in_place(kind):
    options = {"windows": {"length": 4}, "transitions": {"n_step": 3}}.get(kind, {})
    image = EXAMPLE._replace(observation=jax.ShapeDtypeStruct((12, 12), jnp.uint8))
    used = {}
    for capacity in (512, 8192):
        storage = getattr(ring, kind)(
            capacity, num_streams=4, largest_add=32, **options
        )
        batch = lambda x: jax.ShapeDtypeStruct((32, *x.shape), x.dtype)
        items, memory = jax.tree.map(batch, image), jax.eval_shape(storage.init, image)
        add = jax.jit(storage.add, donate_argnums=0)
        cursor = jax.eval_shape(nothing)
        memory_used = add.lower(memory, cursor, items).compile().memory_analysis()
        nbytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(memory))
        assert memory_used.alias_size_in_bytes == nbytes
        used[capacity] = memory_used.temp_size_in_bytes
    assert used[512] == used[8192] < 8192


# ----------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ring.items(0), "capacity 0 must be at least 1"),
        (lambda: ring.windows(0, length=1), "capacity 0 must be at least 1"),
        (
            lambda: ring.items(9, num_streams=2),
            "capacity 9 must be a multiple of num_streams 2",
        ),
        (lambda: ring.items(8, num_streams=0), r"num_streams 0 must be in \[1, 8\]"),
        (lambda: ring.items(8, num_streams=9), r"num_streams 9 must be in \[1, 8\]"),
        (
            lambda: ring.transitions(8, num_streams=0),
            r"num_streams 0 must be in \[1, 8\]",
        ),
        (lambda: ring.items(8, largest_add=9), r"largest_add 9 must be in \[1, 8\]"),
        (
            lambda: ring.windows(8, length=2, num_streams=4, largest_add=3),
            r"largest_add 3 must be in \[4, 8\]",
        ),
        (lambda: ring.windows(8, length=0), "length 0 must be at least 1"),
        (
            lambda: ring.windows(8, length=3, num_streams=4),
            r"length \* num_streams 12 must be in \[1, 8\]",
        ),
        (lambda: ring.transitions(8, n_step=0), "n_step 0 must be at least 1"),
        (
            lambda: ring.transitions(8, n_step=2, num_streams=4),
            r"\(n_step \+ 1\) \* num_streams 12 must be in \[1, 8\]",
        ),
    ],
)
def test_an_impossible_ring_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_the_largest_ring_for_its_options_is_not_refused():
    assert ring.windows(12, length=3, num_streams=4).largest_add == 4
    assert ring.transitions(12, n_step=2, num_streams=4).largest_add == 4


def test_the_largest_add_has_room_for_a_step_of_every_stream():
    assert ring.items(10_000).largest_add == 2048
    assert ring.items(100).largest_add == 100
    assert ring.windows(100, length=11).largest_add == 90
    assert ring.transitions(100, n_step=10, num_streams=2).largest_add == 80
    assert ring.transitions(40_960, num_streams=4096).largest_add == 4096


def test_an_impossible_add_is_refused():
    storage = ring.windows(12, length=3, num_streams=2, largest_add=10)
    of = replay.uniform(storage)
    state, items = jax.eval_shape(of.init, EXAMPLE), History(0, 2, 6).items(0, 6)
    few = lambda n: jax.tree.map(lambda x: jnp.array(x[:n]), items)
    for size, message in (
        (3, "items of an add 3 must be a multiple of num_streams 2"),
        (12, r"an add, with largest_add, of 12 must be in \[0, 10\]"),
        (10, r"an add, beside the steps that wait, of 10 must be in \[0, 8\]"),
    ):
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(of.add, state, few(size))
    with pytest.raises(AssertionError, match="shape"):
        storage.add(state.memory, state.cursor, few(4)._replace(reward=jnp.ones(2)))


def test_unknown_options_are_refused():
    with pytest.raises(TypeError, match="stride"):
        ring.windows(8, length=2, stride=1)
    with pytest.raises(TypeError, match="discount"):
        ring.windows(8, length=2).get(None, None, None, discount=0.9)
    with pytest.raises(TypeError, match="discount"):
        ring.items(8).get(None, None, None, discount=0.9)
    with pytest.raises(TypeError, match="discount"):
        ring.transitions(8).get(None, None, None)


@pytest.mark.parametrize("discount", [-0.1, 1.1, np.nan])
def test_an_impossible_discount_is_refused(discount):
    outcome = jax.tree.map(jnp.array, random_outcome(0, 2))
    message = rf"discount {discount} must be in \[0, 1\]"
    with pytest.raises(ValueError, match=message):
        ring.n_step_return(outcome, discount)
