"""Rows between two margins against a plain list, under random operations."""

import functools
import re

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fps_jax.replay.wrap import wrap

CAPACITIES = (1, 2, 3, 5, 8)
BATCH = 20


def largest_writes(capacity):
    return sorted({1, (capacity + 1) // 2, capacity})


class Compiled:
    """The functions of an array of rows, compiled."""

    def __init__(self, capacity, largest_write):
        self.of = wrap(capacity, largest_write)
        self.init = self.of.init
        self.write, self.put, self.increment, self.flag = map(
            jax.jit, (self.of.write, self.of.put, self.of.increment, self.of.flag)
        )
        self.read, self.all, self.replace = map(
            jax.jit, (self.of.read, self.of.all, self.of.replace)
        )


compiled_wrap = functools.cache(Compiled)


# ------------------------------------------------------------------------------- a list


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_a_write_of_any_length_from_any_start_wraps_around(capacity):
    for largest in largest_writes(capacity):
        this = compiled_wrap(capacity, largest)
        before = np.arange(100, 100 + capacity, dtype=np.int32)
        rows = this.replace(this.init(before[0]), before)
        for start in range(capacity):
            for length in range(largest + 1):
                expected, values = before.tolist(), np.arange(length, dtype=np.int32)
                for i, value in enumerate(values):
                    expected[(start + i) % capacity] = value
                written = this.write(rows, np.int32(start), values)
                np.testing.assert_array_equal(this.all(written), expected)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.sampled_from(CAPACITIES), st.integers(0, 10**6))
def test_random_operations_do_what_they_do_to_a_list(capacity, seed):
    largest = (capacity + 1) // 2
    this = compiled_wrap(capacity, largest)
    rng = np.random.default_rng(seed)
    fresh = lambda *shape: rng.integers(-99, 99, shape).astype(np.int32)
    rows = this.init(jax.ShapeDtypeStruct((), jnp.int32), 7)
    expected = [7] * capacity
    for operation in rng.choice(["write", "put", "increment", "replace"], 12):
        if operation == "write":
            start, values = rng.integers(capacity), fresh(rng.integers(largest + 1))
            rows = this.write(rows, np.int32(start), values)
            for i, value in enumerate(values):
                expected[(start + i) % capacity] = value
        elif operation == "put":
            slots = rng.permutation(capacity).astype(np.int32)
            left_out = rng.integers(-4 * capacity, 0, capacity)
            slots = np.where(rng.random(capacity) < 0.5, left_out, slots)
            values = fresh(capacity)
            rows = this.put(rows, slots, values)
            for slot, value in zip(slots, values):
                if slot >= 0:
                    expected[slot] = value
        elif operation == "increment":
            slots = rng.integers(-4 * capacity, capacity, BATCH).astype(np.int32)
            rows = this.increment(rows, slots)
            for slot in slots[slots >= 0]:
                expected[slot] += 1
        else:
            values = fresh(capacity)
            rows, expected = this.replace(rows, values), values.tolist()
        np.testing.assert_array_equal(this.all(rows), expected)
        slots = rng.integers(0, capacity, (2, 3)).astype(np.int32)
        np.testing.assert_array_equal(this.read(rows, slots), np.take(expected, slots))


@pytest.mark.parametrize("capacity", [1, 2, 5])
def test_a_write_of_flags_tells_how_many_it_replaced(capacity):
    this, rng = compiled_wrap(capacity, (capacity + 1) // 2), np.random.default_rng(0)
    flags = this.init(jnp.bool_(False))
    expected = np.zeros(capacity, bool)
    for length in rng.integers(0, (capacity + 1) // 2 + 1, 30):
        values = rng.random(length) < 0.7
        start = rng.integers(capacity).astype(np.int32)
        where = (start + np.arange(length)) % capacity
        flags, replaced = this.flag(flags, start, values)
        assert replaced == expected[where].sum()
        expected[where] = values
        np.testing.assert_array_equal(this.all(flags), expected)


@pytest.mark.parametrize("size", [0, 1, 2])
def test_a_put_of_few_leaves_the_rest(size):
    this = compiled_wrap(5, 3)
    rows = this.replace(this.init(jnp.int32(0)), np.arange(5, dtype=np.int32))
    for slots in ([3, 0], [-1, 4], [-1, -1]):
        slots, expected = np.int32(slots[:size]), np.arange(5)
        values = np.array([8, 9], np.int32)[:size]
        expected[slots[slots >= 0]] = values[slots >= 0]
        np.testing.assert_array_equal(this.all(this.put(rows, slots, values)), expected)
        expected = np.arange(5)
        expected[slots[slots >= 0]] += 1
        np.testing.assert_array_equal(this.all(this.increment(rows, slots)), expected)


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        (jnp.bool_, ()),
        (jnp.uint8, (2, 1, 3)),
        (jnp.uint32, ()),
        (jnp.bfloat16, (3,)),
        (jnp.float32, (3, 0)),
    ],
)
def test_rows_have_any_shape_and_dtype(dtype, shape):
    this, rng = compiled_wrap(5, 3), np.random.default_rng(0)
    fresh = lambda size: rng.integers(0, 2, (size, *shape)).astype(dtype)
    rows = this.init(jax.ShapeDtypeStruct(shape, dtype), 1)
    expected = np.ones((5, *shape), dtype)
    for start in (0, 3, 1, 4):
        values = fresh(3)
        rows = this.write(rows, np.int32(start), values)
        expected[(start + np.arange(3)) % 5] = values
    slots, values = np.array([4, -1, 0], np.int32), fresh(3)
    rows = this.put(rows, slots, values)
    expected[[4, 0]] = values[[0, 2]]
    assert rows.dtype == dtype
    np.testing.assert_array_equal(this.all(rows), expected)
    everywhere = np.arange(5, dtype=np.int32)
    np.testing.assert_array_equal(this.read(rows, everywhere), expected)


# ----------------------------------------------------------------------------- programs


def test_a_population_of_rings_is_written_as_each_of_them_alone():
    this, rng = compiled_wrap(8, 4), np.random.default_rng(0)
    members = rng.random((3, 8)).astype(np.float32)
    rows = jax.vmap(this.replace)(jnp.zeros((3, 16)), members)
    start = np.array([0, 5, 7], np.int32)
    values = rng.random((3, 4)).astype(np.float32)
    slots = np.array([[1, 2], [-1, 7], [0, -1]], np.int32)

    def change(rows, start, values, slots):
        rows = this.of.write(rows, start, values)
        return this.of.put(rows, slots, values[:2])

    together = jax.jit(jax.vmap(change))(rows, start, values, slots)
    for i, expected in enumerate(members):
        expected[(start[i] + np.arange(4)) % 8] = values[i]
        is_there = slots[i] >= 0
        expected[slots[i][is_there]] = values[i, :2][is_there]
        np.testing.assert_array_equal(this.all(together[i]), expected)


def test_writes_in_a_scan_follow_each_other():
    this, values = compiled_wrap(5, 3), np.arange(21.0, dtype=np.float32).reshape(7, 3)
    starts = (3 * np.arange(7, dtype=np.int32)) % 5

    def step(rows, row):
        return this.of.write(rows, *row), None

    rows, _ = jax.jit(lambda rows: jax.lax.scan(step, rows, (starts, values)))(
        this.init(jnp.float32(0))
    )
    np.testing.assert_array_equal(this.all(rows), [20, 16, 17, 18, 19])


SHAPE = re.compile(r"= \w+\[([\d,]*)\]\S* ([\w-]+)\(")
IN_PLACE = {"parameter", "bitcast", "dynamic-update-slice", "fusion", "scatter"}
IN_PLACE |= {"get-tuple-element", "tuple", "while"}


@pytest.mark.parametrize(
    ("operation", "size", "dtype"),
    [
        ("write", 32, jnp.bool_),
        ("write", 32, jnp.uint8),
        ("write", 1, jnp.float32),
        ("flag", 32, jnp.bool_),
        ("flag", 1, jnp.bool_),
        ("put", 32, jnp.uint8),
        ("put", 1, jnp.float32),
        ("increment", 32, jnp.int32),
        ("increment", 1, jnp.int32),
    ],
)
def test_a_donated_array_is_changed_in_place(operation, size, dtype):
    used = {}
    for capacity in (1 << 10, 1 << 14):
        this = wrap(capacity, 32)
        example = jnp.ones((4,) if dtype == jnp.uint8 else (), dtype)
        rows = jax.eval_shape(functools.partial(this.init, example))
        shape = () if operation in ("write", "flag") else (size,)
        where = jax.ShapeDtypeStruct(shape, jnp.int32)
        values = jax.ShapeDtypeStruct((size, *example.shape), dtype)
        values = () if operation == "increment" else (values,)
        change = jax.jit(getattr(this, operation), donate_argnums=0)
        compiled = change.lower(rows, where, *values).compile()
        memory = compiled.memory_analysis()
        assert memory.alias_size_in_bytes >= rows.size * rows.dtype.itemsize
        used[capacity] = memory.temp_size_in_bytes
        for shape, name in SHAPE.findall(compiled.as_text()):
            elements = np.prod([int(n) for n in shape.split(",") if n])
            assert elements < rows.size or name in IN_PLACE, (shape, name)
    least, most = used.values()
    assert least == most < 8192


# ----------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((0, 1), "capacity 0 must be at least 1"),
        ((4, 0), r"largest_write 0 must be in \[1, 4\]"),
        ((4, 5), r"largest_write 5 must be in \[1, 4\]"),
    ],
)
def test_an_impossible_ring_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        wrap(*options)


def test_a_write_that_is_too_large_is_refused():
    this = compiled_wrap(5, 3)
    rows = this.init(jnp.float32(0))
    with pytest.raises(ValueError, match=r"a write of 4 must be in \[0, 3\]"):
        this.write(rows, jnp.int32(0), jnp.ones(4))


def test_values_of_another_shape_are_refused_and_not_written_in_part(monkeypatch):
    # As for users, whose annotations nobody checks.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    this = wrap(5, 3)
    rows = this.init(jnp.ones(4))
    for values in (jnp.ones((2, 3)), jnp.ones((2, 1)), jnp.ones((2, 4, 1))):
        with pytest.raises(AssertionError, match="shape"):
            this.write(rows, jnp.int32(0), values)
        with pytest.raises(AssertionError, match="shape"):
            this.put(rows, jnp.arange(2), values)
    with pytest.raises(AssertionError, match="shape"):
        this.put(rows, jnp.arange(2), jnp.ones((1, 4)))
