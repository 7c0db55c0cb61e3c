"""Sphinx's settings. It reads the tree that `docs.site.stage` has made, not docs/ itself.

A reference in a docstring leads to a public name, whatever module it was made in. One to a module
or name inside is only text, and has to exist.
"""

# Sphinx is in an environment of its own.
# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from docs.site.directives import Mermaid
from docs.site.docstrings import Names, sections
from docs.site.reference import name_classes
from docs.site.references import resolve
from xckpt import __version__

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "xckpt"
author = "the xckpt authors"
copyright = author  # Sphinx's own name
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
source_suffix = {".md": "markdown"}
nitpicky = True
suppress_warnings = ["config.cache"]

# Python's docstrings write `name` for a name.
default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
add_module_names = False
toc_object_entries_show_parents = "hide"

myst_heading_anchors = 4
myst_fence_as_directive = {"mermaid"}
myst_enable_extensions = ["attrs_block"]

html_search_scorer = str(Path(__file__).with_name("scorer.js"))
html_theme = "pydata_sphinx_theme"
html_title = "xckpt"
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
    "show_toc_level": 2,
    "navbar_end": ["theme-switcher"],
    "navbar_persistent": ["search-button"],
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
}


def setup(app: Sphinx) -> None:
    """Have docstrings, references and diagrams read by the modules of `docs.site`."""
    name_classes()
    app.add_directive("mermaid", Mermaid)
    app.connect("autodoc-process-docstring", sections)
    app.add_domain(Names, override=True)
    app.connect("missing-reference", resolve)
