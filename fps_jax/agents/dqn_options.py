"""The options of DQN, and those of them that are numbers as traced leaves."""

import dataclasses
import math
import re
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from fps_jax import checks
from fps_jax.models.networks import ACTIVATIONS

REPLAYS = ("uniform", "proportional", "rank_based", "greedy")
TABLE_3 = {"proportional": (0.6, 0.4), "rank_based": (0.7, 0.5)}
"""Exponents alpha and beta of Schaul et al. (2016), table 3."""

Number = Float[Array, ""]


class Hyper(NamedTuple):
    """The numeric hyper-parameters: traced leaves, so none of them recompiles.

    Each is described in `DQNOptions`; one whose option is None is None.
    """

    total_env_steps: Number
    learning_rate: Number
    final_learning_rate_fraction: Number
    gamma: Number
    reward_clip: Number | None
    td_error_clip: Number | None
    max_grad_norm: Number
    final_priority_exponent: Number | None
    importance_exponent: Number
    final_importance_exponent: Number
    priority_epsilon: Number
    predecessor_coef: Number
    epsilon: Number
    final_epsilon: Number
    temperature: Number
    final_temperature: Number
    exploration_steps: Number | None
    eval_epsilon: Number
    feedback_decay: Number
    feedback_floor: Number


@dataclasses.dataclass(frozen=True, kw_only=True)
class DQNOptions:
    """Options of DQN.

    Attributes:
      name: of this variant, and of its folder of runs.
      double: choose the action that is bootstrapped from by the online network (Double
        DQN), else by the target network.
      dueling: value the state and its actions apart, see `networks.DuelingHead`.
      learning_rate: step size with uniform replay.
      prioritized_learning_rate_fraction: step size of any other replay over that; a
        quarter in the paper, since large errors are replayed more often.
      final_learning_rate_fraction: step size at the end over that at the start, in
        [0, 1]; it moves linearly in env steps. 1 keeps it constant.
      gamma: discount of one step, in [0, 1].
      n_step: steps of a transition.
      batch_size: transitions of a gradient step, over all devices, which divide it.
      replay_period: K, env steps for each gradient step, over all devices; divides the
        num_envs x rollout_steps x actors rows of an update.
      target_period: env steps between copies of the network into the target network; a
        multiple of the replay period.
      learning_starts: env steps before the first gradient step, over all devices.
      reward_clip: largest reward and, negated, smallest; by default none.
      td_error_clip: largest TD error in a gradient, above 0; by default none.
      clips_priority: a priority is made of the clipped error too.
      replay: how transitions are drawn.
      replay_capacity: env steps that each device remembers.
      priority_exponent: alpha, at least 0; by default that of table 3.
      final_priority_exponent: alpha at the end of the run, which it moves to linearly,
        in O(N) an update; by default it stays.
      importance_exponent: beta at the start, in [0, 1]; by default that of table 3.
      final_importance_exponent: beta at the end, in [0, 1].
      priority_epsilon: added to the size of a TD error, at least 0.
      predecessor_coef: share of an error that is added to the priority of the step
        before (appendix A), at least 0.
      sort_period: updates between sorts of the rank-based replay; by default N.
      exploration: epsilon_greedy, or boltzmann: likelier the better.
      epsilon: chance of any action at the start, in [0, 1].
      final_epsilon: what it moves to linearly.
      temperature: of boltzmann at the start, above 0, in units of return.
      final_temperature: what it moves to linearly, above 0.
      exploration_steps: env steps until then; by default the whole run.
      eval_epsilon: chance of any action in evaluations.
      exploration_levels: instead of the schedule, epsilons or temperatures of which
        each environment has one for each segment: drawn in proportion to how often a
        transition that was made with it has been replayed (section 6). By default none.
      feedback_decay: share of those counts that every update leaves, in [0, 1].
      feedback_floor: share of the draws that are of any level, in (0, 1].
      normalize_observations: standardise vector observations by their running moments.
      optimizer: how gradients become steps.
      adam_epsilon: see `gradient.gradient_transform`.
      max_grad_norm: longest gradient, in its global Euclidean norm, above 0.
      hidden_sizes: width of each hidden layer, for vectors; frames have Nature's.
      activation: of the hidden layers: tanh, relu, elu or swish.
    """

    name: str = "dqn"
    double: bool = True
    dueling: bool = False
    learning_rate: float = 1e-3
    prioritized_learning_rate_fraction: float = 0.25
    final_learning_rate_fraction: float = 1.0
    gamma: float = 0.99
    n_step: int = 1
    batch_size: int = 64
    replay_period: int = 4
    target_period: int = 1_000
    learning_starts: int = 1_000
    reward_clip: float | None = None
    td_error_clip: float | None = 1.0
    clips_priority: bool = False
    replay: Literal["uniform", "proportional", "rank_based", "greedy"] = "uniform"
    replay_capacity: int = 50_000
    priority_exponent: float | None = None
    final_priority_exponent: float | None = None
    importance_exponent: float | None = None
    final_importance_exponent: float = 1.0
    priority_epsilon: float = 1e-3
    predecessor_coef: float = 0.0
    sort_period: int | None = None
    exploration: Literal["epsilon_greedy", "boltzmann"] = "epsilon_greedy"
    epsilon: float = 1.0
    final_epsilon: float = 0.05
    temperature: float = 1.0
    final_temperature: float = 0.05
    exploration_steps: int | None = 10_000
    eval_epsilon: float = 0.0
    exploration_levels: tuple[float, ...] = ()
    feedback_decay: float = 0.99
    feedback_floor: float = 0.2
    normalize_observations: bool = True
    optimizer: Literal["adam", "rmsprop", "sgd"] = "adam"
    adam_epsilon: float = 1e-8
    max_grad_norm: float = 10.0
    hidden_sizes: tuple[int, ...] = (128, 128)
    activation: str = "relu"

    def __post_init__(self):
        """Refuses options that are out of range, or that contradict each other."""
        _check_ranges(self)
        _check_together(self)

    @property
    def exponents(self) -> tuple[float, float]:
        """The exponents alpha and beta as a run starts with them."""
        alpha, beta = TABLE_3.get(self.replay, (0.0, 0.0))
        alpha = alpha if self.priority_exponent is None else self.priority_exponent
        beta = beta if self.importance_exponent is None else self.importance_exponent
        return alpha, beta

    @property
    def is_prioritized(self) -> bool:
        """Whether there are priorities."""
        return self.replay != "uniform"

    def hyper(self, total_env_steps: int) -> Hyper:
        """The numbers, as a run starts with them.

        Args:
          total_env_steps: the planned length of the run.
        """
        fraction = self.prioritized_learning_rate_fraction
        values = dataclasses.asdict(self) | {
            "total_env_steps": total_env_steps,
            "learning_rate": self.learning_rate
            * (fraction if self.is_prioritized else 1.0),
            "importance_exponent": self.exponents[1],
        }
        leaf: Any = lambda x: None if x is None else jnp.asarray(x, jnp.float32)
        return Hyper(*(leaf(values[name]) for name in Hyper._fields))


def _check_ranges(options: DQNOptions) -> None:
    check = lambda *names, low=0, high=math.inf, ends="[]": checks.in_range(
        options, low, high, *names, ends=ends
    )
    check("learning_rate", "prioritized_learning_rate_fraction", "learning_starts")
    check("gamma", "epsilon", "final_epsilon", "eval_epsilon", high=1)
    check("final_learning_rate_fraction", high=1)
    check("importance_exponent", "final_importance_exponent", high=1)
    check("priority_exponent", "priority_epsilon", "predecessor_coef")
    check("final_priority_exponent", ends="()")
    check("feedback_decay", high=1)
    check("feedback_floor", high=1, ends="(]")
    check("reward_clip", "td_error_clip", "temperature", "final_temperature", ends="()")
    check("max_grad_norm", "adam_epsilon", ends="()")
    check("n_step", "batch_size", "replay_period", "target_period", low=1)
    check("replay_capacity", "sort_period", "exploration_steps", low=1)
    checks.one_of(options, REPLAYS, "replay")
    checks.one_of(options, ("epsilon_greedy", "boltzmann"), "exploration")
    checks.one_of(options, ("adam", "rmsprop", "sgd"), "optimizer")
    checks.one_of(options, ACTIVATIONS, "activation")
    is_greedy = options.exploration == "epsilon_greedy"
    for level in options.exploration_levels:
        bounds = (0, 1) if is_greedy else (0, math.inf)
        ends = "[]" if is_greedy else "()"
        checks.number("exploration_levels", level, *bounds, ends=ends)
    if not (options.hidden_sizes and all(size >= 1 for size in options.hidden_sizes)):
        raise ValueError(f"hidden_sizes {options.hidden_sizes} must be at least 1.")
    if not re.fullmatch(r"[\w.-]+", options.name):
        raise ValueError(f"name {options.name!r} must be one that a folder can have.")


def _check_together(options: DQNOptions) -> None:
    if options.target_period % options.replay_period:
        raise ValueError(
            f"target_period {options.target_period} must be a multiple of "
            f"replay_period {options.replay_period}."
        )
    if options.learning_starts > options.replay_capacity:
        raise ValueError(
            f"learning_starts {options.learning_starts} must be at most "
            f"replay_capacity {options.replay_capacity}."
        )
    if options.clips_priority and options.td_error_clip is None:
        raise ValueError(
            f"clips_priority {options.clips_priority} needs a td_error_clip."
        )
    needs = {
        "priority_exponent": ("proportional", "rank_based"),
        "final_priority_exponent": ("proportional", "rank_based"),
        "importance_exponent": ("proportional", "rank_based"),
        "sort_period": ("rank_based",),
    }
    for name, replays in needs.items():
        value = getattr(options, name)
        if value is not None and options.replay not in replays:
            raise ValueError(
                f"{name} {value} needs replay {' or '.join(replays)}, not "
                f"{options.replay}."
            )
    if options.predecessor_coef and not options.is_prioritized:
        raise ValueError(
            f"predecessor_coef {options.predecessor_coef} needs a replay with "
            f"priorities, not {options.replay}."
        )
