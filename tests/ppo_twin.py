"""PPO compiled once a configuration, and its twin in plain numpy, float64.

The twin says the loss as it reads and finds its slope by differences.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import reference
from probes import acted
from probes import random_trajectory as random_experience

from fps_jax.agents.ppo import PPOConfig
from fps_jax.agents.ppo_options import Hyper
from fps_jax.models.networks import actor_critic
from fps_jax.models.normalize import AverageState, MomentsState, PercentileState
from fps_jax.types import Discrete, EnvSpec

LENGTH, ENVS = 6, 4
ROWS = LENGTH * ENVS
TOTAL = 10 * ROWS
random_trajectory = functools.partial(random_experience, length=LENGTH, envs=ENVS)


class Compiled:
    """An agent with its functions compiled, and how often `update` was traced."""

    def __init__(self, config: PPOConfig, spec: EnvSpec):
        self.config, self.spec, self.traces = config, spec, 0
        self.agent = config.make(spec, total_env_steps=TOTAL)

        def update(state, trajectory):
            self.traces += 1
            return self.agent.update(state, trajectory)

        self.update = jax.jit(update)
        self.network = actor_critic(
            spec,
            hidden_sizes=config.hidden_sizes,
            activation=config.activation,
            init_log_std=config.init_log_std,
            shares_torso=config.shares_torso,
            separates_losses=config.separates_losses,
        )

    @functools.cached_property
    def state(self):
        """A state in the middle of a run, with nothing in it at its first value."""
        state = jax.jit(self.agent.init)(jax.random.key(1))
        rng = np.random.default_rng(2)
        draw = lambda x: np.float32(0.5) * rng.normal(size=x.shape).astype(np.float32)
        shape = self.spec.observation_shape
        mean, variance = np.full(shape, 0.8), np.linspace(2, 5, np.prod(shape))
        moments = 100.0, mean, variance.reshape(shape)
        single = lambda xs, kind=MomentsState: kind(
            *(jnp.asarray(x, jnp.float32) for x in xs)
        )
        learner = state.learner._replace(
            params=jax.tree.map(lambda x: jnp.asarray(draw(x)), state.learner.params),
            observation_moments=single(moments),
            return_moments=single((100.0, 0.5, 4.0)),
            update=jnp.asarray(3, jnp.int32),
        )
        if learner.average is not None:
            near = lambda x: jnp.asarray(x + np.float32(0.05) * draw(x))
            average = jax.tree.map(near, learner.params)
            weight = jnp.asarray(1.5, jnp.float32)
            learner = learner._replace(average=AverageState(weight, average))
        if learner.return_percentiles is not None:
            percentiles = single((0.5, -0.6, 0.9), PercentileState)
            learner = learner._replace(return_percentiles=percentiles)
        return state._replace(learner=learner)

    def nearly_acted(self, seed, state=None):
        """Experience of a policy that differs a little from the state's."""
        trajectory = random_trajectory(seed, self.spec)
        trajectory = acted(self.agent, state or self.state, trajectory)
        noise = np.random.default_rng(seed).normal(size=(LENGTH, ENVS))
        log_prob = trajectory.behaviour["log_prob"] + np.float32(0.3) * noise
        return trajectory._replace(behaviour={"log_prob": np.float32(log_prob)})

    def with_hyper(self, state=None, **values):
        """The state with other numeric hyper-parameters."""
        state = state or self.state
        values = {k: jnp.asarray(v, jnp.float32) for k, v in values.items()}
        hyper = state.learner.hyper._replace(**values)
        return state._replace(learner=state.learner._replace(hyper=hyper))


compiled = functools.cache(Compiled)


class Twin:
    """PPO's update, by full-batch gradient descent."""

    def __init__(self, this: Compiled, state, trajectory):
        self.config, self.spec = this.config, this.spec
        self.hyper = Hyper(*(x if x is None else float(x) for x in state.learner.hyper))
        self.learner = jax.device_get(state.learner._replace(key=0))
        self.rows = jax.device_get(trajectory)
        self.is_valid = np.asarray(trajectory.is_valid)
        moments = self.learner.observation_moments
        self.observation = np.float64(self.rows.observation)
        if self.config.normalize_observations:
            deviation = np.sqrt(np.float64(moments.variance))
            self.observation = (self.observation - moments.mean) / deviation
        variance = float(self.learner.return_moments.variance)
        self.scale = np.sqrt(variance) if self.config.scale_returns else 1.0
        progress = min(
            1.0, int(self.learner.update) * ROWS / self.hyper.total_env_steps
        )
        falls = lambda end: 1 - (1 - end) * progress
        hyper = self.hyper
        self.learning_rate = hyper.learning_rate * falls(
            hyper.final_learning_rate_fraction
        )
        high = hyper.clip_epsilon_high
        width = falls(hyper.final_clip_epsilon_fraction)
        self.low = width * hyper.clip_epsilon
        self.high = width * (hyper.clip_epsilon if high is None else high)

    def hidden(self, params, torso):
        layer = params[torso]["Dense_0"]
        return np.tanh(self.observation @ layer["kernel"] + layer["bias"])

    def value(self, params, frozen=None):
        """``[T + 1, E]``, in the network's own unit."""
        head = params["value_head"]["Dense_0"]
        torso = "policy_torso" if self.config.shares_torso else "value_torso"
        if self.config.separates_losses and frozen is not None:
            params = frozen
        features = self.hidden(params, torso)
        return (features @ head["kernel"])[..., 0] + head["bias"]

    def policy_output(self, params):
        """``[T, E, ...]``, logits or means."""
        layer = params["policy_head"]["Dense_0"]
        hidden = self.hidden(params, "policy_torso")[:-1]
        return hidden @ layer["kernel"] + layer["bias"]

    def log_prob_and_entropy(self, params):
        out = self.policy_output(params)
        if isinstance(self.spec.action, Discrete):
            probability = np.exp(out) / np.exp(out).sum(-1, keepdims=True)
            index = self.rows.action[..., None]
            log_prob = np.log(np.take_along_axis(probability, index, -1)[..., 0])
            return log_prob, -(probability * np.log(probability)).sum(-1)
        std = np.exp(params["policy_head"]["log_std"])
        z = (self.rows.action - out) / std
        log_prob = (-0.5 * z**2 - np.log(std) - 0.5 * np.log(2 * np.pi)).sum(-1)
        entropy = (0.5 * np.log(2 * np.pi * np.e) + np.log(std)).sum()
        return log_prob, np.full(log_prob.shape, entropy)

    def advantages(self, params):
        """Advantages and value targets, in units of reward."""
        values = self.value(params) * self.scale
        per_env = [
            reference.Rows(
                *(
                    np.asarray(getattr(self.rows, name))[:, e]
                    for name in ("reward", "terminated", "truncated", "is_valid")
                ),
                values[:, e],
            )
            for e in range(ENVS)
        ]
        gamma, lambda_ = self.hyper.gamma, self.hyper.lambda_
        found = [reference.advantages(rows, gamma, lambda_) for rows in per_env]
        advantage = np.stack(found, axis=1)
        return advantage, values[:-1] + advantage

    def unit(self, target):
        """What advantages are divided by, once the statistics have seen the targets."""
        target, rule = target[self.is_valid], self.config.normalize_advantage
        if rule == "percentile":
            old, rate = self.learner.return_percentiles, self.hyper.advantage_norm_rate
            low = old.low + rate * (np.quantile(target, 0.05) - old.low)
            high = old.high + rate * (np.quantile(target, 0.95) - old.high)
            weight = old.weight + rate * (1 - old.weight)
            debias = self.config.advantage_norm_debias
            return max((high - low) / (weight if debias else 1.0), 1.0)
        if rule == "running":
            old = self.learner.return_moments
            seen = float(old.count)
            total = seen + len(target)
            mean = (seen * old.mean + target.sum()) / total
            squares = seen * (old.variance + old.mean**2) + (target**2).sum()
            return np.sqrt(squares / total - mean**2)
        return 1.0

    def weigh(self, advantage, unit):
        kept = advantage[self.is_valid] / unit
        if self.config.normalize_advantage in ("minibatch", "batch"):
            kept = (kept - kept.mean()) / kept.std()
        return kept

    def items(self, params, given):
        """What the loss is the mean of, of every valid row."""
        hyper, kept = self.hyper, self.is_valid
        log_prob, entropy = (x[kept] for x in self.log_prob_and_entropy(params))
        ratio, objective = np.exp(log_prob - given["proximal"]), []
        for r, w, a in zip(ratio, given["weight"], given["advantage"]):
            clipped = min(max(r, 1 - self.low), 1 + self.high)
            one = min(r * a, clipped * a)
            if hyper.dual_clip is not None and a < 0:
                one = max(one, hyper.dual_clip * a)
            objective.append(-w * one)
        distance = {
            "l2": np.square,
            "l1": np.abs,
            "smooth_l1": lambda x: np.where(abs(x) < 1, x**2 / 2, abs(x) - 0.5),
        }[self.config.value_loss]
        value, old = self.value(params, given["frozen"])[:-1][kept], given["old_value"]
        target = given["target"][kept] / self.scale
        critic = distance(value - target)
        limit = hyper.clip_value
        found = {}
        if limit is not None:
            moved = np.clip(value - old, -limit, limit)
            critic = np.maximum(critic, distance(old + moved - target))
            found["value_clip_fraction"] = np.abs(value - old) > limit
        low, high = ratio < 1 - self.low, ratio > 1 + self.high
        return found | {
            "loss_objective": np.array(objective),
            "loss_critic": hyper.value_coef * critic,
            "loss_entropy": -hyper.entropy_coef * entropy,
            "entropy": entropy,
            "kl_k1": -np.log(ratio),
            "kl_k2": np.log(ratio) ** 2 / 2,
            "kl_k3": ratio - 1 - np.log(ratio),
            "clip_fraction": low | high,
            "clip_fraction_low": low,
            "clip_fraction_high": high,
            "clip_fraction_active_low": low & (given["advantage"] < 0),
            "clip_fraction_active_high": high & (given["advantage"] > 0),
            "ratio": ratio * given["weight"],
        }

    def loss(self, params, given):
        items = self.items(params, given)
        return sum(x.mean() for name, x in items.items() if name.startswith("loss_"))

    def slope(self, params, given):
        """The gradient of the loss, by central differences."""

        def of_leaf(path):
            leaf = functools.reduce(lambda node, key: node[key.key], path, params)
            slope = np.zeros_like(leaf)
            for i in np.ndindex(leaf.shape):
                middle, losses = leaf[i], []
                for side in (-1e-6, 1e-6):
                    leaf[i] = middle + side
                    losses.append(self.loss(params, given))
                leaf[i] = middle
                slope[i] = (losses[1] - losses[0]) / 2e-6
            return slope

        return jax.tree_util.tree_map_with_path(lambda path, _: of_leaf(path), params)

    def constants(self, params, average, start):
        """All that the loss of one step takes as given."""
        advantage, target = start["signals"]
        if self.config.recompute_advantages:
            advantage, target = self.advantages(params)
        kept = self.is_valid
        behaviour = np.float64(self.rows.behaviour["log_prob"])[kept]
        log_prob = self.log_prob_and_entropy(params)[0][kept]
        proximal = behaviour
        if average is not None:
            proximal = self.log_prob_and_entropy(average)[0][kept]
        # The cap bounds pi / b; what is left of it after pi / pi_prox is a constant.
        cap = self.hyper.max_importance_ratio or np.inf
        whole = np.minimum(np.exp(log_prob - behaviour), cap)
        return {
            "proximal": proximal,
            "weight": whole / np.exp(log_prob - proximal),
            "advantage": self.weigh(advantage, start["unit"]),
            "target": target,
            "old_value": start["old_value"],
            "frozen": jax.tree.map(np.copy, params),
        }

    def update(self):
        """Parameters, their average, and metrics after the update."""
        double = lambda tree: jax.tree.map(np.float64, tree)
        params, average, weight = double(self.learner.params["params"]), None, 1.0
        if self.learner.average is not None:
            weight, average = self.learner.average
            average = double(average["params"])
        signals = self.advantages(params)
        start = {
            "signals": signals,
            "unit": self.unit(signals[1]),
            "old_value": self.value(params)[:-1][self.is_valid],
        }
        value = start["old_value"] * self.scale
        epochs, norms = [], []
        for _ in range(self.config.num_epochs):
            given = self.constants(params, average, start)
            epochs.append(self.items(params, given))
            slope = self.slope(params, given)
            norms.append(np.sqrt(sum((x**2).sum() for x in jax.tree.leaves(slope))))
            step = self.learning_rate * min(1.0, self.hyper.max_grad_norm / norms[-1])
            params = jax.tree.map(lambda p, s, step=step: p - step * s, params, slope)
            if average is not None:
                decay = self.hyper.ewma_decay
                weight = decay * weight + 1
                share = 1 / weight if self.config.ewma_debias else 1 - decay
                closer = lambda m, p, share=share: m + share * (p - m)
                average = jax.tree.map(closer, average, params)
        pooled = {k: np.concatenate([e[k] for e in epochs]) for k in epochs[0]}
        ratio = pooled.pop("ratio")
        metrics = {k: x.mean() for k, x in pooled.items()}
        target = signals[1][self.is_valid]
        metrics |= {
            "loss": sum(x for k, x in metrics.items() if k.startswith("loss_")),
            "ESS": ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum()),
            "max_ratio": ratio.max(),
            "mean_ratio": ratio.mean(),
            "grad_norm": np.mean(norms),
            "learning_rate": self.learning_rate,
            "return_scale": self.scale,
            "explained_variance": reference.explained_variance(value, target),
            "explained_error": 1 - np.mean((target - value) ** 2) / np.var(target),
        }
        return params, average, metrics
