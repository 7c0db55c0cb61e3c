"""The notebooks of docs/notebooks: run, and made into pages of the site.

``python -m docs.site.notebooks`` runs them and writes what they show into them; a test runs them
again and compares. A page of the site shows what is written, so a build of it starts no kernel.
"""

# nbclient is in an environment of its own.
# pyright: reportMissingImports=false

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

FOLDER: Final = Path(__file__).parents[1] / "notebooks"
SECONDS: Final = 300
"""The longest that a cell may take."""

Notebook = dict[str, Any]


def notebooks() -> list[Path]:
    """All notebooks."""
    return sorted(FOLDER.glob("*.ipynb"))


def executed(notebook: Path) -> Notebook:
    """The notebook after a run from its beginning, in an empty folder.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed.
    """
    import nbformat
    from nbclient import NotebookClient

    read = nbformat.read(notebook, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        NotebookClient(read, timeout=SECONDS, resources=resources, record_timing=False).execute()
    return json.loads(nbformat.writes(read))


def shown(notebook: Notebook) -> list[list[str]]:
    """What the cells of code show: of each output the text that a page has of it."""
    return [
        [text for output in cell["outputs"] for text in _output(output)]
        for cell in notebook["cells"]
        if cell["cell_type"] == "code"
    ]


def as_page(notebook: Path) -> str:
    """The notebook as Markdown: texts, code, and what was shown when it ran."""
    read: Notebook = json.loads(notebook.read_text(encoding="utf-8"))
    parts: list[str] = []
    for cell in read["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
        else:
            parts.append(f"```python\n{source}\n```")
            parts += [text for output in cell["outputs"] for text in _output(output)]
    return "\n\n".join(parts) + "\n"


def _output(output: Mapping[str, Any]) -> Iterator[str]:
    """An output as Markdown: a picture, or text."""
    data: Mapping[str, Any] = output.get("data", {})
    if "image/svg+xml" in data:
        yield f"```{{raw}} html\n{''.join(data['image/svg+xml'])}\n```"
    elif "text/plain" in data or "text" in output:
        text = "".join(data.get("text/plain", output.get("text", "")))
        yield f"```text\n{text.rstrip()}\n```"


def main() -> None:
    """Run all notebooks and write what they show into them."""
    for notebook in notebooks():
        text = json.dumps(executed(notebook), indent=1, ensure_ascii=False)
        notebook.write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
