"""Does DQN run on Atari games without a surprise, and what does the replay cost there?

``python -m experiments.atari`` trains Double DQN with each replay on Pong from frames,
for some ten thousand steps, with the settings of Mnih et al. (2015) and van Hasselt et
al. (2016) (row ``Atari`` of `experiments/presets.py`), each in a process of its own,
and writes to ``experiments/results/atari.csv``

* ``steps_per_s``: env steps per second, everything counted, once learning has begun;
* ``replay_mib``, ``bytes_per_step``: what the replay's arrays hold, and that over its
  capacity (a stack and its successor as they come would take 56,448);
* ``peak_mib``: the most memory that the process ever had;
* ``replay_share``: of the time of an update, that of the same update with a network
  that reads every pixel once and does no more;
* ``score``, ``human_normalized``: of the greedy policy at the end, see `normalized`.

That is far too short to play well. For learning curves:
``python -m experiments.learning --agent dqn_proportional --env Pong-v5``.
"""

import dataclasses
import math
import resource
import sys
import time
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from experiments import presets, synthetic, train, turns
from fps_jax import checks
from fps_jax.agents.dqn import make_agent, make_replay
from fps_jax.agents.dqn_state import Parts
from fps_jax.runtime.envs import env_spec
from fps_jax.runtime.options import TrainConfig
from fps_jax.types import Discrete

PROG = "experiments.atari"
WARM_UP = 1_000
"""Env steps that learn before time is taken."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(turns.Options):
    """Trains DQN on an Atari game for a while, and measures.

    Attributes:
      env: EnvPool task id of one of 57 games.
      total_env_steps: length of each run, in env steps of 4 frames.
      learning_starts: env steps before the first gradient step.
      replay_capacity: env steps that are remembered.
      eval_episodes: full episodes of the evaluation at the end.
      seed: of the runs.
    """

    env: str = "Pong-v5"
    total_env_steps: int = 30_000
    learning_starts: int = 5_000
    replay_capacity: int = 100_000
    eval_episodes: int = 2
    seed: int = 0
    repeats: int = 1

    def __post_init__(self):
        """Refuses options that are out of range."""
        super().__post_init__()
        checks.in_range(self, 1, math.inf, "replay_capacity")
        checks.in_range(self, 0, math.inf, "learning_starts", "eval_episodes", "seed")
        checks.choice("env", self.env, presets.atari_scores())
        # What is timed begins a little after learning does.
        least = self.learning_starts + 2 * WARM_UP
        checks.in_range(self, least, math.inf, "total_env_steps")


def normalized(env: str, score: float) -> float:
    """A score between those of random play, 0, and of a human, 1.

        (score - random) / |human - random|

    Schaul et al. (2016), equation 4.

    Args:
      env: EnvPool task id.
      score: mean undiscounted return of an episode.

    Raises:
      KeyError: if the game is not one of the 57.
    """
    random, human = presets.atari_scores()[env]
    return (score - random) / abs(human - random)


class Glance(nn.Module):
    """Reads every pixel, and values actions by their mean.

    Attributes:
      num_actions: how many there are.
    """

    num_actions: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps frames to values."""
        mean = jnp.mean(x.astype(jnp.float32), axis=tuple(range(1, x.ndim)))
        return nn.Dense(self.num_actions)(mean[:, None])


def seconds_of(update: Any, state: Any, trajectory: Any, calls: int = 10) -> float:
    """Seconds of an update, the median of several.

    Args:
      update: compiled; its first argument is donated.
      state: of the agent.
      trajectory: what it is given.
      calls: how many.
    """
    taken = []
    for _ in range(calls + 1):
        start = time.perf_counter()
        state, metrics = update(state, trajectory)
        jax.block_until_ready((state, metrics))
        taken.append(time.perf_counter() - start)
    return float(np.median(taken[1:]))  # The first one compiles.


def replay_share(agent: Any, config: TrainConfig) -> float:
    """The replay's share of the time of an update, see above.

    Args:
      agent: its options.
      config: those of its run.
    """
    spec = env_spec(config.env, env_options=config.env_options)
    plan: Any = {"num_envs": config.num_envs, "rollout_steps": config.rollout_steps}
    trajectory = synthetic.trajectory(spec, **plan)
    hurried = dataclasses.replace(agent, learning_starts=0)
    assert isinstance(spec.action, Discrete)
    taken = []
    for network in (None, Glance(spec.action.num_actions)):
        made = hurried.make(spec, total_env_steps=10**6, **plan)
        if network is not None:
            parts = Parts(hurried, network, make_replay(hurried, spec, **plan))
            made = make_agent(parts, spec, 10**6, num_envs=config.num_envs)
        update = jax.jit(made.update, donate_argnums=0)
        state = jax.jit(made.init)(jax.random.key(0))
        taken.append(seconds_of(update, state, trajectory))
    return taken[1] / taken[0]


def measured(options: Options, variant: str) -> dict[str, float]:
    """Trains one variant, and measures it.

    Args:
      options: of this program.
      variant: of DQN.
    """
    given = {
        "env": options.env,
        "seed": options.seed,
        "total-env-steps": options.total_env_steps,
        "learning-starts": options.learning_starts,
        "replay-capacity": options.replay_capacity,
        "eval-every": 0,
        "eval-episodes": options.eval_episodes,
        "log-every": 0,
        "directory": None,
    }
    words = [str(word) for name, x in given.items() for word in (f"--{name}", x)]
    agent, config = train.read([variant, *words, "--no-show-progress"])
    run = train.Run(agent, config)
    history = run.train()
    marks = [(r["env_steps"], r["wall_s"]) for r in history.records[:-1]]
    memory = jax.tree.leaves(run.state.local.replay.memory)
    held = sum(x.nbytes for x in memory) / len(jax.devices())
    unit = 2**20 if sys.platform == "darwin" else 2**10
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
    score = history.records[-1].get("eval/return", math.nan)
    rate = turns.rate(marks, after=options.learning_starts + WARM_UP)
    return {
        "steps_per_s": rate["steps_per_s"],
        "replay_mib": held / 2**20,
        "bytes_per_step": held / options.replay_capacity,
        "peak_mib": peak,
        "replay_share": replay_share(agent, config),
        "score": score,
        "human_normalized": normalized(options.env, score),
    }


VARIANTS: turns.Variants = {
    name: lambda options, name=name: measured(options, name)
    for name in ("dqn", "dqn_proportional", "dqn_rank_based")
}


def of_runs(options: Options, rows: list[turns.Row]) -> dict[str, Any]:
    """What the header says of the runs.

    Args:
      options: of this program.
      rows: of the runs.
    """
    del rows
    names = "env", "total_env_steps", "learning_starts", "replay_capacity"
    return {name: getattr(options, name) for name in names}


def main(argv: Sequence[str] | None = None) -> int:
    """Measures every variant, and writes the CSV.

    Args:
      argv: the words after the program's name; None reads the process's own.
    """
    return turns.run(
        PROG,
        Options,
        VARIANTS,
        argv,
        ratios={},
        more=of_runs,
    )


if __name__ == "__main__":
    sys.exit(main())
