"""The commands about mappings: `xckpt map infer`, `xckpt map check` and `xckpt map show`.

Answers go to stdout; a command that finds nothing wrong, or proposes a mapping with gaps, exits 0.
`check` exits 1 where the mapping does not fit, and prints every fault.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import IO, TYPE_CHECKING, Any, ClassVar, Unpack

import click

from xckpt.cli.mapping_argument import Given, family_options, given_mapping

if TYPE_CHECKING:
    from rich.console import RenderableType

    from xckpt.mapping.infer.infer import Inference
    from xckpt.mapping.mapping import LeafMapping
    from xckpt.mapping.resolve import ResolvedMapping
    from xckpt.mapping.spec import TensorSpec

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
    from xckpt.formats.detect import open_source
    from xckpt.mapping.infer.infer import infer as inferred

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


class Misfit(click.ClickException):
    """What `check` found."""

    exit_code: ClassVar[int] = 1

    def show(self, file: IO[str] | None = None) -> None:
        """Print the message, without click's usage lines."""
        click.echo(f"xckpt: {self.format_message()}", file=file, err=file is None)


@map_commands.command()
@click.argument("mapping")
@click.argument("source")
@click.argument("target", required=False)
@family_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def check(
    mapping: str,
    source: str,
    target: str | None,
    as_json: bool,
    **given: Unpack[Given],
) -> None:
    """Prove that MAPPING makes all leaves of TARGET of all of SOURCE, each element once.

    MAPPING is a TOML file, or a model family's name, such as llama.

    SOURCE and TARGET are checkpoints of any format that xckpt reads; only names, shapes and dtypes
    are looked at. Without TARGET the proof is about SOURCE and the leaves that the mapping makes.
    Exit code 0: it is proven. 1: it does not fit; every fault is printed. 2: the question could not
    be answered.
    """
    from xckpt.errors import MappingError

    near = [source] if target is None else [source, target]
    rules = given_mapping(mapping, near=near, **given)
    read, wanted = _specs(source), None if target is None else _specs(target)
    problems: tuple[str, ...] = ()
    resolved = None
    try:
        resolved = rules.check(read, rules.resolve(read).targets if wanted is None else wanted)
    except MappingError as error:
        problems = error.problems or (str(error),)
    if as_json:
        lossy = resolved.lossy if resolved else ()
        asserted = [each.reason for each in resolved.assertions] if resolved else []
        _echo_json({"ok": not problems, "problems": problems, "lossy": lossy, "asserted": asserted})
    if problems:
        raise Misfit("\n  - ".join([f"{mapping} does not fit", *problems]))
    if resolved is not None and not as_json:
        for line in _proof(mapping, resolved):
            click.echo(line)


def _proof(mapping: str, resolved: ResolvedMapping) -> Iterable[str]:
    from xckpt.cli.report import counted

    read, made = counted(len(resolved.sources), "tensor"), counted(len(resolved.targets), "tensor")
    yield f"{mapping}: {made} made of {read}, every element used once and defined once"
    for reason, times in Counter(each.reason for each in resolved.assertions).items():
        yield f"  asserted while reading: {reason}{_times(times)}"
    if resolved.dropped:
        yield f"  dropped unchecked: {counted(len(resolved.dropped), 'tensor')}"
    for each in resolved.lossy:
        yield f"  lossy: {each.operation}: {each.bound} (rule {each.rule})"


def _times(count: int) -> str:
    return f", {count} times" if count > 1 else ""


@map_commands.command()
@click.argument("mapping")
@click.argument("source", required=False)
@family_options
@click.option("--output", "-o", metavar="FILE", help="Write the mapping, as TOML.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def show(
    mapping: str,
    source: str | None,
    output: str | None,
    as_json: bool,
    **given: Unpack[Given],
) -> None:
    """Show the rules of MAPPING, or what it makes of the leaves of SOURCE.

    MAPPING is a TOML file, or a model family's name, such as llama.
    """
    rules = given_mapping(mapping, near=[] if source is None else [source], **given)
    if output is not None:
        rules.to_file(output)
    resolved = None if source is None else rules.resolve(_specs(source))
    if as_json:
        _echo_json(rules.to_document() if resolved is None else _leaf_documents(resolved))
        return
    from xckpt.cli.tables import console

    screen = console()
    if resolved is None:
        for part in _rule_tables(rules):
            screen.print(part)
    else:
        leaves = _leaf_documents(resolved)
        rows = [
            (each["name"], f"{each['dtype']}{each['shape']}", _short(each["sources"]), each["rule"])
            for each in leaves
        ]
        columns = ("target", "tensor", "made of", "rule")
        screen.print(_table(f"{len(rows)} leaves", columns, rows))
    if output is not None:
        screen.print(f"\nThe mapping is in {output}.")


def _rule_tables(rules: LeafMapping) -> Iterable[RenderableType]:
    """A table for each step of a mapping."""
    step: LeafMapping | None = rules
    while step is not None:
        rows = [
            (
                " + ".join(rule.source),
                " + ".join(rule.target),
                "; ".join(map(str, rule.operations)),
                rule.exactness,
            )
            for rule in step.rules
        ]
        columns = ("source", "target", "operations", "type")
        yield _table(f"{len(rows)} rules", columns, rows)
        step = step.following


def _leaf_documents(resolved: ResolvedMapping) -> list[dict[str, Any]]:
    """What is to be said of every leaf that a mapping makes."""
    return [
        {
            "name": name,
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "sources": list(dict.fromkeys(copy.source for copy in resolved.copies[name])),
            "copies": len(resolved.copies[name]),
            "rule": str(resolved.makers[name]),
        }
        for name, spec in resolved.targets.items()
    ]


def _short(sources: Sequence[str]) -> str:
    shown = [source or "a constant" for source in sources[:SHOWN_NAMES]]
    more = f", and {len(sources) - SHOWN_NAMES} more" if len(sources) > SHOWN_NAMES else ""
    return ", ".join(shown) + more


def _specs(path: str) -> dict[str, TensorSpec]:
    """The leaves of a checkpoint of any format."""
    from xckpt.formats.detect import open_source

    source = open_source(path)
    try:
        return dict(source.specs)
    finally:
        source.close()


def _echo_json(document: object) -> None:
    import msgspec

    click.echo(msgspec.json.format(msgspec.json.encode(document), indent=2))


def _print_json(inference: Inference) -> None:
    _echo_json(
        {
            "mapping": inference.mapping.to_document(),
            "certain": inference.certain,
            "ambiguous": inference.ambiguous,
            "unmatched": inference.unmatched,
        }
    )


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
    from xckpt.mapping.infer.fold import without_numbers

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
