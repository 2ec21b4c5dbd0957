"""MNIST from its IDX files, and the class-imbalanced variant of it.

The files are LeCun's, gzipped or not: ``train-images-idx3-ubyte[.gz]`` and so on. Where
there are none, `download` makes them from OpenML's copy. An IDX file of bytes is two
bytes 0, the dtype 8, the number of dimensions, each dimension as four bytes with the
highest first, and the data.
"""

import gzip
import math
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fps_jax import checks

PARTS = {"train": "train", "test": "t10k"}
KINDS = {3: "images-idx3-ubyte", 1: "labels-idx1-ubyte"}
"""Names of files by the number of their dimensions."""
NUM_DIGITS, SIDE = 10, 28
RARE = 5
"""Digits below this one become rare."""
NUM_TEST = 10_000
"""Images of the test set, which are OpenML's last."""


class Digits(NamedTuple):
    """Labelled images.

    Attributes:
      images: ``[N, 28, 28]``, bytes, 255 is ink.
      labels: ``[N]``, bytes, 0 to 9.
    """

    images: np.ndarray
    labels: np.ndarray

    def take(self, places: np.ndarray) -> "Digits":
        """Some of them.

        Args:
          places: which, integers.
        """
        return Digits(self.images[places], self.labels[places])


class Split(NamedTuple):
    """What is learned from, what step-sizes are selected by, and what is reported.

    Attributes:
      train: imbalanced.
      validation: as many of each digit; none of them in `train`.
      test: as it came.
    """

    train: Digits
    validation: Digits
    test: Digits


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """Reads an IDX file of bytes, gzipped or not.

    Args:
      path: the file.
      dimensions: how many its array must have.

    Returns:
      The array, uint8.

    Raises:
      ValueError: if the file is something else, or not whole; in one line.
    """
    content = path.read_bytes()
    if content.startswith(b"\x1f\x8b"):
        try:
            content = gzip.decompress(content)
        except (EOFError, OSError, zlib.error) as error:
            raise ValueError(f"{path}: is no whole gzip file: {error}") from None
    magic, start = 0x800 + dimensions, 4 + 4 * dimensions
    found = int.from_bytes(content[:4], "big")
    if len(content) < start or found != magic:
        raise ValueError(
            f"{path}: magic number {found} of {len(content)} bytes must be {magic}, "
            f"of bytes in {dimensions} dimensions."
        )
    shape = tuple(np.frombuffer(content[4:start], ">u4").tolist())
    if len(content) - start != math.prod(shape):
        raise ValueError(
            f"{path}: {len(content) - start} bytes of data must be "
            f"{math.prod(shape)}, of the shape {shape} in its header."
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def write_idx(path: Path, array: np.ndarray) -> None:
    """Writes bytes as an IDX file, gzipped if its name ends in .gz.

    Args:
      path: the file; it appears whole or not at all.
      array: uint8.
    """
    header = np.array([0x800 + array.ndim, *array.shape], ">u4")
    content = header.tobytes() + array.tobytes()
    if path.suffix == ".gz":
        content = gzip.compress(content, mtime=0)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(content)
    temporary.replace(path)


def load(folder: Path) -> tuple[Digits, Digits]:
    """Reads the training set and the test set.

    Args:
      folder: where the four files are.

    Raises:
      ValueError: if one of them is missing, or is not what it must be; in one line.
    """
    train, test = (_load_part(folder, part) for part in PARTS)
    return train, test


def write(folder: Path, train: Digits, test: Digits) -> None:
    """Writes the four files, gzipped.

    Args:
      folder: where.
      train: the training set.
      test: the test set.
    """
    for part, digits in zip(PARTS, (train, test), strict=True):
        for dimensions, array in zip(KINDS, digits, strict=True):
            write_idx(folder / f"{_name(part, dimensions)}.gz", array)


def download(folder: Path) -> None:
    """Writes the four files from OpenML's ``mnist_784``, by scikit-learn.

    Args:
      folder: where; what is there already stays, if all four are.

    Raises:
      ValueError: if scikit-learn is missing, or OpenML can't be reached.
    """
    if all(_find(folder, part, kind) for part in PARTS for kind in KINDS):
        return
    try:
        from sklearn.datasets import fetch_openml  # pyright: ignore
    except ImportError:
        raise ValueError(
            "download needs scikit-learn: pip install scikit-learn."
        ) from None
    try:
        found = fetch_openml("mnist_784", version=1, as_frame=False)
    except OSError as error:
        raise ValueError(f"download: OpenML can't be reached: {error}") from None
    images = np.asarray(found.data).astype(np.uint8).reshape(-1, SIDE, SIDE)
    both = Digits(images, np.asarray(found.target).astype(np.uint8))
    first = np.arange(len(images) - NUM_TEST)
    write(folder, both.take(first), both.take(len(first) + np.arange(NUM_TEST)))


def imbalanced(
    train: Digits,
    test: Digits,
    *,
    kept_share: float = 0.01,
    validation_per_digit: int = 1000,
    seed: int = 0,
) -> Split:
    """Sets a balanced validation set aside, then removes most of the digits 0 to 4.

    Schaul et al. (2016), arXiv:1511.05952, section 6 and appendix B.3: of each of these
    digits a random 1 % stays in the training set, and all of the others. The test set
    stays as it is.

    Args:
      train: the training set.
      test: the test set.
      kept_share: of the training examples of each digit 0 to 4, in (0, 1], to the
        nearest whole example.
      validation_per_digit: examples of each digit that are set aside first.
      seed: of what is drawn.

    Raises:
      ValueError: if a number is out of range, or nothing is left of a digit.
    """
    checks.number("kept_share", kept_share, 0, 1, ends="(]")
    fewest = int(np.bincount(train.labels, minlength=NUM_DIGITS).min())
    checks.number("validation_per_digit", validation_per_digit, 1, fewest, ends="[)")
    generator = np.random.default_rng(seed)
    aside, rest = set_aside(train.labels, [validation_per_digit] * 10, generator)
    counts = np.bincount(train.labels[rest], minlength=NUM_DIGITS)
    kept = [round(kept_share * int(count)) for count in counts[:RARE]]
    kept += counts[RARE:].tolist()
    for digit in np.flatnonzero(np.equal(kept, 0)):
        raise ValueError(
            f"kept_share {kept_share} must leave something of the "
            f"{counts[digit]} examples of {digit}."
        )
    chosen, _ = set_aside(train.labels[rest], kept, generator)
    return Split(train.take(rest[chosen]), train.take(aside), test)


def set_aside(
    labels: np.ndarray, counts: Iterable[int], generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Chooses so many examples of each digit at random.

    Args:
      labels: of all examples.
      counts: how many, of each digit.
      generator: of what is drawn.

    Returns:
      The places of those that were chosen and of the others, in order.

    Raises:
      ValueError: if a digit has fewer examples.
    """
    is_chosen = np.zeros(len(labels), bool)
    for digit, count in enumerate(counts):
        places = np.flatnonzero(labels == digit)
        checks.number(f"the number of {digit}s set aside", count, 0, len(places))
        is_chosen[generator.permutation(places)[:count]] = True
    return np.flatnonzero(is_chosen), np.flatnonzero(~is_chosen)


def _name(part: str, dimensions: int) -> str:
    return f"{PARTS[part]}-{KINDS[dimensions]}"


def _find(folder: Path, part: str, dimensions: int) -> Path | None:
    """The file, as it is or gzipped, if it is there."""
    name = _name(part, dimensions)
    paths = [folder / name, folder / f"{name}.gz"]
    return next((path for path in paths if path.is_file()), None)


def _load_part(folder: Path, part: str) -> Digits:
    arrays = []
    for dimensions in KINDS:
        path = _find(folder, part, dimensions)
        if path is None:
            name = _name(part, dimensions)
            raise ValueError(
                f"data_dir {folder} has no {name} and no {name}.gz: put MNIST's four "
                "IDX files there, or give --download, which needs scikit-learn."
            )
        arrays.append(read_idx(path, dimensions))
    images, labels = arrays
    if images.shape[1:] != (SIDE, SIDE):
        raise ValueError(
            f"{folder}: {part} images of {images.shape[1:]} must be of 28 x 28."
        )
    if len(images) != len(labels) or not len(labels):
        raise ValueError(
            f"{folder}: {len(images)} {part} images must be as many as the "
            f"{len(labels)} labels, and some."
        )
    if labels.max() >= NUM_DIGITS:
        raise ValueError(f"{folder}: {part} label {labels.max()} must be in [0, 9].")
    return Digits(images, labels)
