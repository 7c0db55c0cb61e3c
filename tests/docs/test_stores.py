"""What the pages of docs/stores show is so, on servers that speak the languages of S3 and GCS."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.test_pages import BLOCK, ROOT, run_blocks
from tests.support.servers import environment, gcs, s3

__all__ = ["environment", "gcs", "s3"]

STORES = {"s3": "s3", "gcs": "gcs"}


@pytest.mark.parametrize("page", STORES)
def test_a_page_of_a_store_runs(page: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(STORES[page])
    run_blocks(f"docs/stores/{page}.md", tmp_path, request)


def test_every_page_of_a_store_is_run() -> None:
    pages = (ROOT / "docs" / "stores").glob("*.md")
    assert {path.stem for path in pages if BLOCK.search(path.read_text())} == set(STORES)
