"""Which operations on files a process does, in their order, seen through Linux's ptrace.

Checkpoint libraries write from C++ threads, and several processes may save together, so hooks in
Python see little; the kernel sees all. No program is needed besides Python.

1. `Tracer` attaches to a process; its threads and the processes that it forks come along.
2. Each thread stops before and after each system call (`PTRACE_GET_SYSCALL_INFO` says which). Of
   the calls that change files below the root one is let through at a time, so that the order is
   the order in which they happened, and none overlaps another.
3. Before a call its paths are read from the process's memory and its descriptors from ``/proc``;
   after it, what it wrote is read back from the file. That makes an `Operation`.
4. A tracer can kill all processes just before the n-th operation, which then does not happen.

What cannot be expressed as operations (shared writable maps, io_uring, symbolic links) raises
`CannotRecordError`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import signal
from collections import deque

from conformance.crash.operations import Operation
from conformance.crash.system_calls import NUMBERS, Call, CannotRecordError, Effect, effect_of

__all__ = ["CannotRecordError", "Tracer"]

_SYSCALL, _SEIZE, _INTERRUPT, _GET_SYSCALL_INFO = 24, 0x4206, 0x4207, 0x420E
_SYSGOOD, _FORK, _VFORK, _CLONE, _EXIT_KILL = 1, 2, 4, 8, 0x100000
_SYSCALL_STOP = signal.SIGTRAP | 0x80
_WALL = 0x40000000
_ENTRY, _EXIT = 1, 2


class _SyscallInfo(ctypes.Structure):
    _fields_ = (
        ("op", ctypes.c_uint8),
        ("pad", ctypes.c_uint8 * 3),
        ("arch", ctypes.c_uint32),
        ("ip", ctypes.c_uint64),
        ("sp", ctypes.c_uint64),
        ("values", ctypes.c_uint64 * 8),
    )


class Tracer:
    """Traces a child process, which does nothing yet, in the thread that makes the tracer.

    This process must have no other children meanwhile.
    """

    def __init__(self, process: int, root: str, *, most: int | None = None) -> None:
        """Attach to a process.

        Args:
            process: its number.
            root: the folder whose operations count, without symbolic links.
            most: how many operations may happen; before the next one all processes are killed.

        Raises:
            CannotRecordError: the system does not allow it.
        """
        self.root = root
        self.most = most
        self.operations: list[Operation] = []
        self.killed = False
        """Whether the processes were killed, as was asked for."""
        self._process = process
        self._numbers = NUMBERS.get(platform.machine())
        self._threads = {int(thread) for thread in os.listdir(f"/proc/{process}/task")}
        self._running: tuple[int, Effect] | None = None
        self._waiting: deque[Call] = deque()
        self._ptrace = ctypes.CDLL(None, use_errno=True).ptrace
        self._ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
        self._ptrace.restype = ctypes.c_long
        if self._numbers is None:
            raise CannotRecordError(f"system calls of {platform.machine()} are not known")
        options = _SYSGOOD | _FORK | _VFORK | _CLONE | _EXIT_KILL
        for thread in self._threads:
            if self._ptrace(_SEIZE, thread, None, options) != 0:
                why = os.strerror(ctypes.get_errno())
                raise CannotRecordError(
                    f"ptrace: {why}; a container needs the SYS_PTRACE capability"
                )
            self._ptrace(_INTERRUPT, thread, None, None)

    def run(self) -> int:
        """Let the process and its descendants run to their ends; the process's exit status.

        Raises:
            CannotRecordError: it did something that no operation expresses.
        """
        status = 0
        try:
            while self._threads:
                thread, found = os.waitpid(-1, _WALL)
                if os.WIFSTOPPED(found):
                    self._threads.add(thread)
                    self._stopped(thread, found)
                    continue
                self._threads.discard(thread)
                if thread == self._process:
                    status = found
                if self._running is not None and self._running[0] == thread:
                    self._running = None
                    self._start_next()
        except BaseException:
            self._kill()
            raise
        return status

    def _stopped(self, thread: int, status: int) -> None:
        stop, event = os.WSTOPSIG(status), status >> 16
        if stop == _SYSCALL_STOP:
            self._system_call(thread)
        else:
            self._resume(thread, 0 if event else stop)

    def _resume(self, thread: int, number: int = 0) -> None:
        self._ptrace(_SYSCALL, thread, None, number)  # fails only if the thread was killed

    def _system_call(self, thread: int) -> None:
        info = _SyscallInfo()
        size = ctypes.sizeof(info)
        if self._ptrace(_GET_SYSCALL_INFO, thread, size, ctypes.addressof(info)) < 0:
            return  # killed meanwhile
        assert self._numbers is not None
        if info.op == _EXIT and self._running is not None and self._running[0] == thread:
            effect, self._running = self._running[1], None
            result = ctypes.c_int64(info.values[0]).value
            if result >= 0:
                self.operations += effect(result)
            self._resume(thread)
            self._start_next()
        elif info.op == _ENTRY and (name := self._numbers.get(info.values[0])):
            self._waiting.append(Call(thread, name, tuple(info.values[1:7])))
            self._start_next()
        else:
            self._resume(thread)

    def _start_next(self) -> None:
        """Let the next call through, if none is under way."""
        while self._running is None and self._waiting:
            call = self._waiting.popleft()
            effect = effect_of(call, self.root)
            if effect is not None:
                if self.most is not None and len(self.operations) >= self.most:
                    self.killed = True
                    self._kill()
                    return
                self._running = call.thread, effect
            self._resume(call.thread)

    def _kill(self) -> None:
        """Kill whatever is traced; a call that is about to happen then does not."""
        self._waiting.clear()
        for thread in self._threads:
            with contextlib.suppress(ProcessLookupError):
                os.kill(thread, signal.SIGKILL)
