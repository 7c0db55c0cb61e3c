"""The commands about mappings: `xckpt map infer`.

Answers go to stdout; a command that finds nothing wrong, or proposes a mapping with gaps, exits 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import RenderableType

    from xckpt.convert.inference import Inference

__all__ = ["map_commands"]

SHOWN_NAMES = 4
"""Names of one ambiguity that a table spells out; ``--json`` has them all."""


@click.group("map")
def map_commands() -> None:
    """Propose, prove and show mappings between two models' leaves."""


@map_commands.command()
@click.argument("source")
@click.argument("target")
@click.option("--output", "-o", metavar="FILE", help="Write the rules that are certain, as TOML.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def infer(source: str, target: str, output: str | None, as_json: bool) -> None:
    """Propose the mapping from the leaves of SOURCE to those of TARGET.

    Both are checkpoints of any format that xckpt reads; only names, shapes and dtypes are looked
    at. Prints what is certain, what is ambiguous (nothing is chosen) and what is left over.
    """
    from xckpt.convert.detection import open_source
    from xckpt.convert.inference import infer as inferred

    opened = [open_source(path) for path in (source, target)]
    inference = inferred(*(dict(each.specs) for each in opened))
    for each in opened:
        each.close()
    if output is not None:
        inference.mapping.to_file(output)
    if as_json:
        _print_json(inference)
        return
    from xckpt.cli.tables import console

    screen = console()
    for part in _tables(inference):
        screen.print(part)
    if output is not None:
        screen.print(f"\nThe rules are in {output}; xckpt map check tells what they leave out.")


def _print_json(inference: Inference) -> None:
    import msgspec

    document = {
        "mapping": inference.mapping.to_document(),
        "certain": inference.certain,
        "ambiguous": inference.ambiguous,
        "unmatched": inference.unmatched,
    }
    click.echo(msgspec.json.format(msgspec.json.encode(document), indent=2))


def _tables(inference: Inference) -> Iterable[RenderableType]:
    rules = [
        (" + ".join(rule.source), " + ".join(rule.target), "; ".join(map(str, rule.operations)))
        for rule in inference.mapping.rules
    ]
    count = f"{len(inference.certain)} certain, in {len(rules)} rules"
    yield _table(count, ("source", "target", "operations"), rules)
    doubts = Counter(
        (_listed(each.sources), _listed(each.targets), each.reason) for each in inference.ambiguous
    )
    if doubts:
        rows = [(*doubt, str(times)) for doubt, times in doubts.items()]
        columns = ("source", "target", "why nothing was chosen", "leaves")
        yield _table(f"\n{len(inference.ambiguous)} ambiguous", columns, rows)
    for side in ("source", "target"):
        left = inference.unmatched.source if side == "source" else inference.unmatched.target
        if left:
            rows = [
                (name, why, str(times))
                for (name, why), times in Counter(
                    (_numberless(name), _numberless(why)) for name, why in left.items()
                ).items()
            ]
            title = f"\n{len(left)} left over of the {side}"
            yield _table(title, ("name", "what is known", "leaves"), rows)


def _listed(names: Sequence[str]) -> str:
    found = list(dict.fromkeys(_numberless(name) for name in names))
    more = f", and {len(found) - SHOWN_NAMES} more" if len(found) > SHOWN_NAMES else ""
    return ", ".join(found[:SHOWN_NAMES]) + more


def _numberless(text: str) -> str:
    """A text with the numbers of its names left out, so that twelve layers are one line."""
    from xckpt.convert.folding import without_numbers

    return without_numbers(text)


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(_printable(cell)) for cell in row))
    return Group(Text(title, "bold"), table)


def _printable(text: str) -> str:
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )
