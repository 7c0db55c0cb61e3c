"""Source of a function for scripts that fork: a child acts, and says what became of it."""

from __future__ import annotations

IN_A_CHILD = """
import os, sys
import xckpt

def in_a_child(what, act):
    sys.stdout.flush()
    process = os.fork()
    if process == 0:
        try:
            act()
            print(what, "done")
        except xckpt.XckptError as error:
            spawns = "'spawn' or 'forkserver'" in str(error)
            print(what, type(error).__name__ if spawns else error)
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(process, 0)[1] == 0, what
"""
"""It prints "done", the class of an error that says how to start processes, or another error."""
