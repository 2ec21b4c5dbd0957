"""Checkpoints: whole or not at all, checked before use, and kept by two rules."""

import contextlib
import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fps_jax.runtime import checkpoints as module
from fps_jax.runtime.checkpoints import CheckpointError, open_checkpoints

SMALL = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "n": np.int32(7)}


class Learner(NamedTuple):
    params: Any
    opt_state: Any
    keys: Any
    odd: Any


@pytest.fixture(scope="module")
def learner():
    """A state with every kind of leaf and container that a learner may hold."""
    params = {"Dense_0": {"kernel": jnp.full((4, 3), 0.1), "bias/x.y": jnp.zeros(3)}}
    optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    opt_state = jax.tree.map(lambda x: x + x.dtype.type(3), optimiser.init(params))
    keys = (
        jax.random.key(3),
        jax.random.split(jax.random.key(4), 5),
        jax.random.key(5, impl="rbg"),
    )
    odd = {
        "bfloat16": jnp.arange(3, dtype=jnp.bfloat16),
        "bool": np.array([True, False]),
        "uint8": np.arange(4, dtype=np.uint8),
        "no_elements": np.zeros((0, 3), np.int16),
        "special": np.array([np.nan, -0.0, np.inf, 1e-45], np.float32),
        "number": 5,
        "none": None,
        "nothing": (),
    }
    return Learner(params, opt_state, keys, odd)


def bits(tree):
    """The structure, and type, shape and bytes of every leaf."""

    def leaf_bits(x):
        if hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            words = np.asarray(jax.random.key_data(x))
            return str(x.dtype), str(jax.random.key_impl(x)), words.tobytes()
        x = np.asarray(x)
        return str(x.dtype), x.shape, x.tobytes()

    leaves, structure = jax.tree.flatten(tree)
    return structure, [leaf_bits(x) for x in leaves]


def leftovers(directory):
    return [entry.name for entry in directory.iterdir() if ".tmp" in entry.name]


def array_files(checkpoints, step):
    files = [f for f in (checkpoints.path(step) / "arrays").rglob("*") if f.is_file()]
    return sorted(files, key=lambda f: f.stat().st_size)


@pytest.fixture
def run_python():
    """Starts scripts, and ends with the test what is still running."""
    with contextlib.ExitStack() as stack:

        def start(script, *arguments):
            process = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", script, *map(str, arguments)],
                    cwd=Path(__file__).parents[1],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            stack.callback(process.kill)
            return process

        yield start


@pytest.mark.parametrize("as_target", ["arrays", "types"])
def test_a_state_comes_back_bit_for_bit_in_its_own_containers(
    tmp_path, learner, as_target
):
    checkpoints = open_checkpoints(tmp_path / "deep" / "run")
    meta = {"env_steps": 2**40, "rho_bar": float("inf"), "names": ["a"], "no": None}
    path = checkpoints.save(12, learner, meta=meta, score=1.5)
    assert path == tmp_path / "deep" / "run" / "0000000012"
    target = learner
    if as_target == "types":
        odd = learner.odd | {"number": jax.ShapeDtypeStruct((), np.int64)}
        types = jax.eval_shape(lambda: learner._replace(odd={}))
        types = types._replace(odd=odd)
        target = types
    state, restored_meta = checkpoints.restore(12, target)
    assert bits(state) == bits(learner)
    assert restored_meta == checkpoints.meta(12) == meta
    assert isinstance(state.opt_state[1][0], optax.ScaleByAdamState)
    assert type(state.params["Dense_0"]["kernel"]) is np.ndarray
    np.testing.assert_array_equal(
        jax.random.normal(state.keys[0], 3), jax.random.normal(jax.random.key(3), 3)
    )


def test_a_state_on_four_devices_is_taken_up_by_one_or_two(tmp_path):
    def place(tree, count):
        mesh = Mesh(jax.devices()[:count], "learner")
        return jax.device_put(tree, NamedSharding(mesh, PartitionSpec()))

    checkpoints = open_checkpoints(tmp_path)
    replicated = place(SMALL, 4)
    assert len(replicated["w"].devices()) == 4
    checkpoints.save(0, replicated, meta={})
    state, _ = checkpoints.restore(0, SMALL)
    for count in (1, 2):
        assert bits(place(state, count)) == bits(SMALL)


def test_a_single_array_and_a_state_without_elements_are_states(tmp_path):
    checkpoints = open_checkpoints(tmp_path)
    for step, state in enumerate([np.float32(2.0), (np.zeros((0,), np.float32),), ()]):
        checkpoints.save(step, state, meta={})
        assert bits(checkpoints.restore(step, state)[0]) == bits(state)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"w": np.zeros((2, 4), np.float32)}, "['w'] is float32[2, 3] in the"),
        ({"w": np.zeros((2, 3), np.float16)}, "and float16[2, 3] in this run"),
        ({"more": np.zeros(1)}, "['more'] is absent in the checkpoint and float64[1]"),
        ({"w": None}, "['w'] is float32[2, 3] in the checkpoint and absent in this"),
        ({"key": jax.random.key(0, impl="rbg")}, "key<fry>[] in the checkpoint and "),
        ({"w": None, "a": np.zeros(9)}, "['a'] is absent in the checkpoint"),
    ],
    ids=["shape", "dtype", "added", "removed", "key", "first"],
)
def test_another_state_is_refused_by_its_first_leaf_that_differs(
    tmp_path, change, says
):
    checkpoints = open_checkpoints(tmp_path)
    state = SMALL | {"key": jax.random.key(0)}
    checkpoints.save(1, state, meta={})
    with pytest.raises(CheckpointError) as refusal:
        checkpoints.restore(1, state | change)
    assert says in str(refusal.value)
    assert str(checkpoints.path(1)) in str(refusal.value)


def truncate(file):
    file.write_bytes(file.read_bytes()[:-1])


def flip(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda c: truncate(array_files(c, 3)[-1]), r"arrays/\S+ has \d+ of \d+ bytes"),
        (lambda c: flip(array_files(c, 3)[-1]), r"arrays/\S+ is not what was written"),
        (lambda c: array_files(c, 3)[-1].unlink(), r"arrays/\S+ is missing"),
        (lambda c: truncate_manifest(c), "manifest.json is not whole"),
        (lambda c: edit_manifest(c), "manifest.json is not what was written"),
        (lambda c: (c.path(3) / "manifest.json").unlink(), "manifest.json cannot be"),
    ],
    ids=["truncated", "flipped", "missing", "half manifest", "edited", "no manifest"],
)
def test_a_damaged_checkpoint_is_refused_and_the_whole_one_before_it_offered(
    tmp_path, damage, says
):
    checkpoints = open_checkpoints(tmp_path, keep_last=9)
    for step in range(5):
        checkpoints.save(step, SMALL, meta={"env_steps": 1234}, score=float(step))
    flip(array_files(checkpoints, 2)[-1])  # Not to be offered.
    damage(checkpoints)
    with pytest.raises(CheckpointError, match=says) as refusal:
        checkpoints.restore(3, SMALL)
    message = str(refusal.value)
    assert f"checkpoint {checkpoints.path(3)} is damaged" in message
    assert f"{checkpoints.path(1)}, is whole" in message
    assert "--resume-step 1," in message
    assert bits(checkpoints.restore(1, SMALL)[0]) == bits(SMALL)
    assert checkpoints.steps() == [0, 1, 2, 3, 4]
    with pytest.raises(CheckpointError, match=says):
        checkpoints.meta(3)


def truncate_manifest(checkpoints):
    manifest = checkpoints.path(3) / "manifest.json"
    manifest.write_text(manifest.read_text()[:-4])


def edit_manifest(checkpoints):
    manifest = checkpoints.path(3) / "manifest.json"
    manifest.write_text(manifest.read_text().replace("1234", "1235"))


def test_without_a_whole_one_before_it_damage_says_so(tmp_path):
    checkpoints = open_checkpoints(tmp_path)
    checkpoints.save(1, SMALL, meta={})
    checkpoints.save(2, SMALL, meta={})
    truncate(array_files(checkpoints, 1)[-1])
    with pytest.raises(CheckpointError, match="none before it is whole"):
        checkpoints.restore(1, SMALL)


def test_a_missing_checkpoint_is_named_with_those_that_are_there(tmp_path):
    checkpoints = open_checkpoints(tmp_path)
    checkpoints.save(2, SMALL, meta={})
    with pytest.raises(CheckpointError, match=r"no checkpoint .*0000000005; .* \[2\]"):
        checkpoints.restore(5, SMALL)


@pytest.mark.parametrize(
    "where", ["write_arrays", "write_manifest", "sync_tree", "os.replace"]
)
def test_a_full_disk_is_reported_and_harms_no_earlier_checkpoint(
    tmp_path, monkeypatch, where
):
    checkpoints = open_checkpoints(tmp_path, keep_last=1)
    checkpoints.save(1, SMALL, meta={"n": 1})

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        owner = module.os if where == "os.replace" else module
        patch.setattr(owner, where.removeprefix("os."), full)
        with pytest.raises(OSError, match="No space left on device") as report:
            checkpoints.save(2, SMALL, meta={"n": 2})
    assert report.value.errno == errno.ENOSPC
    assert f"checkpoint {checkpoints.path(2)} was not written" in str(report.value)
    assert leftovers(tmp_path) == []
    assert checkpoints.steps() == [1]
    assert checkpoints.restore(1, SMALL)[1] == {"n": 1}
    checkpoints.save(2, SMALL, meta={"n": 2})
    assert checkpoints.steps() == [2]


FILE_SIZE_LIMIT = """
import resource, sys
import numpy as np
from fps_jax.runtime.checkpoints import open_checkpoints

checkpoints = open_checkpoints(sys.argv[1])
checkpoints.save(1, {"w": np.zeros(9)}, meta={})
resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
noise = np.random.default_rng(0).random(100_000)
try:
    checkpoints.save(2, {"w": noise, "v": noise}, meta={})
except OSError as error:
    sys.stdout.write(f"{error.errno} {error}")
"""


def test_what_the_file_system_refuses_inside_orbax_is_an_os_error(tmp_path, run_python):
    process = run_python(FILE_SIZE_LIMIT, tmp_path)
    said, _ = process.communicate(timeout=60)
    assert said.startswith(f"{errno.EFBIG} ")
    assert f"{tmp_path}/0000000002 was not written" in said
    assert "File too large" in said
    checkpoints = open_checkpoints(tmp_path)
    assert checkpoints.steps() == [1]
    checkpoints.restore(1, {"w": np.zeros(9)})


KILLED = """
import os, signal, sys
import numpy as np
from fps_jax.runtime import checkpoints

opened = checkpoints.open_checkpoints(sys.argv[1], keep_last=1)
opened.save(1, {"w": np.zeros(9)}, meta={"n": 1})
setattr(checkpoints, sys.argv[2], lambda *_: os.kill(os.getpid(), signal.SIGKILL))
opened.save(2, {"w": np.ones(9)}, meta={"n": 2})
"""


def test_a_killed_save_leaves_the_earlier_checkpoint_and_rubbish(tmp_path, run_python):
    stages = ["write_manifest", "sync_tree"]
    processes = [run_python(KILLED, tmp_path / stage, stage) for stage in stages]
    for stage, process in zip(stages, processes, strict=True):
        process.communicate(timeout=60)
        assert process.returncode == -signal.SIGKILL
        checkpoints = open_checkpoints(tmp_path / stage, keep_last=1)
        assert len(leftovers(tmp_path / stage)) == 1
        assert checkpoints.steps() == [1]
        assert checkpoints.restore(1, {"w": np.zeros(9)})[1] == {"n": 1}
        checkpoints.save(2, {"w": np.ones(9)}, meta={"n": 2})
        assert leftovers(tmp_path / stage) == []
        assert checkpoints.steps() == [2]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_crash_while_an_old_checkpoint_goes_leaves_no_half_of_it(
    tmp_path, monkeypatch, when
):
    checkpoints = open_checkpoints(tmp_path, keep_last=1)
    checkpoints.save(1, SMALL, meta={})

    def half_deleted(path, **_):
        next(f for f in Path(path).rglob("*") if f.is_file()).unlink()
        raise KeyboardInterrupt

    replace = os.replace

    def not_renamed(source, target):
        if ".tmp-" not in Path(source).name:
            raise KeyboardInterrupt
        replace(source, target)

    with monkeypatch.context() as patch:
        if when == "before":
            patch.setattr(module.os, "replace", not_renamed)
        else:
            patch.setattr(module.shutil, "rmtree", half_deleted)
        with pytest.raises(KeyboardInterrupt):
            checkpoints.save(2, SMALL, meta={})
    assert checkpoints.steps() == ([1, 2] if when == "before" else [2])
    for step in checkpoints.steps():
        checkpoints.restore(step, SMALL)


def test_everything_is_on_the_disk_before_the_name_and_the_name_before_the_return(
    tmp_path, monkeypatch
):
    order = []
    fsync, replace = os.fsync, os.replace

    def spied_fsync(descriptor):
        order.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def spied_replace(source, target):
        # Orbax renames too, in its own folder within ours.
        if Path(target) == tmp_path / "0000000001":
            order.append("renamed")
            written = [Path(source), *Path(source).rglob("*")]
            assert {entry.stat().st_ino for entry in written} <= set(order)
            assert len(written) > 5
        replace(source, target)

    monkeypatch.setattr(os, "fsync", spied_fsync)
    monkeypatch.setattr(os, "replace", spied_replace)
    open_checkpoints(tmp_path).save(1, SMALL, meta={})
    assert order[-2:] == ["renamed", tmp_path.stat().st_ino]


def test_a_reader_leaves_alone_what_a_writer_is_writing(tmp_path):
    open_checkpoints(tmp_path).save(1, SMALL, meta={})
    (tmp_path / ".0000000002.tmp-0123abcd").mkdir()
    reader = open_checkpoints(tmp_path)
    reader.restore(reader.latest(), SMALL)
    assert leftovers(tmp_path) == [".0000000002.tmp-0123abcd"]
    reader.save(2, SMALL, meta={})
    assert leftovers(tmp_path) == []


class Twin:
    """Retention as one would do it on paper: every score ever, every rule in turn."""

    def __init__(self, keep_last, keep_best):
        self.keep_last, self.keep_best, self.scores = keep_last, keep_best, {}

    def save(self, step, score):
        self.scores[step] = score
        newest = sorted(self.scores)[-self.keep_last :]
        best = self.best() if self.keep_best else None
        self.scores = {s: x for s, x in self.scores.items() if s in newest or s == best}

    def best(self):
        best = None
        for step in sorted(self.scores):
            score = self.scores[step]
            if score is None or np.isnan(score):
                continue
            if best is None or score >= self.scores[best]:
                best = step
        return best

    def discard_after(self, step):
        self.scores = {s: x for s, x in self.scores.items() if s <= step}


@pytest.mark.parametrize(("keep_last", "keep_best"), [(1, True), (2, False), (3, True)])
def test_random_histories_keep_what_the_naive_twin_keeps(
    tmp_path, monkeypatch, keep_last, keep_best
):
    rng = np.random.default_rng(keep_last)
    # Orbax is not what is tested here, and takes most of the time.
    monkeypatch.setattr(module, "write_arrays", lambda folder, arrays: folder.mkdir())
    twin = Twin(keep_last, keep_best)
    checkpoints = open_checkpoints(tmp_path, keep_last=keep_last, keep_best=keep_best)
    saved = discarded = 0
    for _ in range(120):
        latest = checkpoints.latest()
        match rng.choice(["save", "discard", "reopen", "fail"], p=[0.7, 0.1, 0.1, 0.1]):
            case "save":
                step = int(rng.integers(1, 10**9)) + (latest if latest else -1)
                score = [None, float("nan"), *map(float, range(5))][rng.integers(7)]
                checkpoints.save(step, SMALL, meta={}, score=score)
                twin.save(step, score)
                saved += 1
                assert checkpoints.latest() == step
            case "discard" if latest is not None:
                step = int(rng.choice(checkpoints.steps()))
                checkpoints.discard_after(step)
                twin.discard_after(step)
                discarded += step < latest
            case "fail" if latest is not None:
                with pytest.raises(ValueError, match=f"step {latest} must"):
                    checkpoints.save(latest, SMALL, meta={})
            case "reopen":
                checkpoints = open_checkpoints(
                    tmp_path, keep_last=keep_last, keep_best=keep_best
                )
        assert checkpoints.steps() == sorted(twin.scores)
        assert checkpoints.best() == twin.best()
        assert leftovers(tmp_path) == []
    assert saved > 60
    assert discarded > 0


def test_an_empty_folder_or_none_holds_no_checkpoint(tmp_path):
    for directory in (tmp_path, tmp_path / "none"):
        checkpoints = open_checkpoints(directory)
        assert checkpoints.steps() == []
        assert checkpoints.latest() is None
        assert checkpoints.best() is None
    assert not (tmp_path / "none").exists()


def test_nonsense_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match="keep_last 0 must be at least 1"):
        open_checkpoints(tmp_path, keep_last=0)
    checkpoints = open_checkpoints(tmp_path / "run")
    with pytest.raises(ValueError, match="step -1 must be at least 0"):
        checkpoints.save(-1, SMALL, meta={})
    with pytest.raises(TypeError, match=re.escape("leaf state['name'] is not a numer")):
        checkpoints.save(0, {"name": "text"}, meta={})
    with pytest.raises(TypeError, match="not JSON serializable"):
        checkpoints.save(0, SMALL, meta={"path": Path("x")})
    assert not (tmp_path / "run").exists()


def test_the_manifest_is_json_for_people_to_read(tmp_path):
    path = open_checkpoints(tmp_path).save(4, SMALL, meta={"env_steps": 9}, score=2.0)
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["step"] == 4
    assert manifest["score"] == 2.0
    assert manifest["meta"] == {"env_steps": 9}
    w = {"dtype": "float32", "shape": [2, 3], "key_impl": None}
    assert manifest["leaves"]["state['w']"] == w
    listed = {path / name for name in manifest["files"]}
    present = {f for f in path.rglob("*") if f.is_file()} - {path / "manifest.json"}
    assert listed == present


TWO_PROCESSES = """
import sys, time
import jax
import numpy as np

process = int(sys.argv[1])
jax.distributed.initialize(sys.argv[2], num_processes=2, process_id=process)
from fps_jax.runtime.checkpoints import open_checkpoints

checkpoints = open_checkpoints(sys.argv[3])
state = {"w": np.arange(3.0), "key": jax.random.key(7)}
if process == 1:
    checkpoints.save(1, state, meta={})
    assert not checkpoints.directory.exists()
    open(sys.argv[4], "w").close()
    while checkpoints.latest() is None:
        time.sleep(0.01)
else:
    # The other process has come and gone: a barrier would wait in vain.
    import pathlib
    while not pathlib.Path(sys.argv[4]).exists():
        time.sleep(0.01)
    checkpoints.save(1, state, meta={"n": 1})
restored, meta = checkpoints.restore(1, state)
checkpoints.discard_after(0 if process == 1 else 1)
assert checkpoints.steps() == [1]
np.testing.assert_array_equal(restored["w"], state["w"])
assert jax.random.key_data(restored["key"]).tolist() == [0, 7]
sys.stdout.write(f"{jax.process_count()} {meta}")
"""


def test_of_two_processes_one_writes_without_the_other_and_both_read(
    tmp_path, run_python
):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    arguments = (address, tmp_path / "run", tmp_path / "signal")
    processes = [run_python(TWO_PROCESSES, i, *arguments) for i in range(2)]
    for process in processes:
        said, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        assert said == "2 {'n': 1}"
