"""Algorithm 1 in plain numpy, float64, for a network with one hidden layer of tanh.

It is told which slots were drawn, and nothing else: rows, priorities, probabilities,
weights, errors, gradients and target copies are its own.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from probes import DISCRETE, random_trajectory

from fps_jax.agents import memory as memories
from fps_jax.agents.dqn import DQNConfig, make_replay

LENGTH, ENVS = 6, 4
ROWS = LENGTH * ENVS
CAPACITY = 60
SMALL = {
    "optimizer": "sgd",
    "learning_rate": 0.2,
    "prioritized_learning_rate_fraction": 1.0,
    "max_grad_norm": 1e6,
    "gamma": 0.9,
    "batch_size": 8,
    "replay_period": ROWS // 3,
    "target_period": 2 * (ROWS // 3),
    "learning_starts": 0,
    "replay_capacity": CAPACITY,
    "normalize_observations": False,
    "hidden_sizes": (5,),
    "activation": "tanh",
}


class Small(NamedTuple):
    """A small agent, and its functions compiled; the last three are of its replay."""

    config: DQNConfig
    agent: object
    init: object
    update: object
    remember: object
    draw: object
    prioritize: object


@functools.cache
def small(**options) -> Small:
    """Builds it.

    Args:
      **options: of DQN, beside `SMALL`.
    """
    config = DQNConfig(**(SMALL | options))
    plan = {"num_envs": ENVS, "rollout_steps": LENGTH}
    agent = config.make(DISCRETE, total_env_steps=5 * ROWS, **plan)
    of_replay = make_replay(config, DISCRETE, **plan)

    def remember(memory, trajectory):
        return memories.remember(of_replay, memory, trajectory, kept=())

    def draw(state, key, beta):
        return of_replay.sample(
            state,
            key,
            batch_size=config.batch_size,
            importance_exponent=beta,
            discount=jnp.float32(config.gamma),
        )[1]

    functions = agent.init, agent.update, remember, draw, of_replay.update
    return Small(config, agent, *map(jax.jit, functions))


def segment(seed: int, *, levels: int = 0):
    """Experience of nobody, with levels of exploration if there are any."""
    trajectory = random_trajectory(seed, DISCRETE, LENGTH, ENVS)
    rng = np.random.default_rng(seed)
    level = rng.integers(max(levels, 1), size=(LENGTH, ENVS)).astype(np.int32)
    return trajectory._replace(behaviour={"level": level} if levels else {})


class Twin:
    """The naive agent.

    Attributes:
      params, target: by layer, ``(kernel, bias)``.
      priority: by slot; None where nothing can be drawn yet.
    """

    def __init__(self, this: Small, state):
        self.config = this.config
        self.params = layers(state.learner.q.params)
        self.target = [(w.copy(), b.copy()) for w, b in self.params]
        self.rows, self.priority = {}, {}
        self.head = self.steps = 0
        self.largest = 1.0

    def add(self, trajectory) -> None:
        """Stores rows one by one; what a slot held before is gone.

        The rows before them are of somebody else: their last steps lead nowhere.
        """
        limit = self.config.reward_clip or np.inf
        for k in range(ENVS if self.rows else 0):
            self.rows[(self.head - 1 - k) % CAPACITY]["is_valid"] = False
        for t in range(LENGTH):
            for e in range(ENVS):
                slot = (self.head + t * ENVS + e) % CAPACITY
                self.priority.pop(slot, None)
                self.rows[slot] = {
                    "observation": trajectory.observation[t, e].astype(np.float64),
                    "action": int(trajectory.action[t, e]),
                    "reward": float(np.clip(trajectory.reward[t, e], -limit, limit)),
                    "terminated": trajectory.terminated[t, e],
                    "ends": (trajectory.terminated | trajectory.truncated)[t, e],
                    "is_valid": trajectory.is_valid[t, e],
                }
        self.head = (self.head + ROWS) % CAPACITY
        newest = [(self.head - 1 - k) % CAPACITY for k in range(len(self.rows))]
        waiting = set(newest[: self.config.n_step * ENVS])
        for slot in newest:
            is_known = slot in self.priority or slot in waiting
            if not is_known and self.rows[slot]["is_valid"]:
                self.priority[slot] = self.largest

    def transition(self, slot: int):
        """Up to n steps from a slot: reward, discount, and where they led."""
        reward, discount, gamma = 0.0, 1.0, self.config.gamma
        for k in range(self.config.n_step):
            row = self.rows[(slot + k * ENVS) % CAPACITY]
            if k and not row["is_valid"]:
                break
            reward += discount * row["reward"]
            discount *= 0.0 if row["terminated"] else gamma
            after = self.rows[(slot + (k + 1) * ENVS) % CAPACITY]
            if row["ends"]:
                break
        return reward, discount, after["observation"]

    def gradient_step(self, slots, alpha: float, beta: float) -> None:
        """Lines 7 to 15 of Algorithm 1 for given draws.

        Args:
          slots: that were drawn.
          alpha: exponent of priorities.
          beta: exponent of importance weights.
        """
        config = self.config
        powers = {slot: p**alpha for slot, p in self.priority.items()}
        total = sum(powers.values())
        chance = np.array([powers[slot] / total for slot in slots])
        weights = (len(powers) * chance) ** -beta
        weights /= weights.max()
        change = [(np.zeros_like(w), np.zeros_like(b)) for w, b in self.params]
        errors = []
        for slot, weight in zip(slots, weights):
            row = self.rows[slot]
            reward, discount, following = self.transition(slot)
            selector = self.params if config.double else self.target
            best = np.argmax(values(selector, following)[0])
            bootstrap = values(self.target, following)[0][best]
            q, hidden = values(self.params, row["observation"])
            error = reward + discount * bootstrap - q[row["action"]]
            errors.append(error)
            limit = config.td_error_clip or np.inf
            scale = weight * np.clip(error, -limit, limit) / len(slots)
            (_, _), (kernel, _) = self.params
            last = np.zeros_like(q)
            last[row["action"]] = scale
            inner = (kernel @ last) * (1 - hidden**2)
            for (dw, db), x, d in zip(
                change, (row["observation"], hidden), (inner, last)
            ):
                dw += np.outer(x, d)
                db += d
        step = config.learning_rate
        self.params = [
            (w + step * dw, b + step * db)
            for (w, b), (dw, db) in zip(self.params, change)
        ]
        for slot, error in zip(slots, errors):  # Of equal slots the last one counts.
            priority = abs(error) + config.priority_epsilon
            if config.is_prioritized:
                self.priority[slot] = priority
                self.largest = max(self.largest, priority)
        self.steps += 1
        if self.steps % (config.target_period // config.replay_period) == 0:
            self.target = [(w.copy(), b.copy()) for w, b in self.params]


def layers(params):
    """The two layers of the network, in float64."""
    leaves = jax.tree.leaves(params)
    b1, w1, b2, w2 = (np.asarray(x, np.float64) for x in leaves)
    assert w1.shape[1] == b1.size
    assert w2.shape == (b1.size, b2.size)
    return [(w1, b1), (w2, b2)]


def values(network, observation):
    """Values of all actions, and the hidden layer."""
    (w1, b1), (w2, b2) = network
    hidden = np.tanh(observation @ w1 + b1)
    return hidden @ w2 + b2, hidden
