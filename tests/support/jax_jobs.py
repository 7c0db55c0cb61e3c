"""Real JAX processes for tests: each runs one function of a test module and reports its answer.

`run` starts them on this machine with `jax.distributed.initialize` and CPU devices, waits, and
returns what each function returned (JSON), in process order.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
SECONDS = 120


def run(
    function: Callable[..., object],
    processes: int,
    *args: object,
    devices: int = 2,
    killed: tuple[int, ...] = (),
) -> list[object]:
    """Answers of ``function(*args)`` from each of ``processes`` with ``devices`` each.

    Processes in ``killed`` are expected to die by SIGKILL; their answer is None.
    """
    port = _free_port()
    target = f"{function.__module__}:{function.__name__}"
    command = [sys.executable, "-m", "tests.support.jax_jobs", target, json.dumps(args)]
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "OMP_NUM_THREADS": "1",
        "XCKPT_TEST_JOB": f"localhost:{port},{processes}",
    }
    started = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env={**environment, "XCKPT_TEST_PROCESS": str(number)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(processes)
    ]
    try:
        ended = [process.communicate(timeout=SECONDS) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    answers: list[object] = []
    for number, (process, (out, err)) in enumerate(zip(started, ended, strict=True)):
        expected = -signal.SIGKILL if number in killed else 0
        assert process.returncode == expected, f"process {number}: {process.returncode}\n{err}"
        answers.append(None if number in killed else json.loads(out.splitlines()[-1]))
    return answers


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def main() -> None:
    """Join the job, run the function, print its answer."""
    import jax

    address, processes = os.environ["XCKPT_TEST_JOB"].split(",")
    number = int(os.environ["XCKPT_TEST_PROCESS"])
    jax.distributed.initialize(address, int(processes), number)
    module, name = sys.argv[1].split(":")
    answer = getattr(importlib.import_module(module), name)(*json.loads(sys.argv[2]))
    print(json.dumps(answer), flush=True)
    if os.environ.get("XCKPT_TEST_NO_GOODBYE"):
        os._exit(0)


if __name__ == "__main__":
    main()
