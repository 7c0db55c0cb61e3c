"""Elements of a leaf: the commands `xckpt cat`, `xckpt head` and `xckpt stats`.

1. A leaf is opened by its name (`_leaf`), a part of it is a box (`box_of`).
2. Into a pipe `cat` writes the elements' bytes in C order, a slab after the other; on a terminal it
   prints numbers: all of a small part, or only the edges of a large one; nothing else is read then.
3. `stats` reads all of each tensor once, a slab at a time.
"""

from __future__ import annotations

import sys
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Final, TypeGuard

import click

from xckpt.cli.arguments import as_json, box_of, path_argument, patterns_argument
from xckpt.cli.choose import chosen, no_such_leaf
from xckpt.cli.listing import shape_text
from xckpt.cli.output import Failure, print_json, progress_bar, say

if TYPE_CHECKING:
    from xckpt.core.geometry.box import Box
    from xckpt.storage.contents.statistics import Statistics
    from xckpt.storage.stored_array import StoredArray

box_option: Final = click.option(
    "--box", "slice_", metavar="SLICE", help='A part, as in "0:100, 64:128".'
)
leaf_argument: Final = click.argument("leaf")
NO_BOX = "--box takes a part of a tensor, and this leaf is a Python value"


@click.command()
@path_argument
@leaf_argument
@box_option
@click.option("--raw/--text", default=None, help="Print bytes, or text, to a terminal or pipe.")
@as_json
def cat(path: str, leaf: str, slice_: str | None, raw: bool | None, as_json: bool) -> None:
    """Print a LEAF, as text or as raw bytes.

    A terminal gets text, a pipe or a file gets bytes: a tensor's elements in C order,
    little-endian; the UTF-8 of a str; the repr of any other Python value. On a terminal only the
    edges of a large tensor are read and shown.
    """
    stored = _leaf(path, leaf)
    if as_json:
        _print_json(leaf, stored, slice_)
        return
    if raw is None:
        raw = not sys.stdout.isatty()
    if not _is_tensor(stored):
        _print_value(stored, slice_, raw)
    elif raw:
        _write(stored, box_of(slice_, stored.shape))
    else:
        click.echo(_text(stored, box_of(slice_, stored.shape)))


@click.command()
@path_argument
@leaf_argument
@click.option(
    "-n", "rows", metavar="ROWS", type=click.IntRange(0), default=5, help="How many; by default 5."
)
@as_json
def head(path: str, leaf: str, rows: int, as_json: bool) -> None:
    """Print the first rows of a LEAF as text."""
    stored = _leaf(path, leaf)
    if as_json:
        _print_json(leaf, stored, f":{rows}" if _is_tensor(stored) and stored.shape else None)
    elif not _is_tensor(stored):
        _print_value(stored, None, False)
    else:
        click.echo(_text(stored, box_of(f":{rows}" if stored.shape else None, stored.shape)))


@click.command()
@path_argument
@patterns_argument
@as_json
def stats(path: str, patterns: tuple[str, ...], as_json: bool) -> None:
    """Show minimum, maximum, mean, NaN and infinities of tensors.

    A PATTERN chooses leaves as it does for xckpt ls. Everything is read and verified once.
    """
    import xckpt
    from xckpt.progress import Progress
    from xckpt.storage.contents.statistics import statistics

    checkpoint = xckpt.open(path)
    leaves = [checkpoint[name] for name in chosen(path, list(checkpoint), patterns)]
    tensors = [leaf for leaf in leaves if _is_tensor(leaf)]
    if not tensors:
        raise Failure(f"{path} has no tensor among the leaves chosen")
    total, done = sum(leaf.nbytes for leaf in tensors), 0
    found: list[tuple[StoredArray, Statistics]] = []
    with progress_bar("reading") as show:

        def count(size: int) -> None:
            nonlocal done
            done += size
            show(Progress(done, total))

        for leaf in tensors:
            found.append((leaf, statistics(leaf, checkpoint.options.memory_bytes, count)))
    if as_json:
        print_json([_as_json(leaf, numbers) for leaf, numbers in found])
        return
    from xckpt.cli.render.tables import console, statistics_table

    console().print(statistics_table(found))


def _as_json(leaf: StoredArray, numbers: Statistics) -> dict[str, object]:
    from dataclasses import asdict

    fields = asdict(numbers)
    if isinstance(numbers.mean, complex):
        fields["mean"] = [numbers.mean.real, numbers.mean.imag]
    return {"name": leaf.name, "dtype": str(leaf.dtype), "shape": leaf.shape, **fields}


def _leaf(path: str, name: str) -> object:
    """The stored array or value of a name.

    Raises:
        Failure: there is none.
    """
    import xckpt

    checkpoint = xckpt.open(path)
    if name not in list(checkpoint):
        raise no_such_leaf(path, list(checkpoint), name)
    return checkpoint[name]


def _is_tensor(leaf: object) -> TypeGuard[StoredArray]:
    from xckpt.storage.stored_array import StoredArray

    return isinstance(leaf, StoredArray)


def _print_json(name: str, leaf: object, slice_: str | None) -> None:
    """A part of a tensor, or a Python value, as JSON."""
    if _is_tensor(leaf):
        from xckpt.cli.render.numbers import elements_document

        print_json(elements_document(leaf, box_of(slice_, leaf.shape)))
        return
    if slice_ is not None:
        raise click.UsageError(NO_BOX)
    from xckpt.core.values import shown_value

    print_json({"name": name, "dtype": type(leaf).__name__, "value": shown_value(leaf)})


def _print_value(value: object, slice_: str | None, raw: bool) -> None:
    """A Python value: its bytes, or its repr."""
    if slice_ is not None:
        raise click.UsageError(NO_BOX)
    if raw and isinstance(value, str | bytes):
        content = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
        sys.stdout.buffer.write(content)
    else:
        from xckpt.core.values import shown_value

        say(shown_value(value))


def _write(stored: StoredArray, box: Box) -> None:
    """The bytes of a part, in C order."""
    from xckpt.options import LoadOptions
    from xckpt.storage.contents.slabs import in_order

    for _, elements in in_order(stored, box, LoadOptions().memory_bytes):
        little = elements.astype(elements.dtype.newbyteorder("<"), copy=False)
        sys.stdout.buffer.write(little.reshape(-1).view("u1").data)


def _text(stored: StoredArray, box: Box) -> str:
    """A part as NumPy prints it, with its dtype and shape."""
    from xckpt.storage.contents.outline import outline

    width = get_terminal_size().columns - 1
    return f"{outline(stored, box, width)}\n{stored.dtype} {shape_text(box.sizes)}"
