"""Settings that were tuned for a task: one row each, for any agent.

A row overrides the agent's defaults (first) and the run's (second); what is given on
the command line overrides the row. ``--preset auto`` takes the row of the task's own
name, if there is one, ``--preset none`` takes none.
"""

from typing import Any

Preset = tuple[dict[str, Any], dict[str, Any]]

_CLASSIC = {"num_envs": 16, "rollout_steps": 64}
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
}


def find(agent: str, env: str, name: str) -> Preset:
    """Looks a row up.

    Args:
      agent: the agent's name.
      env: the task id.
      name: "auto", "none", or the task whose row is wanted.

    Raises:
      ValueError: if a task is named that has no row.
    """
    rows = PRESETS.get(agent, {})
    if name == "none":
        return {}, {}
    if name == "auto":
        return rows.get(env, ({}, {}))
    if name not in rows:
        raise ValueError(
            f"preset {name!r} is not one of {['auto', 'none', *rows]} for {agent}."
        )
    return rows[name]
