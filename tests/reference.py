"""Second implementations in plain numpy, float64: slow, and written to be believed.

Each says its definition as directly as it can and shares no trick with the package:
returns are mixtures of n-step sums and not recursions, statistics are numpy's own over
the rows that count. `random_rows` draws what they are compared on.
"""

from typing import NamedTuple

import numpy as np


class Rows(NamedTuple):
    """One environment's segment: flags and rewards ``[T]``, values ``[T + 1]``."""

    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    is_valid: np.ndarray
    value: np.ndarray


def random_rows(rng: np.random.Generator, length: int, resets: bool = True) -> Rows:
    """A segment of short episodes; a done row is followed by an invalid reset row.

    Args:
      rng: the source.
      length: T.
      resets: False draws the invalid rows anywhere, as a filter might.
    """
    end = rng.random(length) < 0.3
    is_terminal = rng.random(length) < 0.5
    is_valid = rng.random(length) < 0.8
    if resets:
        is_valid = np.ones(length, bool)
        for t in range(1, length):
            is_valid[t] = not (end[t - 1] and is_valid[t - 1])
        end &= is_valid
    return Rows(
        reward=rng.normal(size=length),
        terminated=end & is_terminal,
        truncated=end & ~is_terminal,
        is_valid=is_valid,
        value=rng.normal(size=length + 1),
    )


def lambda_return(rows: Rows, t: int, gamma: float, lambda_: float) -> float:
    """The lambda-return of row t, a mixture of the n-step returns of its episode.

    (1 - lambda) sum_n lambda^(n - 1) G^(n), with all the rest of the weight on the
    longest return, the one that ends with the episode or with the segment.
    """
    n_step, total = [], 0.0
    for k in range(t, len(rows.reward)):
        if not rows.is_valid[k]:
            break
        total += gamma ** (k - t) * rows.reward[k]
        future = 0.0 if rows.terminated[k] else rows.value[k + 1]
        n_step.append(total + gamma ** (k - t + 1) * future)
        if rows.terminated[k] or rows.truncated[k]:
            break
    mixed = 0.0
    for n, one in enumerate(n_step, start=1):
        is_longest = n == len(n_step)
        weight = 1.0 if is_longest else 1.0 - lambda_
        mixed += weight * lambda_ ** (n - 1) * one
    return mixed


def lambda_returns(rows: Rows, gamma: float, lambda_: float) -> np.ndarray:
    """The lambda-returns of every row, 0 where not valid."""
    times = range(len(rows.reward))
    return np.array(
        [
            lambda_return(rows, t, gamma, lambda_) if rows.is_valid[t] else 0
            for t in times
        ]
    )


def advantages(rows: Rows, gamma: float, lambda_: float) -> np.ndarray:
    """What the lambda-returns are above the values, 0 where not valid."""
    above = lambda_returns(rows, gamma, lambda_) - rows.value[:-1]
    return np.where(rows.is_valid, above, 0.0)


def standardized(x: np.ndarray, is_valid: np.ndarray) -> np.ndarray:
    """Standardises the valid items by themselves, 0 elsewhere."""
    kept = x[is_valid].astype(np.float64)
    out = np.zeros(x.shape)
    out[is_valid] = (kept - kept.mean()) / (kept.std() + 1e-8)
    return out


def explained_variance(value: np.ndarray, target: np.ndarray) -> float:
    """``1 - Var(G - v) / Var(G)`` of items that all count."""
    return 1.0 - np.var(target - value) / np.var(target)


def clipped_surrogate(ratio: float, advantage: float, clip_epsilon: float) -> float:
    """Equation 7 of Schulman et al. (2017), of one item."""
    clipped = min(max(ratio, 1.0 - clip_epsilon), 1.0 + clip_epsilon)
    return min(ratio * advantage, clipped * advantage)


def truncated_is_targets(
    rows: Rows,
    ratio: np.ndarray,
    gamma: float,
    *,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
    lambda_: float = 1.0,
    n: int | None = None,
    trace: str = "vtrace",
) -> np.ndarray:
    """The sums of equations 12 and 13 of DFPS, term by term, 0 where not valid."""
    length = len(rows.reward)
    targets = np.zeros(length)
    for t in range(length):
        if not rows.is_valid[t]:
            continue
        targets[t], weight = rows.value[t], 1.0
        for k in range(t, length if n is None else min(t + n, length)):
            if not rows.is_valid[k]:
                break
            future = 0.0 if rows.terminated[k] else rows.value[k + 1]
            delta = rows.reward[k] + gamma * future - rows.value[k]
            targets[t] += weight * min(rho_bar, ratio[k]) * delta
            if rows.terminated[k] or rows.truncated[k]:
                break
            weight *= gamma
            if trace == "vtrace":
                weight *= lambda_ * min(c_bar, ratio[k])
    return targets


def policy_advantages(rows: Rows, targets: np.ndarray, gamma: float) -> np.ndarray:
    """Reward and next target above the value of each row, 0 where not valid."""
    length = len(rows.reward)
    advantages = np.zeros(length)
    for t in range(length):
        if not rows.is_valid[t]:
            continue
        goes_on = not rows.truncated[t] and t + 1 < length and rows.is_valid[t + 1]
        future = targets[t + 1] if goes_on else rows.value[t + 1]
        future = 0.0 if rows.terminated[t] else gamma * future
        advantages[t] = rows.reward[t] + future - rows.value[t]
    return advantages
