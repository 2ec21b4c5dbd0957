"""MNIST's files, what may be wrong with them, and the imbalanced split.

The digits in tests/data/mnist are 150 and 50 of each, both of the real training set:

    train, _ = mnist.load(Path("data/mnist"))
    generator = np.random.default_rng(0)
    first, rest = mnist.set_aside(train.labels, [150] * 10, generator)
    second, _ = mnist.set_aside(train.labels[rest], [50] * 10, generator)
    test = train.take(rest[second])
    mnist.write(Path("tests/data/mnist"), train.take(first), test)
"""

import gzip
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from experiments import mnist

FIXTURE = Path(__file__).parent / "data" / "mnist"


# A file, and what is wrong with it.


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("shape", [(3, 28, 28), (7,), (0, 28, 28)])
def test_what_was_written_as_idx_is_read_again(tmp_path, suffix, shape):
    array = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    path = tmp_path / f"file{suffix}"
    mnist.write_idx(path, array)
    read = mnist.read_idx(path, len(shape))
    assert read.dtype == np.uint8
    np.testing.assert_array_equal(read, array)
    assert (path.read_bytes()[:2] == b"\x1f\x8b") == bool(suffix)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_idx_is_laid_out_as_lecun_says(tmp_path):
    path = tmp_path / "labels"
    path.write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 2, 7, 9]))
    np.testing.assert_array_equal(mnist.read_idx(path, 1), [7, 9])


LABELS = bytes([0, 0, 8, 1, 0, 0, 0, 2, 7, 9])


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (LABELS[:-1], ["1 bytes of data", "2", "(2,)"]),
        (LABELS + b"x", ["3 bytes of data", "2", "(2,)"]),
        (LABELS[:6], ["6 bytes", "2049"]),
        (b"", ["0 bytes", "2049"]),
        (bytes([0, 0, 8, 3]) + LABELS[4:], ["2051", "2049", "1 dimensions"]),
        (b"<html>not found</html>", ["magic number", "2049"]),
        (gzip.compress(LABELS)[:-4], ["no whole gzip file"]),
        (gzip.compress(LABELS)[:12] + b"\xff" * 20, ["no whole gzip file"]),
    ],
    # Not their content: gzip's has the time in it, and each process collects its own.
    ids=[
        *("a byte less", "a byte more", "half a header", "nothing"),
        *("images", "a page", "cut", "spoiled"),
    ],
)
def test_a_file_that_is_not_what_it_must_be_is_one_line(tmp_path, content, parts):
    path = tmp_path / "labels"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="labels: ") as error:
        mnist.read_idx(path, 1)
    assert "\n" not in str(error.value)
    for part in parts:
        assert part in str(error.value)


def test_a_folder_without_a_file_says_both_ways_to_get_it(tmp_path):
    with pytest.raises(ValueError, match=r"train-images-idx3-ubyte.*--download"):
        mnist.load(tmp_path)


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        ((3, 28, 28), [1, 2], "3 train images must be as many as the 2"),
        ((0, 28, 28), [], "0 train images"),
        ((2, 27, 28), [1, 2], r"\(27, 28\) must be of 28 x 28"),
        ((2, 28, 28), [1, 10], "label 10"),
    ],
)
def test_files_that_do_not_belong_together_are_refused(
    tmp_path, images, labels, message
):
    digits = mnist.Digits(np.zeros(images, np.uint8), np.array(labels, np.uint8))
    mnist.write(tmp_path, digits, digits)
    with pytest.raises(ValueError, match=message):
        mnist.load(tmp_path)


def test_openml_s_copy_becomes_the_four_files(tmp_path, monkeypatch):
    monkeypatch.setattr(mnist, "NUM_TEST", 5)
    images = np.random.default_rng(0).integers(0, 256, (12, 784))
    labels = np.arange(12) % 10
    calls = []

    def fetch_openml(name, *, version, as_frame):
        calls.append((name, version, as_frame))
        target = labels.astype(str).astype(object)
        return types.SimpleNamespace(data=images.astype(float), target=target)

    module = types.ModuleType("sklearn.datasets")
    monkeypatch.setattr(module, "fetch_openml", fetch_openml, raising=False)
    monkeypatch.setitem(sys.modules, "sklearn", types.ModuleType("sklearn"))
    monkeypatch.setitem(sys.modules, "sklearn.datasets", module)
    for _ in range(2):  # The second time they are there.
        mnist.download(tmp_path)
    assert calls == [("mnist_784", 1, False)]
    train, test = mnist.load(tmp_path)
    np.testing.assert_array_equal(train.images, images[:7].reshape(7, 28, 28))
    np.testing.assert_array_equal(test.images, images[7:].reshape(5, 28, 28))
    np.testing.assert_array_equal(np.append(train.labels, test.labels), labels)


def test_a_download_without_scikit_learn_or_network_is_one_line(tmp_path, monkeypatch):
    def fetch_openml(name, **options):
        raise ConnectionError("no route")

    monkeypatch.setitem(sys.modules, "sklearn", types.ModuleType("sklearn"))
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ValueError, match="pip install scikit-learn"):
        mnist.download(tmp_path)
    module = types.SimpleNamespace(fetch_openml=fetch_openml)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", module)
    with pytest.raises(ValueError, match="OpenML can't be reached: no route"):
        mnist.download(tmp_path)
    assert not list(tmp_path.iterdir())


# What is rare.


def test_the_imbalance_is_exact_and_leaves_validation_and_test_balanced():
    train, test = mnist.load(FIXTURE)
    split = mnist.imbalanced(
        train, test, kept_share=0.05, validation_per_digit=20, seed=3
    )
    counts = lambda digits: np.bincount(digits.labels, minlength=10).tolist()
    # 5 % of 130 are 6.5, which rounds to 6.
    assert counts(split.train) == [6] * 5 + [130] * 5
    assert counts(split.validation) == [20] * 10
    assert split.test is test
    seen = lambda digits: {image.tobytes() for image in digits.images}
    of = [seen(train), seen(split.train), seen(split.validation)]
    assert len(of[0]) == 1500  # All are different, so bytes tell them apart.
    assert of[1] | of[2] <= of[0]
    assert not of[1] & of[2]
    labels = {i.tobytes(): y for i, y in zip(train.images, train.labels, strict=True)}
    for digits in split[:2]:
        for image, label in zip(digits.images, digits.labels, strict=True):
            assert labels[image.tobytes()] == label


def test_a_split_is_its_seed_s():
    split = lambda seed: mnist.imbalanced(
        *mnist.load(FIXTURE), kept_share=0.05, validation_per_digit=20, seed=seed
    )
    np.testing.assert_array_equal(split(0).train.images, split(0).train.images)
    assert not np.array_equal(split(0).train.images, split(1).train.images)
    assert not np.array_equal(split(0).validation.images, split(1).validation.images)
