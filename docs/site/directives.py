"""What the pages of the site may hold besides Markdown: diagrams."""

# Sphinx is in an environment of its own.
# pyright: reportMissingImports=false, reportMissingModuleSource=false, reportUntypedBaseClass=false

from __future__ import annotations

from docutils import nodes
from docutils.parsers.rst import Directive

from docs.site.diagram import arrows, svg


class Mermaid(Directive):
    """A diagram, drawn when the site is built; one that cannot be drawn fails the build."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        """The picture."""
        text = "\n".join(self.content)
        try:
            picture = svg(text, ", ".join(map(" to ".join, arrows(text))))
        except ValueError as error:
            raise self.error(str(error)) from error
        return [nodes.raw("", picture, format="html")]
