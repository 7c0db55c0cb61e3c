"""The mapping that a command is given: a TOML file, or the name of a model family."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

import click

if TYPE_CHECKING:
    from xckpt.mapping.mapping import LeafMapping

__all__ = ["Given", "family_options", "given_mapping"]


class Given(TypedDict):
    """What `family_options` give to a command, besides the mapping."""

    config: str | None
    choices: Sequence[str]
    inverse: bool


Command = TypeVar("Command", bound=Callable[..., Any])


def family_options(command: Command) -> Command:
    """Options of a command that takes a family's name where it takes a mapping's file."""
    for option in (
        click.option("--inverse", is_flag=True, help="Take the mapping backwards."),
        click.option(
            "--choose",
            "choices",
            multiple=True,
            metavar="KEY=VALUE",
            help="What a family leaves open, such as scanned=true.",
        ),
        click.option("--config", metavar="FILE", help="The config.json that a family needs."),
    ):
        command = option(command)
    return command


def given_mapping(
    given: str,
    *,
    near: Sequence[str] = (),
    config: str | None = None,
    choices: Sequence[str] = (),
    inverse: bool = False,
) -> LeafMapping:
    """The mapping that a user names.

    Args:
        given: a mapping's file, or a family's name.
        near: paths of checkpoints beside which the family's config.json may lie.
        config: the path of the config.json, where it is stated.
        choices: what the family leaves open, each as ``key=value``.
        inverse: whether to take it backwards.

    Raises:
        MappingError: there is neither such a file nor such a family, or it is no mapping.
        click.UsageError: an option does not go with what is given.
    """
    from xckpt.errors import MappingError
    from xckpt.mapping.mapping import LeafMapping

    if _is_family(given):
        from xckpt.convert import family

        rules = family(given, _config(given, near, config), **dict(map(_choice, choices)))
    else:
        if config is not None or choices:
            raise click.UsageError("--config and --choose are for a model family's name")
        try:
            rules = LeafMapping.from_file(given)
        except OSError as error:
            raise MappingError(f"{given} is no mapping's file: {error.strerror}") from error
    return rules.inverse() if inverse else rules


def _is_family(given: str) -> bool:
    from xckpt.mapping.families import families

    if Path(given).exists():
        return False
    looks_like_a_file = given.endswith(".toml") or "/" in given
    if given not in families() and not looks_like_a_file:
        raise click.UsageError(f"{given!r} is no file, and no family: {', '.join(families())}")
    return not looks_like_a_file


def _config(given: str, near: Sequence[str], config: str | None) -> str:
    """The path of the family's configuration."""
    if config is not None:
        return config
    from xckpt.storage.foreign.paths import find_path

    for path in map(find_path, near):
        for folder in (path, path.parent):
            if (folder / "config.json").is_file():
                return str(folder / "config.json")
    raise click.UsageError(f"{given} needs the model's config.json: say where, with --config")


def _choice(text: str) -> tuple[str, bool | str]:
    """``scanned=true`` as a key and its value."""
    key, equals, value = text.partition("=")
    if not equals:
        raise click.UsageError(f"--choose takes KEY=VALUE, not {text!r}")
    return key, {"true": True, "false": False}.get(value.lower(), value)
