"""The options of PPO, and those of them that are numbers as traced leaves."""

import dataclasses
import math
import re
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from fps_jax import checks
from fps_jax.models.networks import ACTIVATIONS
from fps_jax.objectives.clip_ppo import DISTANCES

NORMALIZERS = ("minibatch", "batch", "percentile", "running", "none")


class Hyper(NamedTuple):
    """The numeric hyper-parameters: traced leaves, so none of them recompiles.

    Each is described in `PPOOptions`; one whose option is None is None.
    """

    learning_rate: Float[Array, ""]
    final_learning_rate_fraction: Float[Array, ""]
    total_env_steps: Float[Array, ""]
    gamma: Float[Array, ""]
    lambda_: Float[Array, ""]
    clip_epsilon: Float[Array, ""]
    clip_epsilon_high: Float[Array, ""] | None
    final_clip_epsilon_fraction: Float[Array, ""]
    dual_clip: Float[Array, ""] | None
    ewma_decay: Float[Array, ""] | None
    max_importance_ratio: Float[Array, ""] | None
    entropy_coef: Float[Array, ""]
    value_coef: Float[Array, ""]
    clip_value: Float[Array, ""] | None
    advantage_norm_rate: Float[Array, ""]
    max_grad_norm: Float[Array, ""]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PPOOptions:
    """Options of PPO.

    Attributes:
      name: of this variant, and of its folder of runs.
      learning_rate: step size at the start.
      final_learning_rate_fraction: step size at the end over that at the start, in
        [0, 1]; it moves linearly in env steps. 1 keeps it constant.
      gamma: discount of one step, in [0, 1].
      lambda_: decay of the advantage's trace, in [0, 1].
      clip_epsilon: half-width of the interval of the ratio, in (0, 1).
      clip_epsilon_high: its width above 1 alone, at least 0, so that rare actions may
        grow (Clip-Higher); by default the same.
      final_clip_epsilon_fraction: widths at the end over those at the start, in [0, 1].
      dual_clip: largest ratio of an action that was worse than expected, above 1; by
        default there is none.
      ewma_decay: stay close to a moving average of the parameters over gradient steps,
        with this decay, in [0, 1) (PPO-EWMA); by default to the policy that acted.
      ewma_debias: let the parameters that the average starts from weigh no more than
        later ones.
      max_importance_ratio: largest ratio to the policy that acted, above 0; by default
        there is none.
      entropy_coef: weight of the entropy bonus, at least 0.
      value_coef: weight of the value loss, at least 0.
      value_loss: distance of values from their targets; l2 has no half.
      clip_value: how far a value may move from what it was before the update, in
        deviations of the return if scale_returns is set; by default any way.
      num_epochs: passes over each batch.
      minibatch_size: rows of one gradient step, over all devices; divides the batch
        of num_envs x rollout_steps x actors rows. None takes the whole batch.
      normalize_advantage: standardise each minibatch or each batch; or only divide by
        the range of returns without their tails (percentile) or by their deviation
        (running), both over all batches; or nothing.
      advantage_norm_rate: share of a batch in the running percentiles, in (0, 1].
      advantage_norm_debias: leave out that they start from 0.
      normalize_observations: standardise vector observations by their running moments.
      scale_returns: let the value network predict returns over their running
        deviation, so that its loss does not depend on the unit of reward.
      recompute_advantages: recompute advantages and targets before each epoch.
      optimizer: how gradients become steps.
      adam_epsilon: added to Adam's root mean square.
      max_grad_norm: longest gradient, in its global Euclidean norm, above 0.
      hidden_sizes: width of each hidden layer, of the policy and of the value.
      activation: of the hidden layers: tanh, relu, elu or swish.
      init_log_std: log standard deviation of a Gaussian policy at the start; actions
        range over [-1, 1].
      shares_torso: one torso reads vectors for policy and value; frames always share.
      separates_losses: only the policy trains what is shared.
    """

    name: str = "ppo"
    learning_rate: float = 3e-4
    final_learning_rate_fraction: float = 0.0
    gamma: float = 0.99
    lambda_: float = 0.95
    clip_epsilon: float = 0.2
    clip_epsilon_high: float | None = None
    final_clip_epsilon_fraction: float = 1.0
    dual_clip: float | None = None
    ewma_decay: float | None = None
    ewma_debias: bool = True
    max_importance_ratio: float | None = None
    entropy_coef: float = 0.0
    value_coef: float = 0.25
    value_loss: Literal["l2", "l1", "smooth_l1"] = "l2"
    clip_value: float | None = None
    num_epochs: int = 10
    minibatch_size: int | None = 64
    normalize_advantage: Literal[
        "minibatch", "batch", "percentile", "running", "none"
    ] = "minibatch"
    advantage_norm_rate: float = 0.01
    advantage_norm_debias: bool = True
    normalize_observations: bool = True
    scale_returns: bool = True
    recompute_advantages: bool = False
    optimizer: Literal["adam", "sgd"] = "adam"
    adam_epsilon: float = 1e-5
    max_grad_norm: float = 0.5
    hidden_sizes: tuple[int, ...] = (64, 64)
    activation: str = "tanh"
    init_log_std: float = -0.5
    shares_torso: bool = False
    separates_losses: bool = False

    def __post_init__(self):
        """Refuses options that are out of range."""
        fractions = "gamma", "lambda_", "final_learning_rate_fraction"
        checks.in_range(self, 0, 1, *fractions, "final_clip_epsilon_fraction")
        checks.in_range(self, 0, 1, "clip_epsilon", ends="()")
        checks.in_range(self, 0, 1, "ewma_decay", ends="[)")
        checks.in_range(self, 0, 1, "advantage_norm_rate", ends="(]")
        checks.in_range(self, 1, math.inf, "dual_clip", ends="()")
        coefficients = "learning_rate", "entropy_coef", "value_coef"
        widths = "clip_epsilon_high", "clip_value"
        checks.in_range(self, 0, math.inf, *coefficients, *widths)
        scales = "max_grad_norm", "adam_epsilon", "max_importance_ratio"
        checks.in_range(self, 0, math.inf, *scales, ends="()")
        checks.in_range(self, -20, 2, "init_log_std")
        checks.in_range(self, 1, math.inf, "num_epochs", "minibatch_size")
        checks.one_of(self, ACTIVATIONS, "activation")
        checks.one_of(self, NORMALIZERS, "normalize_advantage")
        checks.one_of(self, DISTANCES, "value_loss")
        checks.one_of(self, ("adam", "sgd"), "optimizer")
        if not re.fullmatch(r"[\w.-]+", self.name):
            raise ValueError(f"name {self.name!r} must be one that a folder can have.")
        if not all(size >= 1 for size in self.hidden_sizes):
            raise ValueError(f"hidden_sizes {self.hidden_sizes} must be at least 1.")

    def hyper(self, total_env_steps: int) -> Hyper:
        """The numbers, as a run starts with them.

        Args:
          total_env_steps: the planned length of the run.
        """
        values = dataclasses.asdict(self) | {"total_env_steps": total_env_steps}
        leaf: Any = lambda x: None if x is None else jnp.asarray(x, jnp.float32)
        return Hyper(*(leaf(values[name]) for name in Hyper._fields))
