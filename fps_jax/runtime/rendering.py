"""Pictures of EnvPool's environments, by EnvPool's own renderers.

Classic control, Box2D and Atari are drawn without any library. MuJoCo is drawn through
EGL on Linux: with the GPU's driver, or with Mesa on the CPU.
"""

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from envpool.registration import registry
from jaxtyping import UInt8

_MAPS = Path("/proc/self/maps")


class RenderError(RuntimeError):
    """A task that EnvPool cannot draw, or not on this machine."""


def drawing(env_id: str, size: tuple[int, int] | None = None) -> dict[str, Any]:
    """Returns the `env_options` that let `make_env`'s environments be drawn.

    Args:
      env_id: an id of `envpool.list_all_envs()`.
      size: width and height in pixels; None is the task's own. Only MuJoCo's tasks take
        it, of which the camera sees more or less: others would be drawn cut off.
    """
    options: dict[str, Any] = {"render_mode": "rgb_array"}
    import_path, *_ = registry.specs.get(env_id, ("",))
    if size is not None and import_path.startswith("envpool.mujoco"):
        options |= {"render_width": size[0], "render_height": size[1]}
    return options


def draw(pool: Any, env_id: str, envs: Sequence[int]) -> UInt8[np.ndarray, "N H W 3"]:
    """Draws some environments of a pool; always from the same thread.

    Args:
      pool: EnvPool's, made with the options of `drawing`.
      env_id: its task.
      envs: which of them, at least one.

    Raises:
      RenderError: if EnvPool has no renderer for the task, or if EGL fails; the message
        then names the packages that bring it.
    """
    try:
        return pool.render(env_ids=list(envs))
    except RuntimeError as error:
        if "EGL" in str(error):
            reason = (
                f"EnvPool draws {env_id} through EGL, and has {error}; on Debian or "
                "Ubuntu, apt-get install libegl1 libgl1-mesa-dri brings it"
            )
        else:
            reason = f"EnvPool cannot draw {env_id}: {error}"
        raise RenderError(f"{reason}.") from error


def share_egl() -> None:
    """Lets MuJoCo see the libEGL that EnvPool has loaded, once a pool is made.

    MuJoCo looks for EGL among the symbols of the whole process, and ends the process
    if it finds none. EnvPool 1.2.5 brings a libEGL that only its own modules see.
    """
    if not _MAPS.exists():
        return
    files = {line.split(maxsplit=5)[-1] for line in _MAPS.read_text().splitlines()}
    for file in files:
        if Path(file).name.startswith("libEGL-"):
            ctypes.CDLL(file, mode=ctypes.RTLD_GLOBAL)
