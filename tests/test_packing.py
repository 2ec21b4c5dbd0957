"""A packed tree is the same tree, in fewer arrays."""

import jax
import jax.numpy as jnp
import numpy as np
from chex import assert_trees_all_equal
from hypothesis import given, settings
from hypothesis import strategies as st

from fps_jax.runtime import packing

SHAPES = st.sampled_from([(), (0,), (1,), (5,), (2, 3), (packing.LARGEST + 1,)])
DTYPES = st.sampled_from([np.float32, np.int32, np.uint8, np.bool_, jnp.bfloat16])
TREES = st.recursive(
    st.tuples(SHAPES, DTYPES, st.integers(0, 2**32 - 1)).map(
        lambda of: np.random.default_rng(of[2]).uniform(0, 9, of[0]).astype(of[1])
    ),
    lambda trees: st.lists(trees, max_size=4) | st.dictionaries(st.text(), trees),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(TREES)
def test_unpacking_gives_back_every_leaf_bit_for_bit(tree):
    tree = jax.tree.map(jnp.asarray, tree)
    packed = packing.pack(tree)
    again = packing.unpack(packed)
    assert_trees_all_equal(again, tree, strict=True)
    leaves = jax.tree.leaves(tree)
    large = [x for x in leaves if x.size > packing.LARGEST]
    small = {x.dtype for x in leaves if x.size <= packing.LARGEST}
    assert len(jax.tree.leaves(packed)) == len(large) + len(small)


def test_keys_lie_alone_and_stay_keys():
    tree = {"a": jnp.ones(3), "key": jax.random.key(7), "b": jnp.zeros((2, 2))}
    packed = packing.pack(tree)
    assert len(packed.vectors) == 2
    key = packing.unpack(packed)["key"]
    assert_trees_all_equal(jax.random.key_data(key), jax.random.key_data(tree["key"]))


def test_what_was_never_packed_is_unpacked_as_it_is():
    tree = {"a": jnp.ones(3)}
    assert packing.unpack(tree) is tree


def test_two_trees_of_one_kind_are_one_compilation():
    traces = []

    @jax.jit
    def total(packed):
        traces.append(1)
        return sum(jnp.sum(x) for x in jax.tree.leaves(packing.unpack(packed)))

    for value in 1.0, 2.0:
        tree = {"w": jnp.full((2, 3), value), "b": jnp.full((3,), value)}
        np.testing.assert_allclose(total(jax.jit(packing.pack)(tree)), 9 * value)
    assert len(traces) == 1
