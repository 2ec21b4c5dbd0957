"""Films a trained policy: ``python -m experiments.watch RUN --video film.mp4``.

RUN is the folder of a run, which `experiments.train` names at its end. The policy acts
as it does when it is evaluated; each of several environments plays one episode, drawn
by EnvPool, in the task's own time. A tile whose episode has ended stays as it is.
"""

import contextlib
import dataclasses
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import rich.console
import rich.progress
import tyro

from experiments import command_line, film, presets, train
from fps_jax import checks
from fps_jax.runtime import envs
from fps_jax.runtime.checkpoints import CheckpointError, open_checkpoints
from fps_jax.runtime.evaluation import Evaluation, evaluate
from fps_jax.runtime.interrupts import interrupts
from fps_jax.runtime.options import TrainConfig
from fps_jax.runtime.policy import Policy, restore_policy
from fps_jax.runtime.rendering import RenderError, drawing
from fps_jax.types import AgentConfig

PROG = "experiments.watch"

# Steps of a task in a second of its own time, as Gymnasium's `render_fps` has them.
_STEPS_PER_S = {
    **{"Ant": 20, "HalfCheetah": 20, "Hopper": 125, "Humanoid": 67, "Walker2d": 125},
    **{"HumanoidStandup": 67, "InvertedDoublePendulum": 20, "InvertedPendulum": 25},
    **{"Pusher": 20, "Reacher": 50, "Swimmer": 25},
    **{"Acrobot": 15, "CartPole": 50, "MountainCar": 30, "Pendulum": 30},
    **{"BipedalWalker": 50, "CarRacing": 50, "LunarLander": 50},
}
_ATARI_FRAMES_PER_S = 60


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Films a trained policy.

    Attributes:
      run: folder of the run, with config.json and checkpoints/.
      video: the film, .mp4 or .gif; by default film.mp4 in the run's folder.
      step: update of the checkpoint; by default the newest.
      best: take the checkpoint of the highest evaluation.
      envs: environments, side by side, one episode each.
      seed: of the environments.
      seconds: longest film, in seconds; episodes that are not over by then are cut.
      max_steps: env steps after which episodes are cut; by default no other limit.
      fps: most frames a second: of faster tasks only every n-th step is drawn.
      height: of each environment's picture, in pixels.
      width: of each picture, in pixels; by default of the task's shape. What a task
        cannot fill is black; MuJoCo fills any.
      colours: of a gif; fewer make a smaller file.
    """

    run: Annotated[Path, tyro.conf.Positional]
    video: Path | None = None
    step: int | None = None
    best: bool = False
    envs: int = 4
    seed: int = 0
    seconds: float = 60.0
    max_steps: int | None = None
    fps: float = 30.0
    height: int = 240
    width: int | None = None
    colours: int = 64

    def __post_init__(self):
        """Refuses options that are out of range."""
        checks.in_range(self, 1, 100, "envs")
        checks.in_range(self, 1, math.inf, "max_steps")
        checks.in_range(self, 0, math.inf, "step", "seed")
        checks.in_range(self, 0, math.inf, "seconds", "fps", ends="()")
        checks.in_range(self, 64, 2048, "height", "width")
        checks.in_range(self, 4, 256, "colours")
        checks.choice("the suffix of video", self.path.suffix, film.SUFFIXES)
        if self.best and self.step is not None:
            raise ValueError(f"step {self.step} and best exclude each other.")

    @property
    def path(self) -> Path:
        """The film's file."""
        return self.run / "film.mp4" if self.video is None else self.video


def read_run(directory: Path) -> tuple[AgentConfig, TrainConfig]:
    """Reads with which options a run was trained.

    Args:
      directory: of the run.

    Raises:
      ValueError: if it holds no run, or one with options that are not known here.
    """
    path = directory / "config.json"
    try:
        of_run = json.loads(path.read_text())["config"]
        of_agent = of_run.pop("agent")
        agent = train.AGENTS[presets.base(of_agent["name"])]
        return _options(agent, of_agent), _options(TrainConfig, of_run)
    except OSError as error:
        reason = f"{directory} is not the folder of a run: {path}: {error.strerror}."
        raise ValueError(reason) from error
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is of no run that is known here: {error}.") from error


def _options(of: Any, values: dict[str, Any]) -> Any:
    """An instance of a dataclass, whose tuples JSON has made lists of."""
    return of(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})


def load(
    options: Options,
    agent: AgentConfig,
    config: TrainConfig,
    *,
    make_env: Callable[..., envs.RenderableEnv],
) -> tuple[Policy, envs.RenderableEnv]:
    """Restores the policy of a run, and makes the environments that it will act in.

    Args:
      options: what is filmed.
      agent: the agent's options.
      config: the run's.
      make_env: makes environments, with the arguments of `envs.make_env`.

    Raises:
      CheckpointError: if there is no checkpoint, or it is damaged.
      ValueError: if an option is impossible.
    """
    checkpoints = open_checkpoints(options.run / "checkpoints")
    step = options.step
    if step is None:
        step = checkpoints.best() if options.best else checkpoints.latest()
    if step is None:
        which = "checkpoint of an evaluation" if options.best else "checkpoint"
        raise CheckpointError(f"{options.run} has no {which} yet.")
    size = None if options.width is None else (options.width, options.height)
    env = make_env(
        config.env,
        num_envs=options.envs,
        # A stream that no run comes to.
        seeds=envs.env_seeds(
            options.seed, stream=envs.MAX_STREAMS - 1, first=0, count=options.envs
        ),
        num_threads=config.env_threads,
        max_episode_steps=config.max_episode_steps,
        env_options=drawing(config.env, size) | config.env_options,
    )
    return restore_policy(agent, config, env.spec, checkpoints, step), env


class Camera:
    """Environments that are filmed: a `VectorEnv` around another.

    Args:
      env: the environments.
      title: the first line of each tile.
      every: steps from one frame to the next.
      size: width and height of each picture, by name.
      show: takes each frame.

    Attributes:
      is_running: ``[E]``, the first episode has not ended.
    """

    def __init__(
        self,
        env: envs.RenderableEnv,
        *,
        title: str,
        every: int,
        size: dict[str, int],
        show: film.Show,
    ):
        """Films nothing yet."""
        self.spec, self.num_envs = env.spec, env.num_envs
        self._env, self._title, self._every, self._show = env, title, every, show
        self._size = size

    def reset(self) -> np.ndarray:
        """Starts new episodes, and the film with them."""
        observation = self._env.reset()
        self.is_running = np.ones(self.num_envs, bool)
        self._returns = np.zeros(self.num_envs)
        self._tiles: list[Any] = [None] * self.num_envs
        self._steps = 0
        self._film(self.is_running)
        return observation

    def step(self, action: np.ndarray) -> envs.EnvStep:
        """Steps every environment once, and films what is due."""
        step = self._env.step(action)
        was_running = self.is_running
        self._returns += np.where(was_running, step.reward, 0)
        self.is_running = was_running & ~(step.terminated | step.truncated)
        self._steps += 1
        is_due = self._steps % self._every == 0 or not self.is_running.any()
        if is_due:
            self._film(was_running)
        else:  # How an episode ended can be seen now or never.
            self._draw(was_running & ~self.is_running)
        return step

    def finish(self) -> None:
        """Films how the episodes that were cut ended."""
        if self.is_running.any() and self._steps % self._every:
            self._film(self.is_running)

    def close(self) -> None:
        """Frees the environments."""
        self._env.close()

    def _film(self, changed: np.ndarray) -> None:
        self._draw(changed)
        self._show(film.grid(self._tiles))

    def _draw(self, changed: np.ndarray) -> None:
        which = np.flatnonzero(changed).tolist()
        for i, picture in zip(which, self._env.render(which) if which else ()):
            end = "" if self.is_running[i] else ", end"
            state = f"return {self._returns[i]:z,.1f}, step {self._steps:,}{end}"
            self._tiles[i] = film.tile(picture, (self._title, state), **self._size)


def steps_per_s(env: str, env_options: dict[str, Any]) -> float:
    """Steps of a task in a second of its own time; 30 where nobody says.

    Args:
      env: EnvPool task id.
      env_options: further options of the task.
    """
    if env in presets.atari_scores():
        return _ATARI_FRAMES_PER_S / env_options.get("frame_skip", 4)
    return _STEPS_PER_S.get(env.rpartition("-v")[0], 30)


def shoot(
    options: Options, policy: Policy, env: envs.RenderableEnv, rate: float
) -> tuple[Evaluation, np.ndarray]:
    """Evaluates the policy in front of a camera.

    Args:
      options: what is filmed, and where to.
      policy: what acts.
      env: the environments.
      rate: steps of the task in a second.

    Returns:
      The evaluation, and which episodes were cut, ``[E]``.

    Raises:
      RenderError: if the environments cannot be drawn.
      OSError: if the film cannot be written.
      KeyboardInterrupt: after Ctrl-C; SystemExit after SIGTERM.
    """
    every = math.ceil(rate / options.fps)
    env.reset()
    drawn = env.render([0])[0]
    title = f"{env.spec.env_id}, {policy.env_steps:,} steps trained"
    width = round(options.height * drawn.shape[1] / drawn.shape[0])
    size = {"width": options.width or width, "height": options.height}
    sheet = film.grid([film.tile(drawn, (title, ""), **size)] * options.envs)
    limit = math.ceil(options.seconds * rate)
    limit = min(limit, options.max_steps or limit)
    num_frames = min(limit, env.spec.max_episode_steps or limit) // every + 1
    options.path.parent.mkdir(parents=True, exist_ok=True)
    with (
        film.writing(
            options.path,
            width=sheet.shape[1],
            height=sheet.shape[0],
            fps=rate / every,
            colours=options.colours,
        ) as show,
        interrupts() as interrupt,
        _progress(show, num_frames) as show,
    ):
        camera = Camera(env, title=title, every=every, size=size, show=show)
        evaluation = evaluate(
            policy.act,
            policy.params,
            camera,
            jax.random.key(options.seed),
            max_steps=limit,
            is_interrupted=interrupt.is_requested,
        )
        if interrupt.is_requested():
            raise interrupt.error()
        camera.finish()
    return evaluation, camera.is_running


@contextlib.contextmanager
def _progress(show: film.Show, num_frames: int) -> Iterator[film.Show]:
    """Counts frames on a terminal's bar: MuJoCo on a CPU draws ten tiles a second."""
    console = rich.console.Console(stderr=True)
    with rich.progress.Progress(
        console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("frames", total=num_frames)
        yield lambda frame: (show(frame), bar.advance(task))


def main(
    argv: Sequence[str] | None = None,
    *,
    make_env: Callable[..., envs.RenderableEnv] = envs.make_env,
) -> int:
    """Films a run's policy; prints where the film is and what was reached in it.

    Args:
      argv: the words after the program's name; None reads the process's own.
      make_env: makes environments, with the arguments of `envs.make_env`.

    Returns:
      The exit code: 0, or 130 after Ctrl-C.
    """
    words = sys.argv[1:] if argv is None else argv
    options = command_line.parse(Options, words, prog=PROG)
    try:
        agent, config = read_run(options.run)
        policy, env = load(options, agent, config, make_env=make_env)
    except (ValueError, CheckpointError) as error:
        command_line.refuse(error, prog=PROG)
    rate = steps_per_s(config.env, config.env_options)
    try:
        evaluation, is_cut = shoot(options, policy, env, rate)
    except (RenderError, OSError) as error:
        command_line.refuse(error, prog=PROG)
    except KeyboardInterrupt:
        print(f"{PROG}: interrupted; no film was written.", file=sys.stderr)
        return 130
    env.close()
    returns = ", ".join(f"{x:,.1f}" for x in evaluation.returns[0])
    print(f"{config.env} after {policy.env_steps:,} env steps: returns {returns}")
    if is_cut.any():
        length = evaluation.lengths.max()
        print(f"{is_cut.sum()} of {len(is_cut)} episodes were cut at step {length:,}")
    print(options.path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
