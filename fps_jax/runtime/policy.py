"""The greedy policy of a run, from one of its checkpoints; the run stays as it is."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from fps_jax.runtime import parallel
from fps_jax.runtime.checkpoints import Checkpoints
from fps_jax.runtime.options import TrainConfig
from fps_jax.runtime.program import compile_agent, make_agent
from fps_jax.types import AgentConfig, AgentState, EnvSpec


class Policy(NamedTuple):
    """What acts as a run's evaluations do.

    Attributes:
      act: ``act(params, observation, key, count)``, compiled, as `evaluate` takes it.
      params: what it acts with.
      env_steps: that the run had made when they were saved.
    """

    act: Callable[..., Any]
    params: Any
    env_steps: int


def restore_policy(
    agent_config: AgentConfig,
    config: TrainConfig,
    spec: EnvSpec,
    checkpoints: Checkpoints,
    step: int,
) -> Policy:
    """Restores the policy of a checkpoint, on one device, whatever devices learned.

    Only the learner's half of the state is read: a replay may be far larger.

    Args:
      agent_config: the agent's options, as the run had them.
      config: the run's.
      spec: the environment.
      checkpoints: the run's.
      step: which of them.

    Raises:
      CheckpointError: if it is missing, damaged, or of another agent.
      ValueError: if an option is impossible.
    """
    agent = make_agent(agent_config, spec, config, devices=1)
    mesh = parallel.learner_mesh(jax.local_devices()[:1])
    program = compile_agent(agent, mesh, mapping=config.mapping)
    state = jax.eval_shape(agent.init, jax.eval_shape(lambda: jax.random.key(0)))
    target = {"agent": AgentState(state.learner)}
    saved, meta = checkpoints.restore(step, target, is_part=True)
    params = program.actor_params(saved["agent"].learner, None)
    return Policy(program.act_greedily, params, meta["env_steps"])
