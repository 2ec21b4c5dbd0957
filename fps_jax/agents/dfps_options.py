"""The options of DFPS, and those of them that are numbers as traced leaves."""

import dataclasses
import math
import re
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from fps_jax import checks
from fps_jax.models.networks import ACTIVATIONS
from fps_jax.objectives.fusion import (
    CONTROL_VARIATES,
    CRITIC_SCALES,
    STATISTICS,
    SURROGATES,
)

Number = Float[Array, ""]


class Hyper(NamedTuple):
    """The numeric hyper-parameters: traced leaves, so none of them recompiles.

    Each is described in `DFPSOptions`; one whose option is None is None.
    """

    total_env_steps: Number
    gamma: Number
    lambda_: Number
    rho_bar: Number
    c_bar: Number
    rho_bar_gradient: Number | None
    learning_rate: Number
    final_learning_rate_fraction: Number
    ipg_nu: Number
    final_ipg_nu: Number | None
    nu_rate: Number
    entropy_coef: Number
    clip_epsilon: Number
    kl_target: Number
    kl_hinge_coef: Number
    kl_stop: Number | None
    dpg_coef: Number
    dpg_learning_rate: Number
    final_dpg_learning_rate_fraction: Number
    dpg_decay_steps: Number | None
    critic_learning_rate: Number
    target_rate: Number
    policy_target_rate: Number
    target_noise: Number
    target_noise_clip: Number
    importance_exponent: Number
    value_learning_rate: Number
    noise_distance: Number
    action_noise: Number
    average_decay: Number | None
    max_grad_norm: Number


@dataclasses.dataclass(frozen=True, kw_only=True)
class DFPSOptions:
    """Options of DFPS; the defaults are the paper's equations as they are printed.

    Attributes:
      name: of this variant, and of its folder of runs.
      gamma: discount of one step, in [0, 1].
      lambda_: decay of the returns' trace, in [0, 1].
      rho_bar: largest weight of an error, above 0, at least c_bar.
      c_bar: largest ratio in a trace, at least 0.
      rho_bar_gradient: largest ratio of the policy's gradient; by default rho_bar.
      n_step: rows of the returns' window; by default to the end of a segment.
      trace: vtrace, equation 13; or none, equation 12.
      corrects_lag: whether ratios correct for the policy that acted; else all are 1.
      surrogate: of the score function's term: R1, R2 or R3.
      control_variate: how much of the critic is subtracted from the advantage: ones,
        conservative, aggressive, optimal or zero. The critic's term is multiplied by
        the same, but for zero.
      statistics: what centres and scales the signal: residual, advantage, center_only
        or none.
      ipg_nu: the score function's term is multiplied by 1 less this, in [0, 1].
      final_ipg_nu: ipg_nu at the end of the run, linearly; by default the same.
      adapts_nu: let ipg_nu be a moving average of the control variate's slope.
      nu_rate: share of an update in that average, in (0, 1].
      entropy_coef: weight of the entropy bonus, at least 0.
      trust_region: kl_hinge penalises the divergence, clip clips the ratio (R3 alone),
        none does nothing.
      kl_target: divergence that is wanted of an update, above 0, in nats.
      kl_coef: weight of the divergence at the start, above 0; it steers itself.
      kl_hinge_coef: weight of what exceeds twice the target, squared, at least 0.
      kl_stop: end an update's epochs at this multiple of the target; None never does.
      kl_reference: divergence from the old policy, or from the behaviour that acted.
      clip_epsilon: half-width of the interval of the ratio, in (0, 1).
      learning_rate: of the policy at the start.
      final_learning_rate_fraction: its end, and that of the value's, over the start,
        in [0, 1]; linear in env steps.
      num_epochs: passes over each batch.
      minibatch_size: rows of one step, over all devices; None takes the whole batch.
      policy_data: segments of the queue, of the replay, or as many of both (mixed).
      dpg_coef: weight of the critic's term, at least 0.
      dpg_scale: what divides it: none, inv_sigma or inv_control_variate_std.
      dpg_states: its states: those of the batch, or of the replay.
      dpg_phase: in a joint loss, or in separate steps after it, with an Adam of their
        own.
      dpg_utd: separate steps for each env step, at least 0.
      dpg_batch_size: states of a separate step, on each device.
      dpg_learning_rate: of the separate steps.
      final_dpg_learning_rate_fraction: its end over its start, in [0, 1].
      dpg_decay_steps: env steps until that end; by default the run's length.
      critic_utd: critic steps for each env step, at least 0; 0 has no critic.
      critic_batch_size: items of a critic step, on each device.
      critic_learning_rate: of the critic's Adam.
      critic_n_step: rewards before the critic's bootstrap, at least 1.
      critic_trace: correct the later ones of them by truncated ratios (vtrace), or not.
      critic_action: the action that the critic learns from: clipped, as the
        environment did it; or raw.
      num_critics: targets take the least of so many; the first one is the critic.
      target_action: the target policy's mean; that, smoothed by noise; or expected,
        over samples.
      target_noise: deviation of that noise, at least 0.
      target_noise_clip: its largest magnitude, at least 0.
      target_samples: samples of an expected value.
      target_rate: tau, share of the critic in its target, each critic step, in [0, 1].
      policy_target_rate: share of the policy in its target, each update, in [0, 1].
      learning_starts: env steps on each device before the critic learns, and is used.
      replay_capacity: env steps kept on each device; 0 keeps none.
      recent_fraction: share of a critic's batch that comes from recent_steps.
      recent_steps: the newest env steps on each device, which that share, and the
        states of the critic's term, come from.
      priority_exponent: alpha of prioritized replay, by the critic's errors; by default
        the replay is uniform.
      importance_exponent: beta of its importance weights, in [0, 1].
      value_learning_rate: of the value's Adam.
      value_data: segments of the replay, with targets recomputed at every step; or of
        the queue.
      value_target: recomputed for the new policy and value, or precomputed (queue).
      value_epochs: passes over as much data as the queue has.
      value_first: fit the value before the policy, as an ablation.
      noise: on parameters, on actions, or none.
      noise_scale: deviation of parameter noise at the start, at least 0.
      adapts_noise: let it seek noise_distance.
      noise_distance: how far parameter noise should move actions, at least 0.
      noise_groups: groups of an actor's environments with noise of their own.
      shares_noise: all actors and groups have the same noise.
      action_noise: deviation of noise on actions, at least 0.
      average_decay: evaluate a moving average of the policy's parameters over updates,
        in which each weighs so much of the next, in [0, 1); by default the policy.
      normalize_observations: standardise observations by their running moments.
      scale_returns: divide rewards by the running deviation of returns.
      max_grad_norm: longest gradient, in its global Euclidean norm, above 0.
      adam_epsilon: added to Adam's root mean square.
      hidden_sizes: width of each hidden layer, of the policy and of the value.
      activation: of the hidden layers: tanh, relu, elu or swish.
      layer_norm: normalise the policy's hidden layers, so that noise fits them all.
      critic_hidden_sizes: width of each of the critic's, which are normalised ReLUs.
      init_log_std: log standard deviation at the start; actions range over [-1, 1].
      learns_log_std: whether it moves from there.
      bounds_mean: keep the policy's mean in that range by a tanh.
      squash: what the environment does of what the policy draws: clip, or tanh.
    """

    name: str = "dfps"
    gamma: float = 0.99
    lambda_: float = 1.0
    rho_bar: float = 1.0
    c_bar: float = 1.0
    rho_bar_gradient: float | None = None
    n_step: int | None = None
    trace: Literal["vtrace", "none"] = "vtrace"
    corrects_lag: bool = True
    surrogate: Literal["R1", "R2", "R3"] = "R3"
    control_variate: Literal[
        "ones", "conservative", "aggressive", "optimal", "zero"
    ] = "ones"
    statistics: Literal["residual", "advantage", "center_only", "none"] = "residual"
    ipg_nu: float = 0.0
    final_ipg_nu: float | None = None
    adapts_nu: bool = False
    nu_rate: float = 0.01
    entropy_coef: float = 0.0
    trust_region: Literal["kl_hinge", "clip", "none"] = "kl_hinge"
    kl_target: float = 0.003
    kl_coef: float = 1.0
    kl_hinge_coef: float = 50.0
    kl_stop: float | None = 4.0
    kl_reference: Literal["old", "behaviour"] = "old"
    clip_epsilon: float = 0.2
    learning_rate: float = 3e-4
    final_learning_rate_fraction: float = 1.0
    num_epochs: int = 20
    minibatch_size: int | None = None
    policy_data: Literal["queue", "replay", "mixed"] = "queue"
    dpg_coef: float = 1.0
    dpg_scale: Literal["none", "inv_sigma", "inv_control_variate_std"] = "none"
    dpg_states: Literal["batch", "replay"] = "batch"
    dpg_phase: Literal["joint", "separate"] = "joint"
    dpg_utd: float = 0.25
    dpg_batch_size: int = 128
    dpg_learning_rate: float = 3e-4
    final_dpg_learning_rate_fraction: float = 1.0
    dpg_decay_steps: int | None = None
    critic_utd: float = 0.25
    critic_batch_size: int = 128
    critic_learning_rate: float = 1e-3
    critic_n_step: int = 1
    critic_trace: Literal["none", "vtrace"] = "none"
    critic_action: Literal["clipped", "raw"] = "clipped"
    num_critics: int = 1
    target_action: Literal["mean", "smoothed", "expected"] = "mean"
    target_noise: float = 0.2
    target_noise_clip: float = 0.5
    target_samples: int = 4
    target_rate: float = 0.005
    policy_target_rate: float = 0.1
    learning_starts: int = 1_000
    replay_capacity: int = 1_000_000
    recent_fraction: float = 0.0
    recent_steps: int = 50_000
    priority_exponent: float | None = None
    importance_exponent: float = 0.4
    value_learning_rate: float = 1e-3
    value_data: Literal["replay", "queue"] = "replay"
    value_target: Literal["recomputed", "precomputed"] = "recomputed"
    value_epochs: int = 4
    value_first: bool = False
    noise: Literal["parameters", "actions", "none"] = "parameters"
    noise_scale: float = 0.05
    adapts_noise: bool = True
    noise_distance: float = 0.1
    noise_groups: int = 1
    shares_noise: bool = False
    action_noise: float = 0.1
    average_decay: float | None = None
    normalize_observations: bool = True
    scale_returns: bool = True
    max_grad_norm: float = 0.5
    adam_epsilon: float = 1e-5
    hidden_sizes: tuple[int, ...] = (64, 64)
    activation: str = "tanh"
    layer_norm: bool = True
    critic_hidden_sizes: tuple[int, ...] = (128, 128)
    init_log_std: float = -0.5
    learns_log_std: bool = True
    bounds_mean: bool = True
    squash: Literal["clip", "tanh"] = "clip"

    def __post_init__(self):
        """Refuses options that are out of range, or that contradict each other."""
        _check_ranges(self)
        _check_names(self)
        _check_together(self)

    @property
    def has_critic(self) -> bool:
        """Whether there is a critic."""
        return self.critic_utd > 0

    @property
    def has_replay(self) -> bool:
        """Whether anything is kept."""
        return self.replay_capacity > 0

    def hyper(self, total_env_steps: int) -> Hyper:
        """The numbers, as a run starts with them.

        Args:
          total_env_steps: the planned length of the run.
        """
        values = dataclasses.asdict(self) | {"total_env_steps": total_env_steps}
        leaf: Any = lambda x: None if x is None else jnp.asarray(x, jnp.float32)
        return Hyper(*(leaf(values[name]) for name in Hyper._fields))


def _check_ranges(options: DFPSOptions) -> None:
    check = lambda *names, low=0, high=math.inf, ends="[]": checks.in_range(
        options, low, high, *names, ends=ends
    )
    check("gamma", "lambda_", "ipg_nu", "final_ipg_nu", high=1)
    check("final_learning_rate_fraction", "final_dpg_learning_rate_fraction", high=1)
    check("target_rate", "policy_target_rate", "recent_fraction", high=1)
    check("importance_exponent", high=1)
    check("nu_rate", high=1, ends="(]")
    check("clip_epsilon", high=1, ends="()")
    check("rho_bar", "rho_bar_gradient", ends="(]")
    check("c_bar", "entropy_coef", "kl_hinge_coef", "dpg_coef", "priority_exponent")
    check("learning_rate", "dpg_learning_rate", "critic_learning_rate")
    check("value_learning_rate", "dpg_utd", "critic_utd", "target_noise")
    check("target_noise_clip", "learning_starts", "replay_capacity", "noise_scale")
    check("noise_distance", "action_noise")
    check("kl_target", "kl_coef", "kl_stop", ends="()")
    check("max_grad_norm", "adam_epsilon", ends="()")
    check("n_step", "num_epochs", "minibatch_size", "dpg_batch_size", low=1)
    check("dpg_decay_steps", "critic_batch_size", "critic_n_step", low=1)
    check("num_critics", "target_samples", "recent_steps", low=1)
    check("value_epochs", "noise_groups", low=1)
    check("average_decay", high=1, ends="[)")
    check("init_log_std", low=-20, high=2)
    for name in ("hidden_sizes", "critic_hidden_sizes"):
        sizes = getattr(options, name)
        if not all(size >= 1 for size in sizes):
            raise ValueError(f"{name} {sizes} must be at least 1.")
    if not re.fullmatch(r"[\w.-]+", options.name):
        raise ValueError(f"name {options.name!r} must be one that a folder can have.")


CHOICES = {
    "trace": ("vtrace", "none"),
    "surrogate": SURROGATES,
    "control_variate": CONTROL_VARIATES,
    "statistics": STATISTICS,
    "trust_region": ("kl_hinge", "clip", "none"),
    "kl_reference": ("old", "behaviour"),
    "policy_data": ("queue", "replay", "mixed"),
    "dpg_scale": CRITIC_SCALES,
    "dpg_states": ("batch", "replay"),
    "dpg_phase": ("joint", "separate"),
    "critic_trace": ("none", "vtrace"),
    "critic_action": ("clipped", "raw"),
    "target_action": ("mean", "smoothed", "expected"),
    "value_data": ("replay", "queue"),
    "value_target": ("recomputed", "precomputed"),
    "noise": ("parameters", "actions", "none"),
    "activation": ACTIVATIONS,
    "squash": ("clip", "tanh"),
}
"""What each option with names may be."""


def _check_names(options: DFPSOptions) -> None:
    for name, choices in CHOICES.items():
        checks.one_of(options, choices, name)


def _check_together(options: DFPSOptions) -> None:
    if options.trace == "vtrace" and options.rho_bar < options.c_bar:
        raise ValueError(
            f"rho_bar {options.rho_bar} must be at least c_bar {options.c_bar}: "
            "otherwise a trace carries errors further than they weigh, and the values "
            "may diverge."
        )
    if options.trust_region == "clip" and options.surrogate != "R3":
        raise ValueError(
            f"trust_region clip needs surrogate R3, not {options.surrogate}."
        )
    if options.recent_fraction == 1.0 and options.priority_exponent is not None:
        raise ValueError(
            f"recent_fraction {options.recent_fraction} must be below 1 with a "
            f"priority_exponent ({options.priority_exponent}): nothing would be drawn "
            "by priority."
        )
    if not options.has_replay:
        wants = {
            "critic_utd": options.has_critic,
            "value_data": options.value_data == "replay",
            "policy_data": options.policy_data != "queue",
        }
        for name, is_wanted in wants.items():
            if is_wanted:
                raise ValueError(
                    f"{name} {getattr(options, name)} needs a replay: "
                    f"replay_capacity {options.replay_capacity} must be above 0."
                )
    if options.has_critic:
        return
    if options.dpg_coef or options.control_variate != "zero":
        raise ValueError(
            f"dpg_coef {options.dpg_coef} must be 0 and control_variate "
            f"{options.control_variate} be zero without a critic "
            f"(critic_utd {options.critic_utd})."
        )
