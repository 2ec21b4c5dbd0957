"""Noise on parameters: where it is, how much it moves actions, and its scale."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from fps_jax.models import noise
from fps_jax.models.networks import MLP, GaussianHead

NET = nn.Sequential([MLP((8, 8), "tanh", layer_norm=True), GaussianHead(2)])


INIT, PERTURB = jax.jit(NET.init), jax.jit(noise.perturb)


def flat(params):
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    return {jax.tree_util.keystr(path): x for path, x in leaves}


def test_norms_and_deviations_are_left_alone():
    params = INIT(jax.random.key(0), jnp.zeros((1, 3)))
    before, after = flat(params), flat(PERTURB(params, jax.random.key(1), 0.1))
    assert before.keys() == after.keys()
    kept = {name for name, x in before.items() if (x == after[name]).all()}
    assert kept == {n for n in before if "LayerNorm" in n or "log_std" in n}
    assert len(kept) == 5


def test_the_same_key_gives_the_same_noise_and_no_scale_none():
    params = INIT(jax.random.key(0), jnp.zeros((1, 3)))
    one, same, other = (
        flat(PERTURB(params, jax.random.key(k), 0.1)) for k in (1, 1, 2)
    )
    moved = [name for name in one if "Dense" in name]
    assert all((one[n] == same[n]).all() for n in one)
    assert all((one[n] != other[n]).any() for n in moved)
    quiet = flat(PERTURB(params, jax.random.key(1), 0.0))
    assert all((quiet[n] == x).all() for n, x in flat(params).items())


def test_leaves_have_noise_of_their_own():
    params = {"a": {"kernel": jnp.zeros((3, 3))}, "b": {"kernel": jnp.zeros((3, 3))}}
    after = noise.perturb(params, jax.random.key(0), 1.0)
    assert (after["a"]["kernel"] != after["b"]["kernel"]).all()


def test_a_linear_policy_is_moved_as_far_as_the_states_are_long(float64):
    # d^2 = sigma^2 mean |(s, 1)|^2 on average; each draw of A x (F + 1) numbers.
    rng = np.random.default_rng(0)
    state = rng.normal(size=(50, 3))
    params = {"kernel": jnp.asarray(rng.normal(size=(3, 4))), "bias": jnp.zeros(4)}
    act = lambda p: state @ p["kernel"] + p["bias"][None]
    valid = jnp.ones(50, bool)

    def square(key):
        noisy = noise.perturb(params, key, 0.2)
        return jnp.square(noise.action_distance(act(params), act(noisy), valid))

    squares = jax.vmap(square)(jax.random.split(jax.random.key(1), 2000))
    expected = 0.04 * np.mean(np.sum(state**2, axis=1) + 1)
    error = np.std(squares) / np.sqrt(squares.size)
    assert abs(np.mean(squares) - expected) < 4 * error
    assert error < 0.03 * expected


def test_the_distance_counts_valid_items_of_every_device(float64):
    rng = np.random.default_rng(2)
    a, b = rng.normal(size=(2, 4, 5, 3))
    is_valid = rng.random((4, 5)) < 0.6
    expected = np.sqrt(np.square(a - b)[is_valid].mean())
    arrays = [jnp.asarray(x) for x in (a, b, is_valid)]
    np.testing.assert_allclose(noise.action_distance(*arrays), expected, rtol=1e-12)
    found = jax.vmap(
        lambda *xs: noise.action_distance(*xs, axis_name="d"), axis_name="d"
    )(*arrays)
    np.testing.assert_allclose(found, np.full(4, expected), rtol=1e-12)


def test_the_scale_settles_where_the_distance_is_the_wanted_one():
    # Actions move by twice the scale.
    scale = jnp.float32(0.5)
    for _ in range(400):
        scale = noise.adapt(scale, 2.0 * scale, 0.1)
    np.testing.assert_allclose(2.0 * scale, 0.1, rtol=0.011)
