"""From TD errors to priorities, and from probabilities to importance weights.

Rules are functions of arrays that compose by being called on each other's results:

    novelty(derivative(td_error, last, epsilon=1e-6), times_replayed, coef=1.0)

Priorities are raw: a replay stores ``priority ** exponent`` and draws in proportion to
that. From a TD error that is not finite comes a priority that `is_acceptable` refuses,
not one that looks right. Coefficients may be traced; a number that is out of the range
told here raises ValueError. The source is Schaul et al. (2016), "Prioritized experience
replay", arXiv:1511.05952: appendix A where no section is named.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree, Real

from fps_jax import checks

Scalar = Float[Array, ""] | float
Count = Int[Array, ""] | int
Items = Float[Array, " B"]  # Of a batch, or [N] of a whole replay.
Counts = Real[Array, " B"]  # Integers or floats.
NORMALIZATIONS = ("batch", "buffer", "none")
LARGEST = float(jnp.finfo(jnp.float32).max)


def _at_least_0(**coefficients: Scalar) -> None:
    for name, value in coefficients.items():
        checks.number(name, value, 0.0, LARGEST)


def _interval(low: Scalar, high: Scalar, smallest: float, *, ends: str) -> None:
    checks.number("low", low, smallest, LARGEST)
    is_known = isinstance(low, (int, float))
    checks.number("high", high, low if is_known else smallest, LARGEST, ends=ends)


def absolute(td_error: Items, *, epsilon: Scalar) -> Items:
    """Proportional prioritization: how surprising an item was (section 3.3).

        |delta| + epsilon

    Args:
      td_error: delta, in units of return.
      epsilon: at least 0, in the same units; above 0 no item is lost for good.
    """
    _at_least_0(epsilon=epsilon)
    return jnp.abs(td_error) + epsilon


def signed(
    td_error: Items, *, positive: Scalar = 1.0, negative: Scalar = 0.5, epsilon: Scalar
) -> Items:
    """Asymmetric prioritization: better than expected tells more than worse.

        positive |delta| + epsilon   where delta is above 0
        negative |delta| + epsilon   elsewhere

    The Anna Karenina principle, which gives no numbers.

    Args:
      td_error: delta, in units of return.
      positive: at least 0.
      negative: at least 0; equal to `positive` nothing is asymmetric.
      epsilon: at least 0, in units of return.
    """
    _at_least_0(positive=positive, negative=negative, epsilon=epsilon)
    return jnp.where(td_error > 0.0, positive, negative) * jnp.abs(td_error) + epsilon


def derivative(td_error: Items, last_td_error: Items, *, epsilon: Scalar) -> Items:
    """Learning progress: what has changed since the item was last replayed.

        | |delta| - |delta_last| | + epsilon,  delta_last = 0 if it is unknown

    An error that stays, such as that of a noisy reward, loses its priority.

    Args:
      td_error: delta, in units of return.
      last_td_error: delta when last replayed; NaN if it never was.
      epsilon: at least 0, in units of return.
    """
    _at_least_0(epsilon=epsilon)
    last = jnp.where(jnp.isfinite(last_td_error), jnp.abs(last_td_error), 0.0)
    return jnp.abs(jnp.abs(td_error) - last) + epsilon


def sign_consistent(
    priority: Items,
    td_error: Items,
    last_td_error: Items,
    *,
    grow: Scalar = 1.2,
    shrink: Scalar = 0.5,
    low: Scalar,
    high: Scalar,
) -> Items:
    """Rprop's law: priorities grow while errors keep their sign, else they shrink.

        clip(f priority, low, high),  f = grow    where delta delta_last > 0
                                      f = shrink  where delta delta_last < 0
                                      f = 1       where it is 0 or unknown

    Footnote 3; factors of Riedmiller and Braun (1993).

    Args:
      priority: what the items have now.
      td_error: delta, in units of return.
      last_td_error: delta when last replayed; NaN if it never was.
      grow: at least 1.
      shrink: in [0, 1].
      low: smallest priority, at least 0.
      high: largest priority, at least `low`.
    """
    checks.number("grow", grow, 1.0, LARGEST)
    checks.number("shrink", shrink, 0.0, 1.0)
    _interval(low, high, 0.0, ends="[]")
    # Signs, since the product of small errors is 0. NaN is neither above nor below 0.
    agreement = jnp.sign(td_error) * jnp.sign(last_td_error)
    factor = jnp.where(agreement > 0.0, grow, jnp.where(agreement < 0.0, shrink, 1.0))
    priority = jnp.clip(factor * priority, low, high)
    return jnp.where(jnp.isfinite(td_error), priority, jnp.nan)


def weight_change_norm(changes: PyTree[Float[Array, "B ..."]]) -> Items:
    """How far replaying an item moves the parameters: the norm over all of them.

        sqrt(sum_j change_j^2)

    Of gradients, or of the steps that an optimiser makes of them; an adaptive one's
    steps, and so these priorities, are smaller where there is more noise:

        step = lambda gradient: optimizer.update(gradient, state)[0]
        priority = weight_change_norm(jax.vmap(step)(gradients))

    Entries are divided by the largest first, whose square may overflow.

    Args:
      changes: arrays ``[B, ...]``, at least one, of any units.
    """

    def norm(change):
        leaves = [x.astype(jnp.float32) for x in jax.tree.leaves(change)]
        largest = [jnp.max(jnp.abs(x), initial=0.0) for x in leaves]
        # Within bounds, since compiled programs may multiply by 1 / scale.
        scale = jnp.clip(jnp.max(jnp.stack(largest)), 1e-30, 1e30)
        return scale * jnp.sqrt(sum(jnp.sum(jnp.square(x / scale)) for x in leaves))

    return jax.vmap(norm)(changes)


def return_boost(
    priority: Items, returns: Items, *, low: Scalar, high: Scalar, coef: Scalar
) -> Items:
    """Raises the priority of what went well, of items or of whole episodes.

        priority (1 + coef clip((return - low) / (high - low), 0, 1))

    Args:
      priority: of another rule.
      returns: of the item's episode, or from the item to the end of it.
      low: return from which on the priority is raised.
      high: from which on it is ``1 + coef`` times as large; above `low`, else no boost.
      coef: at least 0.
    """
    _interval(low, high, -LARGEST, ends="(]")
    _at_least_0(coef=coef)
    width = jnp.asarray(high, priority.dtype) - low
    above = jnp.clip(returns, low, high) - low
    return priority * (1.0 + coef * (above / jnp.where(width > 0.0, width, jnp.inf)))


def staleness_bonus(priority: Items, age: Counts, *, rate: Scalar) -> Items:
    """Raises the priority of what has not been replayed for long.

        priority + rate age

    For a pass over the whole replay now and then. With a target network the age may
    count up to its last change only (footnote 4).

    Args:
      priority: of another rule.
      age: updates since the item was last replayed, at least 0.
      rate: at least 0, in priority an update.
    """
    _at_least_0(rate=rate)
    return priority + rate * age.astype(priority.dtype)


def staleness_offset(priority: Items, step: Count, *, rate: Scalar) -> Items:
    """The order of `staleness_bonus`, without passes over the replay.

        priority - rate step

    Given to new priorities alone: at update T all of them are less by ``rate T`` than
    with the bonus, so their order is the same. Their ratios are not, and they may be
    below 0: they serve rank-based and greedy replay only. In float32 differences below
    ``rate step 2^-23`` are lost.

    Args:
      priority: of another rule.
      step: updates until now, of the whole run.
      rate: at least 0, in priority an update.
    """
    _at_least_0(rate=rate)
    return priority - rate * jnp.asarray(step, priority.dtype)


def novelty(priority: Items, times_seen: Counts, *, coef: Scalar) -> Items:
    """Raises the priority of what was seen seldom, to keep replay diverse.

        priority (1 + coef / sqrt(1 + times_seen))

    The formula is that of count-based exploration; the paper gives none.

    Args:
      priority: of another rule.
      times_seen: how often the item was replayed, or its observation met; at least 0.
      coef: at least 0.
    """
    _at_least_0(coef=coef)
    return priority * (1.0 + coef / jnp.sqrt(1.0 + times_seen.astype(priority.dtype)))


def predecessor(
    priority_of_predecessor: Items,
    td_error: Items,
    is_same_episode: Bool[Array, " B"],
    *,
    coef: Scalar = 1.0,
) -> Items:
    """Raises the priority of the item before: what it leads to has just changed.

        priority_of_predecessor + coef |delta|,  unless an episode ended between them

    Args:
      priority_of_predecessor: what the items before have now.
      td_error: delta of the items themselves, in units of return.
      is_same_episode: whether the item before did not end its episode.
      coef: at least 0.
    """
    _at_least_0(coef=coef)
    boost = jnp.where(is_same_episode, jnp.abs(td_error), 0.0)
    return priority_of_predecessor + coef * boost


def off_policy(td_error: Items, ratio: Items, *, epsilon: Scalar) -> Items:
    """Surprise as far as the policy meets it: ``rho |delta| + epsilon`` (section 6).

    Args:
      td_error: delta, in units of return.
      ratio: rho, ``pi(a|s) / b(a|s)``, at least 0.
      epsilon: at least 0, in units of return.
    """
    _at_least_0(epsilon=epsilon)
    return ratio * jnp.abs(td_error) + epsilon


def rejection(ratio: Items) -> Items:
    """Rejection sampling: ``min(1, rho)``, the chance that an item is accepted.

    For exponent 1, importance exponent 0 and the ratio of `off_policy`. Section 6.
    """
    return jnp.minimum(ratio, 1.0)


def importance_weights(
    probability: Items,
    size: Count | Scalar,
    *,
    exponent: Scalar,
    is_valid: Bool[Array, " B"] | None = None,
    ratio: Items | None = None,
    normalize: str = "batch",
    min_probability: Scalar | None = None,
    axis_name: str | None = None,
) -> Items:
    """Corrects, as far as the exponent says, for draws that were not uniform.

        w = rho (size P)^-exponent / m,  m = max_i rho_i (size P_i)^-exponent  "batch"
                                         m = (size min_probability)^-exponent  "buffer"
                                         m = 1                                 "none"

    Section 3.4, which anneals the exponent: ``optax.linear_schedule(0.4, 1.0, steps)``
    for one. With a ratio, uniform draws and exponent 1: weighted importance sampling
    (section 6). Rows that are not valid, or with P = 0, or whose weight is not finite,
    weigh 0 and have no influence on others. All weights are finite, at most
    ``exp(88)``, and constants to a gradient.

    Args:
      probability: P of the item in one draw, in (0, 1].
      size: how many items there are; their mean a device if P is of a device's own.
      exponent: beta, in [0, 1]; 0 corrects nothing, 1 all of it.
      is_valid: which rows count; all of them by default.
      ratio: rho, ``pi(a|s) / b(a|s)``, at least 0; 1 by default.
      normalize: "batch", "buffer" or "none".
      min_probability: for "buffer", the smallest P that is above 0. If there is none,
        such as 0, the batch's largest weight is taken.
      axis_name: the device axis over which m is the largest, if any.
    """
    checks.number("exponent", exponent, 0.0, 1.0)
    checks.choice("normalize", normalize, NORMALIZATIONS)
    if normalize == "buffer" and min_probability is None:
        raise ValueError("min_probability None must be a number for 'buffer'.")

    def log_of_power(probability):
        log_share = jnp.log(size * probability)
        return jnp.where(jnp.isfinite(log_share), -exponent * log_share, -jnp.inf)

    size = jnp.asarray(size, probability.dtype)
    log_weight = log_of_power(probability)
    if ratio is not None:
        log_weight = log_weight + jnp.log(ratio)
    is_counted = jnp.isfinite(log_weight) & (True if is_valid is None else is_valid)
    log_weight = jax.lax.stop_gradient(jnp.where(is_counted, log_weight, -jnp.inf))
    if normalize != "none":
        largest = jnp.max(log_weight, initial=-jnp.inf)
        if normalize == "buffer":
            least = log_of_power(jnp.asarray(min_probability, probability.dtype))
            largest = jax.lax.stop_gradient(jnp.where(least > -jnp.inf, least, largest))
        if axis_name is not None:
            largest = jax.lax.pmax(largest, axis_name)
        # Where no row counts there is nothing to divide by.
        log_weight -= jnp.where(largest > -jnp.inf, largest, 0.0)
    return jnp.exp(jnp.minimum(log_weight, 88.0))


def is_acceptable(priority: Items) -> Bool[Array, " B"]:
    """Which priorities a replay can store: finite and at least 0."""
    return jnp.isfinite(priority) & (priority >= 0.0)


def new_maximum(
    maximum: Float[Array, ""],
    priority: Items,
    *,
    decay: Scalar = 1.0,
    axis_name: str | None = None,
) -> Float[Array, ""]:
    """The priority of new items after a batch: the largest of all that were seen.

        max(decay maximum, max_i priority_i),  starting from 1

    Priorities that are not acceptable do not count. With decay 1 this is Algorithm 1,
    where the errors of a policy that knew nothing stay the maximum.

    Args:
      maximum: that before the batch.
      priority: of the batch's items.
      decay: in [0, 1]; 1 keeps the maximum for ever.
      axis_name: the device axis that has one maximum, if any.
    """
    checks.number("decay", decay, 0.0, 1.0)
    acceptable = jnp.where(is_acceptable(priority), priority, 0.0)
    largest = jnp.maximum(decay * maximum, jnp.max(acceptable, initial=0.0))
    return largest if axis_name is None else jax.lax.pmax(largest, axis_name)


def quota(weights: Items, is_source: Bool[Array, " B"], fraction: Scalar) -> Items:
    """Raises the weights of one source, such as demonstrations, to their share.

        w_i = fraction / (1 - fraction) others w_i / source   in the source

    with the sums of the weights of the source and of the others. Nothing changes if the
    source has that share already, is absent or alone. Section 6.

    Args:
      weights: priorities after their exponent, of every slot; 0 in empty ones.
      is_source: which slots hold items of the source.
      fraction: the least share of draws from the source, in [0, 1).
    """
    checks.number("fraction", fraction, 0.0, 1.0, ends="[)")
    source = jnp.sum(weights, where=is_source)
    others = jnp.sum(weights, where=~is_source)
    due = fraction / (1.0 - fraction) * others
    is_short = (source > 0.0) & (source < due)
    # The share first: due / source may be infinite.
    share = weights / jnp.where(is_short, source, 1.0)
    return jnp.where(is_source & is_short, share * due, weights)


def eviction_score(weight: Items, age: Counts, *, age_coef: Scalar) -> Items:
    """Which items to give up first: the larger, the sooner.

        age_coef log(1 + age) - log(weight)

    An item is drawn by its share of all weights, so only their ratios matter: k times
    ``1 + age`` makes up for ``k^age_coef`` times the weight. With 0 the smallest weight
    goes first; the larger the coefficient, the more nearly the oldest item; below 0 the
    old are spared, against cycles. Section 6, which gives no formula.

    Args:
      weight: priorities after their exponent, at least 0, which counts as 1.2e-38.
      age: updates since the item was stored, at least 0.
      age_coef: finite.
    """
    checks.number("age_coef", age_coef, -LARGEST, LARGEST)
    log_weight = jnp.log(jnp.maximum(weight, float(jnp.finfo(jnp.float32).tiny)))
    return age_coef * jnp.log1p(age.astype(weight.dtype)) - log_weight
