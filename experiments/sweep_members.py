"""Who takes part in a sweep: settings from a grid or drawn at random, times seeds."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
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


def draw(ranges: Sequence[str], count: int, seed: int) -> list[Setting]:
    """Settings drawn at random, each option independently.

    Args:
      ranges: ``name=log:LOW:HIGH``, log-uniform in between; ``name=LOW:HIGH``, uniform;
        or ``name=a,b,c``, one of these.
      count: how many settings.
      seed: of the draws.

    Raises:
      ValueError: if a range is none of these.
    """
    draws = np.random.default_rng(seed)
    named = [_named(one, "ranges") for one in ranges]
    if len({name for name, _ in named}) < len(named):
        raise ValueError("ranges: an option stands twice.")
    return [{name: _drawn(name, of, draws) for name, of in named} for _ in range(count)]


def _drawn(name: str, text: str, draws: np.random.Generator) -> str:
    if ":" not in text:
        return str(draws.choice(text.split(",")))
    is_log = text.startswith("log:")
    ends = text.removeprefix("log:").split(":")
    try:
        low, high = map(float, ends)
    except ValueError:
        low, high = math.nan, math.nan
    if not low < high or (is_log and low <= 0):
        raise ValueError(
            f"ranges: {name}={text} must be log:LOW:HIGH, LOW:HIGH or a,b,c with LOW "
            f"below HIGH{' and above 0' if is_log else ''}."
        )
    if is_log:
        return f"{math.exp(draws.uniform(math.log(low), math.log(high))):.6g}"
    return f"{draws.uniform(low, high):.6g}"


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
) -> list[Group]:
    """Gathers the members that can share a program.

    Args:
      agent: its name, as `experiments.train` takes it.
      settings: of the members, each with every seed.
      seeds: of each setting.
      more: further options of every run.
      largest: members of a group, at most.

    Returns:
      Groups in the order of their first members. An option that is refused ends the
      program as it would end `experiments.train`.
    """
    found: dict[Any, Group] = {}
    for number, setting in enumerate(settings):
        given = [agent, "--no-tensorboard", *more, *words(setting)]
        config_of_agent, config = train.read(given)
        shared = dataclasses.replace(config, seed=0)
        key = static_part(config_of_agent), repr(shared)
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
