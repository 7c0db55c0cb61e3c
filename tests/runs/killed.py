"""A life in a process of its own, which is killed at any moment."""

from __future__ import annotations

import os
import random
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from tests.runs.life import Life, Place, on_threads
from tests.runs.world import World
from tests.support.fork_server import context

ENVIRONMENT = (
    *("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"),
    *("TENSORSTORE_GCS_HTTP_URL", "GOOGLE_AUTH_TOKEN_FOR_TESTING"),
)
SECONDS = 60
MOST_SECONDS = 0.015
"""After the announcement of a save; some are over by then."""


@dataclass
class Telling(World):
    """A world that says to another process what is begun."""

    pipe: Any = None

    def announce(self, step: int, tag: int) -> None:
        self.pipe.send(("announce", step, tag))

    def begin(self, step: int, tag: int) -> None:
        self.pipe.send(("begin", step, tag))
        super().begin(step, tag)


def doomed(
    pipe: Connection, environment: dict[str, str], world: World, number: int, every: int, size: int
) -> None:
    """Train for ever."""
    os.environ.update(environment)
    known: dict[str, Any] = {**vars(world), "good": dict(world.good), "bad": set(world.bad)}

    def live(place: Place) -> None:
        mine = Telling(**known, pipe=pipe) if place.rank == 0 else World(**known)
        Life(mine, place, number, every).live([("force", 0), ("train", 7)] * 1000)

    try:
        on_threads(size, live)
    except BaseException:
        pipe.send(("failed", traceback.format_exc(), 0))
        raise


def live_and_be_killed(
    draw: random.Random, world: World, number: int, every: int, size: int
) -> None:
    """Go on with a run, and kill it while it saves; then look at what is left."""
    here, there = context().Pipe()
    environment = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
    arguments = (there, environment, world, number, every, size)
    process = context().Process(target=doomed, args=arguments, daemon=True)
    process.start()
    there.close()
    announced: dict[int, int] = {}

    def note(message: tuple[str, Any, int]) -> None:
        kind, step, tag = message
        assert kind != "failed", step
        if kind == "announce":
            announced.clear()
            announced[step] = tag
        else:
            announced.clear()
            world.begin(step, tag)

    assert here.poll(SECONDS), "nothing was saved"
    try:
        for _ in range(draw.randint(1, 12)):
            note(here.recv())
    except EOFError:
        process.join(SECONDS)
        raise AssertionError(f"it ended before it was killed: {process.exitcode}") from None
    time.sleep(draw.uniform(0, MOST_SECONDS))
    process.kill()
    process.join()
    try:
        while here.poll():
            note(here.recv())
    except EOFError:
        pass
    here.close()
    world.begun |= announced
    world.found()
