"""How much sooner do values converge if transitions are replayed in a good order?

``python -m experiments.cliffwalk`` repeats figures 1 and 2 of the prioritized replay
paper (Schaul et al., 2016, arXiv:1511.05952) on its Blind Cliffwalk, as appendix B.1
says, and then the variants of its appendix A and section 6 on one size. See
`cliffwalk_problem`, `cliffwalk_learning` and `cliffwalk_methods`.

Where the paper is silent there are arms. New transitions have the maximal priority, so
that each of N must be replayed once, or the |delta| that they have at first. Importance
weights have exponent 0 or 1. Where an oracle finds nothing that makes the loss less, it
rests, or takes the largest |delta|.

A run that has not converged after ``10,000 + 100 N`` updates counts as one that takes
longer than any other; once half of an arm's do, the arm is not run on larger problems.

``experiments/results/cliffwalk.csv`` has a row for each run, and in its header the
slopes k of ``updates ~ N^k``, fitted to the medians from n = 4 on;
``cliffwalk_variants.csv`` has those of the variants. `cliffwalk_figures` draws both.
"""

import dataclasses
import functools
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments import (
    cliffwalk_figures,
    cliffwalk_learning,
    cliffwalk_methods,
    command_line,
    figures,
    results,
)
from experiments import cliffwalk_problem as cliffwalk
from fps_jax import checks

PROG = "experiments.cliffwalk"
PARTS = ("curves", "variants")
SAMPLERS = ("greedy", "rank_based", "proportional")
ORACLES = ("oracle", "oracle_or_greedy")
METHODS = ("uniform", *ORACLES, *SAMPLERS)
VARIANTS = (*cliffwalk_methods.VARIANTS, "uniform")
SMALLEST_FITTED = 4
"""States from which on slopes are fitted."""


class Arm(NamedTuple):
    """A curve of the figures.

    Attributes:
      representation: of the values, a key of `cliffwalk_problem.BIAS`.
      method: one of `METHODS`.
      beta: exponent of the importance weights.
      initial_priority: "maximal" or "td_error"; "none" if there is no priority.
    """

    representation: str
    method: str
    beta: float = 0.0
    initial_priority: str = "none"


def _arms() -> Iterable[Arm]:
    for representation in cliffwalk.BIAS:
        yield Arm(representation, "uniform")
        yield Arm(representation, "oracle")
        if representation == "linear":  # Tabular values know no dead ends.
            yield Arm(representation, "oracle_or_greedy")
        for initial_priority in ("maximal", "td_error"):
            if representation == "tabular":
                yield Arm(representation, "greedy", 0.0, initial_priority)
            else:
                for method in ("rank_based", "proportional"):
                    for beta in (0.0, 1.0):
                        yield Arm(representation, method, beta, initial_priority)


ARMS = tuple(_arms())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Counts the updates until values have converged.

    Attributes:
      parts: what is run: curves, variants.
      sizes: numbers of states n, for the curves.
      largest_prioritized: the largest of them for greedy, rank-based and proportional.
      largest_corrected: as well, with importance weights, which takes longer.
      methods: of the curves.
      seeds: of each curve; they are 0, 1, ...
      variants: which of them.
      variants_size: n for the variants.
      variants_seeds: of each variant.
      alpha_proportional: exponent of proportional replay.
      alpha_rank_based: exponent of rank-based replay.
      epsilon: added to the priorities of both.
    """

    parts: tuple[str, ...] = PARTS
    sizes: tuple[int, ...] = (2, 4, 6, 8, 10, 12, 14, 16)
    largest_prioritized: int = 14
    largest_corrected: int = 10
    methods: tuple[str, ...] = METHODS
    seeds: int = 10
    variants: tuple[str, ...] = VARIANTS
    variants_size: int = 8
    variants_seeds: int = 20
    alpha_proportional: float = 0.6
    alpha_rank_based: float = 0.7
    epsilon: float = 1e-3

    def __post_init__(self):
        """Refuses options that are out of range."""
        names = ("parts", PARTS), ("methods", METHODS), ("variants", VARIANTS)
        for name, choices in names:
            for value in getattr(self, name):
                checks.choice(name, value, choices)
        for size in self.sizes:
            checks.number("sizes", size, 2, 16)
        limits = "largest_prioritized", "largest_corrected"
        checks.in_range(self, 2, 16, "variants_size", *limits)
        checks.in_range(self, 1, math.inf, "seeds", "variants_seeds")
        checks.in_range(self, 0, 10, "alpha_proportional", "alpha_rank_based")
        checks.in_range(self, 0, 1, "epsilon", ends="(]")

    @property
    def numbers(self) -> cliffwalk_methods.Numbers:
        """What the methods are told."""
        return cliffwalk_methods.Numbers(
            self.alpha_proportional, self.alpha_rank_based, self.epsilon
        )

    def largest(self, arm: Arm) -> int:
        """The largest n that an arm is run on.

        Args:
          arm: of the curves.
        """
        if arm.method not in SAMPLERS:
            return max(self.sizes)
        limit = self.largest_corrected if arm.beta else self.largest_prioritized
        return min(limit, self.largest_prioritized)


class Runs:
    """All runs on problems of one size: programs that are compiled once."""

    def __init__(self, n: int, seeds: int, numbers: cliffwalk_methods.Numbers):
        """Makes the problem, and what the seeds start from.

        Args:
          n: states.
          seeds: how many runs there are of each arm.
          numbers: what the methods are told.
        """
        self.n, self.transitions = n, 2 ** (n + 1) - 2
        self.max_updates = 10_000 + 100 * self.transitions
        self._numbers = numbers
        thetas = [cliffwalk.initial_theta(_keys(seed)[0], n) for seed in range(seeds)]
        self._theta = jnp.stack(thetas)
        self._programs: dict[Any, Callable[..., Any]] = {}

    def of(self, make: Callable[..., Any], arm: Arm) -> list[tuple[int, bool]]:
        """The updates of each seed, and whether its values converged.

        Args:
          make: of `cliffwalk_methods`, what makes the method.
          arm: what is run; `make` knows its method, unless it has no priorities.
        """
        of = cliffwalk.problem(self.n, arm.representation)
        limit = {"max_updates": jnp.int32(self.max_updates)}
        if arm.method == "uniform":
            learn = self._compiled("uniform", cliffwalk_learning.learn_uniformly)
            memory = cliffwalk.memory(self.n, 0)
            together = learn(of, self._theta, memory, _keys(0)[1], **limit)
        elif arm.method in ORACLES:
            learn = self._compiled("oracle", cliffwalk_learning.learn_by_oracle)
            never_rests = jnp.bool_(arm.method == "oracle_or_greedy")
            together = learn(of, self._theta, never_rests=never_rests, **limit)
        else:
            method = make(arm.method, self.transitions, numbers=self._numbers)
            learn = functools.partial(cliffwalk_learning.learn, method)
            learn = self._compiled(arm.method, learn)
            given = {
                "beta": jnp.float32(arm.beta),
                "knows_errors": jnp.bool_(arm.initial_priority == "td_error"),
                **limit,
            }
            alone = [
                learn(
                    of, theta, cliffwalk.memory(self.n, seed), _keys(seed)[1], **given
                )
                for seed, theta in enumerate(self._theta)
            ]
            together = zip(*alone)
        updates, is_converged = (np.asarray(x) for x in together)
        return [(int(u), bool(c)) for u, c in zip(updates, is_converged)]

    def rows(
        self, about: dict[str, Any], given: Sequence[tuple[int, bool]]
    ) -> list[dict[str, Any]]:
        """A row of the CSV for each run.

        Args:
          about: what was run.
          given: see `of`.
        """
        size = {"n": self.n, "transitions": self.transitions}
        return [
            {**about, **size, "seed": seed, "updates": updates, "is_converged": done}
            for seed, (updates, done) in enumerate(given)
        ]

    def _compiled(self, name: str, learn: Callable[..., Any]) -> Callable[..., Any]:
        return self._programs.setdefault(name, jax.jit(learn))


def _keys(seed: int) -> jax.Array:
    """A seed's keys: of its parameters, and of its draws."""
    return jax.random.split(jax.random.key(seed))


def run_curves(options: Options) -> list[dict[str, Any]]:
    """Runs the arms of the figures, size by size; a row for each run.

    Args:
      options: of the command.
    """
    rows, left = [], [arm for arm in ARMS if arm.method in options.methods]
    for n in sorted(set(options.sizes)):
        runs = Runs(n, options.seeds, options.numbers)
        for arm in list(left):
            if n > options.largest(arm):
                continue
            start = time.perf_counter()
            given = runs.of(cliffwalk_methods.of_figures, arm)
            rows += runs.rows(arm._asdict(), given)
            _tell(f"n = {n}, {label(arm)}", given, time.perf_counter() - start)
            if not math.isfinite(median(given)):
                left.remove(arm)
    return rows


def run_variants(options: Options) -> list[dict[str, Any]]:
    """Runs the variants on one size; a row for each run.

    Args:
      options: of the command.
    """
    rows = []
    runs = Runs(options.variants_size, options.variants_seeds, options.numbers)
    for variant in options.variants:
        for representation in cliffwalk.BIAS:
            arm = Arm(representation, variant, initial_priority="maximal")
            start = time.perf_counter()
            given = runs.of(cliffwalk_methods.of_variant, arm)
            about = {"representation": representation, "variant": variant}
            rows += runs.rows(about, given)
            name = f"{representation} {variant}"
            _tell(name, given, time.perf_counter() - start)
    return rows


def median(runs: Iterable[tuple[int, bool]]) -> float:
    """Median of updates; infinite if half of the runs did not converge.

    Args:
      runs: the updates of each, and whether its values converged.
    """
    return float(np.median([u if converged else np.inf for u, converged in runs]))


def label(arm: Arm) -> str:
    """Words for an arm.

    Args:
      arm: of the figures.
    """
    if arm.initial_priority == "none":
        return f"{arm.representation} {arm.method}"
    words = arm.representation, arm.method, f"beta {arm.beta:g}", arm.initial_priority
    return " ".join(words)


def slopes(rows: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Fits k of ``updates ~ N^k`` for each arm, to the logarithms of medians.

    Medians count from n = 4 on, as far as they are finite; None if they are fewer than
    two.

    Args:
      rows: see `run_curves`.
    """
    names = Arm._fields
    fitted: dict[str, float | None] = {}
    for arm in dict.fromkeys(tuple(row[name] for name in names) for row in rows):
        mine = [row for row in rows if tuple(row[name] for name in names) == arm]
        points = []
        for size in dict.fromkeys(row["transitions"] for row in mine):
            runs = [r for r in mine if r["transitions"] == size]
            middle = median((r["updates"], r["is_converged"]) for r in runs)
            if runs[0]["n"] >= SMALLEST_FITTED and math.isfinite(middle):
                points.append((math.log(size), math.log(middle)))
        fitted[label(Arm(*arm))] = None
        if len(points) > 1:
            x, y = np.array(points).T
            fitted[label(Arm(*arm))] = round(float(np.polyfit(x, y, 1)[0]), 3)
    return fitted


def _tell(name: str, runs: Sequence[tuple[int, bool]], seconds: float) -> None:
    """Prints what an arm's runs came to."""
    done = sum(converged for _, converged in runs)
    print(
        f"{name}: median {median(runs):,.0f} updates; {done} of {len(runs)} converged; "
        f"{seconds:.1f} s",
        flush=True,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs what is asked for, writes the CSVs and draws them.

    Args:
      argv: the words after the program's name; None reads the process's own.
    """
    options = command_line.parse(
        Options, sys.argv[1:] if argv is None else argv, prog=PROG
    )
    start = time.perf_counter()
    about = {
        "max_updates": "10,000 + 100 N; runs that reach it have is_converged False",
        "options": dataclasses.asdict(options),
    }
    minutes = lambda: round((time.perf_counter() - start) / 60.0, 1)
    if "curves" in options.parts:
        rows = run_curves(options)
        path = results.FOLDER / "cliffwalk.csv"
        more = {"slopes": slopes(rows), "minutes": minutes()}
        results.write_csv(path, rows, **about, **more)
    if "variants" in options.parts:
        start = time.perf_counter()
        rows = run_variants(options)
        path = results.FOLDER / "cliffwalk_variants.csv"
        results.write_csv(path, rows, **about, minutes=minutes())
    for drawn in cliffwalk_figures.draw_all(results.FOLDER, figures.FOLDER):
        print(drawn)
    return 0


if __name__ == "__main__":
    sys.exit(main())
