"""Networks: what shapes they read and give, how they start, what they share."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fps_jax.models.networks import MLP, NatureCNN, actor_critic
from fps_jax.types import Continuous, Discrete, EnvSpec

BOX, CHOICE = Continuous((-1.0,) * 3, (1.0,) * 3), Discrete(5)


def make(shape=(7,), action=BOX, hidden_sizes=(16, 8), activation="tanh"):
    spec = EnvSpec("Toy-v0", shape, np.dtype(np.float32), action)
    return actor_critic(
        spec, hidden_sizes=hidden_sizes, activation=activation, init_log_std=-0.5
    )


def initialise(network, shape=(7,), seed=0):
    return network.init(jax.random.key(seed), jnp.zeros((1, *shape)))


@pytest.fixture(scope="module")
def pixels():
    """The network of frames and its parameters: slow to make, so made once."""
    network = make((4, 84, 84), CHOICE)
    return network, jax.jit(network.init)(jax.random.key(0), jnp.zeros((1, 4, 84, 84)))


@pytest.mark.parametrize("lead", [(), (1,), (2, 3)])
@pytest.mark.parametrize(("action", "event"), [(BOX, (3,)), (CHOICE, ())])
def test_vectors_with_any_leading_axes_are_read(lead, action, event):
    network = make(action=action)
    policy, value = network.apply(initialise(network), jnp.ones((*lead, 7)))
    assert policy.mode().shape == (*lead, *event)
    assert policy.log_prob(policy.mode()).shape == value.shape == lead


def test_frames_with_any_leading_axes_are_read_alike(pixels):
    network, params = pixels
    frames = np.random.default_rng(0).integers(0, 256, (2, 3, 4, 84, 84), np.uint8)

    @jax.jit
    def read(frames):
        policy, value = network.apply(params, frames)
        return policy.logits, value

    logits, value = read(jnp.asarray(frames))
    assert logits.shape == (2, 3, 5) and value.shape == (2, 3)
    assert np.std(value) > 0
    one_logits, one_value = read(jnp.asarray(frames[1, 2]))
    np.testing.assert_allclose(logits[1, 2], one_logits, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(value[1, 2], one_value, rtol=1e-4, atol=1e-6)


def test_the_nature_torso_maps_84_by_84_bytes_to_512_features(pixels):
    torso = {"params": pixels[1]["params"]["policy_torso"]}
    kernels = [torso["params"][f"Conv_{i}"]["kernel"].shape for i in range(3)]
    assert kernels == [(8, 8, 4, 32), (4, 4, 32, 64), (3, 3, 64, 64)]
    assert torso["params"]["Dense_0"]["kernel"].shape == (7 * 7 * 64, 512)
    frames = jnp.full((4, 84, 84), 255, jnp.uint8)
    features = NatureCNN().apply(torso, frames)
    assert features.shape == (512,) and features.dtype == jnp.float32
    same = NatureCNN().apply(torso, frames.astype(jnp.float32))
    np.testing.assert_array_equal(features, same)
    assert 0.1 < np.std(features) < 10  # bytes became numbers of size 1


def kernels(params) -> dict[str, np.ndarray]:
    """Every kernel as a matrix of inputs by outputs, by its path."""
    leaves = jax.tree_util.tree_leaves_with_path(params["params"])
    return {
        jax.tree_util.keystr(path): np.reshape(x, (-1, x.shape[-1]))
        for path, x in leaves
        if "kernel" in jax.tree_util.keystr(path)
    }


@pytest.mark.parametrize("action", [BOX, CHOICE])
def test_kernels_start_orthogonal_with_gains_of_their_place(action):
    found = kernels(initialise(make(action=action)))
    assert len(found) == 6
    for path, kernel in found.items():
        gain = (
            0.01 if "policy_head" in path else 1.0 if "value_head" in path else 2**0.5
        )
        small = min(kernel.shape)
        gram = kernel.T @ kernel if kernel.shape[1] == small else kernel @ kernel.T
        np.testing.assert_allclose(gram, gain**2 * np.eye(small), atol=gain**2 * 1e-5)


def test_convolutions_start_orthogonal_too(pixels):
    found = kernels(pixels[1])
    assert len(found) == 6
    kernel = found["['policy_torso']['Conv_1']['kernel']"]
    np.testing.assert_allclose(kernel.T @ kernel, 2 * np.eye(64), atol=1e-5)


def value_gradient(network, params, observation):
    loss = lambda params: jnp.sum(network.apply(params, observation, method="value"))
    return jax.jit(jax.grad(loss))(params)["params"]


def is_zero(tree) -> bool:
    return all(not np.any(x) for x in jax.tree.leaves(tree))


def test_of_vectors_the_value_has_a_torso_of_its_own():
    network = make()
    gradient = value_gradient(network, initialise(network), jnp.ones((2, 7)))
    assert is_zero(gradient["policy_torso"]) and is_zero(gradient["policy_head"])
    assert not is_zero(gradient["value_torso"]) and not is_zero(gradient["value_head"])


def test_of_frames_both_share_one_torso(pixels):
    frames = np.random.default_rng(1).integers(0, 256, (1, 4, 84, 84), np.uint8)
    gradient = value_gradient(*pixels, jnp.asarray(frames))
    assert set(gradient) == {"policy_torso", "policy_head", "value_head"}
    assert is_zero(gradient["policy_head"])
    assert not is_zero(gradient["policy_torso"])


def test_a_continuous_policy_starts_with_its_deviation_and_near_the_centre():
    network = make()
    policy = network.apply(initialise(network), jnp.ones((4, 7)), method="policy")
    np.testing.assert_allclose(
        policy.stddev(), np.full((4, 3), np.exp(-0.5)), rtol=1e-6
    )
    assert np.max(np.abs(policy.mode())) < 0.05


def test_different_keys_give_different_networks_and_equal_keys_equal_ones():
    network = make()
    first, again, other = (kernels(initialise(network, seed=s)) for s in (0, 0, 1))
    for path, kernel in first.items():
        np.testing.assert_array_equal(kernel, again[path])
        assert np.any(kernel != other[path])


def test_a_normalised_layer_ignores_the_scale_of_its_input():
    x = jnp.asarray(np.random.default_rng(2).normal(size=(5, 7)), jnp.float32)
    for layer_norm in (True, False):
        mlp = MLP((16,), "relu", layer_norm)
        params = mlp.init(jax.random.key(0), x)
        near = np.allclose(mlp.apply(params, x), mlp.apply(params, 100 * x), atol=1e-3)
        assert near == layer_norm


def test_layers_are_as_wide_and_bend_as_asked():
    x = jnp.ones((1, 7))
    outputs = {}
    for activation in ("tanh", "relu", "elu", "swish"):
        mlp = MLP((16, 9), activation)
        outputs[activation] = np.asarray(mlp.apply(mlp.init(jax.random.key(0), x), x))
        assert outputs[activation].shape == (1, 9)
    assert len({out.tobytes() for out in outputs.values()}) == 4
    assert np.max(np.abs(outputs["tanh"])) < 1
    assert np.min(outputs["relu"]) == 0


@pytest.mark.parametrize(
    "shape", [(), (3, 4), (84, 84, 4), (4, 35, 84), (1, 4, 84, 84)]
)
def test_observations_of_other_shapes_are_refused(shape):
    with pytest.raises(ValueError, match=r"Toy-v0 have shape \(.*; a vector is needed"):
        make(shape)


def test_the_smallest_frame_is_read():
    network = make((1, 36, 36), CHOICE)
    value = jax.eval_shape(lambda: initialise(network, (1, 36, 36)))
    assert value["params"]["policy_torso"]["Dense_0"]["kernel"].shape == (64, 512)


def test_an_unknown_activation_is_refused():
    with pytest.raises(ValueError, match="activation 'gelu' is not one of"):
        make(activation="gelu")
