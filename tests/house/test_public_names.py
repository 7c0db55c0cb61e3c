"""The public names are these: adding one is a decision, losing one breaks callers."""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import re
from pathlib import Path

import pytest

import xckpt
from xckpt import errors

ERRORS = {
    "CheckpointExistsError",
    "CheckpointReplacedError",
    "CorruptCheckpointError",
    "LeafTooLargeError",
    "ManifestError",
    "MappingError",
    "MemoryLimitError",
    "NotACheckpointError",
    "PathError",
    "PlanError",
    "Problem",
    "RankFailure",
    "NoGroupError",
    "RanksFailedError",
    "StorageError",
    "TreeMismatchError",
    "UnsafePickleError",
    "UnsupportedLeafError",
    "VersionError",
    "XckptError",
}
METADATA = {
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "Sharding",
    "TensorProperties",
    "TensorStorageMetadata",
}
PLANNER = {
    "DefaultLoadPlanner",
    "DefaultSavePlanner",
    "GridOptions",
    "LoadItemType",
    "LoadPlan",
    "LoadPlanner",
    "ReadItem",
    "SavePlan",
    "SavePlanner",
    "TensorWriteData",
    "WriteItem",
    "WriteItemType",
}
NAMES = {
    "xckpt": ERRORS
    | {"ChunkStorageMetadata", "Metadata", "MetadataIndex", "TensorProperties"}
    | {"LoadOptions", "LoadReport", "Metrics", "Progress", "SaveOptions", "__version__"}
    | {"load", "load_into", "load_state_dict", "open", "save", "save_state_dict"}
    | {"Difference", "diff"}
    | {"copy", "delete", "exists", "gc", "view"}
    | {"SaveFuture", "save_async"}
    | {"Checkpoint", "StoredArray"}
    | {"CheckpointManager", "StepRecord"}
    | {"Group", "LocalGroup", "PerRank"},
    "xckpt.adapters": {"Adapter", "ArrayAdapter", "register", "unregister"}
    | {"Box", "Boxes", "Copyable", "SourceLeaf", "TargetLeaf"},
    "xckpt.errors": ERRORS,
    "xckpt.metadata": METADATA,
    "xckpt.planner": PLANNER,
    "xckpt.policies": {"FirstStep", "OnPreemption", "OnSteps", "SavePolicy", "WhenIdle", "Moment"}
    | {"All", "Best", "KeepPolicy", "Latest", "EveryMinutes", "EverySteps", "StepRecord"}
    | {"Temporary"},
    "xckpt.convert": {"Mapping", "ResolvedMapping", "Rule", "StridedCopy", "TensorSpec"}
    | {"Inference", "convert", "family", "infer", "with_optimizer"},
    "xckpt.mapping.operations": {"Each", "Exactness", "Operation"}
    | {"Add", "Cast", "Rearrange", "Reshape", "Rope", "Scale", "Transpose"}
    | {"Concatenate", "Deinterleave", "GroupedDeinterleave", "GroupedInterleave", "Interleave"}
    | {"Constant", "Drop", "Pad", "Split", "Stack", "Strip", "Tie", "Unstack", "Untie"},
    "xckpt.staging": {"AsyncStager", "BlockingAsyncStager"},
    "xckpt.torch.dcp": {
        "XckptStorageReader",
        "XckptStorageWriter",
        "export_checkpoint",
        "import_checkpoint",
        "install",
        "installed",
        "uninstall",
    },
    "xckpt.storage": {
        "StorageReader",
        "StorageWriter",
        "ZarrStorageReader",
        "ZarrStorageWriter",
    },
}
SIGNATURES = {
    "save": "path, state, *, overwrite=False, base=None, metadata=None, planner=None, group=None,"
    " no_dist=False, timeout=None, options=None",
    "save_async": "path, state, *, stager=None, overwrite=False, base=None, metadata=None,"
    " planner=None, group=None, no_dist=False, timeout=None, options=None",
    "load": "path, like=None, *, at='', select=None, framework=None, device=None, strict=True,"
    " missing=None, unexpected=None, cast=False, planner=None, group=None, no_dist=False,"
    " timeout=None, options=None, mapping=None, allow_lossy=False, report=None",
    "load_into": "path, state, *, at='', select=None, strict=True, missing=None, unexpected=None,"
    " cast=False, planner=None, group=None, no_dist=False, timeout=None, options=None,"
    " mapping=None, allow_lossy=False",
    "diff": "first, second, *, values=False, options=None",
    "open": "path, *, options=None",
    "exists": "path",
    "gc": "path, *, dry_run=False, older_than=None, options=None",
    "delete": "path, *, options=None",
    "copy": "source, target, *, overwrite=False, options=None",
    "save_state_dict": "state_dict, storage_writer, *, process_group=None, coordinator_rank=0,"
    " no_dist=False, planner=None",
    "load_state_dict": "state_dict, storage_reader, *, process_group=None, coordinator_rank=0,"
    " no_dist=False, planner=None",
}


@pytest.mark.parametrize("module", NAMES)
def test_a_module_offers_these_names(module: str) -> None:
    imported = importlib.import_module(module)
    assert set(imported.__all__) == NAMES[module]
    assert len(imported.__all__) == len(NAMES[module])
    assert NAMES[module] <= set(dir(imported))  # as completion asks
    for name in imported.__all__:
        assert getattr(imported, name) is not None


def test_a_user_can_complete_every_public_name_and_no_other() -> None:
    """And a type checker knows each submodule."""
    public = {module.split(".")[1] for module in NAMES if module.count(".") == 1}
    assert set(dir(xckpt)) == {*xckpt.__all__, *public}
    source = inspect.getsource(xckpt).split("if TYPE_CHECKING:")[1].split("__version__")[0]
    known = set(re.findall(r"from xckpt import (\w+) as \1$", source, re.MULTILINE))
    assert known == public


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_functions_take_these_arguments(name: str) -> None:
    function = getattr(xckpt, name)
    bare = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in inspect.signature(function).parameters.values()
    ]
    assert str(inspect.Signature(bare)) == f"({SIGNATURES[name]})"
    home = "xckpt.state_dict" if name.endswith("_state_dict") else "xckpt.api."
    assert function.__module__.startswith(home)


def test_the_tree_of_errors_is_the_one_drawn() -> None:
    drawn = re.findall(r"^ *([│├└─ ]*)(\w+Error)\b(.*)$", errors.__doc__ or "", re.MULTILINE)
    parents: list[str] = []
    found: set[str] = set()
    for branch, name, rest in drawn:
        depth = len(branch) // 4
        parents[depth:] = [name]
        error = getattr(errors, name)
        assert issubclass(error, getattr(errors, parents[depth - 1]) if depth else Exception)
        also = re.search(r"\(also an? (\w+)\)", rest)
        if also:
            assert issubclass(error, getattr(builtins, also[1]))
        found.add(name)
    assert found == ERRORS - {"Problem", "RankFailure"}


def run_together(definition: ast.FunctionDef | ast.ClassDef) -> list[str]:
    """Arguments that a docstring explains in the entry of another one."""
    section = re.search(r"^Args:\n((?: .*\n|\n)*)", f"{ast.get_docstring(definition)}\n", re.M)
    within = re.findall(r"[.;](?: |\n {5,})(\w+): ", section[1]) if section else []
    if not within:
        return []
    taken = {each.arg for each in ast.walk(definition) if isinstance(each, ast.arg)}
    return [name for name in within if name in taken]


def test_each_argument_has_an_entry_of_its_own() -> None:
    example = ast.parse(
        'def f(a, b):\n    """F.\n\n    Args:\n        a: one. b: two.\n    """'
    ).body[0]
    assert isinstance(example, ast.FunctionDef) and run_together(example) == ["b"]
    found = [
        f"{path}: {each.name}({name})"
        for path in Path(xckpt.__path__[0]).rglob("*.py")
        for each in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(each, ast.FunctionDef | ast.ClassDef)
        for name in run_together(each)
    ]
    assert found == []
