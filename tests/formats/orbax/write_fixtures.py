"""Writes a fixture with the release of Orbax that is installed: ``fixtures/orbax-VERSION.tar.xz``.

Run once for each release, in an environment of its own::

    python tests/formats/orbax/write_fixtures.py

| Orbax | Python | JAX | Flax | Optax |
|---|---|---|---|---|
| 0.4.8 | 3.10 | 0.4.26 | 0.8.3 | 0.2.3 |
| 0.5.23, 0.7.0 | 3.10 | 0.4.34 | 0.9.0 | 0.2.3 |
| 0.11.10 | 3.10 | 0.5.3 | 0.10.4 | 0.2.3 |
| 0.12.8 | 3.11 | 0.10.2 | 0.12.8 | 0.2.8 |

`trees.py` beside this file says what is saved: each tree alone (``single/NAME``), and all together
by a `CheckpointManager` (``root``), with metrics, a JSON item and custom metadata.
"""

from __future__ import annotations

import importlib.metadata
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from trees import CUSTOM, JSON, METRICS, keys, trees  # noqa: E402

VERSION = importlib.metadata.version("orbax-checkpoint")
NUMBERS = tuple(map(int, VERSION.split(".")))


def write_single(folder: Path, tree: Any) -> None:
    """One tree."""
    with_metadata: dict[str, Any] = {"custom_metadata": CUSTOM} if NUMBERS >= (0, 11) else {}
    checkpointer = ocp.PyTreeCheckpointer()
    if NUMBERS < (0, 5):
        checkpointer.save(folder, tree)
    else:
        checkpointer.save(folder, args=ocp.args.PyTreeSave(tree, **with_metadata))
    checkpointer.close()


def write_root(folder: Path, tree: Any) -> None:
    """Two steps of a manager that keeps metrics, a tree and JSON."""
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"])
    if NUMBERS < (0, 5):
        json_checkpointer = ocp.Checkpointer(ocp.JsonCheckpointHandler())
        by_name = {"state": ocp.PyTreeCheckpointer(), "dataset": json_checkpointer}
        manager = ocp.CheckpointManager(folder, by_name, options)
    else:
        manager = ocp.CheckpointManager(folder, item_names=("state", "dataset"), options=options)
    with_metadata: dict[str, Any] = {"custom_metadata": CUSTOM} if NUMBERS >= (0, 11) else {}
    for step in (2, 10):
        json = {**JSON, "step": step}
        if NUMBERS < (0, 5):
            manager.save(step, {"state": tree, "dataset": json}, metrics=METRICS)
            continue
        items = {"state": ocp.args.StandardSave(tree), "dataset": ocp.args.JsonSave(json)}
        manager.save(step, args=ocp.args.Composite(**items), metrics=METRICS, **with_metadata)
        manager.wait_until_finished()
    manager.close()


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        top = Path(temporary) / "made"
        (top / "single").mkdir(parents=True)
        everything = trees()
        if NUMBERS >= (0, 11):
            everything["keys"] = keys()
        for name, tree in everything.items():
            write_single(top / "single" / name, tree)
        write_root(top / "root", everything["train_state"])
        plain = ocp.CheckpointManager(top / "plain", ocp.PyTreeCheckpointer())
        plain.save(3, everything["optax"])
        plain.close()
        target = HERE / "fixtures" / f"orbax-{VERSION}.tar.xz"
        target.parent.mkdir(exist_ok=True)
        with tarfile.open(target, "w:xz") as archive:
            archive.add(top, ".")
        print(target, target.stat().st_size, jax.__version__)


if __name__ == "__main__":
    main()
