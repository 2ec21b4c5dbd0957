"""How fast is prioritized replay, beside flashbax, cpprb and torchrl?

``python -m experiments.bench_replay`` fills replays with N items and gives each a
heavy-tailed priority; `experiments.replay_peers` says which replays. Then it measures,
in microseconds of a call until its results are there,

* ``sample``: B items, gathered, and their importance weights; ``update``: of B
  priorities; ``turn``: one after the other, since cpprb leaves to the sample what the
  update should have done; ``fused``: a turn in one jitted program, whose priorities
  depend on what was sampled;
* ``add``: of B items at once;
* ``sort``: what the rank-based replay does once in many updates;
* ``step``: a training step in one jitted program, see `experiments.replay_step`;

and ``memory``: the peak of a process that has filled a replay and made one turn, less
what it had after its imports, in MiB. A jitted replay's compiler is in that, and so
there are rows for a small capacity as well.

Items are ``cartpole`` (two observations of 4 float32) or ``atari`` (two of 84 x 84 x 4
bytes, fewer of them). Every system lives in a process of its own; they take turns,
while the others sleep. A row is a repeat: the median of its calls. Medians of the
repeats, and times of others over ours, are printed, and are in the CSV's header.
"""

import contextlib
import dataclasses
import importlib.metadata
import itertools
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from experiments import command_line, replay_peers, replay_step, replay_tables, results
from fps_jax import checks

PROG = "experiments.bench_replay"
OPERATIONS = "turn", "fused", "sample", "update", "sort", "add", "memory", "step"
OF = {"fused": ("ours", "flashbax"), "sort": ("ours",), "step": ("ours",)}
"""Families that have an operation, where not all have."""
ITEMS = ("cartpole", "atari")
ADDED = (1, 64, 2048)
FLOOR = 2048
"""The small capacity, whose memory is that of compilers."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Measures prioritized replay.

    Attributes:
      repeats: of each measurement; the systems take turns.
      calls: of each repeat, at most.
      seconds: of each repeat, at most, but for five calls.
      capacity: N, of items of CartPole's size.
      atari_capacity: N, of items of Atari's size: 56 kB each, in every system at once.
      batch_sizes: B of samples and updates.
      fan_outs: of our sum-tree, beside its default; for CartPole's items only.
      systems: families of them: ours, flashbax, cpprb, torchrl; by default all.
      items: cartpole, atari; by default both.
      operations: turn, fused, sample, update, sort, add, memory, step; by default all.
      out: the CSV; by default that of the repository's results.
      child: what a process is to measure; for this program itself.
    """

    repeats: int = 5
    calls: int = 200
    seconds: float = 0.5
    capacity: int = 2**20
    atari_capacity: int = 2**14
    batch_sizes: tuple[int, ...] = (32, 256, 2048)
    fan_outs: tuple[int, ...] = (4, 8, 16, 32, 64)
    systems: tuple[str, ...] = tuple(replay_peers.PACKAGES)
    items: tuple[str, ...] = ITEMS
    operations: tuple[str, ...] = OPERATIONS
    out: Path = results.FOLDER / "bench_replay.csv"
    child: str | None = None

    def __post_init__(self):
        """Refuses options that are out of range."""
        checks.in_range(self, 1, math.inf, "repeats", "calls")
        checks.in_range(self, 0, math.inf, "seconds", ends="()")
        checks.in_range(self, FLOOR, 10**8, "capacity", "atari_capacity")
        for value in self.fan_outs:
            checks.number("fan_outs", value, 2, 1024)
        names = {
            "systems": replay_peers.PACKAGES,
            "items": ITEMS,
            "operations": OPERATIONS,
        }
        for name, choices in names.items():
            for value in getattr(self, name):
                checks.choice(name, value, choices)
        for name in ("batch_sizes", "fan_outs", *names):
            values = getattr(self, name)
            if not values and name != "fan_outs":
                raise ValueError(f"{name} () must have at least one value.")
            if len(set(values)) < len(values):
                raise ValueError(f"{name} {values} must be different.")
        measured = [
            s for s in self.systems for o in self.operations if s in OF.get(o, (s,))
        ]
        if not measured:
            raise ValueError(f"operations {self.operations} need other systems.")
        for value in self.batch_sizes:
            limit = min(self.capacity_of(kind) for kind in self.items)
            checks.number("batch_sizes", value, 1, limit)
        if self.out.is_dir():
            raise ValueError(f"out {self.out} must be a file.")

    def capacity_of(self, kind: str) -> int:
        """N for items of a kind."""
        return self.capacity if kind == "cartpole" else self.atari_capacity


def peak_mib() -> float:
    """The most memory that this process has had so far, in MiB."""
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def median_us(
    options: Options,
    call: Callable[[int, Any], Any],
    before: Callable[[int], Any] = lambda k: None,
) -> float:
    """Microseconds of a call, the median of many.

    Args:
      options: how many calls, and for how long.
      call: given its number, and what came before it.
      before: what is not timed, given the call's number.
    """
    for k in range(3):  # Compiles, and warms up.
        call(k, before(k))
    taken: list[float] = []
    end = time.perf_counter() + options.seconds
    while len(taken) < 5 or (len(taken) < options.calls and time.perf_counter() < end):
        given = before(len(taken))
        start = time.perf_counter()
        call(len(taken), given)
        taken.append(time.perf_counter() - start)
    return 1e6 * statistics.median(taken)


def one_repeat(
    options: Options, peer: replay_peers.Peer, kind: str, operation: str, batch: int
) -> float:
    """Microseconds of an operation.

    Args:
      options: see `median_us`.
      peer: a replay that is filled.
      kind: of its items.
      operation: one of those of a replay.
      batch: B.
    """
    if operation == "add":
        items = peer.own(replay_peers.make_items(kind, batch))
        return median_us(options, lambda k, _: peer.add(items))
    if operation == "update":
        return median_us(
            options,
            lambda k, sample: peer.update(sample, batch, k),
            lambda k: peer.sample(batch, k),
        )
    call = getattr(peer, operation)
    if operation == "sort":
        return median_us(options, lambda k, _: call())
    return median_us(options, lambda k, _: call(batch, k))


def serve(options: Options, task: dict[str, Any]) -> None:
    """Answers requests, one a line, until there are no more; at first says it is ready.

    Args:
      options: of this program.
      task: what `worker` was given.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Libraries may print.
    answer = lambda **said: print(json.dumps(said), file=answers, flush=True)
    if "network" in task:
        steps = replay_step.Steps(task["network"], task["capacity"])
        answer(ready=True)
        for _ in sys.stdin:
            answer(**steps.median_us(options.calls, 20.0 * options.seconds))
        return
    replay_peers.load(task["system"])
    before = peak_mib()
    peer = replay_peers.filled(task["system"], task["kind"], task["capacity"])
    peer.turn(256, 0)
    lacking = [name for name in ("fused", "sort") if getattr(peer, name) is None]
    answer(lacking=lacking, MiB=peak_mib() - before)
    for line in sys.stdin:
        answer(us=one_repeat(options, peer, task["kind"], **json.loads(line)))


@contextlib.contextmanager
def worker(words: Sequence[str], **task: Any) -> Iterator[Callable[..., Any]]:
    """A process that measures one system; what is yielded asks it for a measurement.

    Args:
      words: the command line of this program.
      **task: a system, a kind of items and a capacity; or a network and a capacity.
    """
    command = [sys.executable, "-m", PROG, *words, "--child", json.dumps(task)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:

        def ask(**request: Any) -> Any:
            assert process.stdin is not None
            assert process.stdout is not None
            if request:
                process.stdin.write(json.dumps(request) + "\n")
                process.stdin.flush()
            line = process.stdout.readline()
            if not line:
                raise SystemExit(f"{PROG}: the process of {task} ended, see above.")
            return json.loads(line)

        yield ask


def rows_of_replays(
    options: Options, words: Sequence[str], kind: str
) -> Iterator[dict[str, Any]]:
    """Measures all systems on one kind of items.

    Args:
      options: of this program.
      words: its command line.
      kind: of items.
    """
    capacity = options.capacity_of(kind)
    fan_outs = options.fan_outs if kind == "cartpole" else ()
    row = lambda system, operation, batch, repeat, value, n=capacity: {
        "system": system,
        "items": kind,
        "capacity": n,
        "operation": operation,
        "B": batch,
        "repeat": repeat,
        "value": round(value, 2),
        "unit": "MiB" if operation == "memory" else "us",
    }
    draws = itertools.product(
        ("turn", "fused", "sample", "update"), options.batch_sizes
    )
    # New items have the largest priority, so adds come last.
    parts = [*draws, ("sort", 1)], [("add", count) for count in ADDED]
    with contextlib.ExitStack() as stack:
        workers = {}
        for name in replay_peers.systems(options.systems, fan_outs):
            if "memory" in options.operations:
                with worker(words, system=name, kind=kind, capacity=FLOOR) as ask:
                    yield row(name, "memory", 256, 0, ask()["MiB"], FLOOR)
            task = {"system": name, "kind": kind, "capacity": capacity}
            ask = stack.enter_context(worker(words, **task))
            ready = ask()
            workers[name] = ask, ready["lacking"]
            if "memory" in options.operations:
                yield row(name, "memory", 256, 0, ready["MiB"])
        for part in parts:
            pairs = [pair for pair in part if pair[0] in options.operations]
            turns = itertools.product(range(options.repeats), pairs)
            for repeat, (operation, batch) in turns:
                for name, (ask, lacking) in workers.items():
                    if operation not in lacking:
                        us = ask(operation=operation, batch=batch)["us"]
                        yield row(name, operation, batch, repeat, us)


def rows_of_steps(options: Options, words: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Measures training steps.

    Args:
      options: of this program.
      words: its command line.
    """
    for network, kind in replay_step.KINDS.items():
        capacity = options.capacity_of(kind)
        if kind not in options.items:
            continue
        with worker(words, network=network, capacity=capacity) as ask:
            ask()
            for repeat in range(options.repeats):
                for name, us in ask(repeat=repeat).items():
                    yield {
                        "system": name,
                        "items": kind,
                        "capacity": capacity,
                        "operation": "step",
                        "B": replay_step.BATCH,
                        "repeat": repeat,
                        "value": round(us, 2),
                        "unit": "us",
                    }


def versions_of(families: Sequence[str]) -> dict[str, str]:
    """Versions of the packages measured; refuses to go on without one.

    Args:
      families: of systems.
    """
    found = {}
    for family in families:
        for package in replay_peers.PACKAGES[family]:
            try:
                found[package] = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                others = [name for name in families if name != family]
                words = f" (--systems {' '.join(others)} leaves it out)"
                command_line.refuse(
                    f"systems {family} needs {package}, which is not installed"
                    f"{words if others else ''}.",
                    prog=PROG,
                )
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measures everything, and writes the CSV.

    Args:
      argv: the words after the program's name; None reads the process's own.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    options = command_line.parse(Options, words, prog=PROG)
    if options.child is not None:
        serve(options, json.loads(options.child))
        return 0
    peers = versions_of(options.systems)
    rows: list[dict[str, Any]] = []
    parts = []
    if set(options.operations) - {"step"}:
        parts += [rows_of_replays(options, words, kind) for kind in options.items]
    if "step" in options.operations and "ours" in options.systems:
        parts.append(rows_of_steps(options, words))
    load = os.getloadavg()[0]
    for row in itertools.chain(*parts):
        rows.append(row)
        print(*row.values(), flush=True)
    median = replay_tables.medians(rows)
    name = lambda key: "{}, N {}, {}, B {}".format(*key)
    results.write_csv(
        options.out,
        rows,
        peers=peers,
        cores=os.cpu_count(),
        load_before=round(load, 2),
        memory_growth_mib=replay_tables.memory_growth(median),
        medians={name(key): of_system for key, of_system in median.items()},
        others_over_ours=replay_tables.ratios(median),
        steps_over_uniform=replay_tables.step_ratios(rows),
    )
    print(replay_tables.text(median))
    print(json.dumps(replay_tables.ratios(median), indent=2))
    print(json.dumps(replay_tables.step_ratios(rows), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
