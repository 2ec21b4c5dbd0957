"""How fast are truncated importance-sampling returns, beside rlax's V-trace?

``python -m experiments.bench_returns`` compiles and runs, under ``vmap`` over B
trajectories of T rows,

* ``scan`` and ``associative``: `fps_jax.objectives.returns.truncated_is_returns`, each
  of its methods;
* ``rlax``: ``rlax.vtrace``.

``forward`` is the targets; ``gradient`` is that of half the squared error between
targets and values, by the values. They take turns in one process; compile and run
times are medians of the repeats, and the header of
``experiments/results/bench_returns.csv`` has rlax's time over that of ours as it is by
default, for every shape.
"""

import dataclasses
import json
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


def ours(method: str) -> Callable[..., jax.Array]:
    """Errors ``Y - v`` of our own returns; differentiable by the values.

    Args:
      method: see `returns.truncated_is_returns`.
    """

    def errors(log_ratio, reward, values):
        always = jnp.ones_like(reward)
        got = returns.truncated_is_returns(
            log_ratio,
            reward,
            0.99 * always,
            always,
            values[:-1],
            values[1:],
            always > 0,
            method=method,
        )
        return got.target - values[:-1]

    return errors


def theirs(log_ratio, reward, values) -> Any:
    """Errors of rlax's V-trace."""
    discount = jnp.full_like(reward, 0.99)
    return rlax.vtrace(values[:-1], values[1:], reward, discount, jnp.exp(log_ratio))


VARIANTS = {
    "scan": ours("scan"),
    "associative": ours("associative"),
    "rlax": theirs,
}


def functions(errors: Callable[..., jax.Array]) -> dict[str, Callable[..., Any]]:
    """What is measured of one variant, over a batch.

    Args:
      errors: of one trajectory.
    """
    batched = jax.vmap(errors)
    loss = lambda *args: 0.5 * jnp.mean(jnp.square(batched(*args)))
    return {"forward": batched, "gradient": jax.grad(loss, argnums=2)}


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
    """Log ratios, rewards and values of a batch.

    Args:
      length: T.
      batch: B.
    """
    rng = np.random.default_rng(0)
    shapes = (batch, length), (batch, length), (batch, length + 1)
    return tuple(jnp.asarray(rng.normal(0.0, 0.5, s), jnp.float32) for s in shapes)


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
                for name, errors in VARIANTS.items():
                    f = functions(errors)[what]
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
