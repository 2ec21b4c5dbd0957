"""Running moments of streams cut anyhow, masked anyhow, over one device or four."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices import AXIS, BACKENDS, over_devices
from hypothesis import given, settings
from hypothesis import strategies as st

from fps_jax.models.normalize import MomentsState, normalize, running_moments

SHAPES = ((), (3,), (2, 2))
MOMENTS = {shape: running_moments(shape) for shape in SHAPES}
UPDATES = {shape: jax.jit(moments.update) for shape, moments in MOMENTS.items()}


def follow(shape, chunks, masks=None) -> MomentsState:
    """The moments of a stream that comes in chunks of rows."""
    state = MOMENTS[shape].init()
    masks = [np.ones(len(chunk), bool) for chunk in chunks] if masks is None else masks
    for chunk, mask in zip(chunks, masks):
        state = UPDATES[shape](state, jnp.asarray(chunk), jnp.asarray(mask))
    return state


def part(tree, index: int):
    """One device's or one member's part of stacked arrays."""
    return jax.tree.map(lambda x: x[index], tree)


def expect_moments(state: MomentsState, rows, **tolerance):
    rows = np.asarray(rows, np.float64)
    assert state.count == len(rows)
    np.testing.assert_allclose(state.mean, rows.mean(0), **tolerance)
    np.testing.assert_allclose(state.variance, rows.var(0), **tolerance)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    shape=st.sampled_from(SHAPES),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=6),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_stream_in_chunks_has_numpy_s_moments_of_the_whole(shape, sizes, seed):
    rng = np.random.default_rng(seed)
    rows = rng.normal(2.0, 3.0, size=(sum(sizes), *shape)).astype(np.float32)
    is_valid = rng.random(sum(sizes)) < 0.7
    dirty = rows.copy()
    dirty[~is_valid] = rng.choice([np.nan, np.inf, 1e30])
    cuts = np.cumsum(sizes)[:-1]
    state = follow(shape, np.split(dirty, cuts), np.split(is_valid, cuts))
    if is_valid.any():
        expect_moments(state, rows[is_valid], rtol=1e-4, atol=1e-4)
    else:
        jax.tree.map(np.testing.assert_array_equal, state, MOMENTS[shape].init())


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_may_stand_on_several_axes(shape):
    rows = np.random.default_rng(0).normal(size=(6, 4, *shape)).astype(np.float32)
    is_valid = np.arange(24).reshape(6, 4) % 5 > 0
    expect_moments(follow(shape, [rows], [is_valid]), rows[is_valid], rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_four_devices_agree_with_one_that_sees_every_row(backend):
    rng = np.random.default_rng(1)
    rows = rng.normal(5.0, 2.0, size=(2, 4, 6, 3)).astype(np.float32)
    is_valid = np.arange(6) < np.array([6, 0, 1, 4])[:, None]
    moments = MOMENTS[(3,)]
    update = lambda state, x, v: moments.update(state, x, v, axis_name=AXIS)
    mapped = over_devices(update, backend)
    states = jax.tree.map(lambda x: jnp.stack([x] * 4), moments.init())
    for chunk in rows:
        states = mapped(states, chunk, is_valid)
    one = follow((3,), rows, [is_valid, is_valid])
    near = lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6)
    for device in range(4):
        jax.tree.map(near, part(states, device), one)
    expect_moments(one, rows[:, is_valid].reshape(-1, 3), rtol=1e-5)


@pytest.mark.parametrize(
    ("mean", "deviation", "error"),
    [(1e4, 1e-1, 1e-2), (1e6, 1.0, 0.5), (1.0, 1e-4, 1e-2), (0.0, 1e-3, 1e-4)],
)
def test_a_small_deviation_from_a_large_mean_is_not_lost(mean, deviation, error):
    rng = np.random.default_rng(2)
    rows = rng.normal(mean, deviation, size=(30, 1999)).astype(np.float32)
    state, exact = follow((), rows), rows.astype(np.float64)
    # 30 updates each round the mean, twice where multiply and add are not one.
    few_roundings = 3 * np.spacing(np.float32(mean))
    close = max(error * deviation, few_roundings)
    np.testing.assert_allclose(state.mean, exact.mean(), atol=close)
    np.testing.assert_allclose(state.variance, exact.var(), rtol=error)


@pytest.mark.parametrize("size", [7, 1999])
@pytest.mark.parametrize("item", [0.1, 12345.6])
def test_a_constant_stream_normalises_to_zero(size, item):
    rows = np.full((5, size), item, np.float32)
    state = follow((), rows)
    np.testing.assert_allclose(normalize(state, jnp.asarray(rows)), 0, atol=1e-3)
    assert np.sqrt(state.variance) < 2e-8 * item  # less than the last digit


def test_bytes_are_counted_as_numbers():
    rows = np.random.default_rng(3).integers(0, 256, size=(4, 50, 3)).astype(np.uint8)
    state = follow((3,), rows)
    expect_moments(state, rows.reshape(-1, 3), rtol=1e-5)
    out = np.asarray(normalize(state, jnp.asarray(rows)))
    assert out.dtype == np.float32
    np.testing.assert_allclose(out.reshape(-1, 3).std(0), 1, rtol=1e-5)


def test_before_the_first_row_only_the_clip_changes_anything():
    x = jnp.array([[-30.0, -1.5, 0.0], [2.0, 9.9, 11.0]])
    state = MOMENTS[(3,)].init()
    expected = [[-10.0, -1.5, 0.0], [2.0, 9.9, 10.0]]
    np.testing.assert_array_equal(normalize(state, x), np.float32(expected))
    nothing = UPDATES[(3,)](state, jnp.full_like(x, jnp.nan), jnp.zeros(2, bool))
    jax.tree.map(np.testing.assert_array_equal, nothing, state)


def test_normalising_subtracts_and_scales_under_any_leading_axes(compiled):
    state = MomentsState(
        jnp.float32(9), jnp.array([1.0, -2.0, 0.0]), jnp.array([4, 1, 9.0])
    )
    x = np.random.default_rng(4).normal(0, 5, size=(2, 5, 3)).astype(np.float32)
    expected = np.clip((x - [1, -2, 0]) / [2, 1, 3], -1.5, 1.5)
    f = compiled(lambda state, x: normalize(state, x, clip=1.5))
    np.testing.assert_allclose(f(state, jnp.asarray(x)), expected, rtol=1e-5, atol=1e-6)
    one = jnp.asarray(x[0, 0])
    np.testing.assert_allclose(f(state, one), expected[0, 0], rtol=1e-5, atol=1e-6)


def test_members_of_a_population_have_their_own_moments():
    rows = np.random.default_rng(5).normal(size=(2, 8, 3)).astype(np.float32)
    is_valid = np.arange(8) < np.array([[8], [5]])
    states = jax.tree.map(lambda x: jnp.stack([x] * 2), MOMENTS[(3,)].init())
    states = jax.vmap(UPDATES[(3,)])(states, jnp.asarray(rows), jnp.asarray(is_valid))
    for member in range(2):
        state = part(states, member)
        expect_moments(state, rows[member][is_valid[member]], rtol=1e-4, atol=1e-6)


def test_a_mask_of_other_rows_is_refused():
    x = jnp.zeros((5, 3))
    with pytest.raises(AssertionError, match=r"\(5, 3\)"):
        MOMENTS[(3,)].update(MOMENTS[(3,)].init(), x, jnp.ones(1, bool))
