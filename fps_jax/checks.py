"""Refusals of impossible options: each names the option, its value and the limit."""

import math
from collections.abc import Collection
from typing import Any


def number(
    name: str,
    value: Any,
    low: int | float = -math.inf,
    high: int | float = math.inf,
    *,
    ends: str = "[]",
) -> None:
    """Refuses a number outside an interval; NaN is outside of every one.

    None passes, since the option was not given, and so do traced numbers, which nobody
    knows yet.

    Args:
      name: of the option.
      value: its value.
      low: the smallest value.
      high: the largest value.
      ends: one of "[]", "[)", "(]" and "()"; a round bracket leaves that end out.

    Raises:
      ValueError: naming the option, the value and the interval.
    """
    if not isinstance(value, (int, float)):
        return
    above = low < value if ends[0] == "(" else low <= value
    below = value < high if ends[1] == ")" else value <= high
    if above and below:
        return
    if high == math.inf:
        limit = f"above {low:g}" if ends[0] == "(" else f"at least {low:g}"
    else:
        limit = f"in {ends[0]}{low:g}, {high:g}{ends[1]}"
    raise ValueError(f"{name} {value} must be {limit}.")


def choice(name: str, value: Any, choices: Collection[str]) -> None:
    """Refuses what is not one of some names.

    Args:
      name: of the option.
      value: its value.
      choices: the names.

    Raises:
      ValueError: naming the option, the value and the choices.
    """
    if value not in choices:
        raise ValueError(f"{name} {value!r} must be one of {', '.join(choices)}.")


def in_range(
    options: Any,
    low: int | float,
    high: int | float,
    *names: str,
    ends: str = "[]",
) -> None:
    """Refuses options outside an interval; see `number`.

    Args:
      options: what has them as attributes.
      low: the smallest value.
      high: the largest value.
      *names: of the options.
      ends: see `number`.

    Raises:
      ValueError: naming the first option that is outside.
    """
    for name in names:
        number(name, getattr(options, name), low, high, ends=ends)


def one_of(options: Any, choices: Collection[str], name: str) -> None:
    """Refuses an option that is not one of some names.

    Args:
      options: what has it as an attribute.
      choices: the names.
      name: of the option.

    Raises:
      ValueError: naming the option and the choices.
    """
    choice(name, getattr(options, name), choices)
