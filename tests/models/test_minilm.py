"""Trained weights through the BERT family: embeddings as torch's, and the way back bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models import minilm, moves
from tests.models.conftest import Note
from tests.models.oracle import flat


@pytest.mark.thorough
def test_there_and_back(tmp_path: Path, note: Note) -> None:
    params, there = minilm.there()
    note(there)
    assert there.difference <= minilm.TOLERANCE, there
    moves.same(flat(params), minilm.oracle_params())
    back = minilm.back(params, tmp_path)
    note(back)
    assert back.difference <= minilm.TOLERANCE, back
