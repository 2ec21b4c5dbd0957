"""Folders that can prove they are whole: a manifest with the hash of every file.

    digest = SHA-256 of the manifest's own JSON, without `digest`
    files  = {name: [size in bytes, SHA-256]} of all other files

The file system may have reordered or lost writes when a machine stops; `sync` before
the folder gets its final name, and `verify` before anything in it is used.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

_NAME = "manifest.json"


class DamagedError(Exception):
    """What is wrong with a folder, in words that follow "is damaged:"."""


def write_manifest(folder: Path, content: dict[str, Any]) -> None:
    """Writes ``manifest.json`` over all files that are in a folder.

    Args:
      folder: complete but for its manifest.
      content: what else to record, such as `json` can write; neither ``files`` nor
        ``digest``.
    """
    files = {
        str(file.relative_to(folder)): [file.stat().st_size, _sha256(file)]
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }
    manifest = content | {"files": files}
    manifest["digest"] = _digest(manifest)
    (folder / _NAME).write_text(json.dumps(manifest, indent=1) + "\n")


def read_manifest(folder: Path) -> dict[str, Any]:
    """Reads a manifest and checks it against itself, but no other file.

    Raises:
      DamagedError: if it is missing or is not what was written.
    """
    try:
        manifest = json.loads((folder / _NAME).read_text())
        digest = manifest.pop("digest")
    except OSError as error:
        raise DamagedError(f"{_NAME} cannot be read ({error.strerror})") from None
    except (ValueError, KeyError):
        raise DamagedError(f"{_NAME} is not whole") from None
    if digest != _digest(manifest):
        raise DamagedError(f"{_NAME} is not what was written")
    return manifest


def verify(folder: Path) -> dict[str, Any]:
    """Reads a manifest and checks every file of the folder against it.

    Raises:
      DamagedError: naming the first file that is missing or changed.
    """
    manifest = read_manifest(folder)
    for name, (size, sha256) in manifest["files"].items():
        file = folder / name
        if not file.is_file():
            raise DamagedError(f"{name} is missing")
        if file.stat().st_size != size:
            raise DamagedError(f"{name} has {file.stat().st_size} of {size} bytes")
        if _sha256(file) != sha256:
            raise DamagedError(f"{name} is not what was written")
    return manifest


def sync(path: Path) -> None:
    """Waits until a file, or the list of names in a folder, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Waits until a folder and all within are on the disk."""
    for entry in [*folder.rglob("*"), folder]:
        sync(entry)


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest).encode()).hexdigest()
