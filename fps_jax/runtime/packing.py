"""Small arrays laid end to end, since each argument of a compiled call costs time."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

LARGEST = 2**14
"""Elements of the largest array that is packed: taking one out again copies it."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where each leaf of a tree lies.

    Attributes:
      structure: of the tree.
      shapes: of its leaves.
      places: of its leaves: the number of the vector and the offset in it.
    """

    structure: Any
    shapes: tuple[tuple[int, ...], ...]
    places: tuple[tuple[int, int], ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packed:
    """A tree whose small leaves of one dtype share a vector.

    Attributes:
      vectors: ``[n]``; or, of any shape, a leaf that lies alone.
      layout: what it takes to get the tree back.
    """

    vectors: tuple[Any, ...]
    layout: Layout = dataclasses.field(metadata={"static": True})


def pack(tree: Any) -> Packed:
    """Packs a tree; within a compiled function.

    Args:
      tree: arrays and typed keys; keys, and what is larger than `LARGEST`, lie alone.
    """
    leaves, structure = jax.tree.flatten(tree)
    vectors: list[list[Any]] = []
    shared: dict[Any, int] = {}
    places = []
    for x in leaves:
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        if is_key or x.size > LARGEST:
            places.append((len(vectors), 0))
            vectors.append([x])
            continue
        if x.dtype not in shared:
            shared[x.dtype] = len(vectors)
            vectors.append([])
        mine = vectors[shared[x.dtype]]
        places.append((shared[x.dtype], sum(y.size for y in mine)))
        mine.append(x.reshape(-1))
    joined = tuple(x[0] if len(x) == 1 else jnp.concatenate(x) for x in vectors)
    shapes = tuple(x.shape for x in leaves)
    return Packed(joined, Layout(structure, shapes, tuple(places)))


def unpack(tree: Any) -> Any:
    """The tree that was packed; within a compiled function.

    Args:
      tree: what `pack` returned; any other tree is returned as it is.
    """
    if not isinstance(tree, Packed):
        return tree
    layout = tree.layout

    def take(shape, place):
        vector, offset = tree.vectors[place[0]], place[1]
        if vector.shape == shape:
            return vector
        return vector[offset : offset + math.prod(shape)].reshape(shape)

    leaves = map(take, layout.shapes, layout.places)
    return jax.tree.unflatten(layout.structure, leaves)
