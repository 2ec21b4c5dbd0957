"""How fast does DFPS run, beside PPO, and what does an iteration spend its time on?

``python -m experiments.bench_dfps`` measures, in turn and each in a process of its own,
env steps per second on HalfCheetah-v4 with 16 environments, 32 steps each between
updates and two layers of 64 for every network:

* ``dfps_fast`` (lag 0, as it is) and ``dfps_fast, lag 1``;
* ``dfps``, literal: lag 1, one critic step for every env step, no short cuts;
* ``ppo``: 10 epochs in minibatches of 64, the defaults; ``ppo, 4 epochs``: in
  minibatches of 128, as the policy of ``dfps_fast`` has it; both with lag 1;

and the parts of an update of ``dfps_fast`` in milliseconds, each compiled alone (so
they need not add up to the whole): ``remember``, ``critics``, ``signals``, ``policy``,
``dpg`` (steps along the critic), ``value``; ``update``, the whole; and the least that
its steps could take: ``arithmetic``, the same number of gradient steps of the same
networks on one batch that stays, without replay, targets and optimiser, which is what
critics and dpg cannot be faster than.
"""

import dataclasses
import functools
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import presets, synthetic, turns
from fps_jax import checks
from fps_jax.agents import (
    dfps_critic,
    dfps_dpg,
    dfps_policy,
    dfps_signals,
    dfps_value,
)
from fps_jax.agents.dfps import DFPSConfig
from fps_jax.agents.dfps_networks import make_networks
from fps_jax.agents.dfps_replay import make_experience
from fps_jax.agents.dfps_state import Parts, freeze

PROG = "experiments.bench_dfps"
TASK = "HalfCheetah-v4"
ENVS, STEPS = 16, 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(turns.Options):
    """Measures env steps per second, and the parts of an update.

    Attributes:
      learn_steps: env steps of each run.
    """

    learn_steps: int = 60_000

    def __post_init__(self):
        """Refuses runs that end before there is something to time."""
        super().__post_init__()
        checks.in_range(self, 10 * ENVS * STEPS, math.inf, "learn_steps")


def trains(options: Options, agent: Any, max_lag: int) -> dict[str, float]:
    """Rate of a run, from the first update on that uses all parts.

    Args:
      options: give its length.
      agent: its options.
      max_lag: of acting behind learning.
    """
    found = turns.ours(
        agent,
        after=options.learn_steps // 3,
        env=TASK,
        num_envs=ENVS,
        rollout_steps=STEPS,
        total_env_steps=options.learn_steps,
        max_lag=max_lag,
    )
    rate = found["steps_per_s"]
    return {"steps_per_s": rate, "ms": 1e3 * ENVS * STEPS / rate}


def dfps(variant: str) -> DFPSConfig:
    """The options of a preset of DFPS.

    Args:
      variant: its name.
    """
    return DFPSConfig(**presets.find(variant, TASK, "none")[0])


def ppo(**options: Any) -> Any:
    """PPO's, with the networks of DFPS's policy.

    Args:
      **options: of PPO.
    """
    import fps_jax

    return fps_jax.PPOConfig(hidden_sizes=(64, 64), **options)


class Filled:
    """A ``dfps_fast`` that has seen enough, and its parts compiled."""

    def __init__(self):
        """Fills the replay with experience of nobody."""
        from fps_jax.runtime.envs import env_spec

        spec = env_spec(TASK)
        config = dfps("dfps_fast")
        plan: Any = {"num_envs": ENVS, "rollout_steps": STEPS}
        experience = make_experience(config, spec, **plan)
        self.parts = Parts(config, make_networks(config, spec), experience)
        agent = config.make(spec, total_env_steps=10**6, **plan)
        self.trajectory = synthetic.trajectory(spec, **plan)
        self.update = jax.jit(agent.update, donate_argnums=0)
        self.remember = jax.jit(experience.add, donate_argnums=0)
        self.state: Any = jax.jit(agent.init)(jax.random.key(0))
        for _ in range(config.learning_starts // (STEPS * ENVS) + 3):
            self.state, _ = self.update(self.state, self.trajectory)

    def programs(self) -> dict[str, tuple[Callable[..., Any], Sequence[Any]]]:
        """By name of the part: a program, and its arguments."""
        parts, rows = self.parts, ENVS * STEPS
        options = parts.options
        learner, memory = self.state.learner, self.state.local.memory
        key, trajectory = jax.random.key(7), self.trajectory
        is_ready = jnp.ones((), bool)
        frozen_of = lambda learner: freeze(
            parts, learner, rows=rows, is_ready=is_ready, axis_name=None
        )
        told = lambda learner, trajectory: dfps_signals.signals_of(
            parts,
            learner,
            dfps_signals.segment_of(trajectory, frozen_of(learner)),
            frozen_of(learner),
        )[0]
        signals = jax.jit(told)(learner, trajectory)
        critic_steps = max(1, round(options.critic_utd * rows))
        dpg_steps = max(1, round(options.dpg_utd * rows))

        def policy(learner, memory, signals, trajectory):
            frozen = frozen_of(learner)
            segment = dfps_signals.segment_of(trajectory, frozen)
            batch = dfps_policy.rows_of(parts, segment, signals, memory, frozen, key)
            return dfps_policy.learn(parts, learner, batch, signals, frozen, key)

        def value(learner, memory, signals, trajectory):
            frozen = frozen_of(learner)
            segment = dfps_signals.segment_of(trajectory, frozen)
            return dfps_value.learn(
                parts, learner, memory, segment, signals, frozen, key
            )

        return {
            "critics": (
                # Without the memory, which it would have to copy.
                lambda learner, memory: dfps_critic.learn(
                    parts, learner, memory, frozen_of(learner), key, steps=critic_steps
                )[::2],
                (learner, memory),
            ),
            "signals": (told, (learner, trajectory)),
            "policy": (policy, (learner, memory, signals, trajectory)),
            "dpg": (
                lambda learner, memory, weight: dfps_dpg.follow_critic(
                    parts,
                    learner,
                    memory,
                    weight,
                    frozen_of(learner),
                    key,
                    steps=dpg_steps,
                ),
                (learner, memory, signals.critic_weight),
            ),
            "value": (value, (learner, memory, signals, trajectory)),
            "arithmetic": (
                functools.partial(self._arithmetic, critic_steps, dpg_steps),
                (learner,),
            ),
        }

    def _arithmetic(self, critic_steps: int, dpg_steps: int, learner: Any) -> Any:
        """Gradients of critics and policy on a batch that stays, and steps along them.

        A step needs the critics' values of what was drawn, forwards and backwards, and
        those of what followed, forwards; a dpg step the first critic's slope, and the
        policy's gradient.
        """
        networks, options = self.parts.networks, self.parts.options
        trajectory = self.trajectory
        size = options.critic_batch_size
        flat = lambda x: x.reshape(-1, x.shape[-1])
        observation = flat(trajectory.observation[:-1])[:size]
        following = flat(trajectory.observation[1:])[:size]
        action = flat(trajectory.action)[:size]

        def critic_loss(params):
            after = networks.critics(params, following, action)
            q = networks.critics(params, observation, action)
            target = jax.lax.stop_gradient(jnp.min(after, axis=0))
            return jnp.mean(jnp.square(q - target[None]))

        def policy_loss(params):
            states = flat(trajectory.observation[:-1])[: options.dpg_batch_size]
            mean = networks.policy(params, states).mean
            return -jnp.mean(networks.critic(learner.critics.params, states, mean))

        def descend(loss, params, steps):
            step = lambda _, x: jax.tree.map(lambda p, g: p - 1e-6 * g, x, grad(x))
            grad = jax.grad(loss)
            return jax.lax.fori_loop(0, steps, step, params)

        critics = descend(critic_loss, learner.critics.params, critic_steps)
        return critics, descend(policy_loss, learner.policy.params, dpg_steps)


def part_rows(repeats: int, calls: int = 20) -> list[dict[str, Any]]:
    """Milliseconds of each part, a row a repeat: the median of its calls.

    Args:
      repeats: of each part; they take turns.
      calls: of each repeat.
    """
    filled = Filled()
    programs = {
        name: (jax.jit(program), arguments)
        for name, (program, arguments) in filled.programs().items()
    }

    def seconds(call: Callable[[], Any]) -> float:
        start = time.perf_counter()
        jax.block_until_ready(call())
        return time.perf_counter() - start

    def whole() -> Any:
        filled.state, metrics = filled.update(filled.state, filled.trajectory)
        return metrics

    def remember() -> Any:
        local = filled.state.local
        memory = filled.remember(local.memory, filled.trajectory)
        filled.state = filled.state._replace(local=local._replace(memory=memory))
        return memory.following

    measured: dict[str, Callable[[], Any]] = {
        name: functools.partial(program, *arguments)
        for name, (program, arguments) in programs.items()
    }
    # Last, as these are donated what the others are given.
    changing = {"remember": remember, "update": whole}
    rows = []
    for group in (measured, changing):
        for call in group.values():
            seconds(call)  # Compiles.
        for repeat in range(repeats):
            for name, call in group.items():
                ms = 1e3 * float(np.median([seconds(call) for _ in range(calls)]))
                rows.append(_row(name, repeat, ms))
    return rows


def _row(name: str, repeat: int, ms: float) -> dict[str, Any]:
    rate = round(1e3 * ENVS * STEPS / ms, 2)
    variant = f"part, {name}"
    return {
        "variant": variant,
        "repeat": repeat,
        "steps_per_s": rate,
        "ms": round(ms, 3),
    }


VARIANTS: turns.Variants = {
    "dfps_fast": lambda options: trains(options, dfps("dfps_fast"), 0),
    "dfps_fast, lag 1": lambda options: trains(options, dfps("dfps_fast"), 1),
    "dfps": lambda options: trains(options, dfps("dfps"), 1),
    "ppo": lambda options: trains(options, ppo(), 1),
    "ppo, 4 epochs": lambda options: trains(
        options, ppo(num_epochs=4, minibatch_size=128), 1
    ),
}
RATIOS = {
    "dfps_fast / ppo": ("dfps_fast", ("ppo",)),
    "dfps_fast lag 1 / ppo": ("dfps_fast, lag 1", ("ppo",)),
    "dfps / ppo": ("dfps", ("ppo",)),
    "dfps_fast / ppo, 4 epochs": ("dfps_fast", ("ppo, 4 epochs",)),
}
"""What the claims are about."""


def parts_of(options: Options, rows: list[turns.Row]) -> dict[str, Any]:
    """Measures the parts of an update as well, and tells their shares of it.

    Args:
      options: of this program.
      rows: to which those of the parts are added.
    """
    rows += part_rows(options.repeats)
    ms = turns.medians(rows, "ms")
    shares = {
        name.removeprefix("part, "): round(x / ms["part, update"], 3)
        for name, x in ms.items()
        if name.startswith("part, ")
    }
    print(json.dumps(shares, indent=2))
    return {"median_ms": ms, "shares_of_update": shares}


def main(argv: Sequence[str] | None = None) -> int:
    """Measures every variant in turn, then the parts, and writes the CSV.

    Args:
      argv: the words after the program's name; None reads the process's own.
    """
    return turns.run(
        PROG,
        Options,
        VARIANTS,
        argv,
        ratios=RATIOS,
        more=parts_of,
    )


if __name__ == "__main__":
    sys.exit(main())
