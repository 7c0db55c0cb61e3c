"""Real JAX processes for tests: each runs one function of a test module and returns its answer.

`run` forks them from a process that has imported JAX and used nothing of it (`fork_server`), each
with CPU devices of its own and `jax.distributed.initialize`; it waits, and returns what each
function returned (JSON), in process order.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection

from tests.support.fork_server import context

SECONDS = 120


def run(
    function: Callable[..., object],
    processes: int,
    *args: object,
    devices: int = 2,
    killed: tuple[int, ...] = (),
    aborted: tuple[int, ...] = (),
) -> list[object]:
    """Answers of ``function(*args)`` from each of ``processes`` with ``devices`` each.

    Processes in ``killed`` are expected to die by SIGKILL, those in ``aborted`` to be ended by JAX,
    which has lost the process of its coordination service; their answer is None. A function that
    returns once another was killed ends by `os._exit`: it waits for no other process.
    """
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "OMP_NUM_THREADS": "1",
    }
    held = _held_port()
    address = f"localhost:{held.getsockname()[1]}"
    pipes: list[Connection] = []
    started = []
    for number in range(processes):
        here, there = context().Pipe()
        job = (address, processes, number, not killed)
        process = context().Process(target=_serve, args=(there, environment, job, function, args))
        process.start()
        there.close()
        pipes.append(here)
        started.append(process)
    try:
        answers = [_answer(pipe) for pipe in pipes]
        for process in started:
            process.join(SECONDS)
    finally:
        for process in started:
            process.kill()
            process.join()
        for pipe in pipes:
            pipe.close()
        held.close()
    ended = [process.exitcode for process in started]
    said = "\n".join(f"process {n}: {ended[n]}\n{fault}" for n, (fault, _) in enumerate(answers))
    wanted = dict.fromkeys(killed, -signal.SIGKILL) | dict.fromkeys(aborted, -signal.SIGABRT)
    for number, (fault, _) in enumerate(answers):
        assert ended[number] == wanted.get(number, 0), said
        assert number in wanted or not fault, said
    return [answer for _, answer in answers]


def _answer(pipe: Connection) -> tuple[str, object]:
    """What went wrong in a process, and what its function returned."""
    try:
        if not pipe.poll(SECONDS):
            return f"no answer within {SECONDS} s", None
        fault, text = pipe.recv()
    except (EOFError, ConnectionResetError):
        return "ended without an answer", None
    return fault, json.loads(text)


def _held_port() -> socket.socket:
    """A free port, which the job shares and no other process gets; nothing listens here."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held.bind(("localhost", 0))
    return held


def _serve(
    pipe: Connection,
    environment: Mapping[str, str],
    job: tuple[str, int, int, bool],
    function: Callable[..., object],
    args: tuple[object, ...],
) -> None:
    """Join the job, run the function, send its answer."""
    os.environ.clear()
    os.environ.update(environment)
    import jax

    address, processes, number, all_live = job
    jax.distributed.initialize(address, processes, number)
    try:
        pipe.send(("", json.dumps(function(*args))))
    except BaseException:
        pipe.send((traceback.format_exc(), "null"))
    if not all_live:
        os._exit(0)  # JAX's goodbye would wait for the dead process
    jax.distributed.shutdown()
