"""What went wrong in other replays' rings, and in what XLA made of them.

Each test is named for a public bug. The comments name the projects and their issues.
"""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fps_jax.replay import replay, ring
from fps_jax.types import Step

KINDS = ("uniform", "proportional", "rank_based", "greedy")
N, STREAMS = 12, 2
KEY = jax.eval_shape(lambda: jax.random.key(0))


def rows(numbers, *, terminated=(), truncated=(), invalid=()):
    """Steps by their numbers ``t E + e``, which they also have as rewards."""
    numbers = np.asarray(numbers, np.int32)
    flag = lambda which: jnp.array(np.isin(numbers, which))
    return Step(
        observation=jnp.array(numbers),
        action=jnp.array(numbers),
        reward=jnp.array(numbers, float),
        terminated=flag(terminated),
        truncated=flag(truncated),
        is_valid=~flag(invalid),
        behaviour={},
    )


class Compiled:
    """A replay of numbered steps, compiled."""

    def __init__(self, storage, kind="proportional"):
        self.of = getattr(replay, kind)(storage)
        self.add = jax.jit(self.of.add)
        self.update = jax.jit(self.of.update)
        self.sample = jax.jit(self.of.sample, static_argnames="batch_size")
        self.empty = self.of.init(jax.tree.map(lambda x: x[0], rows([0])))

    def growing(self, until, **flags):
        """States, and how many steps they were added, a step of all streams a time."""
        state = self.empty
        for count in range(STREAMS, until + 1, STREAMS):
            state = self.add(state, rows(range(count - STREAMS, count), **flags))
            yield count, state

    def grown(self, until, **flags):
        """The last of those states."""
        return list(self.growing(until, **flags))[-1][1]

    def draws(self, state, **reading):
        key = jax.random.key(0)
        return self.sample(state, key, batch_size=128, **reading)[1]


@functools.cache
def windows(length, kind="proportional"):
    return Compiled(ring.windows(N, length=length, num_streams=STREAMS), kind)


@functools.cache
def transitions(n_step):
    return Compiled(ring.transitions(N, n_step=n_step, num_streams=STREAMS))


# ------------------------------------------------------------------------------ windows


@pytest.mark.parametrize(
    ("length", "kind"), [(1, "proportional"), (3, "proportional"), (6, "uniform")]
)
def test_no_window_is_torn_by_the_head_and_none_is_left_out(length, kind):
    # flashbax #49, #50 and #51; #48 left out too many while it was not full.
    # ray #54284, #60065 and #60773 lost count of what could be drawn.
    this = windows(length, kind)
    for count, state in this.growing(3 * N):
        expected = range(max(count - N, 0), count - (length - 1) * STREAMS)
        assert state.num_usable == len(expected)
        sample = this.draws(state)
        if not expected:
            assert not np.any(sample.is_valid)
            continue
        assert np.all(sample.is_valid)
        assert np.all(sample.items.is_valid)
        numbers = np.asarray(sample.items.items.observation)
        assert set(numbers[0].tolist()) == set(expected)
        later = STREAMS * np.arange(length)[:, None]
        np.testing.assert_array_equal(numbers, numbers[0] + later)


def test_no_window_goes_on_in_the_next_episode():
    # pytorch/rl #2208, #2193 and #1873.
    this, ends = windows(3), {"terminated": [8], "truncated": [13], "invalid": [10, 15]}
    sample = this.draws(this.grown(22, **ends))
    numbers = np.asarray(sample.items.items.observation)
    # Those of 22 and 23 are not there yet, and 10 and 15 only reset.
    assert set(numbers[0].tolist()) == {11, 12, 13, 14, 16, 17}
    for first, is_valid in zip(numbers[0], np.asarray(sample.items.is_valid).T):
        length = {11: 2, 13: 1}.get(int(first), 3)
        np.testing.assert_array_equal(is_valid, np.arange(3) < length)


# -------------------------------------------------------------------------- transitions


@pytest.mark.parametrize("n_step", [1, 3])
def test_n_steps_do_not_cross_the_head_and_are_discounted_n_times(n_step):
    # younggyoseo/FastTD3 #6 and #7: a step across when full; gamma for gamma^n.
    this = transitions(n_step)
    for count, state in this.growing(2 * N + 2):
        expected = range(max(count - N, 0), count - n_step * STREAMS)
        sample = this.draws(state, discount=0.5)
        assert np.all(sample.is_valid) == bool(expected)
        if expected:
            first = np.asarray(sample.items.observation)
            assert set(first.tolist()) == set(expected)
            np.testing.assert_array_equal(
                sample.items.next_observation, first + n_step * STREAMS
            )
            reward = sum(0.5**k * (first + k * STREAMS) for k in range(n_step))
            np.testing.assert_allclose(sample.items.reward, reward)
            np.testing.assert_array_equal(sample.items.discount, 0.5**n_step)


def test_what_a_time_limit_cut_does_not_lead_to_the_next_reset():
    # DLR-RM/stable-baselines3 #934, vwxyzjn/cleanrl #460. Step 16 has the last
    # observation of the episode that was cut at 14; 18 is the first of the next.
    this, ends = transitions(3), {"truncated": [14], "terminated": [15]}
    state = this.grown(24, **ends, invalid=[16, 17])
    transition = this.draws(state, discount=0.5).items
    first = np.asarray(transition.observation)
    assert set(first.tolist()) == {12, 13, 14, 15}
    cut = first % 2 == 0
    steps = (16 - first) // 2
    np.testing.assert_array_equal(transition.next_observation[cut], 16)
    np.testing.assert_array_equal(transition.discount[cut], 0.5 ** steps[cut])
    np.testing.assert_array_equal(transition.discount[~cut], 0)
    reward = {12: 12 + 14 / 2, 13: 13 + 15 / 2, 14: 14, 15: 15}
    np.testing.assert_array_equal(transition.reward, [reward[i] for i in first])


def test_a_batch_of_one_keeps_its_axis():
    # flashbax #27: a squeeze took it away.
    example = jax.tree.map(lambda x: x[0], rows([0]))
    storages = ring.items(N), ring.windows(N, length=1), ring.transitions(N)
    for kind, storage in itertools.product(KINDS, storages):
        of = getattr(replay, kind)(storage)
        state = jax.eval_shape(of.init, example)
        reading = {} if storage is not storages[2] else {"discount": 0.5}
        draw = functools.partial(of.sample, batch_size=1, **reading)
        sample = jax.eval_shape(draw, state, KEY)[1]
        shape = (1, 1) if storage is storages[1] else (1,)
        assert all(x.shape == shape for x in jax.tree.leaves(sample.items))
        rest = jax.tree.leaves(sample._replace(items=()))
        assert all(x.shape == (1,) for x in rest)


# ----------------------------------------------------------------------------- programs

LARGE = 2**18
"""Items, of 16 numbers each. No array is made; one byte of each would be seen."""


@functools.cache
def program(kind, operation, size):
    """An operation with a donated state: lowered, compiled, and the state's bytes."""
    of = getattr(replay, kind)(ring.items(LARGE, largest_add=64))
    state = jax.eval_shape(lambda: of.init(jnp.zeros(16)))
    items = jax.ShapeDtypeStruct((size, 16), jnp.float32)
    priority = jax.ShapeDtypeStruct((size,), jnp.float32)
    draw = functools.partial(of.sample, batch_size=size)

    def step(state, key, items, priority):
        state, sample = draw(of.add(state, items), key)
        return of.update(state, sample.ticket, priority)

    def steps(state, key, items, priority):
        one = lambda i, state: step(
            state, jax.random.fold_in(key, i), items, priority + state.maximum
        )
        return jax.lax.fori_loop(0, 3, one, state)

    if operation == "update":
        given = jax.eval_shape(draw, state, KEY)[1].ticket, priority
    else:
        given = {
            "add": (items,),
            "sample": (KEY,),
            "steps": (KEY, items, priority),
        }[operation]
    f = {"add": of.add, "sample": draw, "update": of.update, "steps": steps}[operation]
    lowered = jax.jit(f, donate_argnums=0).lower(state, *given)
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    return lowered.as_text(), lowered.compile(), held


CHANGES = [
    (kind, operation, size)
    for kind in ("proportional", "rank_based", "greedy")
    for operation in ("add", "update")
    for size in (1, 64)
]
# A rank-based draw may sort.
OTHERS = [(kind, "sample", 64) for kind in ("uniform", "proportional", "greedy")]
OTHERS += [("proportional", "steps", 64)]


@pytest.mark.parametrize(("kind", "operation", "size"), CHANGES + OTHERS)
def test_no_step_costs_as_much_as_the_whole_buffer(kind, operation, size):
    # flashbax #6 and #17: two buffers. #31 and #62: an add of some items, or of one,
    # made a copy. jax-ml/jax #16647: donated to a loop.
    _, compiled, held = program(kind, operation, size)
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= held
    assert memory.temp_size_in_bytes < LARGE
    assert compiled.cost_analysis()["flops"] < LARGE


@pytest.mark.parametrize(("kind", "operation", "size"), CHANGES)
def test_no_two_rows_race_to_add_to_one_place(kind, operation, size):
    # openxla/xla #46225, jax-ml/jax #38806, cusp-ai-oss/kUPS #248: up to 2000 times as
    # slow. jax-ml/jax #11655: and in no fixed order.
    lowered, compiled, _ = program(kind, operation, size)
    scatters = re.findall(r'"stablehlo\.scatter".*?\}\) :', lowered, re.S)
    assert not any("stablehlo.add" in x for x in scatters)
    text = compiled.as_text()
    names = re.findall(r"scatter\(.*to_apply=(%[\w.-]+)", text)
    for name in names:
        body = re.search(rf"^{re.escape(name)} .*?^}}", text, re.M | re.S)
        assert body is not None
        assert " add(" not in body[0]
    assert bool(names) == bool(scatters)


@pytest.mark.parametrize(("kind", "operation", "size"), CHANGES)
def test_nothing_is_promised_of_indices_that_they_do_not_keep(kind, operation, size):
    # jax-ml/jax #21708 and #27796: sorted and unique ones, of which the last was lost.
    lowered, _, _ = program(kind, operation, size)
    assert "indices_are_sorted = true" not in lowered
    assert "unique_indices = true" not in lowered


def test_the_one_promise_about_indices_is_kept():
    # jax-ml/jax #21708: the order of ranks says that it is a permutation.
    this = windows(1, "rank_based")
    for count, state in this.growing(N + 2 * STREAMS):
        ticket = this.draws(state).ticket
        state = this.update(state, ticket, (ticket.slot * 5 % 7).astype(float))
        state, _ = this.sample(state, jax.random.key(count), batch_size=128)
        order = np.asarray(state.sampler.order)
        np.testing.assert_array_equal(np.sort(order), np.arange(N))
        np.testing.assert_array_equal(np.argsort(order), state.sampler.rank)
    assert np.any(np.argsort(order) != order)


def test_rows_that_are_left_out_do_not_touch_the_last_slot():
    # jax-ml/jax #21708: neither the last slot nor the last row is lost.
    this = windows(1)
    state = this.grown(N)
    ticket, priority = this.draws(state).ticket, jnp.full(128, 9.0)
    left_out = ticket._replace(is_valid=jnp.zeros(128, bool))
    after = this.update(state, left_out, priority)
    jax.tree.map(np.testing.assert_array_equal, after.sampler, state.sampler)
    last = ticket._replace(is_valid=ticket.slot == N - 1)
    after = this.update(state, last, priority)
    expected = np.append(np.ones(N - 1), 9**0.6)
    leaves = np.asarray(after.sampler.weights).reshape(-1)[:N]
    np.testing.assert_allclose(leaves, expected, rtol=1e-6)
