"""Judges the settings of a sweep while they run: early stopping and search by Ray Tune.

A trial is one setting: its seeds are a population, and what is judged is the mean
return of their evaluations. Each evaluation is told to ASHA (Li et al., 2020,
arXiv:1810.05934), which may end the trial, and to Optuna, which proposes the next
setting from what it was told. Members live in their folders as those of any sweep do.
When a sweep is started again, every trial first tells what its folders hold, so that
those that ended before are judged with, and only the others go on.
"""

import functools
import itertools
import json
import logging
import os
import pickle
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from ray import tune
from ray.tune.schedulers import ASHAScheduler
from ray.tune.search.optuna import OptunaSearch

from experiments import sweep, sweep_members, sweep_ray
from experiments.sweep_members import Group, Proposals, Range
from fps_jax.runtime.metrics import read_jsonl
from fps_jax.runtime.options import TrainConfig

STEPS, RETURN, GROUP = "env_steps", "return", "group"
JUDGED: dict[str, Any] = {"metric": RETURN, "mode": "max"}


class Ends(tune.Callback):
    """Notes how trials end, as it happens."""

    def on_trial_complete(self, iteration, trials, trial, **info):
        """Leaves a mark in the folders of members that were to go on.

        Args:
          iteration: of Tune's loop.
          trials: all of them.
          trial: that has ended.
          **info: what else Tune tells.
        """
        del iteration, trials, info
        group = pickle.loads(trial.config[GROUP])
        if not sweep.is_finished(group):
            about = json.dumps({STEPS: (trial.last_result or {}).get(STEPS, 0)})
            for member in group.members:
                folder = sweep.folder_of(group, member)
                if sweep.status(folder) == "running":
                    (folder / sweep.STOPPED).write_text(about)
        sweep_ray.tell_end(group)

    def on_trial_error(self, iteration, trials, trial, **info):
        """Reports an error, or a worker that was lost.

        Args:
          iteration: of Tune's loop.
          trials: all of them.
          trial: that has failed.
          **info: what else Tune tells.
        """
        del iteration, trials, info
        group = pickle.loads(trial.config[GROUP])
        if sweep.is_finished(group):  # All of its members have failed.
            sweep_ray.tell_end(group)
            return
        text = Path(trial.error_file or "").read_text(encoding="utf-8")
        sweep.note_error(group, sweep_ray.plain(text))


def run(groups: Sequence[Group], options: Any, proposals: Proposals | None) -> None:
    """Trains groups, each a setting, and ends those that are behind.

    Args:
      groups: all of them.
      options: of the sweep, `sweep.Options`.
      proposals: gets the settings of Optuna's; None if the groups are all there is.

    Raises:
      KeyboardInterrupt: after Ctrl-C; members go on from their last checkpoints.
    """
    count = options.random if proposals else len(groups)
    if len(groups) == count and all(map(sweep.is_finished, groups)):
        return
    # Tune need not keep what the members' folders hold, and Ctrl-C is the sweep's.
    os.environ["TUNE_DISABLE_AUTO_CALLBACK_LOGGERS"] = "1"
    os.environ["TUNE_DISABLE_SIGINT_HANDLER"] = "1"
    os.environ["TUNE_PRINT_ALL_TRIAL_ERRORS"] = "0"
    os.environ["RAY_AIR_NEW_OUTPUT"] = "0"
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)
    config = proposals.config if proposals else groups[0].config
    members = Path(config.directory or "")
    kept = Path(tempfile.mkdtemp(prefix="tune-", dir=members.parent))
    search = _search(options, proposals) if proposals else None
    known = [pickle.dumps(group) for group in groups]
    task = tune.PlacementGroupFactory([_bundle(options)])
    try:
        with sweep_ray.cluster(options):
            tune.Tuner(
                tune.with_resources(trial, task),
                param_space={} if proposals else {GROUP: tune.grid_search(known)},
                tune_config=tune.TuneConfig(
                    search_alg=search,
                    scheduler=_asha(options, config) if options.asha else None,
                    num_samples=count if proposals else 1,
                    reuse_actors=True,
                ),
                run_config=tune.RunConfig(
                    storage_path=str(kept.absolute()), callbacks=[Ends()], verbose=0
                ),
            ).fit()
    finally:
        shutil.rmtree(kept, ignore_errors=True)


def trial(config: Mapping[str, Any]) -> None:
    """One trial, in a worker: tells what was before, then trains and tells.

    Args:
      config: with a pickled group.
    """
    group: Group = pickle.loads(config[GROUP])
    for evaluation in evaluations(group):
        tune.report(evaluation)

    def tell(records: list[dict[str, Any]], is_last: bool) -> None:
        if not is_last:  # Nobody is to end a trial that is at its end.
            tune.report(mean(records))

    if not sweep.is_finished(group):
        sweep.run_group(group, is_shown=False, on_evaluation=tell)
        for last in evaluations(group)[-1:]:
            tune.report(last)
    folders = [sweep.folder_of(group, member) for member in group.members]
    if all(sweep.status(folder) == "failed" for folder in folders):
        raise RuntimeError("no member of the trial is left.")


def evaluations(group: Group) -> list[dict[str, float]]:
    """What a group's folders hold, as it was told.

    Args:
      group: the members.
    """
    paths = [sweep.folder_of(group, m) / "metrics.jsonl" for m in group.members]
    curves = [
        [record for record in read_jsonl(path) if "eval/return" in record]
        for path in paths
        if path.exists()
    ]
    together = itertools.zip_longest(*curves)
    return [mean([record for record in at if record]) for at in together]


def mean(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Means over seeds: those that live, if others have failed.

    Args:
      records: of one evaluation.
    """
    of = lambda name: float(np.mean([record[name] for record in records]))
    return {STEPS: of("env_steps"), RETURN: of("eval/return")}


def _search(options: Any, proposals: Proposals) -> OptunaSearch:
    """Optuna, which first has the settings that it proposed before."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    among = sweep_members.read_ranges(options.ranges)
    before = len(proposals.groups)

    # A sampler that starts again must not begin with the same draws.
    seeds = np.random.SeedSequence([options.search_seed, before])
    sampler = optuna.samplers.TPESampler(seed=int(seeds.generate_state(1)[0]))
    known = list(proposals.values)
    propose = functools.partial(_propose, proposals, among)
    return OptunaSearch(propose, points_to_evaluate=known, sampler=sampler, **JUDGED)


def _propose(
    proposals: Proposals, among: Sequence[Range], asked: optuna.Trial
) -> dict[str, Any]:
    """The next setting's group: a known one's, or that of a new one."""
    values = {one.name: _suggest(asked, one) for one in among}
    if asked.number == len(proposals.groups):
        proposals.add(values)
    return {GROUP: pickle.dumps(proposals.groups[asked.number])}


def _suggest(asked: optuna.Trial, one: Range) -> float | str:
    if one.choices:
        return asked.suggest_categorical(one.name, one.choices)
    return asked.suggest_float(one.name, one.low, one.high, log=one.is_log)


def _asha(options: Any, config: TrainConfig) -> ASHAScheduler:
    length, factor = config.total_env_steps, options.asha_factor
    return ASHAScheduler(
        time_attr=STEPS,
        max_t=length,
        grace_period=options.asha_grace or max(1, int(length / factor**2)),
        reduction_factor=factor,
        stop_last_trials=False,
        **JUDGED,
    )


def _bundle(options: Any) -> dict[str, float]:
    bundle = {"CPU": options.cpus, "GPU": options.gpus, "TPU": options.tpus}
    return {name: number for name, number in bundle.items() if number}
