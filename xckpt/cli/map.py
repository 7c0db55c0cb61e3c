"""The commands about mappings, and the argument MAPPING: a TOML file, or a model family's name.

`xckpt map infer`, `xckpt map check` and `xckpt map show` print answers to stdout. A command that
finds nothing wrong, or proposes a mapping with gaps, exits 0. `check` exits 1 where the mapping
does not fit, and prints every fault.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, Unpack

import click

from xckpt.cli.arguments import PATH, as_json
from xckpt.cli.collector import collector_at_rest
from xckpt.cli.output import Fault, print_json, progress_bar, say, unwritable

if TYPE_CHECKING:
    from xckpt.mapping.mapping import LeafMapping
    from xckpt.mapping.resolve import ResolvedMapping
    from xckpt.mapping.spec import TensorSpec


class FamilyOptions(TypedDict):
    """The values of the options that `family_options` adds to a command."""

    config: str | None
    choices: Sequence[str]
    inverse: bool


Command = TypeVar("Command", bound=Callable[..., Any])


def family_options(command: Command) -> Command:
    """Add the options of a command that takes a mapping's file or a family's name.

    Example:
        >>> @family_options
        ... def command(**options):
        ...     return options
        >>> [option.name for option in click.command(command).params]
        ['config', 'choices', 'inverse']
    """
    config = click.option(
        "--config",
        metavar="FILE",
        type=PATH,
        help="The config.json that a family needs.",
    )
    choose = click.option(
        "--choose",
        "choices",
        multiple=True,
        metavar="KEY=VALUE",
        help="A choice of the family, such as scanned=true.",
    )
    inverse = click.option("--inverse", is_flag=True, help="Use the inverse of the mapping.")
    return config(choose(inverse(command)))


def mapping_argument(
    name: str,
    *,
    near: Sequence[str] = (),
    config: str | None = None,
    choices: Sequence[str] = (),
    inverse: bool = False,
) -> LeafMapping:
    """Load the mapping that a user names.

    Args:
        name: a mapping's file, or a family's name.
        near: checkpoints beside which the family's config.json may lie.
        config: path of the config.json; None to look for it beside ``near``.
        choices: the family's choices, each as ``key=value``.
        inverse: whether to return the inverse.

    Raises:
        MappingError: the file is missing or holds no mapping.
        click.UsageError: no such family, or an option that does not fit a file.

    Example:
        >>> from xckpt.convert import Mapping, Rule
        >>> Mapping([Rule("a.weight", "a/kernel")]).to_file("rules.toml")
        >>> print(*mapping_argument("rules.toml", inverse=True).rules)
        a/kernel -> a.weight
    """
    from xckpt.errors import MappingError
    from xckpt.mapping.mapping import LeafMapping

    if _is_family(name):
        from xckpt.convert import family

        rules = family(name, _config(name, near, config), **dict(map(_choice, choices)))
    else:
        if config is not None or choices:
            raise click.UsageError("--config and --choose are for a model family's name")
        try:
            rules = LeafMapping.from_file(name)
        except OSError as error:
            raise MappingError(f"{name} is not a mapping file: {error.strerror}") from error
    return rules.inverse() if inverse else rules


def _is_family(name: str) -> bool:
    from xckpt.mapping.families import families

    if Path(name).is_file():
        return False  # A folder of that name may well be the model's own.
    looks_like_a_file = name.endswith(".toml") or "/" in name
    if name not in families() and not looks_like_a_file:
        raise click.UsageError(f"{name!r} is neither a file nor a family: {', '.join(families())}")
    return not looks_like_a_file


def _config(name: str, near: Sequence[str], config: str | None) -> str:
    """The path of the config.json: the one stated, or one beside a checkpoint."""
    if config is not None:
        return config
    from xckpt.storage.foreign.paths import find_path

    for path in map(find_path, near):
        for folder in (path, path.parent):
            if (folder / "config.json").is_file():
                return str(folder / "config.json")
    raise click.UsageError(f"{name} needs the model's config.json: say where, with --config")


def _choice(text: str) -> tuple[str, bool | str]:
    """``scanned=true`` as a key and its value."""
    key, equals, value = text.partition("=")
    if not equals:
        raise click.UsageError(f"--choose takes KEY=VALUE, not {text!r}")
    return key, {"true": True, "false": False}.get(value.lower(), value)


@click.group("map")
def map_commands() -> None:
    """Propose, prove and show mappings between two models' leaves."""


@map_commands.command()
@click.argument("source", type=PATH)
@click.argument("target", type=PATH)
@click.option("--output", "-o", metavar="FILE", type=PATH, help="Write the rules, as TOML.")
@as_json
def infer(source: str, target: str, output: str | None, as_json: bool) -> None:
    """Propose the mapping from SOURCE to TARGET.

    Both are checkpoints of any format that xckpt reads; only names, shapes and dtypes are looked
    at. Prints what is certain, what is assumed (compare it with the models' code), what is
    ambiguous (nothing is chosen) and what is left over.
    """
    from xckpt.mapping.infer.infer import infer as inferred

    read, wanted = _specs(source), _specs(target)
    with _watched("inferring", len(read) + len(wanted)) as watched:
        inference = inferred(read, wanted, progress=watched)
    if output is not None:
        _write(inference.mapping, output)
    if as_json:
        document = {
            "mapping": inference.mapping.to_document(),
            "certain": inference.certain,
            "assumed": inference.assumed,
            "ambiguous": inference.ambiguous,
            "unmatched": inference.unmatched,
        }
        print_json(document)
        return
    from xckpt.cli.render.mapping_tables import inference_tables
    from xckpt.cli.render.tables import console

    console().print(*inference_tables(inference), sep="\n")
    if output is not None:
        click.echo()
        say(f"The rules are in {output}; xckpt map check says what they lack.")


@map_commands.command()
@click.argument("mapping", type=PATH)
@click.argument("source", type=PATH)
@click.argument("target", required=False, type=PATH)
@family_options
@as_json
def check(
    mapping: str,
    source: str,
    target: str | None,
    as_json: bool,
    **options: Unpack[FamilyOptions],
) -> None:
    """Prove that MAPPING makes all of TARGET from all of SOURCE.

    Each element is used once and made once. MAPPING is a TOML file, or a model family's name, such
    as llama.

    SOURCE and TARGET are checkpoints of any format that xckpt reads; only names, shapes and dtypes
    are looked at. Without TARGET the proof is about SOURCE and the leaves that the mapping makes.
    Exit code 0: it is proven. 1: it does not fit; every fault is printed. 2: the question could not
    be answered.
    """
    from xckpt.errors import MappingError

    near = [source] if target is None else [source, target]
    rules = mapping_argument(mapping, near=near, **options)
    problems: tuple[str, ...] = ()
    resolved = None
    read, wanted = _specs(source), None if target is None else _specs(target)
    with _watched("checking", len(read)) as watched:
        try:
            resolved = rules.check(read, wanted, progress=watched)
        except MappingError as error:
            problems = error.problems or (str(error),)
    if as_json:
        lossy = resolved.lossy if resolved else ()
        asserted = [each.reason for each in resolved.assertions] if resolved else []
        print_json({"ok": not problems, "problems": problems, "lossy": lossy, "asserted": asserted})
    if problems:
        raise Fault(f"{mapping} does not fit", problems)
    if resolved is not None and not as_json:
        for line in _proof(mapping, rules, resolved):
            say(line)


def _proof(mapping: str, rules: LeafMapping, resolved: ResolvedMapping) -> Iterable[str]:
    from xckpt.cli.report import counted
    from xckpt.core.text.printable import in_few

    read, made = counted(len(resolved.sources), "tensor"), counted(len(resolved.targets), "tensor")
    yield f"{mapping}: {made} made of {read}, every element used once and defined once"
    for reason, times in Counter(each.reason for each in resolved.assertions).items():
        again = f", {times} times" if times > 1 else ""
        yield f"  asserted while reading: {reason}{again}"
    if resolved.dropped:
        yield f"  dropped unchecked: {counted(len(resolved.dropped), 'tensor')}"
    if idle := [*map(str, resolved.idle)]:
        yield f"  idle: {counted(len(idle), 'rule')} without a tensor here: {in_few(idle)}"
    for rule in rules.assumed:
        yield f"  assumed: {rule.assumes} (rule {rule})"
    for each in resolved.lossy:
        yield f"  lossy: {each.operation}: {each.bound} (rule {each.rule})"


@map_commands.command()
@click.argument("mapping", type=PATH)
@click.argument("source", required=False, type=PATH)
@family_options
@click.option("--output", "-o", metavar="FILE", type=PATH, help="Write the mapping, as TOML.")
@as_json
def show(
    mapping: str,
    source: str | None,
    output: str | None,
    as_json: bool,
    **options: Unpack[FamilyOptions],
) -> None:
    """Show the rules of MAPPING, or what it makes from SOURCE.

    MAPPING is a TOML file, or a model family's name, such as llama.
    """
    rules = mapping_argument(mapping, near=[] if source is None else [source], **options)
    if output is not None:
        _write(rules, output)
    leaves = None
    if source is not None:
        read = _specs(source)
        with _watched("resolving", len(read)) as watched:
            leaves = _leaf_documents(rules.resolve(read, progress=watched))
    if as_json:
        print_json(rules.to_document() if leaves is None else leaves)
        return
    from xckpt.cli.render.mapping_tables import made_table, rule_tables
    from xckpt.cli.render.tables import console

    console().print(*(rule_tables(rules) if leaves is None else [made_table(leaves)]), sep="\n")
    if output is not None:
        click.echo()
        say(f"The mapping is in {output}.")


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


def _write(mapping: LeafMapping, output: str) -> None:
    """Write the file of ``--output``."""
    try:
        mapping.to_file(output)
    except OSError as error:
        raise unwritable(output, error) from error


@contextmanager
def _watched(doing: str, leaves: int) -> Iterator[Callable[[float], None] | None]:
    """A bar for work on that many leaves, with the collector of cycles at rest."""
    from xckpt.convert.conversion import in_leaves

    with progress_bar(doing) as bar, collector_at_rest():
        yield in_leaves(bar, leaves)


def _specs(path: str) -> dict[str, TensorSpec]:
    """The leaves of a checkpoint of any format; objects that DCP has pickled are none."""
    from xckpt.formats.detect import open_source

    with closing(open_source(path, skip_objects=True)) as source:
        return dict(source.specs)
