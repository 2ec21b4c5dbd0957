"""Q-learning on the Blind Cliffwalk by features, row by row, in float64."""

import functools

import jax
import numpy as np

from experiments import cliffwalk_problem as problem


class Twin:
    """Q-learning by features, one row of the memory after the other, in float64."""

    def __init__(self, n, representation, theta):
        self.n, self.gamma = n, 1 - 1 / n
        self.theta = np.asarray(theta, float).copy()
        self.has_bias = representation == "linear"

    def features(self, s, action):
        phi = np.zeros((self.n + 1, 2))
        phi[s, action] = 1
        phi[self.n, action] = self.has_bias
        return phi

    def value(self, s, action):
        return np.sum(self.theta * self.features(s, action))

    def td_error(self, row):
        s, action = row
        is_right = action == s % 2
        target = float(is_right and s == self.n - 1)
        if is_right and s < self.n - 1:
            target += self.gamma * max(self.value(s + 1, a) for a in (0, 1))
        return target - self.value(s, action)

    def update(self, row, weight=1.0):
        error = self.td_error(row)
        self.theta += 0.25 * weight * error * self.features(*row)
        return error

    def loss(self):
        errors = [
            self.value(s, a) - self.gamma ** (self.n - 1 - s) * (a == s % 2)
            for s in range(self.n)
            for a in (0, 1)
        ]
        return np.mean(np.square(errors))


def rows_of(memory):
    """The states and actions of transitions."""
    return list(zip(memory.observation.tolist(), memory.action.tolist()))


def thetas(seeds, n):
    """Parameters at first of some seeds."""
    keys = jax.random.split(jax.random.key(5), seeds)
    return jax.vmap(functools.partial(problem.initial_theta, n=n))(keys)
