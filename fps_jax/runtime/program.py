"""An agent compiled for a machine: the functions that a run calls, each once traced."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from fps_jax.runtime import parallel
from fps_jax.runtime.options import TrainConfig
from fps_jax.runtime.packing import pack, unpack
from fps_jax.types import Agent, AgentConfig, AgentState, EnvSpec, Trajectory


class Program(NamedTuple):
    """The functions of one agent on one set of learner devices.

    Attributes:
      mesh: the learner's devices, of all hosts.
      init: ``init(key) -> AgentState`` on all of them.
      learn: ``learn(state, batch) -> (state, metrics)``; the state is donated.
      actor_params: ``actor_params(learner, key) -> params`` from one device's view of
        the learner; `packing.Packed`, and sharing no memory with it.
      act: ``act(params, observation, key, count) -> (action, behaviour)`` with packed
        params or plain ones; the key is folded with the count, and a NaN or an
        infinity is seen as 0.
      act_greedily: the same without exploration.
    """

    mesh: Mesh
    init: Callable[[jax.Array], AgentState]
    learn: parallel.Update
    actor_params: Callable[[Any, jax.Array | None], Any]
    act: Callable[..., Any]
    act_greedily: Callable[..., Any]


def build(
    agent_config: AgentConfig, spec: EnvSpec, config: TrainConfig, mesh: Mesh
) -> Program:
    """Builds an agent for a run, compiles it and checks that it fits.

    Args:
      agent_config: the agent's options.
      spec: the environment.
      config: the run's options.
      mesh: the learner's devices, of all hosts.

    Raises:
      ValueError: if the devices can't share the environments, or the agent refuses the
        environment or the batch that the run would give it.
    """
    agent = make_agent(agent_config, spec, config, devices=mesh.local_mesh.size)
    program = compile_agent(agent, mesh, mapping=config.mapping)
    num_envs = config.num_actors * config.num_envs
    check(program, agent, spec, rollout_steps=config.rollout_steps, num_envs=num_envs)
    return program


def make_agent(
    agent_config: AgentConfig, spec: EnvSpec, config: TrainConfig, *, devices: int
) -> Agent:
    """Makes the agent that each of a host's learner devices runs.

    Args:
      agent_config: the agent's options.
      spec: the environment.
      config: the run's options.
      devices: of a host, that learn.

    Raises:
      ValueError: if the devices can't share the environments, or the agent refuses the
        environment or its options.
    """
    num_envs = config.num_actors * config.num_envs
    if num_envs % devices:
        raise ValueError(
            f"num_actors {config.num_actors} x num_envs {config.num_envs} is not a "
            f"multiple of the {devices} learner_devices of a host."
        )
    return agent_config.make(
        spec,
        total_env_steps=config.total_env_steps,
        num_envs=num_envs // devices,
        rollout_steps=config.rollout_steps,
    )


def compile_agent(agent: Agent, mesh: Mesh, *, mapping: parallel.Backend) -> Program:
    """Wraps an agent's functions for the edge, where alone programs are compiled.

    Args:
      agent: four pure functions.
      mesh: the learner's devices, of all hosts.
      mapping: what maps the update over them.
    """

    def act(params, observation, key, count, *, explore: bool):
        if jnp.issubdtype(observation.dtype, jnp.floating):
            # A NaN would come back as a NaN action; the runtime checks what it stores.
            observation = jnp.where(jnp.isfinite(observation), observation, 0)
        key = jax.random.fold_in(key, count)
        return agent.act(unpack(params), observation, key, explore=explore)

    def actor_params(learner, key):
        # jit hands back an argument that it returns unchanged, and that argument's
        # memory is about to be donated.
        return jax.tree.map(jnp.copy, pack(agent.actor_params(learner, key)))

    return Program(
        mesh=mesh,
        init=functools.partial(parallel.init_state, agent, mesh=mesh),
        learn=parallel.parallelize(agent, mesh, backend=mapping),
        actor_params=jax.jit(actor_params),
        act=jax.jit(functools.partial(act, explore=True)),
        act_greedily=jax.jit(functools.partial(act, explore=False)),
    )


def check(
    program: Program,
    agent: Agent,
    spec: EnvSpec,
    *,
    rollout_steps: int,
    num_envs: int,
) -> None:
    """Traces one round without running it, to refuse shapes that do not fit.

    Args:
      program: the compiled agent.
      agent: the same agent.
      spec: the environment.
      rollout_steps: length T of a segment.
      num_envs: environments of this host.

    Raises:
      ValueError: if the agent refuses the batch that the run would give it.
    """
    key = jax.eval_shape(lambda: jax.random.key(0))
    state = jax.eval_shape(agent.init, key)
    params = jax.eval_shape(program.actor_params, state.learner, key)
    typed: Any = jax.ShapeDtypeStruct
    observation = typed((num_envs, *spec.observation_shape), spec.observation_dtype)
    count = typed((), jnp.uint32)
    row = jax.eval_shape(program.act, params, observation, key, count)
    mine = num_envs // program.mesh.local_mesh.size
    steps = lambda x, length: typed((length, mine, *x.shape[1:]), x.dtype)
    flag, real = typed((num_envs,), jnp.bool_), typed((num_envs,), jnp.float32)
    rows = Trajectory(
        observation=observation,
        action=row[0],
        reward=real,
        terminated=flag,
        truncated=flag,
        is_valid=flag,
        behaviour=row[1],
        policy_version=typed((num_envs,), jnp.int32),
    )
    batch = jax.tree.map(lambda x: steps(x, rollout_steps), rows)
    batch = batch._replace(observation=steps(observation, rollout_steps + 1))
    update = functools.partial(agent.update, axis_name=parallel.AXIS)
    mapped = jax.vmap(
        update,
        axis_name=parallel.AXIS,
        axis_size=program.mesh.size,
        in_axes=(None, None),
    )
    jax.eval_shape(mapped, state, batch)
