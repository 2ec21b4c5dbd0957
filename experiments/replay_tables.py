"""What the rows of ``bench_replay`` come to.

Rows have ``system``, ``items``, ``capacity``, ``operation``, ``B``, ``repeat`` and
``value``.
"""

import itertools
import math
import statistics
from collections.abc import Iterable
from typing import Any

from experiments import replay_step

Key = tuple[str, int, str, int]
"""Kind of items, N, operation and B."""


def medians(rows: Iterable[dict[str, Any]]) -> dict[Key, dict[str, float]]:
    """Medians of the repeats, of each system.

    Args:
      rows: of the CSV.
    """
    values: dict[Key, dict[str, list[float]]] = {}
    for row in rows:
        key = row["items"], row["capacity"], row["operation"], row["B"]
        of_system = values.setdefault(key, {}).setdefault(row["system"], [])
        of_system.append(row["value"])
    return {
        key: {system: statistics.median(x) for system, x in of_system.items()}
        for key, of_system in values.items()
    }


def ratios(median: dict[Key, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Times of other families over ours; of a family's variants the best.

    A turn is also compared with what is faster, the turn or what is fused.

    Args:
      median: of each system.
    """
    found = {}
    for (kind, capacity, operation, batch), of_system in median.items():
        if operation == "memory":
            continue
        choices = {operation: [of_system]}
        if operation == "turn":
            fused = median.get((kind, capacity, "fused", batch), {})
            choices["turn or fused"] = [of_system, fused]
        for name, tables in choices.items():
            best: dict[str, float] = {}
            for table in tables:
                for system, value in table.items():
                    family, _, variant = system.partition(", ")
                    if family != "ours" or not variant:
                        best[family] = min(value, best.get(family, math.inf))
            ours = best.pop("ours", None)
            if ours is not None and best:
                found[f"{kind}, N {capacity}, {name}, B {batch}"] = {
                    family: round(value / ours, 2) for family, value in best.items()
                }
    return found


def memory_growth(median: dict[Key, dict[str, float]]) -> dict[str, dict[str, float]]:
    """MiB that more items take: at the largest capacity, less those at the smallest.

    Args:
      median: of each system.
    """
    sizes: dict[str, dict[int, dict[str, float]]] = {}
    for (kind, capacity, operation, _), of_system in median.items():
        if operation == "memory":
            sizes.setdefault(kind, {})[capacity] = of_system
    return {
        f"{kind}, N {max(of_size)} over {min(of_size)}": {
            system: round(value - of_size[min(of_size)][system], 2)
            for system, value in of_size[max(of_size)].items()
        }
        for kind, of_size in sizes.items()
    }


def step_ratios(rows: Iterable[dict[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """Steps with prioritized replay over those with uniform: least, median, most.

    Args:
      rows: of the CSV.
    """
    base, *others = replay_step.SYSTEMS
    us = {
        (row["items"], row["repeat"], row["system"]): row["value"]
        for row in rows
        if row["operation"] == "step"
    }
    found: dict[str, dict[str, list[float]]] = {}
    for network, kind in replay_step.KINDS.items():
        repeats = [r for k, r, system in us if (k, system) == (kind, base)]
        for system in others if repeats else ():
            x = [us[kind, r, system] / us[kind, r, base] for r in repeats]
            spread = [round(f(x), 4) for f in (min, statistics.median, max)]
            found.setdefault(network, {})[system] = spread
    return found


def text(median: dict[Key, dict[str, float]]) -> str:
    """Medians for a reader: a block an operation, a line a system, a column a batch.

    Args:
      median: of each system.
    """
    lines = []
    blocks = itertools.groupby(sorted(median, key=lambda k: k[:3]), lambda k: k[:3])
    for (kind, capacity, operation), keys in blocks:
        keys = list(keys)
        unit = "MiB" if operation == "memory" else "us"
        head = f"{operation}, {unit}; {kind}, N {capacity}"
        lines.append(f"{head:44}" + "".join(f"{f'B {k[3]}':>11}" for k in keys))
        for system in median[keys[0]]:
            cells = [f"{median[k].get(system, math.nan):11.1f}" for k in keys]
            lines.append(f"  {system:42}" + "".join(cells))
    return "\n".join(lines)
