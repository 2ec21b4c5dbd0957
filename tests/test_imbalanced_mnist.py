"""Supervised learning from a replay, on digits of which some are rare."""

import functools
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.lib.stride_tricks import sliding_window_view

from experiments import figures, imbalanced_mnist, imbalanced_step, mnist, results
from experiments.imbalanced_step import Learner, Rates

FIXTURE = Path(__file__).parent / "data" / "mnist"
NETWORK = imbalanced_step.LeNet(channels=(2, 3), hidden_size=8)
CLASSES = np.eye(10)
N, B, MANY, EPSILON, STEP_SIZE = 40, 6, 5000, 1e-3, 0.05
TOY = "--updates 4 --evaluate-every 2 --batch-size 8 --step-sizes 0.1 0.001 --seeds 2 "
TOY += "--kept-share 0.05 --validation-per-digit 25"


@pytest.fixture(scope="module")
def digits():
    """A few of each digit, 0 to 9 and again."""
    train, _ = mnist.load(FIXTURE)
    places = [np.flatnonzero(train.labels == digit)[: N // 10] for digit in range(10)]
    return train.take(np.stack(places, axis=1).reshape(-1))


# A step, and the same in numpy.


def convolve(x, kernel):
    return np.einsum(
        "bhwcij,ijcf->bhwf", sliding_window_view(x, (5, 5), (1, 2)), kernel
    )


def twin_losses(params, images, labels):
    """Negative log-likelihoods in float64, and their gradients by ``backward``."""
    layer = lambda name: [of[name][x] for x in ("kernel", "bias")]
    of = params["params"]
    convolutions = [of[f"Convolution_{k}"] for k in range(2)]
    x = images[..., None] / 255.0
    saved = []
    for convolution in convolutions:
        kernel = convolution["kernel"].reshape(5, 5, x.shape[-1], -1)
        active = np.maximum(convolve(x, kernel) + convolution["bias"][:, 0], 0.0)
        b, h, w, c = active.shape
        windows = active.reshape(b, h // 2, 2, w // 2, 2, c)
        largest = windows.max(axis=(2, 4))
        saved.append((x, kernel, active, windows, largest))
        x = largest
    flat = x.transpose(0, 3, 1, 2).reshape(len(x), -1)
    (kernel_0, bias_0), (kernel_1, bias_1) = layer("Dense_0"), layer("Dense_1")
    hidden = np.maximum(flat @ kernel_0 + bias_0, 0.0)
    logits = hidden @ kernel_1 + bias_1
    log_p = logits - np.log(np.sum(np.exp(logits), axis=1, keepdims=True))
    one_hot = CLASSES[labels]

    def backward(weights):
        """The gradient of ``sum(weights * losses)``."""
        g = weights[:, None] * (np.exp(log_p) - one_hot)
        gradient = {"Dense_1": {"kernel": hidden.T @ g, "bias": g.sum(axis=0)}}
        g = (g @ kernel_1.T) * (hidden > 0)
        gradient["Dense_0"] = {"kernel": flat.T @ g, "bias": g.sum(axis=0)}
        b, h, w, c = x.shape
        g = (g @ kernel_0.T).reshape(b, c, h, w).transpose(0, 2, 3, 1)
        for below, kernel, active, windows, largest in reversed(saved):
            # Where nothing is drawn all four are the largest, and share the gradient.
            share = windows == largest[:, :, None, :, None]
            share = share / share.sum(axis=(2, 4), keepdims=True)
            g = (g[:, :, None, :, None] * share).reshape(active.shape)
            g = g * (active > 0)
            windows_below = sliding_window_view(below, (5, 5), (1, 2))
            of_kernel = np.einsum("bhwcij,bhwf->ijcf", windows_below, g)
            of_kernel = of_kernel.reshape(-1, g.shape[-1])
            name = f"Convolution_{1 if 'Convolution_1' not in gradient else 0}"
            of_bias = g.sum(axis=(0, 1, 2))[:, None]
            gradient[name] = {"kernel": of_kernel, "bias": of_bias}
            padded = np.pad(g, ((0, 0), (4, 4), (4, 4), (0, 0)))
            g = convolve(padded, kernel[::-1, ::-1].swapaxes(2, 3))
        return {"params": gradient}

    return -np.sum(one_hot * log_p, axis=1), np.argmax(log_p, axis=1), backward


class Linear(nn.Module):
    """What compiles in no time."""

    @nn.compact
    def __call__(self, images):
        x = images.reshape(len(images), -1).astype(jnp.float32) / 255.0
        return nn.log_softmax(nn.Dense(10, use_bias=False)(x))


def linear_losses(params, images, labels):
    """As `twin_losses`, of `Linear`."""
    x = images.reshape(len(images), -1) / 255.0
    logits = x @ params["params"]["Dense_0"]["kernel"]
    p = np.exp(logits) / np.sum(np.exp(logits), axis=1, keepdims=True)

    def backward(weights):
        gradient = x.T @ (weights[:, None] * (p - CLASSES[labels]))
        return {"params": {"Dense_0": {"kernel": gradient}}}

    return -np.log(p[np.arange(len(x)), labels]), np.argmax(p, axis=1), backward


def as_float64(params):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), params)


@pytest.fixture(scope="module")
def params(digits):
    return jax.jit(NETWORK.init)(jax.random.key(0), digits.images[:1])


class Steps(NamedTuple):
    """A learner at its start, and compiled: what it draws, and a step of it."""

    of: Any
    learner: Learner
    draw: Any
    draw_many: Any
    step: Any
    plain_step: Any


def steps_of(network, of, learner, priority="loss", importance_exponent=0.0):
    step = imbalanced_step.make_step(
        network,
        of,
        batch_size=B,
        importance_exponent=importance_exponent,
        priority=priority,
        epsilon=EPSILON,
    )
    draw = functools.partial(of.sample, importance_exponent=importance_exponent)
    return Steps(
        of,
        learner,
        jax.jit(functools.partial(draw, batch_size=B)),
        jax.jit(functools.partial(draw, batch_size=MANY)),
        jax.jit(step),
        step,
    )


@pytest.fixture(scope="module")
def uniform(params, digits):
    of = imbalanced_step.make_replay(N, is_prioritized=False)
    filled = imbalanced_step.filled(of, digits, largest_add=N)
    return steps_of(NETWORK, of, Learner(params, filled))


@pytest.fixture(scope="module")
def prioritized(params, digits):
    of = imbalanced_step.make_replay(N, is_prioritized=True)
    filled = imbalanced_step.filled(of, digits, largest_add=32)
    return steps_of(NETWORK, of, Learner(params, filled))


@pytest.fixture(scope="module")
def linear(prioritized, digits):
    """Of a smaller network; priorities are errors, and weights undo half of them."""
    params = jax.jit(Linear().init)(jax.random.key(0), digits.images[:1])
    learner = prioritized.learner._replace(params=params)
    return steps_of(Linear(), prioritized.of, learner, "error", 0.5)


def follow(
    steps,
    digits,
    *,
    count,
    step_size=STEP_SIZE,
    rare_weight=1.0,
    of_error=None,
    beta=0.0,
    twin=twin_losses,
):
    """Steps beside their twin; the learner, its priorities, and the digits drawn."""
    learner = steps.learner
    params, priorities = as_float64(learner.params), np.ones(N)
    rates = Rates(jnp.float32(step_size), jnp.float32(rare_weight))
    seen = set()
    for key in jax.random.split(jax.random.key(7), count):
        _, sample = steps.draw(learner.replay, jax.random.clone(key))
        slots = np.asarray(sample.ticket.slot)
        # An example is in the slot in which it was added.
        np.testing.assert_array_equal(sample.items["image"], digits.images[slots])
        probability = priorities / priorities.sum()
        np.testing.assert_allclose(sample.probability, probability[slots], rtol=1e-4)
        learner, mean_loss = steps.step(learner, rates, key)
        labels = digits.labels[slots]
        losses, _, backward = twin(params, digits.images[slots], labels)
        weights = np.where(labels < 5, rare_weight, 1.0) / B
        importance = probability[slots] ** -beta
        gradient = backward(weights * importance / importance.max())
        params = jax.tree.map(lambda x, g: x - step_size * g, params, gradient)
        seen |= set(labels.tolist())
        np.testing.assert_allclose(mean_loss, losses.mean(), rtol=1e-4)
        for ours, theirs in zip(
            jax.tree.leaves(learner.params), jax.tree.leaves(params), strict=True
        ):
            np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=2e-5)
        if of_error is not None:
            priorities[slots] = of_error(losses) + EPSILON
    return learner, priorities, seen


def test_a_uniform_step_is_its_twin_s(uniform, digits):
    follow(uniform, digits, count=4)


def test_an_informed_step_weighs_the_rare_digits_losses(uniform, digits):
    *_, seen = follow(uniform, digits, count=6, step_size=5e-4, rare_weight=100.0)
    assert {0, 4, 5, 9} <= seen


def test_a_prioritized_step_is_its_twin_s_and_draws_by_last_losses(prioritized, digits):
    learner, priorities, _ = follow(
        prioritized, digits, count=4, of_error=lambda losses: losses
    )
    assert priorities.max() > 1.5 * priorities.min()
    check_draws(prioritized, learner.replay, digits, priorities)


def check_draws(steps, state, digits, priorities):
    """Of each stratum one is drawn: counts are what priorities say, but for two."""
    _, sample = steps.draw_many(state, jax.random.key(1))
    np.testing.assert_array_equal(sample.importance_weights, np.ones(MANY))
    slots = np.asarray(sample.ticket.slot)
    np.testing.assert_array_equal(sample.items["image"], digits.images[slots])
    np.testing.assert_array_equal(sample.items["label"], digits.labels[slots])
    expected = MANY * priorities / priorities.sum()
    counts = np.bincount(slots, minlength=N)
    assert np.max(np.abs(counts - expected)) < 2.1


def test_at_first_all_examples_are_there_with_the_largest_priority(prioritized, digits):
    state = prioritized.learner.replay
    assert (int(state.num_usable), float(state.maximum)) == (N, 1.0)
    check_draws(prioritized, state, digits, np.ones(N))


def test_priorities_may_be_errors_and_weights_may_undo_them(linear, digits):
    follow(
        linear,
        digits,
        count=3,
        of_error=lambda losses: 1.0 - np.exp(-losses),
        beta=0.5,
        twin=linear_losses,
    )


def test_the_program_of_many_steps_is_the_steps(linear):
    rates = Rates(jnp.float32(STEP_SIZE), jnp.float32(1.0))
    one_by_one, losses = linear.learner, []
    for key in jax.random.split(jax.random.key(5), 3):
        one_by_one, loss = linear.step(one_by_one, rates, key)
        losses.append(float(loss))
    train = imbalanced_step.make_training(linear.plain_step, 3)
    mine = jax.tree.map(jnp.copy, linear.learner)  # It is donated.
    learner, loss = train(mine, rates, jax.random.key(5))
    np.testing.assert_allclose(loss, np.mean(losses), rtol=1e-5)
    for ours, theirs in zip(
        jax.tree.leaves(learner), jax.tree.leaves(one_by_one), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


def test_an_evaluation_counts_what_the_twin_counts(params, digits, monkeypatch):
    monkeypatch.setattr(imbalanced_step, "CHUNK", 25)
    errors, loss = imbalanced_step.make_evaluation(NETWORK)(params, digits)
    losses, guesses, _ = twin_losses(as_float64(params), digits.images, digits.labels)
    assert errors == np.sum(guesses != digits.labels)
    np.testing.assert_allclose(loss, losses.mean(), rtol=1e-5)


# The command.


def rows_of(arm, step_size, seed, errors, losses, *, is_selected=True):
    return [
        {
            "arm": arm,
            "step_size": step_size,
            "seed": seed,
            "updates": 10 * (k + 1),
            "test_errors": error,
            "test_loss": loss,
            "is_selected": is_selected,
        }
        for k, (error, loss) in enumerate(zip(errors, losses, strict=True))
    ]


def test_the_summary_is_of_medians_at_the_selected_step_sizes():
    rows = rows_of("uniform", 0.1, 0, [9, 5, 6], [3.0, 1.0, 2.0])
    rows += rows_of("uniform", 0.1, 1, [9, 4, 6], [3.0, 2.0, 5.0])
    rows += rows_of("uniform", 0.1, 2, [1, 8, 7], [3.0, 3.0, 3.0])
    rows += rows_of("uniform", 0.3, 0, [0, 0, 0], [0.0, 0.0, 0.0], is_selected=False)
    rows += rows_of("informed", 0.01, 0, [8, 7, 6], [1.0, 1.0, 0.5])
    rows += rows_of("prioritized", 0.3, 0, [5, 2, 3], [1.0, 0.5, 0.75])
    assert imbalanced_mnist.summary(rows) == {
        "selected_step_sizes": {"uniform": 0.1, "informed": 0.01, "prioritized": 0.3},
        "final_median_test_errors": {"uniform": 6, "informed": 6, "prioritized": 3},
        "final_median_test_loss": {"uniform": 3, "informed": 0.5, "prioritized": 0.75},
        "least_median_test_loss": {"uniform": 2, "informed": 0.5, "prioritized": 0.5},
        "updates_to_uniforms_best": {
            "uniform": 20,
            "informed": None,
            "prioritized": 10,
        },
    }


def run(tmp_path, words, data=FIXTURE):
    given = f"--data-dir {data} --directory {tmp_path / 'runs'} --name toy"
    return imbalanced_mnist.main(f"{given} {TOY} {words}".split())


def test_the_command_writes_runs_a_csv_and_a_figure_and_goes_on(
    capsys, tmp_path, monkeypatch
):
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    monkeypatch.setattr(figures, "FOLDER", tmp_path)
    monkeypatch.setattr(imbalanced_step, "LeNet", Linear)
    train, test = mnist.load(FIXTURE)
    fewer, _ = mnist.set_aside(test.labels, [5] * 10, np.random.default_rng(0))
    mnist.write(tmp_path / "data", train, test.take(fewer))
    again = functools.partial(run, tmp_path, data=tmp_path / "data")
    assert again("--validation-per-digit 5") == 0
    path = tmp_path / "toy.csv"
    rows = results.read_csv(path)
    # Two step-sizes on a seed, the selected one on another, two evaluations each.
    assert len(rows) == 3 * (2 + 1) * 2
    assert len(list((tmp_path / "runs").iterdir())) == 3 * (2 + 1)
    for arm in imbalanced_mnist.ARMS:
        last = [r for r in rows if (r["arm"], r["updates"]) == (arm, "4")]
        best = min(
            (r for r in last if r["seed"] == "0"),
            key=lambda r: float(r["validation_error"]),
        )
        selected = [r for r in last if r["is_selected"] == "True"]
        assert {r["step_size"] for r in selected} == {best["step_size"]}
        assert {r["seed"] for r in selected} == {"0", "1"}
    assert all(0 <= int(r["test_errors"]) <= 50 for r in rows)
    text = path.read_text()
    for name in ("selected_step_sizes", "updates_to_uniforms_best", "settings"):
        assert f"# {name}: {{" in text
    assert (tmp_path / "toy.png").stat().st_size > 1000
    assert "final_median_test_errors" in capsys.readouterr().out

    # A run that is missing is run; the others are not run again.
    one = tmp_path / "runs" / "prioritized_0.1_s0.csv"
    of_one = results.read_csv(one)
    one.unlink()
    ran = []
    monkeypatch.setattr(
        imbalanced_mnist.Trials, "run", lambda _, *which: ran.append(which) or of_one
    )
    assert again("--validation-per-digit 5") == 0
    assert ran == [("prioritized", 0.1, 0)]
    assert results.read_csv(path) == rows

    # Runs of other options are not taken for those of these.
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        again("--validation-per-digit 5 --epsilon 0.5")
    stderr = capsys.readouterr().err
    assert (end.value.code, stderr.count("\n")) == (2, 1)
    for part in ("epsilon 0.5", "0.001", "uniform_0.1_s0.csv"):
        assert part in stderr


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("--arms greedy", ["arms 'greedy'", "prioritized"]),
        ("--arms", ["arms ()", "at least one"]),
        ("--step-sizes 0", ["step_sizes 0.0", "above 0"]),
        ("--updates 10 --evaluate-every 3", ["updates 10", "evaluate_every 3"]),
        ("--updates 10 --evaluate-every 20", ["evaluate_every 20", "[1, 10]"]),
        ("--seeds 2 --selection-seeds 3", ["selection_seeds 3", "[1, 2]"]),
        ("--batch-size 0", ["batch_size 0", "at least 1"]),
        ("--priority td_error", ["priority 'td_error'", "loss", "error"]),
        ("--priority-exponent -1", ["priority_exponent -1", "at least 0"]),
        ("--importance-exponent 2", ["importance_exponent 2", "[0, 1]"]),
        ("--epsilon nan", ["epsilon nan", "at least 0"]),
        ("--kept-share 0", ["kept_share 0", "(0, 1]"]),
        ("--kept-share 0.001", ["kept_share 0.001", "125 examples of 0"]),
        ("--validation-per-digit 150", ["validation_per_digit 150", "[1, 150)"]),
        ("--data-dir nowhere", ["data_dir nowhere", "train-images", "--download"]),
        ("--epsilom 3", ["--epsilom", "--epsilon"]),
    ],
)
def test_a_mistake_is_one_line(capsys, tmp_path, monkeypatch, words, parts):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        run(tmp_path, words)
    stdout, stderr = capsys.readouterr()
    assert (end.value.code, stdout, stderr.count("\n")) == (2, "", 1)
    for part in parts:
        assert part in stderr
    assert not list(tmp_path.iterdir())
