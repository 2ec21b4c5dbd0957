"""Does prioritized replay find rare digits that nobody told it are rare?

``python -m experiments.imbalanced_mnist`` trains a small LeNet on MNIST without 99 % of
the digits 0 to 4 and tests it on all digits alike, as Schaul et al. (2016),
arXiv:1511.05952, do in section 6, appendix B.3 and figure 5. Three arms:

    uniform       draws examples alike
    informed      draws alike; the losses of the digits 0 to 4 count 100 times
    prioritized   draws in proportion to the last-seen loss (alpha 1, beta 0)

Each is trained with six step-sizes on the selection seeds, one unless told otherwise;
that whose balanced validation error is least at the end is selected, and trained on the
other seeds. A seed is an initialisation and draws; the data's split stays. The paper's
network is LeNet-like, its sizes are lost: here 6 and 16 channels and 84 hidden units.

Each run is a CSV in ``--directory`` once it is done; what is there is not run again.
All of them become ``experiments/results/<name>.csv`` and a figure. Twenty-four runs of
10,000 updates.
"""

import dataclasses
import functools
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from experiments import command_line, figures, imbalanced_step, mnist, results
from experiments.imbalanced_step import Learner, Rates
from fps_jax import checks

PROG = "experiments.imbalanced_mnist"
ARMS = ("uniform", "informed", "prioritized")
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Trains on imbalanced digits, and tests on balanced ones.

    Attributes:
      arms: which of uniform, informed and prioritized.
      step_sizes: of SGD, that are tried for each arm.
      seeds: initialisations at the selected step-size; they are 0, 1, ...
      selection_seeds: how many of them try every step-size.
      updates: of each run.
      evaluate_every: so many updates; a divisor of them.
      batch_size: examples of an update.
      rare_weight: of the losses of digits 0 to 4, in the informed arm.
      kept_share: of the training examples of each digit 0 to 4.
      validation_per_digit: training examples of each digit that are set aside first.
      data_seed: of the split.
      priority: of an example: its "loss", or its "error", 1 - p of its label.
      epsilon: what is added to it.
      priority_exponent: alpha, of the prioritized arm.
      importance_exponent: beta, of the prioritized arm.
      data_dir: where MNIST's four IDX files are.
      download: make them from OpenML's, by scikit-learn, if they are not there.
      directory: of the runs.
      name: of the CSV and of the figure.
    """

    arms: tuple[str, ...] = ARMS
    step_sizes: tuple[float, ...] = (0.3, 0.1, 0.03, 0.01, 0.003, 0.001)
    seeds: int = 3
    selection_seeds: int = 1
    updates: int = 10_000
    evaluate_every: int = 500
    batch_size: int = 60
    rare_weight: float = 100.0
    kept_share: float = 0.01
    validation_per_digit: int = 1000
    data_seed: int = 0
    priority: str = "loss"
    epsilon: float = 1e-3
    priority_exponent: float = 1.0
    importance_exponent: float = 0.0
    data_dir: Path = Path("data/mnist")
    download: bool = False
    directory: Path = Path("runs/imbalanced_mnist")
    name: str = "imbalanced_mnist"

    def __post_init__(self):
        """Refuses options that are out of range."""
        for arm in self.arms:
            checks.choice("arms", arm, ARMS)
        for step_size in self.step_sizes:
            checks.number("step_sizes", step_size, 0, math.inf, ends="()")
        for several in "arms", "step_sizes":
            if not getattr(self, several):
                raise ValueError(f"{several} () must name at least one.")
        counts = "seeds", "updates", "batch_size", "validation_per_digit"
        checks.in_range(self, 1, math.inf, *counts)
        checks.in_range(self, 1, self.seeds, "selection_seeds")
        checks.in_range(self, 1, self.updates, "evaluate_every")
        if self.updates % self.evaluate_every:
            raise ValueError(
                f"updates {self.updates} must be a multiple of evaluate_every "
                f"{self.evaluate_every}."
            )
        checks.in_range(self, 0, math.inf, "rare_weight", "epsilon", ends="[)")
        checks.in_range(self, 0, math.inf, "data_seed", "priority_exponent", ends="[)")
        checks.in_range(self, 0, 1, "importance_exponent")
        checks.in_range(self, 0, 1, "kept_share", ends="(]")
        checks.one_of(self, imbalanced_step.PRIORITIES, "priority")

    def of_a_run(self, split: mnist.Split) -> dict[str, Any]:
        """What a run's numbers depend on, beside arm, step-size and seed.

        Args:
          split: the data.
        """
        elsewhere = "arms step_sizes seeds selection_seeds data_dir download"
        elsewhere += " directory name"
        given = dataclasses.asdict(self)
        given = {name: given[name] for name in given if name not in elsewhere.split()}
        return {**given, "examples": [len(digits.labels) for digits in split]}


class Trials:
    """Runs of every arm on one split; programs are compiled once for all of them."""

    def __init__(self, options: Options, split: mnist.Split):
        """Compiles nothing yet.

        Args:
          options: of the experiment.
          split: the data.
        """
        self._options, self._split = options, split
        self._network = imbalanced_step.LeNet()
        self._init = jax.jit(self._network.init)
        self._evaluate = imbalanced_step.make_evaluation(self._network)
        self._programs = functools.cache(self._make_programs)

    def _make_programs(self, is_prioritized: bool) -> tuple[Any, Callable[..., Any]]:
        """A replay, and the program that trains from it."""
        options = self._options
        replay = imbalanced_step.make_replay(
            len(self._split.train.labels),
            is_prioritized=is_prioritized,
            priority_exponent=options.priority_exponent,
        )
        step = imbalanced_step.make_step(
            self._network,
            replay,
            batch_size=options.batch_size,
            importance_exponent=options.importance_exponent,
            priority=options.priority,
            epsilon=options.epsilon,
        )
        return replay, imbalanced_step.make_training(step, options.evaluate_every)

    def run(self, arm: str, step_size: float, seed: int) -> list[Row]:
        """Trains once; its evaluations, one row each.

        Args:
          arm: one of `ARMS`.
          step_size: of SGD.
          seed: of initialisation and draws.
        """
        options, split = self._options, self._split
        start = time.perf_counter()
        replay, train = self._programs(arm == "prioritized")
        root = jax.random.key(seed)
        images = split.train.images[:1]
        params = self._init(jax.random.fold_in(root, 0), images)
        learner = Learner(params, imbalanced_step.filled(replay, split.train))
        weight = options.rare_weight if arm == "informed" else 1.0
        rates = Rates(jnp.float32(step_size), jnp.float32(weight))
        rows = []
        for k in range(options.updates // options.evaluate_every):
            learner, loss = train(learner, rates, jax.random.fold_in(root, k + 1))
            validation = self._evaluate(learner.params, split.validation)
            test = self._evaluate(learner.params, split.test)
            rows.append(
                {
                    "arm": arm,
                    "step_size": step_size,
                    "seed": seed,
                    "updates": (k + 1) * options.evaluate_every,
                    "train_loss": round(float(loss), 5),
                    "validation_error": round(
                        validation[0] / len(split.validation.labels), 5
                    ),
                    "validation_loss": round(validation[1], 5),
                    "test_errors": test[0],
                    "test_loss": round(test[1], 5),
                    "seconds": round(time.perf_counter() - start, 1),
                }
            )
        return rows

    def run_or_read(self, arm: str, step_size: float, seed: int) -> list[Row]:
        """Trains once and writes a CSV, or reads it if it is there.

        Args:
          arm: one of `ARMS`.
          step_size: of SGD.
          seed: of initialisation and draws.
        """
        path = path_of(self._options, arm, step_size, seed)
        if path.exists():
            rows: list[Row] = list(results.read_csv(path))
        else:
            rows = self.run(arm, step_size, seed)
            settings = self._options.of_a_run(self._split)
            results.write_csv(path, rows, settings=settings)
        last = rows[-1]
        print(
            f"{arm}, step-size {step_size:g}, seed {seed}: "
            f"validation error {float(last['validation_error']):.4f}, "
            f"{last['test_errors']} test errors, {last['seconds']} s; {path}",
            flush=True,
        )
        return rows


def path_of(options: Options, arm: str, step_size: float, seed: int) -> Path:
    """Where a run is written.

    Args:
      options: of the experiment.
      arm: one of `ARMS`.
      step_size: of SGD.
      seed: of initialisation and draws.
    """
    return options.directory / f"{arm}_{step_size}_s{seed}.csv"


def refuse_other_runs(options: Options, split: mnist.Split) -> None:
    """Refuses runs that are there and were made with other options.

    Args:
      options: of the experiment.
      split: the data.

    Raises:
      ValueError: naming the option, both values and the file.
    """
    mine = options.of_a_run(split)
    named = options.arms, options.step_sizes, range(options.seeds)
    for run in itertools.product(*named):
        path = path_of(options, *run)
        if not path.exists():
            continue
        lines = path.read_text(encoding="utf-8").splitlines()
        start = "# settings: "
        told = [x.removeprefix(start) for x in lines if x.startswith(start)]
        theirs = json.loads(told[0]) if told else {}
        for name, value in mine.items():
            if theirs.get(name) != value:
                raise ValueError(
                    f"{name} {value} must be {theirs.get(name)}, as in {path}: remove "
                    "that, or give another directory."
                )


def run_arm(trials: Trials, options: Options, arm: str) -> list[Row]:
    """Selects an arm's step-size and runs that on every seed; all rows.

    Args:
      trials: what runs.
      options: of the experiment.
      arm: one of `ARMS`.
    """
    runs = {
        (step_size, seed): trials.run_or_read(arm, step_size, seed)
        for step_size in options.step_sizes
        for seed in range(options.selection_seeds)
    }
    error = lambda step_size: statistics.fmean(
        float(runs[step_size, seed][-1]["validation_error"])
        for seed in range(options.selection_seeds)
    )
    selected = min(options.step_sizes, key=error)
    for seed in range(options.selection_seeds, options.seeds):
        runs[selected, seed] = trials.run_or_read(arm, selected, seed)
    return [
        {**row, "is_selected": step_size == selected}
        for (step_size, _), rows in runs.items()
        for row in rows
    ]


def median_curve(rows: Sequence[Row], arm: str, column: str) -> dict[int, float]:
    """The median over seeds at the selected step-size, by the updates.

    Args:
      rows: see `run_arm`.
      arm: one of `ARMS`.
      column: such as "test_errors".
    """
    mine = [row for row in rows if row["arm"] == arm and row["is_selected"]]
    updates = sorted({int(row["updates"]) for row in mine})
    return {
        update: statistics.median(
            float(row[column]) for row in mine if int(row["updates"]) == update
        )
        for update in updates
    }


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """What was reached, for the header.

    Args:
      rows: of every arm.

    Returns:
      By arm: the selected step-size, the medians at the end, the median test loss where
      it is least, and after how many updates the median test errors are first as few as
      uniform's ever are, None if never.
    """
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    errors = {arm: median_curve(rows, arm, "test_errors") for arm in arms}
    losses = {arm: median_curve(rows, arm, "test_loss") for arm in arms}
    final = lambda curves: {arm: list(curves[arm].values())[-1] for arm in arms}
    told: dict[str, Any] = {
        "selected_step_sizes": {
            row["arm"]: float(row["step_size"]) for row in rows if row["is_selected"]
        },
        "final_median_test_errors": final(errors),
        "final_median_test_loss": final(losses),
        "least_median_test_loss": {arm: min(losses[arm].values()) for arm in arms},
    }
    if "uniform" in arms:
        best = min(errors["uniform"].values())
        told["updates_to_uniforms_best"] = {
            arm: next((k for k, e in errors[arm].items() if e <= best), None)
            for arm in arms
        }
    return told


def main(argv: Sequence[str] | None = None) -> int:
    """Runs what is missing, writes the CSV and the figure, and prints what was reached.

    Args:
      argv: the words after the program's name; None reads the process's own.
    """
    words = sys.argv[1:] if argv is None else argv
    options: Options = command_line.parse(Options, words, prog=PROG)
    try:
        if options.download:
            mnist.download(options.data_dir)
        split = mnist.imbalanced(
            *mnist.load(options.data_dir),
            kept_share=options.kept_share,
            validation_per_digit=options.validation_per_digit,
            seed=options.data_seed,
        )
        refuse_other_runs(options, split)
    except ValueError as error:
        command_line.refuse(error, prog=PROG)
    trials = Trials(options, split)
    rows = [row for arm in options.arms for row in run_arm(trials, options, arm)]
    reached = summary(rows)
    path = results.FOLDER / f"{options.name}.csv"
    results.write_csv(path, rows, **reached, settings=options.of_a_run(split))
    figures.draw_imbalanced(path, figures.FOLDER / f"{options.name}.png")
    for name, of_arms in reached.items():
        print(f"{name}: {json.dumps(of_arms)}")
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
