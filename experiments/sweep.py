"""Trains an agent with many settings and seeds: a sweep is an array axis.

``python -m experiments.sweep dfps --env HalfCheetah-v4 --seeds 0:16`` trains 16 seeds;
``--grid learning_rate=1e-4,3e-4 clip_epsilon=0.1,0.2 --seeds 0:4`` every combination
of some options with 4 seeds each; ``--random 20 --ranges learning_rate=log:1e-5:1e-2
minibatch_size=64,128`` 20 drawn settings. Further options are those of
`experiments.train`, for every member.

Members that differ in seeds and numbers share one program and one set of environments.
Options that change the program (a network's size, a surrogate, the environments) make
groups, which run one after another or, with ``--jobs``, side by side. A member lives in
``sweeps/<name>/members/<setting>_s<seed>/`` as a single run would. Every evaluation of
all members goes to ``sweep.csv`` there, and what was found to ``report.md``. A sweep
that was ended goes on when it is started again, and what is finished stays.

``--engine ray`` makes each group a task of Ray's, on this machine or on those of
``--address``; ``--members 1`` makes each member one. There ``--asha`` stops settings
that others have left behind, and ``--search optuna`` proposes the next setting from how
the ones before it did: a setting's seeds are then one trial, judged by their mean.
"""

import concurrent.futures
import dataclasses
import functools
import importlib.util
import json
import math
import multiprocessing
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from experiments import command_line, report, results, sweep_members
from experiments.sweep_members import Group
from fps_jax import checks
from fps_jax.runtime.metrics import read_jsonl
from fps_jax.runtime.population import FAILURE, Member, Population
from fps_jax.runtime.runs import write_whole

PROG = "experiments.sweep"
DONE, STOPPED, ERROR = "done.json", "stopped.json", "error.txt"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Trains an agent with many settings and seeds.

    Attributes:
      seeds: of every setting: FIRST:END, or a list such as 0,1,2.
      grid: options and their values, NAME=A,B; every combination is a setting.
      random: how many settings to draw from the ranges.
      ranges: NAME=log:LOW:HIGH, NAME=LOW:HIGH or NAME=A,B,C.
      search: how settings come from the ranges: at random, or as Optuna proposes.
      search_seed: of the draws, or of Optuna.
      asha: stop settings early that are behind others (asynchronous halving).
      asha_grace: env steps before any is stopped; by default a run's / factor**2.
      asha_factor: one in so many goes on, for so many times the env steps.
      name: of the sweep's folder; by default the agent's and the task's.
      directory: folder of all sweeps.
      members: of one program, at most.
      jobs: groups at a time, if the engine is local.
      engine: local, or ray for several machines.
      address: of Ray's cluster; by default one is started here.
      cpus: of a task of Ray's.
      gpus: of a task of Ray's; parts of one may be shared.
      tpus: chips of a task of Ray's.
    """

    seeds: str = "0:4"
    grid: tuple[str, ...] = ()
    random: int = 0
    ranges: tuple[str, ...] = ()
    search: Literal["random", "optuna"] = "random"
    search_seed: int = 0
    asha: bool = False
    asha_grace: int | None = None
    asha_factor: float = 3.0
    name: str | None = None
    directory: str = "sweeps"
    members: int = 64
    jobs: int = 1
    engine: Literal["local", "ray"] = "local"
    address: str | None = None
    cpus: float = 1.0
    gpus: float = 0.0
    tpus: int = 0

    def __post_init__(self):
        """Refuses options that are out of range, or do not go together."""
        checks.in_range(self, 0, math.inf, "random", "search_seed", "gpus", "tpus")
        checks.in_range(self, 1, math.inf, "members", "jobs", "asha_grace")
        checks.in_range(self, 1, math.inf, "asha_factor", ends="()")
        checks.in_range(self, 0, math.inf, "cpus", ends="()")
        checks.one_of(self, ("local", "ray"), "engine")
        checks.one_of(self, ("random", "optuna"), "search")
        if bool(self.random) != bool(self.ranges):
            raise ValueError("random needs ranges, and ranges need random.")
        if self.random and self.grid:
            raise ValueError("grid and random cannot be had together.")
        for name in ("address", "gpus", "tpus", "asha"):
            if self.engine != "ray" and getattr(self, name):
                raise ValueError(f"{name} {getattr(self, name)} needs engine ray.")
        if self.search == "optuna" and not (self.random and self.engine == "ray"):
            raise ValueError("search optuna needs random, ranges and engine ray.")
        seeds = len(sweep_members.seeds(self.seeds))
        if self.is_tuned and self.members < seeds:
            raise ValueError(
                f"members {self.members} must be at least {seeds}: with asha or search "
                f"optuna the seeds of a setting are judged together."
            )

    @property
    def is_tuned(self) -> bool:
        """Whether Ray Tune judges settings while they run."""
        return self.asha or self.search == "optuna"

    def settings(self) -> list[sweep_members.Setting]:
        """What the members' options differ in; the extremes if Optuna is to propose."""
        if not self.random:
            return sweep_members.grid(self.grid)
        if self.search == "optuna":
            return sweep_members.ends(self.ranges)
        return sweep_members.draw(self.ranges, self.random, self.search_seed)


def read(argv: Sequence[str]) -> tuple[str, Options, list[str]]:
    """Reads the command line: the agent's name, then options of the sweep and of runs.

    Args:
      argv: the words after the program's name.

    Returns:
      The agent's name, the sweep's options, and the words that are the runs'.
    """
    words = list(argv)
    if not words or words[0].startswith("-"):
        if {"-h", "--help"} & set(words):
            command_line.parse(Options, ["--help"], prog=f"{PROG} AGENT")
        command_line.refuse("the first word must be an agent, such as ppo.", prog=PROG)
    options, more = command_line.parse(
        Options, words[1:], prog=f"{PROG} {words[0]}", return_unknown_args=True
    )
    for taken in ("--seed", "--directory", "--resume"):
        if any(word.partition("=")[0] == taken for word in more):
            command_line.refuse(f"{taken} is the sweep's to say.", prog=PROG)
    return words[0], options, more


def run_group(
    group: Group,
    *,
    is_shown: bool,
    on_evaluation: Callable[[list[dict[str, Any]], bool], None] | None = None,
) -> None:
    """Trains the members of a group; where they stand is in their folders.

    Args:
      group: the members, with a directory in their configuration.
      is_shown: whether progress and failures are shown.
      on_evaluation: see `Population`.
    """

    def tell(member: Member, reason: str) -> None:
        print(f"{PROG}: member {member.name} stops: {reason}", file=sys.stderr)

    shows = is_shown and group.config.show_progress
    config = dataclasses.replace(group.config, resume=True, show_progress=shows)
    watched = {"on_failure": tell, "on_evaluation": on_evaluation}
    for outcome in Population(group.members, config, **watched).train():
        if outcome.failure is None:
            about = {"env_steps": outcome.history.records[-1]["env_steps"]}
            write_whole(folder_of(group, outcome.member) / DONE, json.dumps(about))


def folder_of(group: Group, member: Member) -> Path:
    """The folder of a member.

    Args:
      group: with a directory in its configuration.
      member: one of it.
    """
    return Path(group.config.directory or "") / member.name


def is_finished(group: Group) -> bool:
    """Whether every member has come to its end, or was ended before.

    Args:
      group: the members.
    """
    ends = DONE, STOPPED, FAILURE
    folders = [folder_of(group, member) for member in group.members]
    return all(any((folder / end).exists() for end in ends) for folder in folders)


def note_error(group: Group, error: BaseException | str) -> None:
    """Leaves the traceback of what ended a group in its members' folders.

    Args:
      group: the members.
      error: what ended it, or what is told of it.
    """
    is_told = isinstance(error, str)
    text = error if is_told else "".join(traceback.format_exception(error))
    names = ", ".join(member.name for member in group.members)
    print(f"{PROG}: members {names} were ended by an error:\n{text}", file=sys.stderr)
    for member in group.members:
        folder = folder_of(group, member)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ERROR).write_text(text, encoding="utf-8")


def run_local(groups: Sequence[Group], jobs: int) -> None:
    """Trains groups on this machine; an error ends its group, not the others.

    Args:
      groups: those that are not finished.
      jobs: groups at a time; each has a process of its own if there are several.
    """
    if jobs == 1:
        for group in groups:
            try:
                run_group(group, is_shown=True)
            except Exception as error:
                note_error(group, error)
        return
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(
        jobs, mp_context=context, max_tasks_per_child=1
    ) as pool:
        runs = {pool.submit(run_group, g, is_shown=False): g for g in groups}
        try:
            for done in concurrent.futures.as_completed(runs):
                names = ", ".join(member.name for member in runs[done].members)
                if (error := done.exception()) is not None:
                    note_error(runs[done], error)
                else:
                    print(f"{PROG}: finished {names}", flush=True)
        except BaseException:  # Ctrl-C: those that have not begun must not.
            pool.shutdown(cancel_futures=True)
            raise


def rows_of(agent: str, groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Every evaluation of every member, from what is in their folders.

    Args:
      agent: its name.
      groups: all of them.
    """
    varied = dict.fromkeys(n for g in groups for s in g.settings for n in s)
    rows = []
    for group in groups:
        for member, setting in zip(group.members, group.settings):
            folder = folder_of(group, member)
            path = folder / "metrics.jsonl"
            about = {
                "member": member.name,
                "agent": agent,
                "env": group.config.env,
                "seed": member.seed,
                **{name: setting.get(name, "") for name in varied},
            }
            records = read_jsonl(path) if path.exists() else ()
            evaluated = [record for record in records if "eval/return" in record]
            rows += [
                {
                    **about,
                    "env_steps": record.get("env_steps", ""),
                    "return": _rounded(record, "eval/return"),
                    "return_std": _rounded(record, "eval/return_std"),
                    "status": status(folder),
                }
                # A member without any evaluation is told of, too.
                for record in evaluated or [{}]
            ]
    return sorted(rows, key=lambda row: row["member"])


def _rounded(record: Mapping[str, Any], name: str) -> Any:
    return round(record[name], 3) if name in record else ""


def status(folder: Path) -> str:
    """Where a member stands: done, failed, stopped or running.

    Args:
      folder: the member's.
    """
    if (folder / FAILURE).exists() or (folder / ERROR).exists():
        return "failed"
    if (folder / STOPPED).exists():
        return "stopped"
    return "done" if (folder / DONE).exists() else "running"


def open_folder(agent: str, options: Options, more: Sequence[str], env: str) -> Path:
    """The folder of a sweep, new or with the same sweep in it.

    Args:
      agent: its name.
      options: of the sweep.
      more: of the runs.
      env: the task, for a name.

    Raises:
      ValueError: if another sweep is there.
    """
    name = options.name or f"{agent}_{env.replace('/', '_')}"
    folder = Path(options.directory) / name
    same = "jobs", "engine", "address", "cpus", "gpus", "tpus"
    kept = {k: v for k, v in dataclasses.asdict(options).items() if k not in same}
    definition = json.dumps({"agent": agent, "sweep": kept, "runs": list(more)})
    path = folder / "sweep.json"
    if path.exists() and json.loads(path.read_text()) != json.loads(definition):
        raise ValueError(
            f"name {name!r}: {folder} holds a sweep with other options; another --name "
            f"keeps both."
        )
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(path, definition + "\n")
    return folder


def main(argv: Sequence[str] | None = None) -> int:
    """Trains all members, then writes the CSV and the report.

    Args:
      argv: the words after the program's name; None reads the process's own.

    Returns:
      The exit code: 0; 1 after an error; 130 after Ctrl-C, 143 after SIGTERM.
    """
    agent, options, more = read(sys.argv[1:] if argv is None else argv)
    parts = map(importlib.util.find_spec, ("ray", "optuna"))
    if options.engine == "ray" and None in parts:
        needed = 'engine ray: `pip install "fps_jax[sweep]"` brings what it needs.'
        command_line.refuse(needed, prog=PROG)
    try:
        settings, seeds = options.settings(), sweep_members.seeds(options.seeds)
    except ValueError as error:
        command_line.refuse(error, prog=PROG)
    make = functools.partial(
        sweep_members.groups,
        agent,
        seeds=seeds,
        more=more,
        largest=options.members,
        is_apart=options.is_tuned,
    )
    groups = make(settings)
    try:
        sweep_members.check_judged(groups, options)
        folder = open_folder(agent, options, more, groups[0].config.env)
    except ValueError as error:
        command_line.refuse(error, prog=PROG)
    home = str((folder / "members").absolute())  # Workers may be elsewhere.
    groups = [
        g._replace(config=dataclasses.replace(g.config, directory=home)) for g in groups
    ]
    proposals = None
    if options.search == "optuna":
        # Of the extremes nothing is kept but the options that all settings have.
        path, config = folder / "proposals.jsonl", groups[0].config
        proposals = sweep_members.Proposals(path, make, config)
        groups = proposals.groups
    code = 0
    try:
        run(groups, options, proposals)
    except (KeyboardInterrupt, SystemExit) as end:
        if isinstance(end, SystemExit) and end.code == 2:  # An engine refused.
            raise
        code = 130 if isinstance(end, KeyboardInterrupt) else 128 + signal.SIGTERM
        print(f"{PROG}: interrupted; the same command goes on.", file=sys.stderr)
    if groups:
        results.write_csv(folder / "sweep.csv", rows_of(agent, groups))
        print(report.write(folder))
    folders = [folder_of(group, m) for group in groups for m in group.members]
    return code or int(any((folder / ERROR).exists() for folder in folders))


def run(
    groups: Sequence[Group],
    options: Options,
    proposals: sweep_members.Proposals | None = None,
) -> None:
    """Trains the groups that are not finished.

    Args:
      groups: all of them.
      options: of the sweep.
      proposals: gets further groups, if Optuna is to propose settings.
    """
    waiting = [group for group in groups if not is_finished(group)]
    for folder in (folder_of(group, m) for group in waiting for m in group.members):
        (folder / ERROR).unlink(missing_ok=True)
    members = sum(len(group.members) for group in groups)
    print(
        f"{PROG}: {members} members in {len(groups)} programs, "
        f"{len(groups) - len(waiting)} of them finished",
        flush=True,
    )
    if options.is_tuned:
        from experiments import sweep_tune

        sweep_tune.run(groups, options, proposals)
    elif options.engine == "ray":
        from experiments import sweep_ray

        sweep_ray.run(waiting, options)
    else:
        run_local(waiting, options.jobs)


if __name__ == "__main__":
    sys.exit(main())
