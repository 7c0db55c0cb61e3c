"""Write what spec/ and a page's schema take from the code: ``python -m tests.spec.generate``."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from tests.spec import example
from tests.spec.cases import cases
from tests.spec.schemas import page_schema, schemas

SPEC = Path(__file__).parent.parent.parent / "spec"
PAGE = SPEC.parent / "xckpt" / "viewer" / "schema.json"


def generated(folder: Path) -> dict[Path, str]:
    """Each generated file, and what is to be in it; ``folder`` is for a checkpoint."""
    found = {SPEC / "schemas" / name: _pretty(schema) for name, schema in schemas().items()}
    found |= {SPEC / "cases" / name: _lines(content) for name, content in cases().items()}
    found[PAGE] = _pretty(page_schema())
    example.save(folder / "ckpt")
    text = SPEC / "example.md"
    found[text] = example.written(text.read_text(), folder / "ckpt")
    return found


def _pretty(content: object) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def _lines(content: object) -> str:
    """JSON with a case a line."""
    if isinstance(content, list):
        return "[\n" + ",\n".join(json.dumps(case) for case in content) + "\n]\n"
    assert isinstance(content, dict)
    parts = [f"{json.dumps(key)}: {_lines(listed).rstrip()}" for key, listed in content.items()]
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        for file, content in generated(Path(temporary)).items():
            file.write_text(content)
            print(file.relative_to(SPEC.parent))
