"""Docstrings of this project for Sphinx: Google's sections, and text that is only text."""

# Sphinx is in an environment of its own.
# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

from typing import TYPE_CHECKING

from sphinx.domains.python import PythonDomain
from sphinx.ext.napoleon import Config
from sphinx.ext.napoleon.docstring import GoogleDocstring

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.domains.python import ObjectEntry
    from sphinx.environment import BuildEnvironment

BUILT_IN = ("bytes", "int", "float", "str", "list", "dict", "type")
CONFIG = Config(napoleon_use_rtype=False)


class Sections(GoogleDocstring):
    """Google's sections, without types in the text: the signature has them."""

    def _consume_returns_section(
        self, preprocess_types: bool = False
    ) -> list[tuple[str, str, list[str]]]:
        return [("", "", self._dedent(self._consume_to_next_section()))]


def sections(
    app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]
) -> None:
    """Write the sections of a docstring as Sphinx wants them; an attribute's has none."""
    if what not in ("attribute", "data", "property"):
        lines[:] = Sections(lines, CONFIG, app, what, name, thing, options).lines()


class Names(PythonDomain):
    """Names of Python; one of a type that is built in means nothing else."""

    def find_obj(
        self,
        env: BuildEnvironment,
        modname: str | None,
        classname: str | None,
        name: str,
        type: str | None,  # Sphinx's own name
        searchmode: int = 0,
    ) -> list[tuple[str, ObjectEntry]]:
        """The documented objects of a name."""
        if name in BUILT_IN:
            return []
        found: list[tuple[str, ObjectEntry]]
        found = super().find_obj(env, modname, classname, name, type, searchmode)  # pyright: ignore
        return found
