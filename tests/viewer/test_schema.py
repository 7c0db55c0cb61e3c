"""What stands in a page, and what its server answers, is as `xckpt/viewer/schema.json` says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from jsonschema import Draft202012Validator

import xckpt
from tests.viewer.grids import random_grids
from xckpt.policies import EverySteps
from xckpt.viewer.leaves import checkpoint_page
from xckpt.viewer.model import Page
from xckpt.viewer.page import page_html
from xckpt.viewer.server import PageServer

SCHEMA = json.loads((Path(xckpt.__file__).parent / "viewer" / "schema.json").read_text())
STATE = {"w": np.array([[0.0, np.nan], [np.inf, 6.0]]), "list": [1, b"ab", None], "none": {}}


def in_page(html: str) -> Any:
    """The JSON in a page."""
    found = re.search(r'<script type="application/json" id="page">(.*?)</script>', html, re.DOTALL)
    assert found
    return json.loads(found[1])


def part(name: str) -> Draft202012Validator:
    """What validates a type of the schema."""
    return Draft202012Validator({"$ref": f"#/$defs/{name}", "$defs": SCHEMA["$defs"]})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from safetensors.numpy import save_file

    folder = tmp_path_factory.mktemp("schema")
    xckpt.save(folder / "ckpt", STATE, metadata={"by": "hand"})
    xckpt.save(folder / "other", {"w": np.zeros((2, 2)), "new": 1})
    xckpt.save(folder / "empty", {})
    xckpt.save(folder / "root", np.ones(3))
    save_file({"w": np.zeros((3, 4), np.float32)}, folder / "model.safetensors")
    with xckpt.CheckpointManager(folder / "run", save=[EverySteps(1)]) as run:
        for step in (1, 2):
            run.save(step, {"w": np.ones(2)}, metrics={"loss": 1 / step, "bad": float("nan")})
    return folder


PAGES: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("ckpt", "empty", "root", "model.safetensors", "run")},
    "run/step-00000001": {},
    "ckpt with all": {"plan": "mesh a=2\nhosts 2\nw: a, -\n*: -", "diff": "other"},
}


@pytest.mark.parametrize("name", PAGES)
def test_pages(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    page = in_page(xckpt.view(name.partition(" ")[0], **PAGES[name]).html(served=True))
    Draft202012Validator(SCHEMA).validate(page)
    assert ("plan" in page, "diff" in page) == ("all" in name, "all" in name)
    for wrong in ({**page, "other": 1}, {**page, "title": None}):
        with pytest.raises(jsonschema.ValidationError):
            Draft202012Validator(SCHEMA).validate(wrong)


def test_a_page_of_every_kind_of_grid() -> None:
    manifest, _ = random_grids(seed=5, count=60)
    html = page_html(Page("grids", "grids", checkpoint=checkpoint_page(manifest)))
    Draft202012Validator(SCHEMA).validate(in_page(html))


def test_answers_of_the_server(folder: Path) -> None:
    view = xckpt.view(folder / "ckpt")
    assert view.page.checkpoint is not None
    leaf = view.page.checkpoint.names.index("w")
    questions = {
        f"values?leaf={leaf}&down=0&across=1&at=0,0": "PlaneValues",
        "plan?text=a+on+a%3D2": "PlanShown",
        f"diff?other={folder / 'other'}": "DiffPage",
    }
    with PageServer(view) as server:
        for question, name in questions.items():
            status, _, content = server.answer(f"/{server.token}/{question}")
            assert status == 200, content
            part(name).validate(json.loads(content))
            with pytest.raises(jsonschema.ValidationError):
                part(name).validate({**json.loads(content), "other": 1})


def test_a_step_names_the_steps_beside_it(folder: Path) -> None:
    page = xckpt.view(folder / "run").step("step-00000001").page
    assert [Path(each).name for each in page.beside] == ["step-00000002"]
