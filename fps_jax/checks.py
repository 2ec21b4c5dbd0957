"""Refusals of impossible options: each names the option, its value and the limit."""

import math
from collections.abc import Collection
from typing import Any


def in_range(
    options: Any,
    low: int | float = -math.inf,
    high: int | float = math.inf,
    *names: str,
    is_open: bool = False,
) -> None:
    """Refuses options outside ``[low, high]``; None passes, NaN does not.

    Args:
      options: what has them as attributes.
      low: the smallest value.
      high: the largest value.
      *names: of the options.
      is_open: refuse the two ends as well.

    Raises:
      ValueError: naming the first option that is outside.
    """
    for name in names:
        value = getattr(options, name)
        if value is None:
            continue
        is_inside = low < value < high if is_open else low <= value <= high
        if not is_inside:
            if high == math.inf:
                limit = f"above {low:g}" if is_open else f"at least {low:g}"
            else:
                limit = f"({low:g}, {high:g})" if is_open else f"[{low:g}, {high:g}]"
                limit = f"in {limit}"
            raise ValueError(f"{name} {value} must be {limit}.")


def one_of(options: Any, choices: Collection[str], name: str) -> None:
    """Refuses an option that is not one of some names.

    Args:
      options: what has it as an attribute.
      choices: the names.
      name: of the option.

    Raises:
      ValueError: naming the option and the choices.
    """
    value = getattr(options, name)
    if value not in choices:
        raise ValueError(f"{name} {value!r} must be one of {', '.join(choices)}.")
