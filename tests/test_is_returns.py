"""Truncated importance-sampling returns against plain sums, laws and small MDPs."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import rlax
from reference import Rows

from fps_jax.objectives import ratios, returns

GAMMA = 0.9
INFINITE = float("inf")
OPTIONS = [
    {},
    {"rho_bar": 2.0, "c_bar": 0.5, "lambda_": 0.8},
    {"rho_bar": INFINITE, "c_bar": INFINITE},
    {"rho_bar": 1.5, "c_bar": 0.0},
    {"n": 1},
    {"n": 3, "rho_bar": 2.0, "c_bar": 2.0},
    {"n": 4},
    {"n": 7, "lambda_": 0.5},
    {"n": 12},
    {"n": 30},
    {"trace": "none"},
    {"trace": "none", "n": 5, "rho_bar": 3.0},
]


def estimate(rows: Rows, log_ratio, gamma=GAMMA, **options):
    """Targets, advantages and ratios of one environment, as an agent gets them."""
    discount_t, trace_t = returns.discounts_and_traces(
        rows.terminated, rows.truncated, rows.is_valid, gamma=gamma
    )
    return returns.truncated_is_returns(
        log_ratio,
        rows.reward,
        discount_t,
        trace_t,
        rows.value[:-1],
        rows.value[1:],
        rows.is_valid,
        **options,
    )


@functools.cache
def compiled(**options):
    return jax.jit(functools.partial(estimate, **options))


def draw(seed: int, length: int, resets: bool = True):
    """Rows and log ratios of both signs."""
    rng = np.random.default_rng(seed)
    rows = reference.random_rows(rng, length, resets)
    return rows, rng.normal(0.0, 0.8, size=length)


def endless(seed: int, length: int):
    """Rows of one episode that does not end."""
    rows, log_ratio = draw(seed, length)
    never = np.zeros(length, bool)
    return rows._replace(terminated=never, truncated=never, is_valid=~never), log_ratio


def on_device(tree):
    is_float = lambda x: np.issubdtype(x.dtype, np.floating)
    return jax.tree.map(
        lambda x: jnp.asarray(x, jnp.float32 if is_float(x) else None), tree
    )


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-5)


# -------------------------------------------------------------------------- the sums


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("method", ["scan", "associative"])
def test_targets_and_advantages_are_the_sums_of_the_paper(options, method):
    for seed in range(6):
        for resets in (True, False):
            rows, log_ratio = draw(seed, 12, resets)
            got = compiled(method=method, **options)(*on_device((rows, log_ratio)))
            ratio = np.exp(log_ratio)
            targets = reference.truncated_is_targets(rows, ratio, GAMMA, **options)
            close(got.target, targets)
            close(got.advantage, reference.policy_advantages(rows, targets, GAMMA))
            rho = np.minimum(options.get("rho_bar", 1.0), ratio)
            close(got.rho[rows.is_valid], rho[rows.is_valid])
            c = options.get("lambda_", 1.0) * np.minimum(
                options.get("c_bar", 1.0), ratio
            )
            c = np.ones(12) if options.get("trace") == "none" else c
            close(got.c[rows.is_valid], c[rows.is_valid])


@pytest.mark.parametrize("length", [1, 2, 3, 500])
def test_both_methods_agree_at_every_length(length):
    data = on_device(draw(length, length))
    for options in ({}, {"rho_bar": 2.0, "c_bar": 1.1}):
        one = compiled(method="scan", **options)(*data)
        other = compiled(method="associative", **options)(*data)
        for x, y in zip(one, other):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rho_bar", [1.0, 1.5, 3.0, INFINITE])
@pytest.mark.parametrize("lambda_", [0.7, 1.0])
def test_with_c_bar_one_it_is_rlax_s(rho_bar, lambda_):
    rows, log_ratio = on_device(endless(3, 20))
    got = compiled(rho_bar=rho_bar, lambda_=lambda_)(rows, log_ratio)
    with jax.numpy_dtype_promotion("standard"):
        expected = rlax.vtrace(
            rows.value[:-1],
            rows.value[1:],
            rows.reward,
            jnp.full(20, GAMMA),
            jnp.exp(log_ratio),
            lambda_,
            clip_rho_threshold=rho_bar,
        )
    close(got.target - rows.value[:-1], expected)


# ---------------------------------------------------------------------------- the laws


@pytest.mark.parametrize("n", [1, 2, 5, 9, None])
def test_on_policy_every_window_is_its_n_step_return(n):
    rows, _ = endless(4, 9)
    steps = 9 if n is None else n
    expected = []
    for t in range(9):
        end = min(t + steps, 9)
        rewards = rows.reward[t:end] @ GAMMA ** np.arange(end - t)
        expected.append(rewards + GAMMA ** (end - t) * rows.value[end])
    rows = on_device(rows)
    close(estimate(rows, jnp.zeros(9), rho_bar=2.0, c_bar=1.5, n=n).target, expected)
    discount_t, trace_t = returns.discounts_and_traces(*rows[1:4], gamma=GAMMA)
    got = returns.n_step_returns(
        rows.reward,
        discount_t,
        trace_t,
        rows.value[:-1],
        rows.value[1:],
        rows.is_valid,
        n=steps,
    )
    close(got, expected)


def test_a_window_is_its_first_row_and_the_shorter_window_after_it():
    rows, log_ratio = on_device(draw(5, 14))
    discount_t, trace_t = returns.discounts_and_traces(*rows[1:4], gamma=GAMMA)
    error = lambda n: jnp.where(
        rows.is_valid, estimate(rows, log_ratio, n=n).target - rows.value[:-1], 0.0
    )
    first = estimate(rows, log_ratio, n=1)
    for n in range(2, 8):
        later = jnp.append(error(n - 1)[1:], 0.0)
        close(error(n), error(1) + discount_t * trace_t * first.c * later)


def test_without_a_trace_only_the_first_error_counts():
    rows, log_ratio = on_device(draw(6, 12))
    one_step = compiled(n=1)(rows, log_ratio)
    close(estimate(rows, log_ratio, c_bar=0.0).target, one_step.target)
    zero = compiled(lambda_=0.0)(rows, log_ratio)
    close(zero.target, one_step.target)
    close(one_step.advantage, zero.advantage)


def test_the_printed_product_is_the_one_whose_traces_are_all_one():
    rows, log_ratio = on_device(draw(7, 12))
    log_ratio = jnp.abs(log_ratio)  # Every ratio is at least c_bar.
    plain = compiled(trace="none", rho_bar=2.0)(rows, log_ratio)
    traced = compiled(rho_bar=2.0)(rows, log_ratio)
    close(plain.target, traced.target)


@pytest.mark.parametrize("bar", [0.7, 1.0, 4.0, INFINITE])
def test_with_equal_bars_the_weighted_advantage_is_the_value_s_error(bar):
    rows, log_ratio = on_device(draw(8, 14, resets=False))
    got = compiled(rho_bar=bar, c_bar=bar)(rows, log_ratio)
    error = jnp.where(rows.is_valid, got.target - rows.value[:-1], 0.0)
    close(jnp.where(rows.is_valid, got.rho * got.advantage, 0.0), error)


@pytest.mark.parametrize("lambda_", [0.0, 0.6, 1.0])
def test_on_policy_it_is_the_lambda_return_and_its_advantage(lambda_):
    rows, _ = draw(9, 15, resets=False)
    got = compiled(lambda_=lambda_)(*on_device((rows, np.zeros(15))))
    close(got.target, reference.lambda_returns(rows, GAMMA, lambda_))
    if lambda_ == 1.0:
        close(got.advantage, reference.advantages(rows, GAMMA, 1.0))


def test_nothing_after_a_termination_matters_before_it():
    rows, log_ratio = endless(10, 8)
    ends = np.arange(8) == 3
    rows = rows._replace(terminated=ends)
    later = rows._replace(
        reward=np.where(np.arange(8) > 3, 1e3, rows.reward),
        value=np.where(np.arange(9) > 3, -1e3, rows.value),
    )
    one = compiled()(*on_device((rows, log_ratio)))
    other = compiled()(*on_device((later, log_ratio)))
    for x, y in zip(one, other):
        np.testing.assert_array_equal(x[:4], y[:4])
    assert np.all(one.target[4:] != other.target[4:])


def test_targets_shift_with_the_values_and_scale_with_rewards_and_values():
    rows, log_ratio = endless(11, 10)
    run = compiled(gamma=1.0)
    plain = run(*on_device((rows, np.zeros(10))))
    shifted = run(*on_device((rows._replace(value=rows.value + 3.0), np.zeros(10))))
    close(shifted.target, plain.target + 3.0)
    scaled = rows._replace(reward=5.0 * rows.reward, value=5.0 * rows.value)
    one = compiled()(*on_device((rows, log_ratio)))
    close(compiled()(*on_device((scaled, log_ratio))).target / 5.0, one.target)


def test_an_action_that_the_policy_would_not_take_leaves_the_value_alone():
    rows, log_ratio = endless(12, 6)
    log_ratio[2] = -1e4
    got = compiled()(*on_device((rows, log_ratio)))
    np.testing.assert_allclose(got.target[2], rows.value[2], atol=1e-6)


def test_targets_do_not_fall_as_rho_bar_rises_where_no_error_is_negative():
    rows, log_ratio = endless(13, 10)
    rows = rows._replace(reward=np.abs(rows.reward) + 10.0)
    by_cap = [
        compiled(rho_bar=rho_bar, c_bar=0.5)(*on_device((rows, log_ratio))).target
        for rho_bar in (0.5, 1.0, 2.0, INFINITE)
    ]
    assert np.all(np.diff(by_cap, axis=0) >= -1e-4)
    assert np.any(np.diff(by_cap, axis=0) > 0.1)


def test_no_gradient_flows_out():
    rows, log_ratio = on_device(draw(14, 9))

    def total(log_ratio, reward, value):
        got = estimate(rows._replace(reward=reward, value=value), log_ratio)
        return sum(jnp.sum(x) for x in got)

    gradients = jax.grad(total, argnums=(0, 1, 2))(log_ratio, rows.reward, rows.value)
    for gradient in gradients:
        np.testing.assert_array_equal(gradient, 0.0)


@pytest.mark.parametrize("method", ["scan", "associative"])
@pytest.mark.parametrize("n", [None, 3])
def test_what_a_masked_row_holds_changes_nothing(n, method):
    rows, log_ratio = on_device(draw(15, 12))
    assert 0 < np.sum(~rows.is_valid) < 6
    run = compiled(n=n, method=method)
    clean = run(rows, log_ratio)
    np.testing.assert_array_equal(clean.target[~rows.is_valid], 0.0)
    np.testing.assert_array_equal(clean.advantage[~rows.is_valid], 0.0)
    for content in (1e30, np.nan, np.inf, -np.inf):
        fill = lambda x, content=content: jnp.where(rows.is_valid, x, content)
        # A reset row's own value is that of a state which nothing valid leads to.
        dirty = rows._replace(reward=fill(rows.reward))
        jax.tree.map(np.testing.assert_array_equal, run(dirty, fill(log_ratio)), clean)


@pytest.mark.parametrize("size", [30.0, 1e4, INFINITE])
def test_extreme_ratios_stay_finite(size):
    rows, log_ratio = endless(16, 9)
    log_ratio = np.sign(log_ratio) * size
    for options in ({}, {"rho_bar": INFINITE, "c_bar": 1.0}):
        got = compiled(**options)(*on_device((rows, log_ratio)))
        assert all(np.all(np.isfinite(x)) for x in got)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rho_bar": 0.0}, "rho_bar 0.0 must be above 0"),
        ({"c_bar": -0.1}, "c_bar -0.1 must be at least 0"),
        ({"rho_bar": 0.5}, "rho_bar 0.5 must be at least c_bar 1.0.*diverge"),
        ({"lambda_": 1.2}, r"lambda_ 1.2 must be in \[0, 1\]"),
        ({"n": 0}, "n 0 must be at least 1"),
        ({"trace": "retrace"}, "trace 'retrace' must be one of vtrace, none"),
        ({"method": "loop"}, "method 'loop' must be one of auto, scan, associative"),
    ],
)
def test_an_impossible_option_is_named_with_its_value(options, message):
    with pytest.raises(ValueError, match=message):
        estimate(*on_device(draw(0, 3)), **options)


# ----------------------------------------------------------------------- small MDPs


@functools.cache
def first_targets(n, trace):
    """Of values and of paths, the first target; compiled once for all numbers."""
    one = lambda rows, ratio, numbers: estimate(
        rows, ratio, n=n, trace=trace, **numbers
    ).target[0]
    of_paths = jax.vmap(one, (Rows(0, None, None, None, 0), 0, None))
    return jax.jit(jax.vmap(of_paths, (Rows(None, None, None, None, 0), None, None)))


class Mdp:
    """Two states, two actions, two policies; expectations by counting every path."""

    def __init__(self, seed: int):
        rng = np.random.default_rng(seed)
        self.moves = rng.dirichlet(np.ones(2) * 0.7, size=(2, 2))  # [s, a, s']
        self.rewards = rng.normal(size=(2, 2))
        self.behaviour, self.policy = rng.dirichlet(np.ones(2) * 0.7, size=(2, 2))

    def value(self, policy, gamma=GAMMA):
        moves = np.einsum("sa,sat->st", policy, self.moves)
        reward = np.sum(policy * self.rewards, axis=1)
        return np.linalg.solve(np.eye(2) - gamma * moves, reward)

    def between(self, rho_bar):
        """The policy whose value is the fixed point."""
        mass = np.minimum(rho_bar * self.behaviour, self.policy)
        return mass / mass.sum(axis=1, keepdims=True)

    def expected_targets(self, values, length: int, **options):
        """E_b of the first target from each state, ``[len(values), 2]``."""
        paths = np.array(list(itertools.product(range(2), repeat=2 * length)))
        action, later = paths[:, 0::2], paths[:, 1::2]
        run = first_targets(options.pop("n", None), options.pop("trace", "vtrace"))
        numbers = {k: jnp.asarray(x, jnp.float64) for k, x in options.items()}
        found = []
        for start in range(2):
            state = np.concatenate([np.full((len(paths), 1), start), later], axis=1)
            before, after = state[:, :-1], state[:, 1:]
            chosen = self.behaviour[before, action]
            weight = np.prod(chosen * self.moves[before, action, after], axis=1)
            never = np.zeros(length, bool)
            rows = Rows(
                self.rewards[before, action], never, never, ~never, values[:, state]
            )
            log_ratio = np.log(self.policy[before, action] / chosen)
            rows = jax.tree.map(jnp.asarray, rows)
            found.append(run(rows, log_ratio, numbers) @ weight)
        return np.stack(found, axis=1)

    def jacobian(self, length, **options):
        """Of the expected update, an affine map of the two values."""
        at = np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
        zero, *units = self.expected_targets(at, length, **options)
        return np.stack(units, axis=1) - zero[:, None]


@pytest.mark.parametrize("rho_bar", [1e-3, 1.0, 1.5, INFINITE])
def test_the_fixed_point_depends_on_rho_bar_alone(rho_bar, float64):
    for seed in range(3):
        mdp = Mdp(seed)
        true = mdp.value(mdp.between(rho_bar) if rho_bar < 1e9 else mdp.policy)
        bounds = {min(c_bar, rho_bar) for c_bar in (0.0, 0.5, 1.0, 1.5)}
        for c_bar, n in itertools.product(bounds, (1, 3)):
            options = {"rho_bar": rho_bar, "c_bar": c_bar, "n": n}
            expected = mdp.expected_targets(true[None], 3, **options)
            np.testing.assert_allclose(expected, true[None], rtol=1e-9, atol=1e-9)


def test_the_fixed_point_runs_from_behaviour_to_policy(float64):
    mdp = Mdp(3)
    one, other = mdp.value(mdp.behaviour), mdp.value(mdp.policy)
    assert np.abs(one - other).max() > 0.1
    for rho_bar, true in ((1e-12, one), (INFINITE, other)):
        expected = mdp.expected_targets(
            true[None], 3, rho_bar=rho_bar, c_bar=min(1.0, rho_bar)
        )
        np.testing.assert_allclose(expected[0], true, rtol=1e-9, atol=1e-9)


def test_uncapped_it_is_the_policy_s_own_n_step_operator(float64):
    mdp, values = Mdp(4), np.array([[0.3, -1.2]])
    moves = np.einsum("sa,sat->st", mdp.policy, mdp.moves)
    reward = np.sum(mdp.policy * mdp.rewards, axis=1)
    expected = values[0]
    for _ in range(4):
        expected = reward + GAMMA * moves @ expected
    got = mdp.expected_targets(values, 4, rho_bar=INFINITE, c_bar=INFINITE)
    np.testing.assert_allclose(got[0], expected, rtol=1e-9)


def test_a_truncated_ratio_is_one_on_average_only_if_nothing_is_cut():
    mdp = Mdp(5)
    log_ratio = jnp.asarray(np.log(mdp.policy / mdp.behaviour), jnp.float32)
    mean = lambda cap: np.sum(
        mdp.behaviour * np.asarray(ratios.truncated_ratio(log_ratio, cap)), axis=1
    )
    np.testing.assert_allclose(mean(INFINITE), 1.0, rtol=1e-5)
    np.testing.assert_allclose(mean(float(jnp.exp(log_ratio.max()))), 1.0, rtol=1e-5)
    assert np.all(mean(1.0) < 0.999)


def test_the_v_trace_product_contracts_and_the_printed_one_need_not(float64):
    norm = lambda jacobian: np.abs(jacobian).sum(axis=1).max()
    traced, printed = [], []
    for seed in range(25):
        mdp = Mdp(seed)
        for rho_bar in (1.0, 10.0):
            traced.append(norm(mdp.jacobian(6, gamma=0.99, rho_bar=rho_bar)))
            options = {"rho_bar": rho_bar, "trace": "none"}
            printed.append(norm(mdp.jacobian(6, gamma=0.99, **options)))
    assert max(traced) <= 1.0 + 1e-9
    assert max(printed) > 1.5
