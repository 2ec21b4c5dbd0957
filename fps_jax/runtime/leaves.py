"""The leaves of a pytree as named arrays on the host, and on disk through Orbax.

A leaf is saved under its path, ``state.learner.params['kernel']``, without the
containers around it: what comes back takes its containers from the tree that asks
for it, so that NamedTuples and optax states return as themselves.
"""

import re
from pathlib import Path
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jaxtyping import PyTree


class LeafType(TypedDict):
    """The type of a leaf, as JSON.

    Attributes:
      dtype: such as ``float32``, or ``key<fry>`` for typed keys.
      shape: without the hidden axis of a key's words.
      key_impl: the generator of typed keys, such as ``threefry2x32``; else None.
    """

    dtype: str
    shape: list[int]
    key_impl: str | None


def named_leaves(tree: PyTree) -> dict[str, Any]:
    """Returns the leaves by their path, in the order of `jax.tree.leaves`."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {"state" + jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def leaf_type(leaf: Any) -> LeafType:
    """Returns the type of an array, a number or a `jax.ShapeDtypeStruct`.

    The generator of a typed key is known of arrays only.
    """
    leaf = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
    is_key_array = _is_key(leaf) and isinstance(leaf, jax.Array)
    return LeafType(
        dtype=str(leaf.dtype),
        shape=list(leaf.shape),
        key_impl=str(jax.random.key_impl(leaf)) if is_key_array else None,
    )


def to_host(name: str, leaf: Any) -> np.ndarray:
    """Returns a leaf as a numpy array, a typed key as its words.

    Raises:
      TypeError: if it is neither numeric, nor boolean, nor a key.
    """
    array = np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)
    if not (jnp.issubdtype(array.dtype, np.number) or array.dtype == np.bool_):
        raise TypeError(f"leaf {name} is not a numeric array but {leaf!r}.")
    return array


def from_host(array: np.ndarray, saved: LeafType) -> Any:
    """Undoes `to_host`: numbers stay on the host, keys go to the default device."""
    if saved["key_impl"] is None:
        return array
    return jax.random.wrap_key_data(jnp.asarray(array), impl=saved["key_impl"])


def first_difference(
    saved: dict[str, LeafType], wanted: dict[str, LeafType]
) -> str | None:
    """Says which leaf differs first between two trees, None if none does."""

    def text(leaf: LeafType | None) -> str:
        return f"{leaf['dtype']}{leaf['shape']}" if leaf else "absent"

    for name in [*wanted, *(name for name in saved if name not in wanted)]:
        there, here = text(saved.get(name)), text(wanted.get(name))
        if there != here:
            return f"{name} is {there} in the checkpoint and {here} in this run"
    return None


def write_arrays(folder: Path, arrays: dict[str, np.ndarray]) -> None:
    """Writes arrays by name into a new folder, and returns once it is done.

    Raises:
      OSError: if the disk is full or refuses.
    """
    # Orbax refuses arrays without elements; their type says all there is of them.
    tree = {name: array for name, array in arrays.items() if array.size}
    if not tree:
        return
    try:
        with _checkpointer() as checkpointer:
            checkpointer.save(folder, args=ocp.args.PyTreeSave(tree))
    except ValueError as error:
        # TensorStore reports what the file system refused as a ValueError.
        # If several files were refused their reports are quoted, quotes and all.
        code = re.search(r"os_error_code=\\*'(\d+)", str(error))
        if code is None:
            raise
        raise OSError(int(code[1]), str(error)) from error


def read_arrays(folder: Path, saved: dict[str, LeafType]) -> dict[str, np.ndarray]:
    """Reads the arrays of some names, or of all, that `write_arrays` wrote."""
    arrays = {}
    names = {name: 0 for name, leaf in saved.items() if 0 not in leaf["shape"]}
    if names:
        some = ocp.args.PyTreeRestore(names, partial_restore=True)
        with _checkpointer() as checkpointer:
            arrays = checkpointer.restore(folder, args=some)
    empty = {
        name: np.zeros(leaf["shape"], jnp.dtype(leaf["dtype"]))
        for name, leaf in saved.items()
        if name not in arrays
    }
    return arrays | empty


def _is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _checkpointer() -> ocp.Checkpointer:
    # One active process, the caller: Orbax then waits for no other at its barriers.
    process = jax.process_index()
    options = ocp.options.MultiprocessingOptions(
        primary_host=process, active_processes={process}
    )
    return ocp.Checkpointer(
        ocp.PyTreeCheckpointHandler(multiprocessing_options=options),
        multiprocessing_options=options,
    )
