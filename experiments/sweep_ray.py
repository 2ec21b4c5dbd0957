"""Runs the groups of a sweep as tasks of Ray.

A local Ray is started and ended with the sweep unless there is an address of one that
runs on several machines (``ray start --head`` on the first, ``ray start --address`` on
the others). These must all see this code, its Python and the sweep's folder under the
same paths: a shared file system. Nothing else is sent between them.
"""

import contextlib
import json
import logging
import os
import re
import socket
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, cast

import ray
from ray.exceptions import RayError

from experiments import command_line, sweep
from experiments.sweep_members import Group
from fps_jax.runtime.population import FAILURE

PATIENCE_S = 60.0  # For tasks that save their last update when they are ended.
STORE_BYTES = 100 * 2**20  # Of a local Ray's shared memory; members use their folders.


def run(groups: Sequence[Group], options: Any) -> None:
    """Trains each group in a task; an error ends its group, not the others.

    Args:
      groups: those that are not finished.
      options: of the sweep, `sweep.Options`.

    Raises:
      KeyboardInterrupt: after Ctrl-C, once the tasks have saved checkpoints.
    """
    if not groups:
        return
    with cluster(options):
        task: Any = ray.remote(cast(Any, sweep.run_group)).options(
            max_retries=0, runtime_env=environment(options), **resources(options)
        )
        groups_of = {task.remote(group, is_shown=False): group for group in groups}
        waiting = list(groups_of)
        try:
            while waiting:
                (done,), waiting = ray.wait(waiting)
                group = groups_of[done]
                try:
                    ray.get(done)
                except RayError as error:
                    text = plain(f"{type(error).__name__}: {error}\n")
                    sweep.note_error(group, text)
                else:
                    tell_end(group)
        except BaseException:
            for ref in waiting:
                ray.cancel(ref)
            ray.wait(waiting, num_returns=len(waiting), timeout=PATIENCE_S)
            raise


@contextlib.contextmanager
def cluster(options: Any) -> Iterator[None]:
    """Joins the cluster of an address, or starts one here; it ends with the context.

    Args:
      options: of the sweep. What cannot be had ends the program as a refused option.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Without a GPU asked for, none is seen, as is to become Ray's default.
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "1"
    is_local = options.address in (None, "local")
    more = {"include_dashboard": False, "object_store_memory": STORE_BYTES}
    try:
        _reach(options.address)
        with warnings.catch_warnings():
            # A local Ray's processes are forked, and each starts its program at once.
            warnings.filterwarnings("ignore", r"os\.fork\(\)", RuntimeWarning)
            ray.init(
                address=options.address or "local",
                log_to_driver=False,
                logging_level=logging.ERROR,
                **(more if is_local else {}),
            )
    except (OSError, RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        command_line.refuse(f"address {options.address}: {reason}", prog=sweep.PROG)
    try:
        _check_room(options, is_local)
        yield
    finally:
        ray.shutdown()


def resources(options: Any) -> dict[str, Any]:
    """What one task takes, by the names of `ray.remote`.

    Args:
      options: of the sweep.
    """
    more = {"resources": {"TPU": options.tpus}} if options.tpus else {}
    return {"num_cpus": options.cpus, "num_gpus": options.gpus, **more}


def environment(options: Any) -> dict[str, Any]:
    """The environment of a task: of a part of a GPU, JAX takes that part.

    Args:
      options: of the sweep.
    """
    if not 0 < options.gpus < 1:
        return {}
    share = f"{0.9 * options.gpus:.3f}"
    return {"env_vars": {"XLA_PYTHON_CLIENT_MEM_FRACTION": share}}


def plain(text: str) -> str:
    """A text of Ray's without its colours.

    Args:
      text: such as a traceback.
    """
    return re.sub(r"\x1b\[\d+m", "", text)


def tell_end(group: Group) -> None:
    """Says that a group has ended, and which of its members failed and why.

    Args:
      group: the members.
    """
    statuses = {}
    for member in group.members:
        folder = sweep.folder_of(group, member)
        statuses.setdefault(sweep.status(folder), []).append(member.name)
        if (folder / FAILURE).exists():
            reason = json.loads((folder / FAILURE).read_text())["reason"]
            told = f"member {member.name} stopped: {reason}"
            print(f"{sweep.PROG}: {told}", file=sys.stderr)
    for status, names in statuses.items():
        print(f"{sweep.PROG}: {status} {', '.join(names)}", flush=True)


def _reach(address: str | None) -> None:
    """Refuses an address where nobody answers, for which Ray would wait for minutes."""
    host, colon, port = (address or "").rpartition(":")
    if colon and "/" not in host:
        socket.create_connection((host, int(port)), timeout=10.0).close()


def _check_room(options: Any, is_local: bool) -> None:
    """Refuses what no node has: its tasks would wait for ever."""
    asked = {"CPU": options.cpus, "GPU": options.gpus, "TPU": options.tpus}
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if any(all(node.get(k, 0) >= v for k, v in asked.items()) for node in nodes):
        return
    told = ", ".join(f"{number:g} {name}" for name, number in asked.items() if number)
    where = "this machine has" if is_local else "a node of the cluster has"
    most = {name: max(node.get(name, 0) for node in nodes) for name in asked}
    has = ", ".join(f"{number:g} {name}" for name, number in most.items())
    command_line.refuse(
        f"a task needs {told}, and {where} at most {has}.", prog=sweep.PROG
    )
