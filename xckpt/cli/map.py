"""The commands about mappings: `xckpt map infer`, `xckpt map check` and `xckpt map show`.

Answers go to stdout; a command that finds nothing wrong, or proposes a mapping with gaps, exits 0.
`check` exits 1 where the mapping does not fit, and prints every fault.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack

import click

from xckpt.cli.mapping_argument import FamilyOptions, family_options, mapping_argument
from xckpt.cli.output import Fault, print_json

if TYPE_CHECKING:
    from rich.console import RenderableType

    from xckpt.mapping.infer.infer import Inference
    from xckpt.mapping.mapping import LeafMapping
    from xckpt.mapping.resolve import ResolvedMapping
    from xckpt.mapping.rule import Rule
    from xckpt.mapping.spec import TensorSpec

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
    from xckpt.mapping.infer.infer import infer as inferred

    inference = inferred(_specs(source), _specs(target))
    if output is not None:
        inference.mapping.to_file(output)
    if as_json:
        print_json(_inference_document(inference))
        return
    _print(_inference_tables(inference))
    if output is not None:
        click.echo(f"\nThe rules are in {output}; xckpt map check tells what they leave out.")


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
    **options: Unpack[FamilyOptions],
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
    rules = mapping_argument(mapping, near=near, **options)
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
        print_json({"ok": not problems, "problems": problems, "lossy": lossy, "asserted": asserted})
    if problems:
        raise Fault(f"{mapping} does not fit", problems)
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
    **options: Unpack[FamilyOptions],
) -> None:
    """Show the rules of MAPPING, or what it makes of the leaves of SOURCE.

    MAPPING is a TOML file, or a model family's name, such as llama.
    """
    rules = mapping_argument(mapping, near=[] if source is None else [source], **options)
    if output is not None:
        rules.to_file(output)
    leaves = None if source is None else _leaf_documents(rules.resolve(_specs(source)))
    if as_json:
        print_json(rules.to_document() if leaves is None else leaves)
        return
    _print(_step_tables(rules) if leaves is None else [_leaf_table(leaves)])
    if output is not None:
        click.echo(f"\nThe mapping is in {output}.")


def _print(parts: Iterable[RenderableType]) -> None:
    from xckpt.cli.tables import console

    screen = console()
    for part in parts:
        screen.print(part)


def _step_tables(rules: LeafMapping) -> Iterator[RenderableType]:
    """A table for each step of a mapping."""
    from xckpt.cli.tables import titled_table

    columns = ("source", "target", "operations", "type")
    step: LeafMapping | None = rules
    while step is not None:
        rows = [(*_rule_cells(rule), rule.exactness) for rule in step.rules]
        yield titled_table(f"{len(rows)} rules", columns, rows)
        step = step.following


def _rule_cells(rule: Rule) -> tuple[str, str, str]:
    return " + ".join(rule.source), " + ".join(rule.target), "; ".join(map(str, rule.operations))


def _leaf_documents(resolved: ResolvedMapping) -> list[dict[str, Any]]:
    """Each leaf that a mapping makes, and what it is made of."""
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


def _leaf_table(leaves: Sequence[dict[str, Any]]) -> RenderableType:
    from xckpt.cli.tables import titled_table

    rows = [
        (
            leaf["name"],
            f"{leaf['dtype']}{leaf['shape']}",
            _listed([source or "a constant" for source in leaf["sources"]]),
            leaf["rule"],
        )
        for leaf in leaves
    ]
    return titled_table(f"{len(rows)} leaves", ("target", "tensor", "made of", "rule"), rows)


def _listed(names: Sequence[str]) -> str:
    more = f", and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return ", ".join(names[:SHOWN_NAMES]) + more


def _specs(path: str) -> dict[str, TensorSpec]:
    """The leaves of a checkpoint of any format."""
    from xckpt.formats.detect import open_source

    source = open_source(path)
    try:
        return dict(source.specs)
    finally:
        source.close()


def _inference_document(inference: Inference) -> dict[str, object]:
    return {
        "mapping": inference.mapping.to_document(),
        "certain": inference.certain,
        "ambiguous": inference.ambiguous,
        "unmatched": inference.unmatched,
    }


def _inference_tables(inference: Inference) -> Iterator[RenderableType]:
    """What is certain, ambiguous and left over; names that differ by a number are one line."""
    from xckpt.cli.tables import titled_table
    from xckpt.mapping.infer.fold import without_numbers

    def folded(names: Iterable[str]) -> str:
        return _listed(list(dict.fromkeys(map(without_numbers, names))))

    rules = [_rule_cells(rule) for rule in inference.mapping.rules]
    title = f"{len(inference.certain)} certain, in {len(rules)} rules"
    yield titled_table(title, ("source", "target", "operations"), rules)
    doubts = Counter(
        (folded(doubt.sources), folded(doubt.targets), doubt.reason)
        for doubt in inference.ambiguous
    )
    if doubts:
        columns = ("source", "target", "why nothing was chosen", "leaves")
        title = f"\n{len(inference.ambiguous)} ambiguous"
        yield titled_table(title, columns, _counted_rows(doubts))
    unmatched = inference.unmatched
    for side, left in (("source", unmatched.source), ("target", unmatched.target)):
        if left:
            reasons = Counter(tuple(map(without_numbers, pair)) for pair in left.items())
            columns = ("name", "what is known", "leaves")
            title = f"\n{len(left)} left over of the {side}"
            yield titled_table(title, columns, _counted_rows(reasons))


def _counted_rows(rows: Mapping[tuple[str, ...], int]) -> list[tuple[str, ...]]:
    return [(*cells, str(count)) for cells, count in rows.items()]
