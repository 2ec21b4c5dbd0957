"""A film shows what the policy did, and is there whole or not at all."""

import dataclasses
import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import imageio_ffmpeg
import jax
import numpy as np
import pytest
from PIL import Image
from scripted_env import ScriptedEnv, episode_length
from tiny_agent import TinyConfig

from experiments import film, presets, train, watch
from fps_jax.runtime import envs, parallel, rendering
from fps_jax.runtime.checkpoints import CheckpointError, Checkpoints, open_checkpoints
from fps_jax.runtime.evaluation import evaluate
from fps_jax.runtime.leaves import leaf_type, named_leaves, read_arrays
from fps_jax.runtime.options import TrainConfig
from fps_jax.runtime.policy import restore_policy
from fps_jax.types import AgentState

SIZE = {"width": 72, "height": 96}


class PaintedEnv(ScriptedEnv):
    """Draws environment i, in step s, in one colour: (50 i, 10 s, 200)."""

    def __init__(self, num_envs=3):
        super().__init__(num_envs)
        self.drawn = []

    def render(self, envs):
        self.drawn.append(list(envs))
        colours = [(50 * i, 10 * self._state.step[i], 200) for i in envs]
        flat = np.array(colours, np.uint8)[:, None, None]
        return np.broadcast_to(flat, (len(envs), 40, 30, 3)).copy()


def act(params, observation, key, count):
    """The policy of a film of `PaintedEnv`: always right in even thirds."""
    del params, key
    return np.full(len(observation), count % 3), {}


def shoot(every, max_steps=None):
    """Films `PaintedEnv`: the frames, the environments and the evaluation."""
    frames, env = [], PaintedEnv()
    camera = watch.Camera(
        env, title="Painted", every=every, size=SIZE, show=frames.append
    )
    evaluation = evaluate(act, None, camera, jax.random.key(0), max_steps=max_steps)
    camera.finish()
    return frames, env, evaluation, camera


def pictures(frame, count=3):
    """The colour of each tile's picture, at its lower right corner."""
    height = film.tile(np.zeros((1, 1, 3), np.uint8), ("", ""), **SIZE).shape[0]
    width = SIZE["width"] + 2  # With the gap between two columns.
    corners = [
        ((i // 2 + 1) * height - 1, (i % 2) * width + SIZE["width"] - 1)
        for i in range(count)
    ]
    return [tuple(int(x) for x in frame[corner]) for corner in corners]


def captions(frame):
    """The pixels of the text above each tile's picture."""
    height = film.tile(np.zeros((1, 1, 3), np.uint8), ("", ""), **SIZE).shape[0]
    band = height - SIZE["height"]
    rows = [frame[:band], frame[height : height + band]]
    width = SIZE["width"]
    return [rows[0][:, :width], rows[0][:, width + 2 :], rows[1][:, :width]]


LENGTHS = episode_length(np.arange(3), np.zeros(3, int))


def test_every_frame_shows_every_environment_in_its_place():
    frames, _, evaluation, _ = shoot(every=1)
    assert evaluation.lengths[0].tolist() == LENGTHS.tolist()
    assert len(frames) == 1 + LENGTHS.max()
    for step, frame in enumerate(frames):
        seen = [(50 * i, 10 * min(step, LENGTHS[i]), 200) for i in range(3)]
        assert pictures(frame) == seen
    # The fourth place, where no tile is.
    assert not frames[0][-1, -1].any()


def test_a_tile_whose_episode_has_ended_is_drawn_no_more_and_stays():
    frames, env, _, _ = shoot(every=1)
    for step, which in enumerate(env.drawn[1:], start=1):
        assert which == [i for i in range(3) if LENGTHS[i] >= step]
    first_end = LENGTHS.min()
    over = int(LENGTHS.argmin())
    np.testing.assert_array_equal(
        captions(frames[first_end])[over], captions(frames[-1])[over]
    )


def test_the_text_tells_the_return_so_far_and_when_the_episode_is_over(monkeypatch):
    told, draw = [], film.tile

    def tile(picture, lines, **size):
        told.append((picture[0, 0, 0] // 50, *lines))
        return draw(picture, lines, **size)

    monkeypatch.setattr(film, "tile", tile)
    frames, _, evaluation, _ = shoot(every=1)
    for i, length in enumerate(LENGTHS):
        mine = [line for j, title, line in told if (j, title) == (i, "Painted")]
        # Every action is right in the first episode, which 1 is the reward for.
        running = [f"return {n}.0, step {n}" for n in range(length)]
        assert mine == [*running, f"return {length}.0, step {length}, end"]
    assert evaluation.returns[0].tolist() == LENGTHS.tolist()
    first, second = captions(frames[0])[0], captions(frames[1])[0]
    assert (first != second).any()
    assert first.max() > 200
    assert first.min() == 0


def test_every_nth_step_is_a_frame_and_every_end_is_seen():
    frames, _, _, camera = shoot(every=5)
    last = int(LENGTHS.max())
    assert len(frames) == 1 + last // 5 + (last % 5 > 0)
    assert pictures(frames[-1]) == [
        (50 * i, 10 * n, 200) for i, n in enumerate(LENGTHS)
    ]
    assert not camera.is_running.any()


def test_episodes_that_are_cut_are_seen_as_they_stood():
    frames, _, evaluation, camera = shoot(every=2, max_steps=3)
    assert len(frames) == 3
    assert pictures(frames[-1]) == [(50 * i, 30, 200) for i in range(3)]
    assert camera.is_running.tolist() == [length > 3 for length in LENGTHS]
    assert evaluation.lengths.max() == 3


@pytest.mark.parametrize(
    ("count", "shape"),
    [(1, (10, 6)), (2, (10, 14)), (3, (20, 14)), (4, (20, 14)), (5, (20, 22))],
)
def test_tiles_make_a_grid_of_even_size(count, shape):
    assert film.grid([np.zeros((10, 6, 3), np.uint8)] * count).shape == (*shape, 3)
    odd = film.grid([np.ones((5, 3, 3), np.uint8)] * count)
    assert odd.shape[0] % 2 == odd.shape[1] % 2 == 0
    assert odd.sum() == count * 45


def test_the_text_hides_nothing_fits_and_keeps_its_size_as_the_return_grows():
    picture = np.full((120, 100, 3), 255, np.uint8)
    long = "return -12,345.6, step 1,000, end"
    short, wide = (
        film.tile(picture, ("Task", text), width=200, height=240)
        for text in ("return 0.0, step 0", long)
    )
    assert short.shape == wide.shape
    band = short.shape[0] - 240
    assert (wide[band:] == 255).all()
    assert not wide[:, -3:][:band].any()  # The longest ends before the margin.
    np.testing.assert_array_equal(short[: band // 2], wide[: band // 2])


def frames_of(count, size=(32, 48)):
    """Frames whose colours change."""
    frames = np.zeros((count, *size, 3), np.uint8)
    frames[..., 0] = np.linspace(0, 255, count).astype(np.uint8)[:, None, None]
    frames[:, :8, :8] = 255
    return frames


def write(path, frames, fps=10.0, colours=8):
    _, height, width, _ = frames.shape
    with film.writing(
        path, width=width, height=height, fps=fps, colours=colours
    ) as show:
        for frame in frames:
            show(frame)
            assert not path.exists() or path.read_bytes() == b"old"


def decode(path, height, width):
    """The frames of a film, and what ffmpeg says of it."""
    words = [imageio_ffmpeg.get_ffmpeg_exe(), "-i", path, "-f", "rawvideo"]
    done = subprocess.run(
        [*words, "-pix_fmt", "rgb24", "-"], capture_output=True, check=True
    )
    frames = np.frombuffer(done.stdout, np.uint8).reshape(-1, height, width, 3)
    return frames, done.stderr.decode()


def test_an_mp4_holds_every_frame_at_its_rate(tmp_path):
    path = tmp_path / "film.mp4"
    path.write_bytes(b"old")
    write(path, frames_of(9))
    decoded, about = decode(path, 32, 48)
    assert re.search(r"48x32,.* 10 fps", about)
    assert len(decoded) == 9
    np.testing.assert_allclose(decoded[4][20, 30], frames_of(9)[4, 20, 30], atol=12)
    assert [entry.name for entry in tmp_path.iterdir()] == ["film.mp4"]


def test_a_gif_holds_every_frame_at_its_rate_in_few_colours(tmp_path):
    path = tmp_path / "film.gif"
    path.write_bytes(b"old")
    frames = frames_of(9)
    frames[..., 1] = np.linspace(0, 255, 48).astype(np.uint8)
    write(path, frames, fps=30.0)
    with Image.open(path) as image:
        decoded, durations = [], []
        for i in range(image.n_frames):
            image.seek(i)
            durations.append(image.info["duration"])
            decoded.append(np.asarray(image.convert("RGB")))
        assert image.info["loop"] == 0
    # Frames that are equal in so few colours are one, which is shown for longer.
    assert sum(durations) == 300
    assert len(decoded) > 4
    colours = np.unique(np.concatenate([x.reshape(-1, 3) for x in decoded]), axis=0)
    assert len(colours) <= 8
    assert [entry.name for entry in tmp_path.iterdir()] == ["film.gif"]


def stop(show):
    """Films a frame and is interrupted."""
    show(frames_of(1)[0])
    raise KeyboardInterrupt


@pytest.mark.parametrize("name", ["film.mp4", "film.gif"])
def test_a_film_that_is_not_finished_leaves_what_was_there(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(b"old")
    with (
        pytest.raises(KeyboardInterrupt),
        film.writing(path, width=48, height=32, fps=10.0, colours=8) as show,
    ):
        stop(show)
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == [name]


def test_a_film_that_ffmpeg_refuses_is_one_line_and_no_file(tmp_path):
    path = tmp_path / "film.mp4"
    with pytest.raises(OSError, match=r"film.mp4 was not written: [^\n]+$"):
        write(path, frames_of(300, size=(33, 47)))
    assert not list(tmp_path.iterdir())


def test_where_nothing_can_be_written_nothing_is_filmed(tmp_path):
    frames = []
    with (
        pytest.raises(OSError, match="nowhere"),
        film.writing(
            tmp_path / "nowhere" / "film.gif", width=2, height=2, fps=1, colours=4
        ),
    ):
        frames.append("filmed")
    assert not frames


@dataclasses.dataclass(frozen=True, kw_only=True)
class NamedConfig(TinyConfig):
    """The tiny agent, with a name among its options, as agents have."""

    name: str = "tiny"  # pyright: ignore[reportIncompatibleVariableOverride]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of three updates, in its folder."""
    config = TrainConfig(
        env="CartPole-v1",
        total_env_steps=96,
        num_envs=4,
        rollout_steps=8,
        learner_devices=1,
        eval_every=1,
        eval_episodes=2,
        checkpoint_every=1,
        max_episode_steps=12,
        directory=str(tmp_path_factory.mktemp("runs")),
        tensorboard=False,
        show_progress=False,
    )
    trained = train.Run(NamedConfig(), config)
    trained.train()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(train.AGENTS, "tiny", NamedConfig)
        yield trained


def files(directory):
    return {
        path.relative_to(directory): path.stat().st_mtime_ns
        for path in directory.rglob("*")
    }


def test_the_film_of_a_run_is_in_its_folder_which_is_else_as_it_was(run, capsys):
    before = files(run.directory)
    assert watch.main([str(run.directory), "--envs", "3", "--height", "64"]) == 0
    path = run.directory / "film.mp4"
    frames, about = decode(path, 2 * 91, 2 * 96 + 2)
    after = files(run.directory)
    assert after.keys() - before.keys() == {Path("film.mp4")}
    assert all(before[name] == after[name] for name in before)
    said, name = capsys.readouterr().out.splitlines()
    returns = [float(x) for x in said.rpartition("returns ")[2].split(", ")]
    assert said.startswith(f"CartPole-v1 after {run.env_steps} env steps: ")
    assert len(returns) == 3
    assert max(returns) <= 12
    # 50 steps of the task in a second, of which every other is drawn.
    assert " 25 fps" in about
    assert len(frames) == 1 + -(-max(returns) // 2)
    assert name == str(path)
    path.unlink()


@pytest.mark.parametrize("limit", ["--seconds 0.1", "--max-steps 5"])
def test_a_film_ends_at_its_limit_and_says_so(run, tmp_path, capsys, limit):
    words = [str(run.directory), "--envs", "1", "--video", str(tmp_path / "new/f.gif")]
    assert watch.main([*words, *limit.split()]) == 0
    _, cut, name = capsys.readouterr().out.splitlines()
    assert cut == "1 of 1 episodes were cut at step 5"
    with Image.open(name) as image:
        assert image.n_frames == 4  # Steps 0, 2, 4 and 5.


def test_ctrl_c_ends_the_film_and_leaves_none(run, tmp_path, capsys):
    def make_env(*args, **kwargs):
        env = envs.make_env(*args, **kwargs)
        env.step = lambda action: signal.raise_signal(signal.SIGINT) or step(action)
        step = type(env).step.__get__(env)
        return env

    words = [str(run.directory), "--envs", "1", "--video", str(tmp_path / "film.mp4")]
    assert watch.main(words, make_env=make_env) == 130
    assert "no film was written" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_what_acts_is_what_the_run_evaluated(run):
    agent, config = watch.read_run(run.directory)
    checkpoints = open_checkpoints(run.directory / "checkpoints")
    spec = envs.env_spec("CartPole-v1")
    policy = restore_policy(agent, config, spec, checkpoints, run.update)
    learner = parallel.first_replica(run.state.learner)
    expected = run.program.actor_params(learner, None)
    jax.tree.map(np.testing.assert_array_equal, policy.params, expected)
    seen = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    greedy = run.program.act_greedily(expected, seen, jax.random.key(0), np.uint32(0))
    action = policy.act(policy.params, seen, jax.random.key(1), np.uint32(0))
    np.testing.assert_array_equal(action[0], greedy[0])
    earlier = restore_policy(agent, config, spec, checkpoints, 1)
    assert (policy.env_steps, earlier.env_steps) == (run.env_steps, 32)
    leaves = zip(jax.tree.leaves(policy.params), jax.tree.leaves(earlier.params))
    assert any((a != b).any() for a, b in leaves)


@pytest.mark.parametrize("agent", [*train.AGENTS, *presets.VARIANTS])
def test_the_options_of_a_run_come_back(agent, tmp_path):
    given = train.read([agent, "--env", "CartPole-v1", "--preset", "none"])
    of_agent, of_run = (dataclasses.asdict(options) for options in given)
    config = {"config": of_run | {"agent": of_agent}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert watch.read_run(tmp_path) == given


def test_the_checkpoint_is_the_newest_the_best_or_the_one_named(
    run, monkeypatch, capsys
):
    asked = []

    def restore(agent, config, spec, checkpoints, step):
        asked.append(step)
        raise CheckpointError("enough.")

    monkeypatch.setattr(watch, "restore_policy", restore)
    monkeypatch.setattr(Checkpoints, "best", lambda self: 1)
    for words in ([], ["--best"], ["--step", "2"]):
        with pytest.raises(SystemExit):
            watch.main([str(run.directory), *words])
    assert asked == [3, 1, 2]
    assert capsys.readouterr().err == 3 * "experiments.watch: enough.\n"


def test_a_part_of_a_checkpoint_is_read_without_the_rest(tmp_path):
    checkpoints = open_checkpoints(tmp_path)
    state = AgentState({"x": np.arange(3.0)}, {"replay": np.zeros(5)})
    checkpoints.save(1, {"agent": state, "actors": []}, meta={"env_steps": 7})
    part = {"agent": AgentState({"x": np.zeros(3)})}
    saved, meta = checkpoints.restore(1, part, is_part=True)
    np.testing.assert_array_equal(saved["agent"].learner["x"], np.arange(3.0))
    assert (saved["agent"].local, meta) == ((), {"env_steps": 7})
    names = {name: leaf_type(leaf) for name, leaf in named_leaves(part).items()}
    assert read_arrays(checkpoints.path(1) / "arrays", names).keys() == names.keys()
    with pytest.raises(CheckpointError, match="replay"):
        checkpoints.restore(1, part)
    stranger = {"agent": AgentState({"y": np.zeros(3)})}
    with pytest.raises(CheckpointError, match=r"'y'.* absent in the checkpoint"):
        checkpoints.restore(1, stranger, is_part=True)


def refusal(capsys, words, **kwargs):
    with pytest.raises(SystemExit) as end:
        watch.main(words, **kwargs)
    stdout, stderr = capsys.readouterr()
    assert (end.value.code, stdout, stderr.count("\n")) == (2, "", 1)
    return stderr


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("RUN --video film.avi", ["suffix", "'.avi'", ".mp4, .gif"]),
        ("RUN --envs 0", ["envs 0", "[1, 100]"]),
        ("RUN --fps 0", ["fps 0", "above 0"]),
        ("RUN --seconds nan", ["seconds nan", "above 0"]),
        ("RUN --max-steps 0", ["max_steps 0", "at least 1"]),
        ("RUN --height 2", ["height 2", "[64, 2048]"]),
        ("RUN --colours 300", ["colours 300", "[4, 256]"]),
        ("RUN --step 1 --best", ["step 1", "best"]),
        ("RUN --step 5", ["no checkpoint", "0000000005", "[1, 2, 3]"]),
        ("nowhere", ["nowhere", "not the folder of a run", "config.json"]),
        ("EMPTY", ["no checkpoint yet"]),
        ("EMPTY --best", ["no checkpoint of an evaluation yet"]),
        ("STRANGE", ["config.json", "'sarsa'"]),
        ("", ["run"]),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_filmed(
    run, tmp_path, monkeypatch, capsys, words, parts
):
    monkeypatch.chdir(tmp_path)
    config = json.loads((run.directory / "config.json").read_text())
    for name in ("EMPTY", "STRANGE"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        config["config"]["agent"]["name"] = "sarsa"
    before = files(tmp_path), files(run.directory)
    words = [str(run.directory) if word == "RUN" else word for word in words.split()]
    line = refusal(capsys, words)
    for part in parts:
        assert part in line
    assert (files(tmp_path), files(run.directory)) == before


def test_a_task_that_cannot_be_drawn_is_one_line(run, capsys):
    def fake(env_id, **kwargs):
        del env_id
        env = envs.make_env("CartPole-v1", **kwargs)
        env._pool = NoRenderer(env._pool, "render not implemented")
        return env

    line = refusal(capsys, [str(run.directory)], make_env=fake)
    assert "EnvPool cannot draw CartPole-v1: render not implemented" in line


class NoRenderer:
    """A pool whose renderer fails."""

    def __init__(self, pool, reason):
        self.reset = getattr(pool, "reset", None)
        self.reason = reason

    def render(self, env_ids):
        raise RuntimeError(self.reason)


def test_without_egl_one_line_names_the_packages():
    with pytest.raises(rendering.RenderError) as error:
        rendering.draw(NoRenderer(None, "failed to initialize EGL"), "Ant-v5", [0])
    assert re.search(
        r"Ant-v5.*EGL.*apt-get install libegl1 libgl1-mesa-dri", str(error)
    )


def test_mujoco_draws_or_says_what_it_lacks_and_never_ends_the_process():
    # In a process of its own, and without the rest of the package, which takes longer.
    code = """
import runpy, envpool
ours = runpy.run_path("fps_jax/runtime/rendering.py")
options = ours["drawing"]("Hopper-v4", (90, 60))
pool = envpool.make("Hopper-v4", env_type="gymnasium", **options)
pool.reset()
ours["share_egl"]()
try:
    picture = ours["draw"](pool, "Hopper-v4", [0])
    print(picture.shape == (1, 60, 90, 3) and picture.std() > 1)
except ours["RenderError"] as error:
    print("apt-get" in str(error))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def test_egl_is_shared_before_environments_are_drawn(monkeypatch):
    shared = []
    monkeypatch.setattr(rendering, "share_egl", lambda: shared.append(True))
    for options in ({}, rendering.drawing("CartPole-v1")):
        envs.make_env("CartPole-v1", num_envs=1, seeds=[1], env_options=options)
    assert len(shared) == 1


def test_each_environment_is_drawn_as_it_is_now():
    options = rendering.drawing("CartPole-v1", (90, 60))
    env = envs.make_env("CartPole-v1", num_envs=3, seeds=[1, 2, 3], env_options=options)
    env.reset()
    before = env.render([0, 1, 2])
    for _ in range(8):
        env.step(np.array([0, 1, 1]))
    after = env.render([0, 1, 2])
    # Not in the size that was asked for: EnvPool would cut the cart off.
    assert after.shape == (3, 400, 600, 3)
    np.testing.assert_array_equal(env.render([2, 0]), after[[2, 0]])
    assert (before != after).any(axis=(1, 2, 3)).all()
    assert (after[0] != after[1]).any()


@pytest.mark.parametrize(
    ("env", "options", "rate"),
    [
        ("HalfCheetah-v4", {}, 20),
        ("Pong-v5", {}, 15),
        ("Pong-v5", {"frame_skip": 2}, 30),
        ("Catch-v0", {}, 30),
    ],
)
def test_a_film_runs_in_the_time_of_the_task(env, options, rate):
    assert watch.steps_per_s(env, options) == rate
