"""A training step of double Q-learning in one jitted program, for ``bench_replay``.

    draw B = 32 transitions, with importance weights w
    delta = r + 0.99 (1 - done) Q_target(s', argmax_a Q(s', a)) - Q(s, a)
    Adam's step along the gradient of mean(w delta^2) / 2
    priorities of what was drawn: |delta|

with our replays: uniform, whose weights are 1, proportional and rank-based. The network
is Nature's, of frames, or a small MLP, of CartPole's observations. The replays take
turns call by call, so that whatever disturbs one disturbs all.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from experiments import replay_peers
from fps_jax.models import networks

BATCH, DISCOUNT, NUM_ACTIONS = 32, 0.99, 6
KINDS = {"cnn": "atari", "mlp": "cartpole"}
"""The items that each network reads."""
SYSTEMS = ("ours, uniform", "ours", "ours, rank-based")


class Learner(NamedTuple):
    """What a step changes.

    Attributes:
      params: of the network.
      target: of the target network.
      optimizer_state: Adam's.
      replay: the replay's state.
    """

    params: Any
    target: Any
    optimizer_state: Any
    replay: Any


def step_of(
    replay: Any, network: nn.Module, optimizer: optax.GradientTransformation
) -> Callable[[Learner, jax.Array], Learner]:
    """The step, to be compiled.

    Args:
      replay: its functions.
      network: maps observations ``[B, ...]`` to values ``[B, A]``.
      optimizer: of its parameters.
    """

    values: Callable[..., Any] = network.apply

    def loss(params, target, sample):
        items = sample.items
        taken = lambda q, action: jnp.take_along_axis(q, action[:, None], axis=1)[:, 0]
        greedy = jnp.argmax(values(params, items["next_observation"]), axis=1)
        following = taken(values(target, items["next_observation"]), greedy)
        goal = items["reward"] + DISCOUNT * jnp.where(items["done"], 0.0, following)
        q = taken(values(params, items["observation"]), items["action"])
        delta = jax.lax.stop_gradient(goal) - q
        return 0.5 * jnp.mean(sample.importance_weights * jnp.square(delta)), delta

    def step(learner, key):
        params, target, optimizer_state, state = learner
        state, sample = replay.sample(
            state,
            key,
            batch_size=BATCH,
            importance_exponent=replay_peers.IMPORTANCE_EXPONENT,
        )
        gradient, delta = jax.grad(loss, has_aux=True)(params, target, sample)
        change, optimizer_state = optimizer.update(gradient, optimizer_state)
        params = optax.apply_updates(params, change)
        state = replay.update(state, sample.ticket, jnp.abs(delta) + 1e-6)
        return Learner(params, target, optimizer_state, state)

    return step


class _Frames(nn.Module):
    """Nature's torso, for frames whose channels are last."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return networks.NatureCNN()(jnp.moveaxis(x, -1, -3))


class Steps:
    """Steps with each replay, to be compared."""

    def __init__(self, name: str, capacity: int):
        """Fills the replays.

        Args:
          name: of the network, a key of `KINDS`.
          capacity: N of each replay.
        """
        torso = _Frames() if name == "cnn" else networks.MLP((64, 64), "relu")
        network = nn.Sequential([torso, nn.Dense(NUM_ACTIONS)])
        optimizer = optax.adam(1e-4)
        self._keys = list(jax.random.split(jax.random.key(1), replay_peers.POOL))
        self._learners, self._programs = {}, {}
        example = replay_peers.make_items(KINDS[name], 1)
        params = jax.jit(network.init)(self._keys[0], example["observation"])
        for system in SYSTEMS:
            peer = replay_peers.filled(system, KINDS[name], capacity)
            assert peer.state is not None
            own = lambda: jax.tree.map(jnp.copy, params)
            self._learners[system] = Learner(
                params=own(),
                target=own(),
                optimizer_state=jax.jit(optimizer.init)(params),
                replay=peer.state(),
            )
            replay = replay_peers.ours(capacity, system.partition(", ")[2])
            step = step_of(replay, network, optimizer)
            self._programs[system] = jax.jit(step, donate_argnums=0)
        for k in range(3):  # Compiles, and warms up.
            for system in SYSTEMS:
                self._step(system, k)

    def median_us(self, calls: int, seconds: float) -> dict[str, float]:
        """Microseconds of a step with each replay, the medians of many.

        Args:
          calls: of each, at most.
          seconds: for all of them, at most, but for five calls.
        """
        taken: dict[str, list[float]] = {system: [] for system in SYSTEMS}
        end = time.perf_counter() + seconds
        for k in range(calls):
            if k >= 5 and time.perf_counter() > end:
                break
            first = k % len(SYSTEMS)  # Nobody is always the one after the others.
            for system in SYSTEMS[first:] + SYSTEMS[:first]:
                start = time.perf_counter()
                self._step(system, k)
                taken[system].append(time.perf_counter() - start)
        return {name: 1e6 * statistics.median(x) for name, x in taken.items()}

    def _step(self, system: str, k: int) -> None:
        key = self._keys[k % replay_peers.POOL]
        learner = self._programs[system](self._learners[system], key)
        self._learners[system] = jax.block_until_ready(learner)
