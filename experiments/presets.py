"""Settings that were tuned for a task, and variants of an agent.

A task's row overrides the agent's defaults (first) and the run's (second), a variant
overrides the row, and what is given on the command line overrides both. ``--preset
auto`` takes the row of the task's own name, if there is one, or ``Atari`` for one of
the 57 games; ``--preset none`` takes none.
"""

import csv
import functools
from pathlib import Path
from typing import Any

Preset = tuple[dict[str, Any], dict[str, Any]]

_CLASSIC = {"num_envs": 16, "rollout_steps": 64}
_FEW = {"num_envs": 8, "rollout_steps": 8}
_VECTORS = {
    "replay_period": 2,
    "target_period": 256,
    "n_step": 3,
    "final_learning_rate_fraction": 0.0,
    # The paper's quarter is for larger gradients; Adam divides by their size.
    "prioritized_learning_rate_fraction": 1.0,
}
_LOCOMOTION: Preset = ({}, {"num_envs": 16, "rollout_steps": 128})

PRESETS: dict[str, dict[str, Preset]] = {
    "ppo": {
        "CartPole-v1": ({"entropy_coef": 0.0}, _CLASSIC),
        "Acrobot-v1": ({"entropy_coef": 0.01}, _CLASSIC),
        "Pendulum-v1": (
            {"gamma": 0.9, "learning_rate": 1e-3, "init_log_std": 0.0},
            _CLASSIC,
        ),
        "HalfCheetah-v4": (
            {"gamma": 0.98, "lambda_": 0.92, "init_log_std": -1.0},
            {"num_envs": 64, "rollout_steps": 32},
        ),
        "Hopper-v4": _LOCOMOTION,
        "Walker2d-v4": _LOCOMOTION,
    },
    "dqn": {
        "CartPole-v1": (_VECTORS, _FEW),
        "Acrobot-v1": (_VECTORS, _FEW),
        "LunarLander-v3": (_VECTORS | {"replay_capacity": 100_000}, _FEW),
        # Mnih et al. (2015), with the changes that van Hasselt et al. (2016) tuned for
        # Double DQN; a gradient there is of a sum over 32, so the epsilon differs.
        # EnvPool's own defaults are theirs: stacks of 4, 4 frames a step, up to 30
        # no-ops, whole episodes.
        "Atari": (
            {
                "learning_rate": 2.5e-4,
                "batch_size": 32,
                "target_period": 30_000,
                "learning_starts": 50_000,
                "reward_clip": 1.0,
                "replay_capacity": 1_000_000,
                "final_epsilon": 0.01,
                "exploration_steps": 1_000_000,
                "eval_epsilon": 0.001,
                "optimizer": "rmsprop",
                "adam_epsilon": 0.01 / 32**2,
            },
            {
                "num_envs": 8,
                "rollout_steps": 4,
                "total_env_steps": 50_000_000,
                "eval_every": 1_000_000,
                "log_every": 10_000,
                "checkpoint_every": 5_000_000,
            },
        ),
    },
}

_FAST: dict[str, Any] = {
    # The policy: PPO's loss at a fixed deviation.
    "lambda_": 0.95,
    "trust_region": "clip",
    "kl_stop": None,
    "num_epochs": 4,
    "minibatch_size": 128,
    "init_log_std": -1.61,
    "learns_log_std": False,
    "layer_norm": False,
    # Then steps along the critic, fewer as the run goes on.
    "control_variate": "zero",
    "dpg_phase": "separate",
    "dpg_states": "replay",
    "final_dpg_learning_rate_fraction": 0.1,
    "dpg_decay_steps": 300_000,
    "num_critics": 2,
    "critic_hidden_sizes": (64, 64),
    "critic_n_step": 5,
    "recent_fraction": 0.5,
    "value_data": "queue",
    "value_target": "precomputed",
    "value_learning_rate": 3e-4,
    "policy_target_rate": 1.0,
    "noise": "none",
    # What is evaluated: at a fixed deviation the mean wanders from update to update.
    "average_decay": 0.98,
}

_SHORT: dict[str, Any] = {"num_envs": 16, "rollout_steps": 32}
_NO_CRITIC: dict[str, Any] = {
    "critic_utd": 0.0,
    "dpg_coef": 0.0,
    "control_variate": "zero",
    "replay_capacity": 0,
    "value_data": "queue",
    "noise": "none",
}

VARIANTS: dict[str, tuple[str, Preset]] = {
    # The fusion gradient at what measurement found best; see the README.
    "dfps_fast": ("dfps", (_FAST, _SHORT | {"max_lag": 0})),
    # Equation 14 with both of its terms in one unit.
    "dfps_unbiased": (
        "dfps",
        ({"dpg_scale": "inv_sigma", "control_variate": "conservative"}, _SHORT),
    ),
    # Gu et al. (2017), arXiv:1611.02247: no lag, no noise on parameters.
    "qprop": ("dfps", ({"noise": "none"}, _SHORT | {"max_lag": 0})),
    # Gu et al. (2017), arXiv:1706.00387: both gradients, without a control variate.
    "ipg": (
        "dfps",
        (
            {
                "ipg_nu": 0.2,
                "dpg_coef": 0.2,
                "control_variate": "zero",
                "dpg_states": "replay",
                "noise": "none",
            },
            _SHORT | {"max_lag": 0},
        ),
    ),
    # Espeholt et al. (2018), arXiv:1802.01561: V-trace alone.
    "impala": (
        "dfps",
        (
            _NO_CRITIC
            | {
                "surrogate": "R2",
                "trust_region": "none",
                "statistics": "none",
                "num_epochs": 1,
                "value_epochs": 1,
                "entropy_coef": 0.001,
            },
            _SHORT | {"max_lag": 4},
        ),
    ),
    # Heess et al. (2017), arXiv:1707.02286, with its penalty on the divergence.
    "dppo_penalty": ("dfps", (_NO_CRITIC, _SHORT | {"max_lag": 0})),
    # Schaul et al. (2016), arXiv:1511.05952, with the exponents of its table 3.
    "dqn_proportional": ("dqn", ({"replay": "proportional"}, {})),
    "dqn_rank_based": ("dqn", ({"replay": "rank_based"}, {})),
    # Wang et al. (2016), arXiv:1511.06581.
    "dqn_dueling": ("dqn", ({"dueling": True, "replay": "proportional"}, {})),
    # Yu et al. (2025), arXiv:2503.14476: the upper side is wider.
    "ppo_clip_higher": ("ppo", ({"clip_epsilon_high": 0.28}, {})),
    # Ye et al. (2020), arXiv:1912.09729.
    "ppo_dual_clip": ("ppo", ({"dual_clip": 3.0}, {})),
    # Hilton et al. (2021), arXiv:2110.00641: the average's centre of mass is as old as
    # an update is long, 8 gradient steps there and 320 here.
    "ppo_ewma": ("ppo", ({"ewma_decay": 320 / 321, "max_importance_ratio": 100.0}, {})),
    # Heess et al. (2017), arXiv:1707.02286: several actors share whole-batch steps.
    "dppo": (
        "ppo",
        (
            {
                "minibatch_size": None,
                "num_epochs": 20,
                "learning_rate": 1e-3,
                "normalize_advantage": "batch",
            },
            {"num_actors": 2},
        ),
    ),
}
"""By name: the agent that it is a variant of, and what differs."""


@functools.cache
def atari_scores() -> dict[str, tuple[float, float]]:
    """Scores of random play and of a human, by task, of 57 Atari games."""
    path = Path(__file__).parent / "atari_scores.csv"
    lines = [x for x in path.read_text().splitlines() if not x.startswith("#")]
    rows = csv.DictReader(lines)
    return {row["env"]: (float(row["random"]), float(row["human"])) for row in rows}


def base(agent: str) -> str:
    """The agent that a variant is one of; an agent is one of itself.

    Args:
      agent: name of an agent or of a variant.
    """
    return VARIANTS[agent][0] if agent in VARIANTS else agent


def find(agent: str, env: str, name: str) -> Preset:
    """Looks the settings of an agent, or of a variant, for a task up.

    Args:
      agent: its name.
      env: the task id.
      name: "auto", "none", or the task whose row is wanted.

    Raises:
      ValueError: if a task is named that has no row.
    """
    rows = {"none": ({}, {})} | PRESETS.get(base(agent), {})
    if name == "auto":
        own = "Atari" if env in atari_scores() and env not in rows else env
        name = own if own in rows else "none"
    if name not in rows:
        raise ValueError(f"preset {name!r} is not one of {['auto', *rows]}.")
    for_agent, for_run = rows[name]
    if agent not in VARIANTS:
        return for_agent, for_run
    _, (of_agent, of_run) = VARIANTS[agent]
    return for_agent | of_agent | {"name": agent}, for_run | of_run
