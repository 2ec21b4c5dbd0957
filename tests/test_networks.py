"""Networks: what shapes they read and give, how they start, what they share."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.lib.stride_tricks import sliding_window_view

from fps_jax.models.networks import (
    ACTIVATIONS,
    MLP,
    NatureCNN,
    actor_critic,
    convolved_by_product,
    q_network,
)
from fps_jax.types import Continuous, Discrete, EnvSpec

BOX, CHOICE = Continuous((-1.0,) * 3, (1.0,) * 3), Discrete(5)


def make(shape=(7,), action=BOX, hidden_sizes=(16,), activation="tanh", **more):
    spec = EnvSpec("Toy-v0", shape, np.dtype(np.float32), action)
    return actor_critic(
        spec,
        hidden_sizes=hidden_sizes,
        activation=activation,
        init_log_std=-0.5,
        **more,
    )


@functools.partial(jax.jit, static_argnums=(0, 1))
def initialise(network, shape, seed):
    return network.init(jax.random.key(seed), jnp.zeros((1, *shape)))


def drawn(network, shape):
    """Any parameters that fit: orthogonal ones take seconds to compile."""
    return filled(jax.eval_shape(lambda: initialise(network, shape, 0)))


def filled(shapes):
    rng = np.random.default_rng(0)
    draw = lambda x: rng.normal(size=x.shape) / np.prod(x.shape[:-1]) ** 0.5
    return jax.tree.map(lambda x: jnp.asarray(draw(x), x.dtype), shapes)


@functools.partial(jax.jit, static_argnums=0)
def apply(network, params, observation):
    """What a policy would do, how likely that is, and the value."""
    policy, value = network.apply(params, observation)
    return policy.mode(), policy.log_prob(policy.mode()), value


FRAMES = (4, 36, 36)
"""The smallest that the torso reads."""


@pytest.mark.parametrize("lead", [(), (1,), (2, 3)])
@pytest.mark.parametrize(("action", "event"), [(BOX, (3,)), (CHOICE, ())])
def test_vectors_with_any_leading_axes_are_read(lead, action, event):
    network = make(action=action)
    params, observation = drawn(network, (7,)), jnp.ones((*lead, 7))
    action, log_prob, value = jax.eval_shape(
        functools.partial(apply, network), params, observation
    )
    assert action.shape == (*lead, *event)
    assert log_prob.shape == value.shape == lead


def test_frames_with_any_leading_axes_are_read_alike():
    network = make(FRAMES, CHOICE)
    params = drawn(network, FRAMES)
    frames = np.random.default_rng(0).integers(0, 256, (2, 3, *FRAMES), np.uint8)
    action, log_prob, value = apply(network, params, jnp.asarray(frames))
    assert action.shape == log_prob.shape == value.shape == (2, 3)
    assert np.std(value) > 0
    one = apply(network, params, jnp.asarray(frames[1, 2]))
    np.testing.assert_array_equal(action[1, 2], one[0])
    np.testing.assert_allclose(log_prob[1, 2], one[1], rtol=1e-4)
    np.testing.assert_allclose(value[1, 2], one[2], rtol=1e-4, atol=1e-6)


def convolve(x, kernel, bias, stride):
    """A convolution without padding, ``[H, W, C] -> [h, w, features]``."""
    windows = sliding_window_view(x, kernel.shape[:2], axis=(0, 1))
    windows = windows[::stride, ::stride]
    return np.einsum("hwcij,ijcf->hwf", windows, kernel) + bias


def test_the_nature_torso_is_its_layers_one_after_the_other():
    rng = np.random.default_rng(3)
    frames = rng.integers(0, 256, FRAMES, np.uint8)
    draw = lambda *shape: rng.normal(size=shape) / np.prod(shape[:-1]) ** 0.5
    layers = {}
    for i, (size, channels, width) in enumerate([(8, 4, 32), (4, 32, 64), (3, 64, 64)]):
        kernel, bias = draw(size, size, channels, width), draw(width)
        layers[f"Conv_{i}"] = {"kernel": kernel, "bias": bias}
    layers["Dense_0"] = {"kernel": draw(64, 512), "bias": draw(512)}

    x = np.moveaxis(frames / 255, 0, -1)
    for i, stride in enumerate((4, 2, 1)):
        x = np.maximum(convolve(x, **layers[f"Conv_{i}"], stride=stride), 0)
    x = x.ravel() @ layers["Dense_0"]["kernel"] + layers["Dense_0"]["bias"]

    params = {"params": jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), layers)}
    actual = jax.jit(NatureCNN().apply)(params, jnp.asarray(frames))
    np.testing.assert_allclose(actual, np.maximum(x, 0), rtol=1e-4, atol=1e-5)


def test_the_nature_torso_maps_84_by_84_bytes_to_512_features():
    frames = jnp.zeros((4, 84, 84), jnp.uint8)
    features, params = jax.eval_shape(
        NatureCNN().init_with_output, jax.random.key(0), frames
    )
    assert features.shape == (512,)
    assert features.dtype == jnp.float32
    assert params["params"]["Dense_0"]["kernel"].shape == (7 * 7 * 64, 512)


def kernels(params) -> dict[str, np.ndarray]:
    """Every kernel as a matrix of inputs by outputs, by its path."""
    leaves = jax.tree_util.tree_leaves_with_path(params["params"])
    return {
        jax.tree_util.keystr(path): np.reshape(x, (-1, x.shape[-1]))
        for path, x in leaves
        if "kernel" in jax.tree_util.keystr(path)
    }


@pytest.mark.parametrize(
    ("shape", "action", "count"), [((7,), BOX, 4), (FRAMES, CHOICE, 6)]
)
def test_kernels_start_orthogonal_with_gains_of_their_place(shape, action, count):
    found = kernels(initialise(make(shape, action), shape, 0))
    assert len(found) == count
    for path, kernel in found.items():
        gains = {"policy_head": 0.01, "value_head": 1.0, "torso": 2**0.5}
        squared_gain = next(gains[place] ** 2 for place in gains if place in path)
        wide = kernel if kernel.shape[0] < kernel.shape[1] else kernel.T
        expected = squared_gain * np.eye(len(wide))
        np.testing.assert_allclose(wide @ wide.T, expected, atol=1e-5 * squared_gain)


def value_gradient(network, params, observation):
    loss = lambda params: jnp.sum(network.apply(params, observation, method="value"))
    return jax.jit(jax.grad(loss))(params)["params"]


def is_zero(tree) -> bool:
    return all(not np.any(x) for x in jax.tree.leaves(tree))


def test_of_vectors_the_value_has_a_torso_of_its_own():
    network = make()
    gradient = value_gradient(network, drawn(network, (7,)), jnp.ones((2, 7)))
    assert is_zero([gradient["policy_torso"], gradient["policy_head"]])
    assert not is_zero(gradient["value_torso"])
    assert not is_zero(gradient["value_head"])


def test_of_frames_both_share_one_torso():
    network = make(FRAMES, CHOICE)
    frames = np.random.default_rng(1).integers(0, 256, (1, *FRAMES), np.uint8)
    gradient = value_gradient(network, drawn(network, FRAMES), jnp.asarray(frames))
    assert set(gradient) == {"policy_torso", "policy_head", "value_head"}
    assert is_zero(gradient["policy_head"])
    assert not is_zero(gradient["policy_torso"])


@pytest.mark.parametrize("separates_losses", [False, True])
@pytest.mark.parametrize("shape", [(7,), FRAMES])
def test_what_is_shared_is_trained_by_both_or_by_the_policy_alone(
    shape, separates_losses
):
    network = make(shape, shares_torso=True, separates_losses=separates_losses)
    params, seen = drawn(network, shape), jnp.ones((1, *shape))
    by_value = value_gradient(network, params, seen)
    assert set(by_value) == {"policy_torso", "policy_head", "value_head"}
    assert is_zero(by_value["policy_torso"]) == separates_losses
    assert not is_zero(by_value["value_head"])

    def of_policy(params):
        return jnp.sum(network.apply(params, seen, method="policy").mode())

    by_policy = jax.jit(jax.grad(of_policy))(params)["params"]
    assert not is_zero(by_policy["policy_torso"])


def test_nothing_can_be_separated_that_is_not_shared():
    with pytest.raises(ValueError, match="separates_losses True needs shares_torso"):
        make(separates_losses=True)


def test_a_continuous_policy_starts_with_its_deviation_and_near_the_centre():
    network = make()
    params = initialise(network, (7,), 0)
    policy = network.apply(params, jnp.ones((4, 7)), method="policy")
    np.testing.assert_allclose(
        policy.stddev(), np.full((4, 3), np.exp(-0.5)), rtol=1e-6
    )
    assert np.max(np.abs(policy.mode())) < 0.05


def test_different_keys_give_different_networks_and_equal_keys_equal_ones():
    first, again, other = (
        kernels(initialise(make(), (7,), seed)) for seed in (0, 0, 1)
    )
    for path, kernel in first.items():
        np.testing.assert_array_equal(kernel, again[path])
        assert np.any(kernel != other[path])


BENDS = {
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(x, 0),
    "elu": lambda x: np.where(x > 0, x, np.expm1(x)),
    "swish": lambda x: x / (1 + np.exp(-x)),
}


@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_mlp_is_its_layers_one_after_the_other(activation, layer_norm):
    rng = np.random.default_rng(2)
    draw = lambda shape: rng.normal(size=shape).astype(np.float32)
    x = h = draw((5, 7))
    params, size = {}, 7
    for i, width in enumerate((16, 9)):
        kernel, bias = draw((size, width)), draw(width)
        params[f"Dense_{i}"] = {"kernel": kernel, "bias": bias}
        h, size = h @ kernel + bias, width
        if layer_norm:
            scale, bias = draw(width), draw(width)
            params[f"LayerNorm_{i}"] = {"scale": scale, "bias": bias}
            h = h - h.mean(-1, keepdims=True)
            h = h / h.std(-1, keepdims=True) * scale + bias
        h = BENDS[activation](h)
    mlp = MLP((16, 9), activation, layer_norm)
    actual = jax.jit(mlp.apply)({"params": params}, x)
    np.testing.assert_allclose(actual, h, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "shape", [(), (3, 4), (84, 84, 4), (4, 35, 84), (1, 4, 84, 84)]
)
def test_observations_of_other_shapes_are_refused(shape):
    with pytest.raises(ValueError, match=r"Toy-v0 have shape \(.*; a vector is needed"):
        make(shape)


def test_an_unknown_activation_is_refused():
    with pytest.raises(ValueError, match="activation 'gelu' must be one of"):
        make(activation="gelu")


def test_a_dueling_network_values_the_state_by_the_mean_of_its_actions():
    spec = EnvSpec("Toy-v0", (7,), np.dtype(np.float32), CHOICE)
    network = q_network(spec, hidden_sizes=(6, 4), activation="relu", dueling=True)
    x = jnp.linspace(-1.0, 1.0, 7)[None]
    params = filled(jax.eval_shape(network.init, jax.random.key(0), x))
    q = network.apply(params, x)
    assert q.shape == (1, 5)
    heads = params["params"]["layers_1"]
    value, advantage = heads["Dense_1"], heads["Dense_0"]
    assert (value["bias"].shape, advantage["bias"].shape) == ((1,), (5,))
    value["bias"] += 3.0
    np.testing.assert_allclose(network.apply(params, x), q + 3.0, rtol=1e-5)
    # What is added to all advantages alike is taken away again.
    advantage["bias"] += 2.0
    np.testing.assert_allclose(network.apply(params, x), q + 3.0, rtol=1e-5, atol=1e-5)
    hidden = {name: heads[name]["Dense_0"]["bias"].shape for name in ("MLP_0", "MLP_1")}
    assert hidden == {"MLP_0": (4,), "MLP_1": (4,)}
    assert params["params"]["layers_0"]["Dense_0"]["bias"].shape == (6,)


def test_frames_duel_after_natures_convolutions():
    spec = EnvSpec("Toy-v0", FRAMES, np.dtype(np.uint8), CHOICE)
    for dueling, streams in ((False, 1), (True, 2)):
        network = q_network(spec, hidden_sizes=(6,), activation="relu", dueling=dueling)
        blank = jnp.zeros((2, *FRAMES), jnp.uint8)
        params = jax.eval_shape(network.init, jax.random.key(0), blank)
        wide = [x for x in jax.tree.leaves(params) if x.shape[-1:] == (512,)]
        assert len(wide) == 2 * streams  # A kernel and a bias each.
        q = jax.eval_shape(network.apply, params, blank)
        assert q.shape == (2, 5)


@pytest.mark.parametrize(("size", "k", "stride"), [(9, 3, 1), (13, 4, 2), (18, 8, 4)])
def test_the_product_is_the_convolution(float64, size, k, stride):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, size, size + 3, 3))
    kernel = rng.normal(size=(k, k, 3, 5))
    found = convolved_by_product(jnp.asarray(x), jnp.asarray(kernel), stride=stride)
    windows = sliding_window_view(x, (k, k), axis=(1, 2))[:, ::stride, ::stride]
    expected = np.einsum("bhwcij,ijcf->bhwf", windows, kernel)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)
    with pytest.raises(ValueError, match="stride 7 must divide"):
        convolved_by_product(jnp.asarray(x), jnp.asarray(kernel), stride=7)
