"""How fast are truncated importance-sampling returns, beside rlax's V-trace?

``python -m experiments.bench_returns`` compiles and runs, under ``vmap`` over the
columns of batches ``[T, B]``,

* ``scan`` and ``associative``: `fps_jax.objectives.returns.truncated_is_returns`, each
  of its methods;
* ``rlax``: ``rlax.vtrace``;
* ``floor``: nothing but a scan of ``x + decay * following``, for how little could be
  compiled at all.

``forward`` is the value targets; ``gradient`` is that of half the squared error between
targets and values, by the values. They take turns in one process; compile times have
tracing in them; they and run times are medians of the repeats, and the header of
``experiments/results/bench_returns.csv`` has rlax's time over that of ours as it is by
default, for every shape.
"""

import dataclasses
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rlax

from experiments import command_line, results
from fps_jax import checks
from fps_jax.objectives import returns, sums

PROG = "experiments.bench_returns"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Measures compilation and execution of returns.

    Attributes:
      repeats: of each measurement; the variants take turns.
      lengths: T, rows of a trajectory.
      batches: B, trajectories.
      seconds: of calls in each run's measurement.
    """

    repeats: int = 7
    lengths: tuple[int, ...] = (20, 128, 1024)
    batches: tuple[int, ...] = (32, 512)
    seconds: float = 0.05

    def __post_init__(self):
        """Refuses options that are out of range."""
        checks.in_range(self, 1, math.inf, "repeats")
        checks.in_range(self, 0, math.inf, "seconds", ends="()")
        for name in ("lengths", "batches"):
            for value in getattr(self, name):
                checks.number(name, value, 1)


def ours(method: str) -> Callable[..., jax.Array]:
    """Value targets of our own returns; constants.

    Args:
      method: see `returns.truncated_is_returns`.
    """

    def targets(log_ratio, reward, discount, values):
        always = jnp.ones_like(reward)
        return returns.truncated_is_returns(
            log_ratio,
            reward,
            discount,
            always,
            values[:-1],
            values[1:],
            always > 0,
            method=method,
        ).target

    return targets


def theirs(log_ratio, reward, discount, values) -> Any:
    """Value targets of rlax's V-trace; constants, as ``stop_target_gradients`` says."""
    v_tm1, v_t = values[:-1], values[1:]
    return v_tm1 + rlax.vtrace(v_tm1, v_t, reward, discount, jnp.exp(log_ratio))


def floor(log_ratio, reward, discount, values) -> jax.Array:
    """No targets of anything: a scan alone."""
    del log_ratio, values
    return jax.lax.stop_gradient(sums.discounted(reward, discount, method="scan"))


VARIANTS = {
    "scan": ours("scan"),
    "associative": ours("associative"),
    "rlax": theirs,
    "floor": floor,
}


def functions(targets: Callable[..., jax.Array]) -> dict[str, Callable[..., Any]]:
    """What is measured of one variant, over a batch.

    Args:
      targets: of one trajectory.
    """
    batched = jax.vmap(targets, in_axes=1, out_axes=1)

    def loss(*args):
        return 0.5 * jnp.mean(jnp.square(batched(*args) - args[-1][:-1]))

    return {"forward": batched, "gradient": jax.grad(loss, argnums=3)}


def measure(f: Callable[..., Any], args: Any, seconds: float) -> tuple[float, float]:
    """Seconds to compile a function anew, and of one call.

    Args:
      f: the function.
      args: of every call.
      seconds: how long to call it.
    """
    jax.clear_caches()
    start = time.perf_counter()
    compiled = jax.jit(f).lower(*args).compile()
    compile_s = time.perf_counter() - start
    jax.block_until_ready(compiled(*args))
    calls, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        jax.block_until_ready(compiled(*args))
        calls += 1
    return compile_s, (time.perf_counter() - start) / calls


def data(length: int, batch: int) -> tuple[jax.Array, ...]:
    """Log ratios, rewards, discounts and values of a batch; one row in 20 is terminal.

    Args:
      length: T.
      batch: B.
    """
    rng = np.random.default_rng(0)
    normal = lambda rows: rng.normal(0.0, 0.5, (rows, batch))
    discount = 0.99 * (rng.random((length, batch)) > 0.05)
    columns = normal(length), normal(length), discount, normal(length + 1)
    return tuple(jnp.asarray(x, jnp.float32) for x in columns)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures every variant in turn, as often as asked, and writes the CSV.

    Args:
      argv: the words after the program's name; None reads the process's own.
    """
    options = command_line.parse(
        Options, sys.argv[1:] if argv is None else argv, prog=PROG
    )
    shapes = [(t, b) for t in options.lengths for b in options.batches]
    rows: list[dict[str, Any]] = []
    speedups = {}
    for length, batch in shapes:
        args = data(length, batch)
        for what in ("forward", "gradient"):
            taken: dict[str, list[tuple[float, float]]] = {
                name: [] for name in VARIANTS
            }
            for _ in range(options.repeats):
                for name, targets in VARIANTS.items():
                    f = functions(targets)[what]
                    taken[name].append(measure(f, args, options.seconds))
            median = {
                name: tuple(statistics.median(column) for column in zip(*pairs))
                for name, pairs in taken.items()
            }
            for name, (compile_s, run_s) in median.items():
                rows.append(
                    {
                        "variant": name,
                        "T": length,
                        "B": batch,
                        "what": what,
                        "compile_ms": round(1e3 * compile_s, 2),
                        "run_us": round(1e6 * run_s, 2),
                    }
                )
                print(rows[-1], flush=True)
            best = "associative" if length >= sums.ASSOCIATIVE_FROM else "scan"
            speedups[f"{what}, T {length}, B {batch}"] = {
                part: round(median["rlax"][i] / median[best][i], 2)
                for i, part in enumerate(("compile", "run"))
            }
    results.write_csv(
        results.FOLDER / "bench_returns.csv", rows, rlax_over_ours=speedups
    )
    print(json.dumps(speedups, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
