"""Checkpoints: the state of a run on disk, whole or not at all.

Orbax serialises the arrays (`leaves`); here is what a run must be able to trust. A
folder under a checkpoint's final name is complete, every byte of it is checked before
it is used, and an older checkpoint goes only once a newer one is whole.

    <directory>/<step>/manifest.json   meta, score, types of leaves, hashes of files
    <directory>/<step>/arrays/         the leaves by name
    <directory>/.<step>.tmp-<random>/  half-written or half-deleted; the next save
                                       removes what a crash has left

Arrays are saved as one host holds them, without their devices, and restored to the
host: any number of devices may take them up. Of several processes only process 0
writes, without waiting for the others, and all may read.
"""

import dataclasses
import json
import math
import os
import re
import shutil
import uuid
from pathlib import Path
from typing import Any

import jax
from jaxtyping import PyTree

from fps_jax.runtime.leaves import (
    first_difference,
    from_host,
    leaf_type,
    named_leaves,
    read_arrays,
    to_host,
    write_arrays,
)
from fps_jax.runtime.manifest import (
    DamagedError,
    read_manifest,
    sync,
    sync_tree,
    verify,
    write_manifest,
)

_ARRAYS = "arrays"


class CheckpointError(RuntimeError):
    """A checkpoint that is missing, damaged, or of another state than asked for."""


@dataclasses.dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one run, by step; `open_checkpoints` makes it.

    Attributes:
      directory: the folder that holds them; the first `save` creates it.
      keep_last: how many of the newest stay.
      keep_best: whether the one of the highest score stays too.
    """

    directory: Path
    keep_last: int
    keep_best: bool

    def path(self, step: int) -> Path:
        """Returns the folder of a step's checkpoint, there or not."""
        return self.directory / f"{step:010d}"

    def steps(self) -> list[int]:
        """Returns the steps of all checkpoints, oldest first, damaged or not."""
        if not self.directory.is_dir():
            return []
        names = (entry.name for entry in self.directory.iterdir())
        return sorted(int(name) for name in names if re.fullmatch(r"\d{10,}", name))

    def latest(self) -> int | None:
        """Returns the newest step, None if there is no checkpoint."""
        return max(self.steps(), default=None)

    def best(self) -> int | None:
        """Returns the step of the highest score, the newest of equals; None if none."""
        scores = [(_score(self.path(step)), step) for step in self.steps()]
        known = [(score, step) for score, step in scores if score is not None]
        return max(known)[1] if known else None

    def save(
        self,
        step: int,
        state: PyTree,
        *,
        meta: dict[str, Any],
        score: float | None = None,
    ) -> Path:
        """Writes a checkpoint, then deletes those that need not stay.

        A crash at any point leaves the earlier checkpoints whole. On a process other
        than 0 it does nothing.

        Args:
          step: names the checkpoint; greater than `latest`. A run that resumes from
            an earlier one calls `discard_after` first.
          state: arrays on the host or on devices, replicated if on several processes.
          meta: what else a resumed run must know (counters, versions, config), such
            as `json` can write.
          score: what `best` compares, the higher the better; NaN counts as None.

        Returns:
          The folder of the checkpoint.

        Raises:
          OSError: if the disk is full or refuses; nothing of this checkpoint remains.
          TypeError: if a leaf is not a numeric array, or `meta` is not JSON.
          ValueError: if `step` is not greater than `latest`.
        """
        path = self.path(step)
        if jax.process_index() != 0:
            return path
        latest = self.latest()
        if step < 0 or (latest is not None and step <= latest):
            raise ValueError(
                f"step {step} must be at least 0 and greater than {latest}, the "
                f"latest checkpoint in {self.directory}."
            )
        leaves = named_leaves(state)
        arrays = {name: to_host(name, leaf) for name, leaf in leaves.items()}
        content = {
            "step": step,
            "score": None if score is None or math.isnan(score) else float(score),
            "meta": meta,
            "leaves": {name: leaf_type(leaf) for name, leaf in leaves.items()},
        }
        json.dumps(content)  # Refuses what is not JSON before anything is written.
        self._write(step, arrays, content)
        self._retain()
        return path

    def restore(
        self, step: int, target: PyTree, *, is_part: bool = False
    ) -> tuple[PyTree, dict[str, Any]]:
        """Reads a checkpoint, after checking every byte of it.

        Args:
          step: which one.
          target: a state of the same structure, of arrays or `jax.ShapeDtypeStruct`;
            only its types count.
          is_part: whether `target` may lack leaves; those are left on disk.

        Returns:
          ``(state, meta)``: numpy arrays in the structure of `target`, typed keys as
          keys on the default device, and `meta` as `json` reads it.

        Raises:
          CheckpointError: if the checkpoint is missing or damaged, naming the whole
            one before it; or if its leaves are not those of `target`, naming the
            first that differs.
        """
        path, manifest = self.path(step), self._verified(step)
        saved, wanted = manifest["leaves"], named_leaves(target)
        if is_part:
            saved = {name: saved[name] for name in wanted if name in saved}
        difference = first_difference(
            saved, {name: leaf_type(leaf) for name, leaf in wanted.items()}
        )
        if difference:
            raise CheckpointError(f"checkpoint {path} does not fit: {difference}.")
        arrays = read_arrays(path / _ARRAYS, saved)
        leaves = [from_host(arrays[name], saved[name]) for name in wanted]
        return jax.tree.structure(target).unflatten(leaves), manifest["meta"]

    def meta(self, step: int) -> dict[str, Any]:
        """Returns what `save` was told beside the state.

        Raises:
          CheckpointError: if the checkpoint is missing or damaged.
        """
        return self._verified(step)["meta"]

    def discard_after(self, step: int) -> None:
        """Deletes the checkpoints later than `step`.

        For a run that resumes from an earlier checkpoint: what came after it belongs
        to a history that the run is about to write anew. Only process 0 deletes.
        """
        if jax.process_index() == 0:
            for later in self.steps():
                if later > step:
                    self._delete(later)

    def _verified(self, step: int) -> dict[str, Any]:
        path = self.path(step)
        if not path.is_dir():
            raise CheckpointError(
                f"there is no checkpoint {path}; there are the steps {self.steps()}."
            )
        try:
            return verify(path)
        except DamagedError as damage:
            raise CheckpointError(
                f"checkpoint {path} is damaged: {damage}; {self._way_out(step)}."
            ) from None

    def _write(self, step: int, arrays: dict[str, Any], content: dict) -> None:
        path, temporary = self.path(step), self._temporary(step)
        # Here and not on opening: a reader must not delete what the writer is writing.
        for leftover in self.directory.glob(".*.tmp-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        try:
            temporary.mkdir(parents=True)
            write_arrays(temporary / _ARRAYS, arrays)
            write_manifest(temporary, content)
            sync_tree(temporary)
            os.replace(temporary, path)
            sync(self.directory)
        except BaseException as error:
            shutil.rmtree(temporary, ignore_errors=True)
            if isinstance(error, OSError):
                message = f"checkpoint {path} was not written: {error.strerror}"
                raise OSError(error.errno, message) from error
            raise

    def _retain(self) -> None:
        steps = self.steps()
        kept = {*steps[-self.keep_last :], self.best() if self.keep_best else None}
        for step in steps:
            if step not in kept:
                self._delete(step)

    def _delete(self, step: int) -> None:
        # Renamed first: a crash must not leave a part of it under its final name.
        temporary = self._temporary(step)
        os.replace(self.path(step), temporary)
        shutil.rmtree(temporary)

    def _temporary(self, step: int) -> Path:
        return self.directory / f".{step:010d}.tmp-{uuid.uuid4().hex[:8]}"

    def _way_out(self, step: int) -> str:
        for earlier in reversed(self.steps()):
            if earlier < step and _is_whole(self.path(earlier)):
                return (
                    f"the one before it, {self.path(earlier)}, is whole: resume from "
                    f"it with --resume-step {earlier}, or delete the damaged folder"
                )
        return "none before it is whole"


def open_checkpoints(
    directory: str | os.PathLike[str], *, keep_last: int = 3, keep_best: bool = True
) -> Checkpoints:
    """Opens the checkpoints of a run, to write or to read; touches nothing.

    Args:
      directory: their folder; it need not exist.
      keep_last: how many of the newest stay, at least 1.
      keep_best: whether the one of the highest score stays too.

    Raises:
      ValueError: if `keep_last` is out of range.
    """
    if keep_last < 1:
        raise ValueError(f"keep_last {keep_last} must be at least 1.")
    return Checkpoints(Path(directory).absolute(), keep_last, keep_best)


def _score(folder: Path) -> float | None:
    try:
        return read_manifest(folder)["score"]
    except DamagedError:
        return None


def _is_whole(folder: Path) -> bool:
    try:
        verify(folder)
    except DamagedError:
        return False
    return True
