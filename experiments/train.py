"""Trains one agent on one task: ``python -m experiments.train ppo --env Hopper-v4``."""

import argparse
import dataclasses
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import jax
import rich
import tyro

from experiments import command_line, figures, presets
from fps_jax.agents.dfps import DFPSConfig
from fps_jax.agents.dqn import DQNConfig
from fps_jax.agents.ppo import PPOConfig
from fps_jax.runtime import envs
from fps_jax.runtime.checkpoints import CheckpointError
from fps_jax.runtime.options import TrainConfig
from fps_jax.runtime.training import Run
from fps_jax.types import AgentConfig

PROG = "experiments.train"
AGENTS: dict[str, Any] = {
    "dfps": DFPSConfig,
    "dqn": DQNConfig,
    "ppo": PPOConfig,
}


def options(agent: str, env: str, preset: str) -> Any:
    """Makes the options of one agent, as its preset for a task has them.

    Args:
      agent: a key of `AGENTS`, or a variant of `experiments/presets.py`.
      env: the task id.
      preset: see `presets.find`.

    Returns:
      A dataclass with fields ``agent``, ``run`` and ``preset``.
    """
    for_agent, for_run = presets.find(agent, env, preset)
    agent_default = AGENTS[presets.base(agent)](**for_agent)
    run_default = TrainConfig(env=env, **for_run)
    fields = [
        (name, tyro.conf.OmitArgPrefixes[type(default)], default)
        for name, default in (("agent", agent_default), ("run", run_default))
    ]
    help_ = "tuned settings: auto takes the task's own, none none, or a task's name"
    preset_type = Annotated[str, tyro.conf.arg(help=help_)]
    return dataclasses.make_dataclass(
        agent, [*fields, ("preset", preset_type, preset)], frozen=True
    )


def read(argv: Sequence[str], *, prog: str = PROG) -> tuple[AgentConfig, TrainConfig]:
    """Reads the command line: the agent's name, then its options and the run's.

    Args:
      argv: the words after the program's name.
      prog: the program's name, for what it refuses.
    """
    names = (*AGENTS, *presets.VARIANTS)
    name, rest = (argv[0], argv[1:]) if argv else ("", [])
    if name in ("-h", "--help"):
        print(f"usage: {prog} {{{','.join(names)}}} [options]\n")
        print(f"`{prog} AGENT --help` lists the options of an agent and of a run.")
        raise SystemExit(0)
    if name not in names:
        reason = f"the first word, {name!r}, is not an agent: {sorted(names)}."
        command_line.refuse(reason, prog=prog)
    # The task and the preset decide the defaults of all other options.
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--env", default=TrainConfig.env)
    first.add_argument("--preset", default="auto")
    known = first.parse_known_args(list(rest))[0]
    try:
        of_agent = options(name, known.env, known.preset)
    except ValueError as error:
        command_line.refuse(error, prog=prog)
    parsed = command_line.parse(of_agent, rest, prog=f"{prog} {name}")
    return parsed.agent, parsed.run


def main(
    argv: Sequence[str] | None = None,
    *,
    make_env: Callable[..., envs.VectorEnv] = envs.make_env,
) -> int:
    """Trains, draws the curve and prints where the time went.

    Args:
      argv: the words after the program's name; None reads the process's own.
      make_env: makes environments, with the arguments of `envs.make_env`.

    Returns:
      The exit code: 0, or 130 after Ctrl-C, or 143 after SIGTERM.
    """
    agent, config = read(sys.argv[1:] if argv is None else argv)
    try:
        run = Run(agent, config, make_env=make_env)
    except (ValueError, CheckpointError) as error:
        command_line.refuse(error, prog=PROG)
    code = 0
    try:
        history = run.train()
    except (KeyboardInterrupt, SystemExit) as end:
        code = 130 if isinstance(end, KeyboardInterrupt) else 128 + signal.SIGTERM
        hint = "" if run.directory is None else "; --resume goes on"
        done = f"interrupted after {run.env_steps:,} env steps{hint}."
        print(f"{PROG}: {done}", file=sys.stderr)
    else:
        rich.print(history.summary)
    if run.directory is not None and jax.process_index() == 0:
        figures.draw_run(run.directory)
        print(f"{run.directory}/learning_curve.png")
    return code


if __name__ == "__main__":
    sys.exit(main())
