"""Imports run one way, each outside library has one door, and the face is light.

1. `imports_of` lists what a module's source imports: at the top, in functions, under
   `TYPE_CHECKING`, and by `importlib.import_module` with a literal name.
2. `violations` holds each of these against `LAYERS` and `DOORS`.
3. A fresh interpreter imports `xckpt` and says what came with it and how long it took.
"""

from __future__ import annotations

import ast
import functools
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# A module may import from its own layer and from the layers before it.
LAYERS = {
    "core": ("xckpt.core", "xckpt.errors"),
    # Which adapters and groups there are; imports them by name only.
    "doors": (
        "xckpt.engine.adapters",
        "xckpt.engine.groups",
        "xckpt.engine.ranks.group",
        "xckpt.engine.ranks.launched",
    ),
    "mapping": ("xckpt.mapping",),
    "engine": (
        "xckpt.engine",
        "xckpt.options",
        "xckpt.progress",
        "xckpt.progress_bar",
    ),
    "storage": ("xckpt.storage",),
    "adapters": ("xckpt.numpy", "xckpt.torch", "xckpt.jax", "xckpt.zarr_dtypes"),
    "formats": ("xckpt.formats",),
    "convert": ("xckpt.convert",),
    "viewer": ("xckpt.viewer",),
    "torch's own checkpoints": ("xckpt.torch.dcp",),
    "surface": (
        "xckpt",
        "xckpt.adapters",
        "xckpt.api",
        "xckpt.manager",
        "xckpt.state_dict",
        "xckpt.planner",
        "xckpt.policies",
        "xckpt.metadata",
        "xckpt.staging",
    ),
    "cli": ("xckpt.cli", "xckpt.__main__"),
    "hooks": ("xckpt.integrations",),
}
SIBLINGS = LAYERS["adapters"]

# Who may import a library from outside; any other module may not.
DOORS = {
    "tensorstore": ("xckpt.storage",),
    "obstore": ("xckpt.storage.buckets.server_side",),
    "google_crc32c": ("xckpt.storage",),
    "xxhash": ("xckpt.storage", "xckpt.engine.ranks.compare"),
    "torch": ("xckpt.torch", "xckpt.integrations"),
    "torch_xla": ("xckpt.torch",),
    "jax": ("xckpt.jax",),
    "jaxlib": ("xckpt.jax",),
    "zarr": ("xckpt.zarr_dtypes",),
    "click": ("xckpt.cli",),
    "rich": ("xckpt.cli", "xckpt.progress_bar"),
    "matplotlib": ("xckpt.viewer.picture.plot",),
    # A trainer's package belongs to its hook.
    "lightning": ("xckpt.integrations.lightning",),
    "transformers": ("xckpt.integrations.hugging_face",),
    "torchtitan": ("xckpt.integrations.torchtitan",),
    "ray": ("xckpt.integrations.ray",),
    "torchft": ("xckpt.integrations.torchft",),
    "orbax": ("xckpt.integrations.orbax",),
}
PURE = {"numpy", "ml_dtypes", "msgspec", *sys.stdlib_module_names}
MAY_IMPORT = {"core": PURE, "mapping": PURE | {"tomli_w"}}
"""All that a pure layer may import from outside."""

HEAVY = ("torch", "jax", "tensorstore", "obstore", "zarr", "rich", "click")
IMPORT_SECONDS = 0.3
AS_NUMPY = 3
"""On a slow machine: so many times what NumPy's part of it takes there."""
IMPORTED_OWN = 100
"""Modules of xckpt that `import xckpt` may bring in. Seconds are judged in the thorough tier, for
they are not the same on two machines."""


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def sources(root: Path) -> dict[str, str]:
    """Module name -> source, of every module of the package."""
    paths = sorted((root / "xckpt").rglob("*.py"))
    return {module_name(path, root): path.read_text() for path in paths}


def imports_of(module: str, source: str, modules: Mapping[str, str]) -> Iterator[str]:
    """Full names of the modules that `source` imports, wherever the import stands."""
    is_package = any(other.startswith(f"{module}.") for other in modules)
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=base, names=names, level=level):
                above = package[: len(package) - level + 1] if level else []
                start = ".".join([*above, *([base] if base else [])])
                for alias in names:
                    inner = f"{start}.{alias.name}"
                    yield inner if inner in modules else start
            case ast.Call(
                func=ast.Attribute(attr="import_module")
                | ast.Name(id="import_module" | "__import__"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield name


@functools.cache
def imports_of_the_package() -> dict[str, tuple[str, ...]]:
    """Module -> full names of what it imports, of every module of the package."""
    modules = sources(ROOT)
    return {name: tuple(imports_of(name, source, modules)) for name, source in modules.items()}


def home(module: str, places: tuple[str, ...]) -> str | None:
    """The place that holds `module`; the bare package `xckpt` holds only itself."""
    for place in places:
        if module == place or (place != "xckpt" and module.startswith(f"{place}.")):
            return place
    return None


def layer_of(module: str) -> str | None:
    """The layer of the longest place that holds a module."""
    homes = {name: home(module, places) or "" for name, places in LAYERS.items()}
    layer = max(homes, key=lambda name: len(homes[name]))
    return layer if homes[layer] else None


def fault(module: str, imported: str) -> str | None:
    """What is wrong with `module`, or with its import of `imported` ("" for none)."""
    top = imported.split(".")[0]
    layer = layer_of(module)
    if layer is None:
        return f"{module} has no layer: give it one in LAYERS"
    if not imported:
        return None
    if top != "xckpt":
        if layer in MAY_IMPORT and top not in MAY_IMPORT[layer]:
            return f"{module} imports {imported}: the {layer} is pure"
        if top in DOORS and not home(module, DOORS[top]):
            return f"{module} imports {imported}: only {', '.join(DOORS[top])} may"
        return None
    order = list(LAYERS)
    below = layer_of(imported)
    if below is None:
        return f"{imported} has no layer: give it one in LAYERS"
    if order.index(below) > order.index(layer):
        return f"{module} ({layer}) imports {imported} ({below}): imports run one way"
    here, there = home(module, SIBLINGS), home(imported, SIBLINGS)
    if here and there and here != there:
        return f"{module} imports {imported}: adapters do not know each other"
    return None


def violations(imports: Mapping[str, Iterable[str]]) -> list[str]:
    found = {
        problem
        for module, names in imports.items()
        for imported in ("", *names)
        if (problem := fault(module, imported))
    }
    return sorted(found)


def test_imports_run_one_way() -> None:
    imports = imports_of_the_package()
    assert "xckpt.core.geometry.box" in imports
    assert violations(imports) == []


@pytest.mark.parametrize(
    "module, source, words",
    [
        ("xckpt.core.geometry.box", "import torch", "the core is pure"),
        ("xckpt.core.geometry.box", "import xxhash", "the core is pure"),
        ("xckpt.core.geometry.box", "def f():\n    import jax.numpy", "the core is pure"),
        ("xckpt.core.geometry.box", "from xckpt import storage", "imports run one way"),
        ("xckpt.core.geometry.box", "from ... import engine", "imports run one way"),
        ("xckpt.core.geometry.box", "from ...storage import writer", "imports run one way"),
        (
            "xckpt.core.geometry.box",
            "import importlib\nimportlib.import_module('xckpt.torch')",
            "one way",
        ),
        ("xckpt.errors", "import xckpt", "imports run one way"),
        ("xckpt.mapping.rule", "import tomli_w, xckpt.core", None),
        ("xckpt.mapping.rule", "import tensorstore", "the mapping is pure"),
        ("xckpt.mapping.rule", "from xckpt.engine import save", "imports run one way"),
        ("xckpt.mapping.rule", "import xckpt.formats.source", "imports run one way"),
        ("xckpt.formats.source", "from xckpt import convert", "imports run one way"),
        (
            "xckpt.engine.save",
            "if TYPE_CHECKING:\n    from torch import Tensor",
            "only xckpt.torch, xckpt.integrations may",
        ),
        ("xckpt.engine.save", "from xckpt.storage import x", "imports run one way"),
        ("xckpt.storage.write_checkpoint", "import xckpt.numpy", "imports run one way"),
        ("xckpt.storage.write_checkpoint", "import zarr", "only xckpt.zarr_dtypes may"),
        ("xckpt.torch", "import tensorstore as ts", "only xckpt.storage may"),
        ("xckpt.torch", "from .jax import arrays", None),
        ("xckpt.torch", "from ..jax import arrays", "adapters do not know each other"),
        ("xckpt.torch.sharded.dtensor", "import xckpt.numpy", "adapters do not know each other"),
        ("xckpt.torch.sharded.dtensor", "from xckpt.cli import main", "imports run one way"),
        (
            "xckpt.torch.sharded.dtensor",
            "import torch\nfrom ..core import boxes\nimport xckpt.storage",
            None,
        ),
        ("xckpt.torch.dcp.writer", "import torch, xckpt.convert.run", None),
        ("xckpt.torch.dcp.writer", "import xckpt.jax", "adapters do not know each other"),
        ("xckpt.torch.group", "import xckpt.torch.dcp", "imports run one way"),
        ("xckpt.convert.run", "import xckpt.torch.dcp.writer", "imports run one way"),
        ("xckpt.numpy", "import jax", "only xckpt.jax may"),
        ("xckpt.api", "import xckpt.torch\nimport xckpt.jax\nimport xckpt.engine.save", None),
        ("xckpt.api", "import rich", "only xckpt.cli, xckpt.progress_bar may"),
        ("xckpt.stray", "", "has no layer"),
        ("xckpt.api", "import xckpt.stray", "has no layer"),
    ],
)
def test_the_contract_notices(module: str, source: str, words: str | None) -> None:
    names = ("xckpt", "xckpt.engine.save", "xckpt.storage", "xckpt.torch.jax", "xckpt.jax.adapter")
    names += (
        "xckpt.convert",
        "xckpt.convert.run",
        "xckpt.formats.source",
        "xckpt.torch.dcp.writer",
    )
    found = violations({module: imports_of(module, source, dict.fromkeys((*names, module), ""))})
    assert len(found) == (words is not None)
    assert words is None or words in found[0]


def imported_by(code: str) -> tuple[set[str], float]:
    """The top-level modules that running `code` brings in, and its seconds of processor time.

    Not of the clock: a neighbour on the machine would count too. `make bench` reads the clock.
    """
    script = (
        "import json, sys, time\n"
        "start = time.process_time()\n"
        f"{code}\n"
        "seconds = time.process_time() - start\n"
        "print(json.dumps([sorted({name.split('.')[0] for name in sys.modules}), seconds]))"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    names, seconds = json.loads(done.stdout)
    return set(names), seconds


def test_importing_the_face_imports_no_framework() -> None:
    names, _ = imported_by("import xckpt")
    assert "xckpt" in names
    assert names.isdisjoint(HEAVY)


def test_importing_the_face_imports_little() -> None:
    """NumPy, msgspec and what they bring, the standard library, and a part of the package."""
    before, _ = imported_by("import ml_dtypes, msgspec, numpy, typing_extensions")
    count = "own = [name for name in sys.modules if name.startswith('xckpt')]"
    names, _ = imported_by(f"import xckpt; {count}; assert len(own) < {IMPORTED_OWN}, own")
    assert names - before - set(sys.stdlib_module_names) == {"xckpt"}


def test_a_public_submodule_comes_when_it_is_named() -> None:
    """Each in a fork of an interpreter that has imported the face alone."""
    code = """
import os, sys, xckpt
for name in ("adapters", "convert", "metadata", "planner", "policies", "staging", "storage"):
    if os.fork() == 0:
        assert getattr(xckpt, name).__name__ == f"xckpt.{name}"
        assert not {"torch", "jax"} & sys.modules.keys()
        assert ("tensorstore" in sys.modules) == (name in ("convert", "storage"))
        os._exit(0)
    assert os.wait()[1] == 0, name
"""
    imported_by(code)


@pytest.mark.thorough
def test_importing_the_face_is_quick() -> None:
    """The best of several runs, in each of which NumPy's import says how fast the machine is."""
    tries = range(8)
    limits = (max(IMPORT_SECONDS, AS_NUMPY * imported_by("import numpy")[1]) for _ in tries)
    assert any(imported_by("import xckpt")[1] < limit for limit in limits)


def test_a_heavy_or_slow_import_would_be_noticed() -> None:
    spin = "end = time.process_time() + 0.35\nwhile time.process_time() < end: pass"
    names, seconds = imported_by(f"import xckpt, tensorstore\n{spin}")
    assert not names.isdisjoint(HEAVY)
    assert seconds > IMPORT_SECONDS
