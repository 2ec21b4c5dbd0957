"""Who takes part in a sweep: settings from a grid, drawn or proposed, times seeds."""

import dataclasses
import itertools
import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments import train
from fps_jax.runtime.options import TrainConfig
from fps_jax.runtime.population import Member
from fps_jax.runtime.stacking import static_part

Setting = dict[str, str]
"""Values of options by name, as text; what is not there is as for all members."""


class Group(NamedTuple):
    """Members that share a program.

    Attributes:
      members: in the order of the axis P.
      config: of their runs.
      settings: of each member.
    """

    members: list[Member]
    config: TrainConfig
    settings: list[Setting]


def seeds(text: str) -> list[int]:
    """Reads seeds: ``0:16`` is 0 to 15, ``3,5`` is those two, ``7`` is one.

    Args:
      text: as on the command line.

    Raises:
      ValueError: if it is none of these, or a seed stands twice.
    """
    try:
        if ":" in text:
            first, end = map(int, text.split(":"))
            found = list(range(first, end))
        else:
            found = [int(word) for word in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 0 or len(set(found)) < len(found):
        raise ValueError(
            f"seeds {text!r} must be FIRST:END or a list such as 0,1,2, each at least "
            f"0 and once."
        )
    return found


def grid(axes: Sequence[str]) -> list[Setting]:
    """All combinations of the values of several options.

    Args:
      axes: such as ``learning_rate=1e-4,3e-4``.

    Raises:
      ValueError: if one is no such text, or an option stands twice.
    """
    names, values = [], []
    for axis in axes:
        name, choices = _named(axis, "grid")
        if name in names:
            raise ValueError(f"grid: {name} stands twice.")
        names.append(name)
        values.append(choices.split(","))
    return [dict(zip(names, chosen)) for chosen in itertools.product(*values)]


class Range(NamedTuple):
    """The values that an option may take.

    Attributes:
      name: of the option.
      choices: one of these; none if it is a number in between.
      low: the least number.
      high: the largest.
      is_log: whether its logarithm is uniform, and not itself.
    """

    name: str
    choices: list[str]
    low: float = 0.0
    high: float = 0.0
    is_log: bool = False

    def draw(self, draws: np.random.Generator) -> str:
        """A value at random.

        Args:
          draws: where chance comes from.
        """
        if self.choices:
            return str(draws.choice(self.choices))
        if self.is_log:
            ends = math.log(self.low), math.log(self.high)
            return as_text(math.exp(draws.uniform(*ends)))
        return as_text(draws.uniform(self.low, self.high))

    @property
    def ends(self) -> list[str]:
        """Values that are refused if any is."""
        return self.choices or [as_text(self.low), as_text(self.high)]


def as_text(value: float | str) -> str:
    """A value of an option as the command line has it.

    Args:
      value: drawn or proposed.
    """
    return value if isinstance(value, str) else f"{value:.6g}"


def read_ranges(ranges: Sequence[str]) -> list[Range]:
    """Reads ranges.

    Args:
      ranges: ``name=log:LOW:HIGH``, log-uniform in between; ``name=LOW:HIGH``, uniform;
        or ``name=a,b,c``, one of these.

    Raises:
      ValueError: if one is none of these, or an option stands twice.
    """
    found = [_range(*_named(text, "ranges")) for text in ranges]
    if len({one.name for one in found}) < len(found):
        raise ValueError("ranges: an option stands twice.")
    return found


def draw(ranges: Sequence[str], count: int, seed: int) -> list[Setting]:
    """Settings drawn at random, each option independently.

    Args:
      ranges: see `read_ranges`.
      count: how many settings.
      seed: of the draws.

    Raises:
      ValueError: if a range cannot be read.
    """
    among = read_ranges(ranges)
    draws = np.random.default_rng(seed)
    return [{one.name: one.draw(draws) for one in among} for _ in range(count)]


def ends(ranges: Sequence[str]) -> list[Setting]:
    """Settings in which every end of every range occurs.

    Args:
      ranges: see `read_ranges`.

    Raises:
      ValueError: if a range cannot be read.
    """
    among = read_ranges(ranges)
    most = max(len(one.ends) for one in among)
    return [{r.name: r.ends[i % len(r.ends)] for r in among} for i in range(most)]


def _range(name: str, text: str) -> Range:
    if ":" not in text:
        return Range(name, text.split(","))
    is_log = text.startswith("log:")
    try:
        low, high = map(float, text.removeprefix("log:").split(":"))
    except ValueError:
        low, high = math.nan, math.nan
    if not low < high or (is_log and low <= 0):
        raise ValueError(
            f"ranges: {name}={text} must be log:LOW:HIGH, LOW:HIGH or a,b,c with LOW "
            f"below HIGH{' and above 0' if is_log else ''}."
        )
    return Range(name, [], low, high, is_log)


def _named(text: str, option: str) -> tuple[str, str]:
    name, equals, values = text.partition("=")
    if not name or not equals or not values or "" in values.split(","):
        raise ValueError(f"{option}: {text!r} must be NAME=VALUES.")
    return name.replace("-", "_"), values


def words(setting: Setting) -> list[str]:
    """What a setting is on the command line of `experiments.train`.

    Args:
      setting: values by option.
    """
    found = []
    for name, value in setting.items():
        flag = name.replace("_", "-")
        if value in ("True", "False"):
            found.append(f"--{flag}" if value == "True" else f"--no-{flag}")
        else:
            found += [f"--{flag}", value]
    return found


def groups(
    agent: str,
    settings: Sequence[Setting],
    seeds: Sequence[int],
    more: Sequence[str],
    *,
    largest: int,
    is_apart: bool = False,
    first: int = 0,
) -> list[Group]:
    """Gathers the members that can share a program.

    Args:
      agent: its name, as `experiments.train` takes it.
      settings: of the members, each with every seed.
      seeds: of each setting.
      more: further options of every run.
      largest: members of a group, at most.
      is_apart: whether each setting is a group of its own.
      first: number of the first setting, for the members' names.

    Returns:
      Groups in the order of their first members. An option that is refused ends the
      program as it would end `experiments.train`.
    """
    found: dict[Any, Group] = {}
    for number, setting in enumerate(settings, first):
        given = [agent, "--no-tensorboard", *more, *words(setting)]
        config_of_agent, config = train.read(given, prog="experiments.sweep")
        shared = dataclasses.replace(config, seed=0)
        key = static_part(config_of_agent), repr(shared), number if is_apart else None
        for seed in seeds:
            group = found.setdefault(key, Group([], shared, []))
            name = f"{number:03d}_s{seed}"
            group.members.append(Member(name, config_of_agent, seed))
            group.settings.append(setting)
    return [part for group in found.values() for part in _parts(group, largest)]


def _parts(group: Group, largest: int) -> list[Group]:
    members, config, settings = group
    return [
        Group(members[i : i + largest], config, settings[i : i + largest])
        for i in range(0, len(members), largest)
    ]


class Proposals:
    """The settings that Optuna has proposed, in order; a file keeps them.

    Attributes:
      config: what the runs of all settings have in common.
      groups: of the settings, one each.
      values: of each setting's options, as they were proposed.
    """

    def __init__(
        self, path: Path, make: Callable[..., list[Group]], config: TrainConfig
    ):
        """Reads what an earlier start was proposed.

        Args:
          path: where proposals are kept.
          make: `groups` but for the settings and their first number.
          config: of all runs, with their directory.
        """
        self._path, self._make, self.config = path, make, config
        self.groups: list[Group] = []
        self.values: list[dict[str, float | str]] = []
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        for line in lines:
            self._append(json.loads(line))

    def add(self, values: dict[str, float | str]) -> Group:
        """Makes a group of a setting, and keeps it; known ones keep their place.

        Args:
          values: of its options.
        """
        group = self._append(values)
        lines = "".join(json.dumps(known) + "\n" for known in self.values)
        temporary = self._path.with_name(self._path.name + ".tmp")
        temporary.write_text(lines, encoding="utf-8")
        os.replace(temporary, self._path)
        return group

    def _append(self, values: dict[str, float | str]) -> Group:
        setting = {name: as_text(x) for name, x in values.items()}
        (group,) = self._make([setting], first=len(self.groups))
        config = dataclasses.replace(group.config, directory=self.config.directory)
        self.groups.append(group._replace(config=config))
        self.values.append(values)
        return self.groups[-1]


def check_judged(groups: Sequence[Group], options: Any) -> None:
    """Refuses runs that are to be judged on their way and cannot be.

    Args:
      groups: all of them.
      options: of the sweep, `sweep.Options`.

    Raises:
      ValueError: naming the option.
    """
    for config in (group.config for group in groups if options.is_tuned):
        length, every = config.total_env_steps, config.eval_every
        if not config.eval_episodes:
            raise ValueError("eval_episodes 0: asha and optuna judge evaluations.")
        if options.asha and not 0 < every < length:
            raise ValueError(
                f"eval_every {every} must be above 0 and below total_env_steps "
                f"{length}: asha judges evaluations on the way."
            )
        if (options.asha_grace or 0) >= length:
            raise ValueError(
                f"asha_grace {options.asha_grace} must be below total_env_steps "
                f"{length}."
            )
