"""The argument MAPPING of a command: a TOML file, or the name of a model family."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

import click

if TYPE_CHECKING:
    from xckpt.mapping.mapping import LeafMapping


class FamilyOptions(TypedDict):
    """The values of the options that `family_options` adds to a command."""

    config: str | None
    choices: Sequence[str]
    inverse: bool


Command = TypeVar("Command", bound=Callable[..., Any])


def family_options(command: Command) -> Command:
    """Add the options of a command that takes a mapping's file or a family's name."""
    for option in (
        click.option("--inverse", is_flag=True, help="Use the inverse of the mapping."),
        click.option(
            "--choose",
            "choices",
            multiple=True,
            metavar="KEY=VALUE",
            help="A choice that the family has, such as scanned=true.",
        ),
        click.option("--config", metavar="FILE", help="The config.json that a family needs."),
    ):
        command = option(command)
    return command


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
            raise MappingError(f"{name} is no mapping's file: {error.strerror}") from error
    return rules.inverse() if inverse else rules


def _is_family(name: str) -> bool:
    from xckpt.mapping.families import families

    if Path(name).exists():
        return False
    looks_like_a_file = name.endswith(".toml") or "/" in name
    if name not in families() and not looks_like_a_file:
        raise click.UsageError(f"{name!r} is no file, and no family: {', '.join(families())}")
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
