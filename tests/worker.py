"""`experiments.train` on scripted environments and agents that go wrong as told.

``python tests/worker.py FAULTS AGENT [options]``, where FAULTS is a JSON object of

    env         keywords of `FaultyEnv`, for the environments that train
    eval_env    the same, for those that evaluate

either of which may be absent. The process says ``FAULT`` and the time on stdout as it
goes wrong.

The agent ``tiny`` can be told on its command line; see `TinyConfig`.
"""

import json
import os
import signal
import sys
import time

import jax
from scripted_env import ScriptedEnv
from tiny_agent import TinyConfig, announce

from experiments import train


class FaultyEnv(ScriptedEnv):
    """A `ScriptedEnv` that may also hang or raise a signal.

    Args:
      num_envs: E.
      signal_at_step: this call of `step`, counted from 0, raises `signal_name` in the
        process, as a user or a scheduler would.
      signal_name: such as ``"SIGTERM"``.
      hang_at_step: this call of `step` never returns.
      **scripted: what else `ScriptedEnv` takes.
    """

    def __init__(
        self,
        num_envs: int,
        *,
        signal_at_step: int | None = None,
        signal_name: str = "SIGTERM",
        hang_at_step: int | None = None,
        **scripted,
    ):
        super().__init__(num_envs, **scripted)
        self._signal_at_step = signal_at_step
        self._signal = signal.Signals[signal_name]
        self._hang_at_step = hang_at_step

    def step(self, action):
        step = self._state.num_calls
        if step in (self._fail_at_step, self._nan_at_step):
            announce()
        if step == self._signal_at_step:
            announce()
            os.kill(os.getpid(), self._signal)
        if step == self._hang_at_step:
            announce()
            time.sleep(3600)
        return super().step(action)


def main() -> int:
    """Trains; environments are numbered over all hosts, those that evaluate first."""
    faults = json.loads(sys.argv[1])
    made = []

    def make_env(env_id, *, num_envs, **_):
        del env_id
        kind = "env" if made else "eval_env"
        # Not before here: a host must join the others before it asks who it is.
        first = 100 * (len(made) + jax.process_index())
        made.append(kind)
        return FaultyEnv(num_envs, first=first, **faults.get(kind, {}))

    train.AGENTS["tiny"] = TinyConfig
    return train.main(sys.argv[2:], make_env=make_env)


if __name__ == "__main__":
    sys.exit(main())
