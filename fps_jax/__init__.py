"""Fusion policy search, prioritized replay and PPO as pure functions in JAX."""

from fps_jax.agents.dfps import DFPSConfig
from fps_jax.agents.dqn import DQNConfig
from fps_jax.agents.ppo import PPOConfig
from fps_jax.runtime.journal import History
from fps_jax.runtime.options import TrainConfig
from fps_jax.runtime.population import Member, train_population
from fps_jax.runtime.training import train
from fps_jax.types import (
    Agent,
    AgentState,
    Continuous,
    Discrete,
    EnvSpec,
    Step,
    Trajectory,
    Transition,
)

__all__ = [
    "Agent",
    "AgentState",
    "Continuous",
    "DFPSConfig",
    "DQNConfig",
    "Discrete",
    "EnvSpec",
    "History",
    "Member",
    "PPOConfig",
    "Step",
    "TrainConfig",
    "Trajectory",
    "Transition",
    "train",
    "train_population",
]
