"""PPO against a naive float64 twin, its laws, and its options."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chex import assert_tree_all_finite, assert_trees_all_close, assert_trees_all_equal
from ppo_twin import ROWS, TOTAL, Twin, compiled, random_trajectory
from probes import CONTINUOUS, DISCRETE, acted

from fps_jax.agents.ppo import PPOConfig
from fps_jax.agents.ppo_options import Hyper

PLAIN = PPOConfig(
    optimizer="sgd",
    learning_rate=0.5,
    final_learning_rate_fraction=0.4,
    gamma=0.9,
    lambda_=0.8,
    clip_epsilon=0.25,
    entropy_coef=0.3,
    value_coef=0.7,
    max_grad_norm=1e6,
    num_epochs=1,
    minibatch_size=ROWS,
    hidden_sizes=(8,),
)
"""One gradient step, so that what it did can be foretold."""
STEPS = PPOConfig(num_epochs=2, minibatch_size=ROWS // 3, hidden_sizes=(8,))
"""Adam, over minibatches."""


TWINS = {
    "discrete": (PLAIN, DISCRETE),
    "continuous, recomputed": (
        dataclasses.replace(
            PLAIN, normalize_advantage="batch", num_epochs=2, recompute_advantages=True
        ),
        CONTINUOUS,
    ),
    "every option": (
        dataclasses.replace(
            PLAIN,
            clip_epsilon=0.1,
            clip_epsilon_high=0.2,
            final_clip_epsilon_fraction=0.5,
            dual_clip=1.2,
            ewma_decay=0.7,
            max_importance_ratio=1.2,
            value_loss="smooth_l1",
            clip_value=0.02,
            num_epochs=3,
            normalize_advantage="percentile",
            advantage_norm_rate=0.2,
            shares_torso=True,
            separates_losses=True,
        ),
        CONTINUOUS,
    ),
    "every option, otherwise": (
        dataclasses.replace(
            PLAIN,
            clip_epsilon=0.05,
            ewma_decay=0.7,
            ewma_debias=False,
            value_loss="l1",
            clip_value=0.02,
            num_epochs=3,
            minibatch_size=None,
            normalize_advantage="running",
            shares_torso=True,
        ),
        DISCRETE,
    ),
    "nothing normalised": (
        dataclasses.replace(
            PLAIN,
            normalize_advantage="none",
            num_epochs=2,
            normalize_observations=False,
            scale_returns=False,
        ),
        DISCRETE,
    ),
}


@pytest.mark.parametrize("max_grad_norm", [1e6, 0.2])
@pytest.mark.parametrize("name", TWINS)
def test_an_update_is_the_gradient_step_of_the_twin(name, max_grad_norm):
    this = compiled(*TWINS[name])
    trajectory = this.nearly_acted(4)
    state = this.with_hyper(max_grad_norm=max_grad_norm)
    after, metrics = this.update(state, trajectory)
    params, average, expected = Twin(this, state, trajectory).update()
    assert 0.1 < expected["clip_fraction"] < 0.9
    assert (expected["grad_norm"] > max_grad_norm) == (max_grad_norm < 1)
    found = after.learner
    close = functools.partial(assert_trees_all_close, rtol=1e-4, atol=1e-5)
    double = lambda tree: jax.tree.map(np.float64, tree["params"])
    close(double(found.params), params)
    if average is not None:
        close(double(found.average.value), average)
    assert metrics.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_allclose(metrics[key], value, 1e-4, 1e-6, err_msg=key)


def test_the_moments_take_in_what_was_valid_and_only_after_learning():
    this = compiled(PLAIN, DISCRETE)
    trajectory = random_trajectory(5, DISCRETE)
    after, _ = this.update(this.state, trajectory)
    old, new = this.state.learner, after.learner
    kept = trajectory.is_valid
    _, target = Twin(this, this.state, trajectory).advantages(
        jax.tree.map(np.float64, jax.device_get(old.params["params"]))
    )
    for before, now, rows in (
        (old.observation_moments, new.observation_moments, trajectory.observation[:-1]),
        (old.return_moments, new.return_moments, target),
    ):
        rows = np.float64(rows[kept])
        n, m = float(before.count), len(rows)
        mean = (n * before.mean + rows.sum(0)) / (n + m)
        square = n * (before.variance + before.mean**2) + (rows**2).sum(0)
        assert now.count == n + m
        np.testing.assert_allclose(now.mean, mean, rtol=1e-5)
        np.testing.assert_allclose(now.variance, square / (n + m) - mean**2, rtol=1e-4)
    assert new.update == old.update + 1


# -------------------------------------------------------------------- rows and ratios


@pytest.mark.parametrize("spec", [DISCRETE, CONTINUOUS], ids=["discrete", "continuous"])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 1e30])
def test_rows_that_are_not_valid_change_nothing_at_all(spec, poison):
    name = "discrete" if spec is DISCRETE else "continuous, recomputed"
    this = compiled(*TWINS[name])
    trajectory = random_trajectory(6, spec)
    bad = ~trajectory.is_valid
    assert bad.sum() > 2
    where = bad if spec is DISCRETE else bad[..., None]
    wild = 10**6 if spec is DISCRETE else np.float32(poison)
    poisoned = trajectory._replace(
        reward=np.where(bad, np.float32(poison), trajectory.reward),
        action=np.where(where, wild, trajectory.action).astype(trajectory.action.dtype),
        terminated=trajectory.terminated | bad,
        truncated=trajectory.truncated | bad,
        behaviour={
            "log_prob": np.where(
                bad, np.float32(poison), trajectory.behaviour["log_prob"]
            )
        },
        policy_version=np.where(bad, 99, trajectory.policy_version),
    )
    expected = this.update(this.state, trajectory)
    actual = this.update(this.state, poisoned)
    assert_tree_all_finite(actual[1])
    assert_trees_all_equal(
        jax.tree.map(read, actual), jax.tree.map(read, expected), strict=True
    )


def read(x):
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(x) if is_key else x


def test_a_batch_without_a_valid_row_moves_nothing():
    this = compiled(PLAIN, DISCRETE)
    trajectory = random_trajectory(7, DISCRETE)
    trajectory = trajectory._replace(is_valid=np.zeros_like(trajectory.is_valid))
    after, metrics = this.update(this.state, trajectory)
    assert_tree_all_finite(metrics)
    for name in ("params", "observation_moments", "return_moments"):
        before, now = (getattr(s.learner, name) for s in (this.state, after))
        assert_trees_all_close(now, before, rtol=1e-6)


@pytest.mark.parametrize("name", ["discrete", "continuous, recomputed"])
def test_the_first_ratio_is_one(name):
    this = compiled(*TWINS[name])
    state = this.with_hyper(learning_rate=0.0)  # Every epoch is then the first.
    trajectory = random_trajectory(8, this.spec)
    _, metrics = this.update(state, acted(this.agent, state, trajectory))
    assert metrics["clip_fraction"] == 0
    np.testing.assert_allclose(metrics["kl_k3"], 0, atol=1e-11)
    np.testing.assert_allclose(metrics["loss_objective"], 0, atol=1e-6)
    # It is not, for a policy that saw through other statistics.
    moved = state.learner.observation_moments._replace(mean=jnp.zeros(3))
    other = state._replace(learner=state.learner._replace(observation_moments=moved))
    _, metrics = this.update(state, acted(this.agent, other, trajectory))
    assert metrics["kl_k3"] > 1e-4


@pytest.mark.parametrize("explore", [True, False])
@pytest.mark.parametrize("name", ["discrete", "continuous, recomputed"])
def test_acting_tells_the_likelihood_of_its_action_and_greed_takes_the_mode(
    name, explore
):
    this = compiled(*TWINS[name])
    trajectory = random_trajectory(9, this.spec)
    params = this.agent.actor_params(this.state.learner, None)
    action, behaviour = this.agent.act(
        params,
        jnp.asarray(trajectory.observation[0]),
        jax.random.key(4),
        explore=explore,
    )
    trajectory.action[0] = action
    twin = Twin(this, this.state, trajectory)
    tree = jax.tree.map(np.float64, jax.device_get(params.params["params"]))
    log_prob, _ = twin.log_prob_and_entropy(tree)
    np.testing.assert_allclose(behaviour["log_prob"], log_prob[0], rtol=1e-4)
    mode = twin.policy_output(tree)[0]
    mode = mode.argmax(-1) if this.spec is DISCRETE else mode
    assert np.allclose(action, mode, rtol=1e-4) == (not explore)


# ------------------------------------------------------------------ hyper-parameters


def test_the_learning_rate_falls_in_a_line_of_env_steps_and_then_stays():
    this = compiled(PLAIN, DISCRETE)
    trajectory = random_trajectory(4, DISCRETE)
    for update, share in ((0, 1.0), (5, 0.7), (9, 0.46), (10, 0.4), (500, 0.4)):
        learner = this.state.learner._replace(update=jnp.asarray(update, jnp.int32))
        _, metrics = this.update(this.state._replace(learner=learner), trajectory)
        np.testing.assert_allclose(metrics["learning_rate"], 0.5 * share, rtol=1e-6)


OTHER_VALUES = {
    "learning_rate": 0.4,
    "final_learning_rate_fraction": 0.9,
    "total_env_steps": 2.0 * TOTAL,
    "gamma": 0.5,
    "lambda_": 0.3,
    "clip_epsilon": 0.01,
    "clip_epsilon_high": 0.02,
    "final_clip_epsilon_fraction": 0.1,
    "dual_clip": 1.01,
    "ewma_decay": 0.1,
    "max_importance_ratio": 0.9,
    "entropy_coef": 0.0,
    "value_coef": 0.2,
    "clip_value": 0.1,
    "advantage_norm_rate": 0.9,
    "max_grad_norm": 0.05,
}


def test_every_number_is_traced_and_none_is_dead():
    assert OTHER_VALUES.keys() == set(Hyper._fields)
    this = compiled(*TWINS["every option"])
    trajectory = this.nearly_acted(4)
    before, _ = this.update(this.with_hyper(max_grad_norm=0.2), trajectory)
    traces = this.traces
    for name, value in OTHER_VALUES.items():
        state = this.with_hyper(**({"max_grad_norm": 0.2} | {name: value}))
        after, _ = this.update(state, trajectory)
        same = jax.tree.map(
            lambda a, b: bool((a == b).all()),
            before.learner.params,
            after.learner.params,
        )
        assert not all(jax.tree.leaves(same)), name
        assert after.learner.hyper._asdict()[name] == np.float32(value)
    assert this.traces == traces == 1


@pytest.mark.parametrize("name", ["discrete", "every option"])
def test_the_options_are_what_the_state_starts_with(name):
    this = compiled(*TWINS[name])
    for field, leaf in this.state.learner.hyper._asdict().items():
        of_options = None if field == "total_env_steps" else getattr(this.config, field)
        expected = TOTAL if field == "total_env_steps" else of_options
        if expected is None:
            assert leaf is None
        else:
            assert leaf == np.float32(expected)
            assert leaf.dtype == jnp.float32


def stack(trees):
    return jax.tree.map(lambda *xs: jnp.stack(xs), *trees)


def test_a_population_learns_as_its_members_do_one_by_one():
    this = compiled(STEPS, DISCRETE)
    members = [
        this.with_hyper(learning_rate=0.01 * (i + 1), gamma=0.9 + 0.03 * i)
        for i in range(3)
    ]
    keys = jax.random.split(jax.random.key(6), 3)
    members = [
        m._replace(learner=m.learner._replace(key=keys[i]))
        for i, m in enumerate(members)
    ]
    batches = [random_trajectory(20 + i, DISCRETE) for i in range(3)]
    together = jax.jit(jax.vmap(this.agent.update))(stack(members), stack(batches))
    together = jax.tree.map(read, together)
    for i, pair in enumerate(zip(members, batches)):
        alone = jax.tree.map(read, this.update(*pair))
        member = jax.tree.map(lambda x, i=i: x[i], together)
        assert_trees_all_close(member, alone, rtol=1e-4, atol=1e-6)


def test_each_update_shuffles_anew_and_says_how_by_its_number():
    this = compiled(STEPS, DISCRETE)
    trajectory = random_trajectory(21, DISCRETE)

    def params_after(update):
        learner = this.state.learner._replace(update=jnp.asarray(update, jnp.int32))
        hyper = this.state.learner.hyper._replace(
            final_learning_rate_fraction=jnp.asarray(1.0, jnp.float32)
        )
        state = this.state._replace(learner=learner._replace(hyper=hyper))
        return this.update(state, trajectory)[0].learner.params

    assert_trees_all_equal(params_after(3), params_after(3))
    different = jax.tree.map(
        lambda a, b: bool((a != b).any()), params_after(3), params_after(4)
    )
    assert any(jax.tree.leaves(different))


def test_rounds_of_acting_and_learning_spend_no_key_twice():
    this = compiled(STEPS, DISCRETE)
    state = jax.jit(this.agent.init)(jax.random.key(0))
    with jax.debug_key_reuse(True):
        for _ in range(3):
            trajectory = acted(this.agent, state, random_trajectory(22, DISCRETE))
            state, _ = this.update(state, trajectory)
        jax.random.normal(state.learner.key)  # It was folded, and never spent.


# -------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("option", "value", "limit"),
    [
        ("learning_rate", -1e-3, "at least 0"),
        ("learning_rate", float("nan"), "at least 0"),
        ("final_learning_rate_fraction", 1.5, r"\[0, 1\]"),
        ("gamma", 1.01, r"\[0, 1\]"),
        ("gamma", -0.1, r"\[0, 1\]"),
        ("lambda_", 2.0, r"\[0, 1\]"),
        ("clip_epsilon", 0.0, r"\(0, 1\)"),
        ("clip_epsilon", 1.0, r"\(0, 1\)"),
        ("clip_epsilon_high", -0.1, "at least 0"),
        ("final_clip_epsilon_fraction", 1.5, r"\[0, 1\]"),
        ("dual_clip", 1.0, "above 1"),
        ("ewma_decay", 1.0, r"\[0, 1\)"),
        ("max_importance_ratio", 0.0, "above 0"),
        ("clip_value", -0.1, "at least 0"),
        ("advantage_norm_rate", 0.0, r"\(0, 1\]"),
        ("name", "a/b", "a folder can have"),
        ("entropy_coef", -0.5, "at least 0"),
        ("value_coef", -0.5, "at least 0"),
        ("max_grad_norm", 0.0, "above 0"),
        ("num_epochs", 0, "at least 1"),
        ("minibatch_size", 0, "at least 1"),
        ("adam_epsilon", 0.0, "above 0"),
        ("hidden_sizes", (64, 0), "at least 1"),
        ("init_log_std", float("inf"), r"\[-20, 2\]"),
        ("activation", "sine", "tanh.*swish"),
    ],
)
def test_an_option_out_of_range_is_named_with_its_value_and_limit(option, value, limit):
    shown = str(value).replace("(", r"\(").replace(")", r"\)")
    with pytest.raises(ValueError, match=f"{option} '?{shown}'? .*{limit}"):
        PPOConfig(**{option: value})


@pytest.mark.parametrize(
    ("option", "limit"),
    [
        ("normalize_advantage", "minibatch, batch, percentile, running, none"),
        ("optimizer", "adam, sgd"),
        ("value_loss", "l1, l2, smooth_l1"),
    ],
)
def test_a_choice_that_there_is_not_is_refused_also_without_a_type_checker(
    option, limit
):
    config = PPOConfig()
    object.__setattr__(config, option, "other")
    with pytest.raises(ValueError, match=f"{option} 'other' must be one of {limit}"):
        config.__post_init__()


def test_options_are_keywords_and_unknown_ones_are_refused():
    with pytest.raises(TypeError, match="learning_rat"):
        PPOConfig(learning_rat=1.0)
    with pytest.raises(TypeError):
        PPOConfig(1.0)
