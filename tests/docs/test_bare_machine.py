"""From a bare machine to a picture of one's own checkpoint: the three commands of the README.

A fresh environment in a temporary folder gets the wheel of this checkout, and what that depends on
from the registry that pip is set to; nothing of the environment of the tests is seen there.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import venv
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from hatchling.builders.wheel import WheelBuilder

import xckpt

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads((ROOT / "xckpt" / "viewer" / "schema.json").read_text())
HEADING = "## Three commands to look at your own checkpoint"


def commands() -> list[str]:
    """The lines of the block under the heading, without remarks."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    block = text.partition(HEADING)[2].partition("```\n")[2].partition("```")[0]
    return [line.partition("#")[0].strip() for line in block.splitlines()]


def test_there_are_three() -> None:
    install, *looks = commands()
    assert install == 'pip install "xckpt[cli]"'
    assert [look.split()[:2] for look in looks] == [["xckpt", "info"], ["xckpt", "view"]]


@pytest.mark.thorough
def test_three_commands_from_a_bare_machine_to_a_picture(tmp_path: Path) -> None:
    [wheel] = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    venv.create(tmp_path / "venv", with_pip=True)
    programs = tmp_path / "venv" / "bin"
    kept = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    kept |= {name: os.environ[name] for name in ("HOME", "TMPDIR") if name in os.environ}
    environ = {
        **kept,
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PIP_CONSTRAINT": str(ROOT / "tests" / "constraints.txt"),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    folder = tmp_path / "mine"
    folder.mkdir()
    state = {"model": {"w": np.arange(64, dtype=np.float32).reshape(8, 8)}, "step": 3}
    xckpt.save(folder / "ckpt", state)

    def run(command: str) -> str:
        done = subprocess.run(
            command,
            shell=True,
            cwd=folder,
            env=environ,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    install, info, view = commands()
    run(install.replace('"xckpt[cli]"', f"'xckpt[cli] @ {Path(wheel).as_uri()}'"))
    where = run('python -c "import xckpt; print(xckpt.__file__)"').strip()
    assert Path(where).is_relative_to(tmp_path / "venv")
    assert "model" in run(info)
    assert "ckpt.html" in run(view)
    html = (folder / "ckpt.html").read_text(encoding="utf-8")
    found = re.search(r'<script type="application/json" id="page">(.*?)</script>', html, re.DOTALL)
    assert found
    page = json.loads(found[1])
    jsonschema.validate(page, SCHEMA)
    assert page["checkpoint"]["names"] == ["model/w", "step"]
    assert page["checkpoint"]["kinds"][0]["shape"] == [8, 8]
    assert "torch" not in run("pip list")
