"""Where a run lives on disk, and what it ran with.

    <root>/<env>/<agent>/<time>_s<seed>/     one run; `_2`, `_3` if that name is taken

Environment ids and agents are percent-quoted, ``ALE/Pong-v5`` as ``ALE%2FPong-v5``, so
that each is one folder and no two share one.
"""

import datetime
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import urllib.parse
from pathlib import Path
from typing import Any

import jax

_PACKAGES = ("fps_jax", "jax", "jaxlib", "flax", "optax", "envpool", "numpy")
PathLike = str | os.PathLike[str]


def run_directory(
    root: PathLike, env_id: str, agent: str, seed: int, time: datetime.datetime
) -> Path:
    """Creates the folder of a new run; of several processes only one may.

    Args:
      root: the folder of all runs.
      env_id: the environment.
      agent: the agent's name.
      seed: the run's seed.
      time: when it starts; the name holds it to the second.

    Returns:
      The folder, new and empty.

    Raises:
      ValueError: if `env_id` or `agent` cannot name a folder.
    """
    parent = _parent(root, env_id, agent)
    parent.mkdir(parents=True, exist_ok=True)
    name = f"{time:%Y%m%d-%H%M%S}_s{seed}"
    count = 1
    while True:
        directory = parent / (name if count == 1 else f"{name}_{count}")
        try:
            directory.mkdir()
        except FileExistsError:
            count += 1
        else:
            return directory


def find_latest_run(root: PathLike, env_id: str, agent: str, seed: int) -> Path | None:
    """Finds the run that started last, for ``--resume``; None if there is none."""
    pattern = re.compile(rf"(\d{{8}}-\d{{6}})_s{seed}(?:_(\d+))?")
    parent = _parent(root, env_id, agent)
    entries = parent.iterdir() if parent.is_dir() else ()
    matches = [m for entry in entries if (m := pattern.fullmatch(entry.name))]
    latest = max(matches, key=lambda m: (m[1], int(m[2] or 1)), default=None)
    return parent / latest[0] if latest else None


def provenance() -> dict[str, Any]:
    """Returns what numbers depend on beside their configuration.

    Versions (None if not installed), the kind and count of devices, and the commit of
    this package if it lies in a git repository, with ``-dirty`` if files changed since.
    """
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "versions": versions,
        "device_kind": jax.devices()[0].device_kind,
        "device_count": jax.device_count(),
        "git_commit": _git_commit(Path(__file__).parent),
    }


def write_config(path: PathLike, config: dict[str, Any]) -> None:
    """Writes a configuration and its `provenance` as JSON, whole or not at all.

    Infinity and NaN are written by their names, as Python reads them back.

    Args:
      path: the file.
      config: what `json` can write.
    """
    text = json.dumps({"config": config, **provenance()}, indent=2)
    write_whole(Path(path), text + "\n")


def write_whole(path: Path, text: str) -> None:
    """Writes a text, whole or not at all.

    Args:
      path: the file.
      text: what it holds.
    """
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _parent(root: PathLike, env_id: str, agent: str) -> Path:
    for option, name in (("env_id", env_id), ("agent", agent)):
        if name in ("", ".", ".."):
            raise ValueError(f"{option} {name!r} must be able to name a folder.")
    quoted = (urllib.parse.quote(name, safe="") for name in (env_id, agent))
    return Path(root).joinpath(*quoted)


def _git_commit(folder: Path) -> str | None:
    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", folder, *arguments],
            capture_output=True,
            check=True,
            text=True,
            timeout=10,
        ).stdout.strip()

    try:
        # Of an installed package the repository around it would be a stranger's.
        git("ls-files", "--error-unmatch", ".")
        return git("describe", "--always", "--abbrev=40", "--exclude=*", "--dirty")
    except (OSError, subprocess.SubprocessError):
        return None
