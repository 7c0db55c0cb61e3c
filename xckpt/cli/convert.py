"""The command `xckpt convert`: what it is given, how far it has come, and what it has done."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Unpack

import click

from xckpt.cli.mapping_argument import Given, family_options, given_mapping

if TYPE_CHECKING:
    from xckpt.options import SaveOptions

__all__ = ["convert_command"]

SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
"""What people type -> the format's names."""


@click.command("convert")
@click.argument("source")
@click.argument("destination")
@click.option("--mapping", "-m", metavar="MAPPING", help="A TOML file, or a family such as bert.")
@family_options
@click.option("--dtype", metavar="DTYPE", help="Type of all floating-point tensors, such as bf16.")
@click.option("--format", metavar="FORMAT", help="xckpt, safetensors, orbax or dcp.")
@click.option("--workers", type=click.IntRange(1), help="Processes that share the work.")
@click.option("--overwrite", is_flag=True, help="Replace what is at DESTINATION.")
@click.option("--allow-lossy", is_flag=True, help="Allow steps that do not bring values back.")
def convert_command(
    source: str,
    destination: str,
    mapping: str | None,
    dtype: str | None,
    format: str | None,
    workers: int | None,
    overwrite: bool,
    allow_lossy: bool,
    **given: Unpack[Given],
) -> None:
    """Write the checkpoint SOURCE as DESTINATION: of another model, dtype or format.

    A family's mapping takes the model's sizes from the config.json beside SOURCE, or from --config.
    What SOURCE is is found out: a checkpoint of ours, safetensors (a file or a folder), Orbax, DCP,
    or a torch.save file. If the command is stopped, the same command goes on where it was.
    """
    from xckpt.cli.report import counted, readable_bytes
    from xckpt.convert.run import convert

    if mapping is None and any(given.values()):
        words = "--inverse, --config and --choose are about a mapping: give one with --mapping"
        raise click.UsageError(words)
    rules = None if mapping is None else given_mapping(mapping, near=[source], **given)
    with _executor(workers) as executor, _bar() as options:
        done = convert(
            source,
            destination,
            mapping=rules,
            dtype=None if dtype is None else SHORT_DTYPES.get(dtype, dtype),
            executor=executor,
            overwrite=overwrite,
            format=format,
            allow_lossy=allow_lossy,
            options=options,
        )
    before = ""
    if done.bytes_before:
        before = f", {readable_bytes(done.bytes_before)} of them written before"
    tensors = counted(done.tensors, "tensor")
    click.echo(f"{destination}: {tensors}, {readable_bytes(done.bytes)}{before}")


def _executor(workers: int | None) -> ProcessPoolExecutor | nullcontext[Executor | None]:
    if workers is None:
        return nullcontext(None)
    from multiprocessing import get_context

    return ProcessPoolExecutor(workers, get_context("spawn"))


@contextmanager
def _bar() -> Iterator[SaveOptions]:
    """Options that show the progress, where stderr is a terminal."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

    from xckpt.cli.tables import console
    from xckpt.options import SaveOptions

    screen = console(stderr=True)
    columns = ("converting", BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bar:
        task = bar.add_task("convert", total=None)
        yield SaveOptions(
            progress=lambda now: bar.update(task, completed=now.done, total=now.total)
        )
