"""The options of a training run, whichever agent it trains."""

import dataclasses
import math
from typing import Literal

from fps_jax import checks


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Options of a training run.

    Attributes:
      env: EnvPool task id.
      seed: root of every random number of the run, at least 0.
      total_env_steps: length of the run, in env steps of all environments; rounded
        up to whole updates, and counted with the rows that only reset.
      num_envs: environments of each actor.
      rollout_steps: env steps of each environment between two updates.
      num_actors: actor threads of each host.
      max_lag: versions that acting may be behind learning: 0 takes turns, 1 overlaps.
      env_threads: threads that step each actor's environments; by default one each,
        as far as cores go.
      max_episode_steps: time limit of an episode, in env steps; by default the task's.
      env_options: further options of the task, by EnvPool's names.
      learner_devices: devices of each host that learn; by default all.
      mapping: what maps the update over them.
      eval_every: env steps between evaluations; 0 evaluates only at the end.
      eval_episodes: full episodes of an evaluation, on as many environments; 0
        never evaluates.
      log_every: env steps between records; 0 records every update.
      checkpoint_every: env steps between checkpoints; 0 saves only at the end.
      keep_checkpoints: how many of the newest stay, beside the best.
      directory: folder of all runs; none writes nothing, which Python callers may ask.
      resume: go on with the latest run of this task, agent and seed, if there is one.
      resume_step: update of the checkpoint to go on with; by default the latest.
      tensorboard: write TensorBoard events.
      wandb_project: Weights & Biases project to send records to; by default none.
      show_progress: show a progress bar, or lines where there is no terminal.
      on_nonfinite: what a NaN or infinite observation or reward does: end the run, or
        mask the rows that touch it. Those of the learner always end it.
      stall_limit_s: longest wait for a rollout, or for a step of an evaluation, before
        the run fails, in seconds.
      distributed: start jax.distributed, from its environment's settings or these.
      coordinator_address: of the first host, as host:port.
      num_processes: how many hosts there are.
      process_id: which of them this is.
    """

    env: str = "HalfCheetah-v4"
    seed: int = 0
    total_env_steps: int = 1_000_000
    num_envs: int = 16
    rollout_steps: int = 128
    num_actors: int = 1
    max_lag: int = 1
    env_threads: int | None = None
    max_episode_steps: int | None = None
    env_options: dict[str, int | float | bool | str] = dataclasses.field(
        default_factory=dict
    )
    learner_devices: int | None = None
    mapping: Literal["pmap", "shard_map"] = "pmap"
    eval_every: int = 50_000
    eval_episodes: int = 10
    log_every: int = 0
    checkpoint_every: int = 100_000
    keep_checkpoints: int = 3
    directory: str | None = "runs"
    resume: bool = False
    resume_step: int | None = None
    tensorboard: bool = True
    wandb_project: str | None = None
    show_progress: bool = True
    on_nonfinite: Literal["stop", "mask"] = "stop"
    stall_limit_s: float = 300.0
    distributed: bool = False
    coordinator_address: str | None = None
    num_processes: int | None = None
    process_id: int | None = None

    def __post_init__(self):
        """Refuses options that are out of range."""
        at_least_0 = "seed", "max_lag", "eval_every", "eval_episodes", "log_every"
        checks.in_range(self, 0, math.inf, *at_least_0, "checkpoint_every")
        checks.in_range(self, 0, math.inf, "resume_step", "process_id")
        counts = "total_env_steps", "num_envs", "rollout_steps", "num_actors"
        checks.in_range(self, 1, math.inf, *counts, "keep_checkpoints")
        limits = "env_threads", "max_episode_steps", "learner_devices", "num_processes"
        checks.in_range(self, 1, math.inf, *limits)
        checks.in_range(self, 0, math.inf, "stall_limit_s", ends="()")
        checks.one_of(self, ("pmap", "shard_map"), "mapping")
        checks.one_of(self, ("stop", "mask"), "on_nonfinite")
        if self.resume_step is not None and not self.resume:
            raise ValueError(f"resume_step {self.resume_step} needs resume.")
        if self.resume and self.directory is None:
            raise ValueError("resume needs a directory.")
        named = (self.coordinator_address, self.num_processes, self.process_id)
        if any(x is not None for x in named) and not self.distributed:
            raise ValueError(
                "coordinator_address, num_processes and process_id need distributed."
            )
