"""What the command line shows of a manifest that others have made: words, never a traceback."""

from __future__ import annotations

import contextlib

from click.testing import CliRunner

from tests.fuzz.checkpoints import home
from tests.fuzz.choices import Choices
from tests.fuzz.manifests import ORIGINALS, changed_manifest
from xckpt.cli.commands import commands
from xckpt.core.manifest.codec import parse
from xckpt.errors import XckptError
from xckpt.storage.array import digest_bytes

__all__ = ["shown"]

COMMANDS = ("ls", "verify", "info", "info")


def shown(data: bytes) -> str:
    """Run a command on a folder that holds a changed manifest and nothing else."""
    choices = Choices(data)
    original = ORIGINALS[choices.below(len(ORIGINALS))]
    command = [COMMANDS[choices.below(len(COMMANDS))]]
    options = ["--json"] if choices.below(2) else []
    leaf = choices.below(64)
    manifest = changed_manifest(original, choices)
    folder = home() / "shown"
    folder.mkdir(exist_ok=True)
    (folder / "xckpt.json").write_bytes(manifest)
    arguments = [*command, *options, "--", str(folder)]
    if command == ["info"]:
        with contextlib.suppress(XckptError):
            names = [entry.name for entry in parse(manifest, digest_bytes).leaves]
            arguments += names[leaf : leaf + 1]
    done = CliRunner().invoke(commands, arguments)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code in (0, 1, 2)
    assert done.exit_code == 0 or done.output.strip(), "failed without a word"
    return f"exit code {done.exit_code}"
