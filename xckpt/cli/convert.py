"""The command `xckpt convert`: its arguments, its progress, its summary."""

from __future__ import annotations

import os
import signal
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import nullcontext
from threading import Thread
from typing import TYPE_CHECKING, Unpack

import click

from xckpt.cli.arguments import PATH, as_json
from xckpt.cli.map import FamilyOptions, family_options, mapping_argument
from xckpt.cli.output import print_json, progress_bar, say

if TYPE_CHECKING:
    from xckpt.convert.run import Converted
    from xckpt.mapping.mapping import LeafMapping

WRITTEN = ("xckpt", "safetensors", "orbax", "dcp")
"""The formats of a destination, as `xckpt.formats.detect.SINKS` has them."""


@click.command("convert")
@click.argument("source", type=PATH)
@click.argument("destination", type=PATH)
@click.option("--mapping", "-m", metavar="MAPPING", help="A TOML file, or a family such as bert.")
@family_options
@click.option("--dtype", metavar="DTYPE", help="Cast all floating-point tensors to it: bf16.")
@click.option("--format", type=click.Choice(WRITTEN), help="The format of DESTINATION.")
@click.option("--workers", type=click.IntRange(1), help="Processes that share the work.")
@click.option("--overwrite", is_flag=True, help="Replace what is at DESTINATION.")
@click.option("--allow-lossy", is_flag=True, help="Allow steps that lose information.")
@click.option("--accept-assumed", is_flag=True, help="Accept what the mapping's rules assume.")
@click.option("--opaque", is_flag=True, help="Keep objects that DCP has pickled, as bytes.")
@click.option("--plain", is_flag=True, help="Store each leaf as a zarr array, however small.")
@as_json
def convert_command(
    source: str,
    destination: str,
    mapping: str | None,
    dtype: str | None,
    format: str | None,
    workers: int | None,
    overwrite: bool,
    allow_lossy: bool,
    accept_assumed: bool,
    opaque: bool,
    plain: bool,
    as_json: bool,
    **options: Unpack[FamilyOptions],
) -> None:
    """Convert SOURCE to another format, dtype or model.

    DESTINATION is a folder or URL, or a *.safetensors file; --format names another format.
    A family's mapping takes the model's sizes from the config.json beside SOURCE, or from --config.
    SOURCE is an xckpt checkpoint, safetensors (a file or a folder), Orbax, DCP, or a torch.save
    file; the format is detected. A command that was stopped resumes when it is run again.
    """
    import xckpt
    from xckpt.convert.run import convert
    from xckpt.options import SaveOptions

    rules = _rules(mapping, source, accept_assumed, options)
    with _executor(workers) as executor, progress_bar("converting") as bar:
        done = convert(
            source,
            destination,
            mapping=rules,
            dtype=dtype,
            executor=executor,
            group=xckpt.LocalGroup(),
            overwrite=overwrite,
            format=format,
            opaque=opaque,
            allow_lossy=allow_lossy,
            options=SaveOptions(progress=bar, pack_bytes=0 if plain else None),
        )
    if as_json:
        sizes = {"bytes": done.bytes, "bytes_before": done.bytes_before}
        print_json({"destination": destination, "tensors": done.tensors} | sizes)
    else:
        say(_summary(destination, done))


def _summary(destination: str, done: Converted) -> str:
    """What was written, in a line."""
    from xckpt.cli.report import counted
    from xckpt.core.text.shown import readable_bytes

    before = readable_bytes(done.bytes_before)
    resumed = f", {before} of them written before" if done.bytes_before else ""
    tensors = counted(done.tensors, "tensor")
    return f"{destination}: {tensors}, {readable_bytes(done.bytes)}{resumed}"


def _rules(
    mapping: str | None, source: str, accept_assumed: bool, options: FamilyOptions
) -> LeafMapping | None:
    """The mapping that the options name, if any."""
    if mapping is None:
        if any(options.values()):
            words = "--inverse, --config and --choose are about a mapping: give one with --mapping"
            raise click.UsageError(words)
        return None
    rules = mapping_argument(mapping, near=[source], **options)
    return rules.accept() if accept_assumed else rules


def _executor(workers: int | None) -> ProcessPoolExecutor | nullcontext[Executor | None]:
    """The workers. Ctrl-C does not reach them: this process ends them, after what they write."""
    if workers is None:
        return nullcontext(None)
    from multiprocessing import get_context

    executor = ProcessPoolExecutor(workers, get_context("spawn"), _end_with_command)
    # What a process ignores, those that it starts ignore; each of these tasks starts one of them.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        for _ in range(workers):
            executor.submit(os.getpid)
    finally:
        signal.signal(signal.SIGINT, before)
    return executor


def _end_with_command() -> None:
    """Run in a worker: have it end when the command is killed; it would wait for work for ever."""
    from multiprocessing import parent_process

    command = parent_process()
    assert command is not None

    def wait() -> None:
        command.join()
        os._exit(1)

    Thread(target=wait, daemon=True).start()
