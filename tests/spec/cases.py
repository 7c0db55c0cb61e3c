"""The language-neutral cases in spec/cases: inputs, and what the code makes of them.

`names` are key paths, leaf names and zarr paths; `values` Python values and their texts; `grids`
boxes and the zarr arrays chosen for them; `reads` the chunks that a wanted box meets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise, product
from typing import Any

from xckpt.core.geometry.box import Boxes
from xckpt.core.geometry.box_lookup import intersect
from xckpt.core.geometry.grid import Grid, GridOptions, cells, choose_grid, count_cells
from xckpt.core.names import KeyPath, join_keys, split_name, zarr_path
from xckpt.core.values import encode_value, value_kind

KEY_PATHS: tuple[KeyPath, ...] = (
    (), ("",), ("w",), ("model", "layers.0.weight"), ("opt", 0, "mu"), ("opt", "0", "mu"), (-1,),
    ("-1",), ("-0",), ("007",), (2**63 - 1,), (-(2**63),), ("9223372036854775808",), ("1" * 20,),
    ("a/b",), ("a", "b"), ("a.b",), ("a%b",), ("%",), ("%2F",), ("%30",), ("a", ""), ("", "a"),
    (".",), ("..",), ("...",), (".hidden",), ("a.",), ("a ",), (" ",), ("__x",), ("_x",),
    ("a.__lock",), (".__lock",),
    ("zarr.json",), ("xckpt.json",), ("xckpt.digests",), ("xckpt.packs",), ("xckpt.saving",),
    (".generations",),
    ("%root",), ("c",), ("c", 0), ("naïve",), ("na\u0131\u0308ve",), ("日本",), ("🜁",), ("\n",),
    ("\0",), ("\\",), ("a:b*?<>|\"'~",), ("-_.%+@=,() ",), ("x" * 160,), ("x" * 161,), ("ü" * 27,),
    ("ü" * 26,), ("/" * 60,),
)  # fmt: skip

NO_NAMES = (
    "/", "a/", "/a", "a//b", "-0", "%41", "%2f", "a%2", "%%", "0%30", "a%25%", "%ZZ", "a%",
    "/".join("a" * 65),
)  # fmt: skip

VALUES: tuple[object, ...] = (
    None, True, False, 0, 1, -255, 2**64, 0.0, -0.0, 0.1, 1e16, 1e-5, 5e-324, float("inf"),
    float("-inf"), float("nan"), 1.5 - 0j, complex("nan-infj"), "", "a", "ü\n", "\\", "\\u0041",
    "\ud800", "🜁", b"", b"hi", bytes(range(8)),
)  # fmt: skip

NO_VALUES = (
    ("None", "None"), ("bool", "true"), ("int", "7"), ("int", "0X7"), ("int", "0x"),
    ("int", " 0x1"), ("float", "1."), ("float", "+1.0"), ("float", "1_0"), ("float", "Infinity"),
    ("complex", "1.0"), ("complex", "1.0, 2.0"), ("str", "\\"), ("str", "\\n"),
    ("str", "\\u00E9"), ("bytes", "aGk"), ("bytes", "a Gk="), ("set", ""),
)  # fmt: skip

Box = tuple[list[int], list[int]]


def names() -> dict[str, object]:
    """Key paths with their names and paths, and names that are none."""
    found = []
    for keys in KEY_PATHS:
        name = join_keys(keys)
        assert split_name(name) == keys
        found.append({"keys": list(keys), "name": name, "path": zarr_path(name)})
    return {"names": found, "no_names": list(NO_NAMES)}


def values() -> dict[str, object]:
    """Texts of values; ``python`` is the value as Python writes it."""
    found = [
        {"type": value_kind(value), "text": encode_value(value), "python": ascii(value)}
        for value in VALUES
    ]
    return {"values": found, "no_values": [{"type": t, "text": text} for t, text in NO_VALUES]}


def tilings() -> Iterator[tuple[list[int], list[Box]]]:
    """Shapes and boxes that cover them."""
    yield [], [([], [])]
    yield [0, 3], []
    yield [7], [([0], [7])]
    for shape, cuts in (
        ([16], [[4, 8, 12]]),
        ([10], [[4, 8]]),
        ([13], [[3, 7]]),
        ([101], [[7, 20]]),
        ([8, 8], [[4], [4]]),
        ([12, 10], [[4, 8], [5]]),
        ([11, 6], [[4, 8], [2, 4]]),
        ([6, 5, 4], [[3], [], [2]]),
        ([1, 9, 2], [[], [3, 6], []]),
    ):
        yield shape, _tiles(shape, cuts)
    yield [5, 6], [([0, 0], [2, 6]), ([2, 0], [3, 1]), ([2, 1], [3, 5])]
    yield [31, 7], [([0, 0], [13, 7]), ([13, 0], [18, 3]), ([13, 3], [18, 4])]


def _tiles(shape: Sequence[int], cuts: Sequence[Sequence[int]]) -> list[Box]:
    bounds = [[0, *cut, size] for cut, size in zip(cuts, shape, strict=True)]
    spans = product(*(list(pairwise(bound)) for bound in bounds))
    return [([a for a, _ in span], [b - a for a, b in span]) for span in spans]


def grids() -> list[dict[str, object]]:
    """Which zarr arrays this writer chooses for boxes; other writers may choose others."""
    found: list[dict[str, object]] = []
    for shape, boxes in tilings():
        for item, chunk_bytes, shard_bytes in ((4, 64, 0), (1, 4, 0), (4, 1 << 20, 0), (2, 16, 64)):
            grid = _grid(shape, boxes, item, chunk_bytes, shard_bytes)
            options = {"chunk_bytes": chunk_bytes, "shard_bytes": shard_bytes}
            listed = [list(box) for box in boxes]
            case = {"shape": shape, "item_bytes": item, "boxes": listed, **options}
            found.append({**case, "regular": grid.is_regular(shape), "arrays": _arrays(grid)})
    return found


def _grid(shape: list[int], boxes: list[Box], item: int, chunk: int, shard: int) -> Grid:
    return choose_grid(shape, item, Boxes.of(boxes, rank=len(shape)), GridOptions(chunk, shard))


def _arrays(grid: Grid) -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    for number, box in enumerate(grid.arrays):
        array: dict[str, object] = {"offset": list(box.offsets), "shape": list(box.sizes)}
        array["chunk"] = grid.chunks[number].tolist()
        if grid.shards is not None:
            array["shard"] = grid.shards[number].tolist()
        found.append(array)
    return found


def reads() -> list[dict[str, object]]:
    """Which chunks a reader needs of a tensor's arrays for a box of it.

    A chunk is named by the number of its array, by its own number there in C order, by the number
    of its digest, by the key of its object below the leaf's path, and by its box in the tensor.
    """
    found: list[dict[str, object]] = []
    for shape, boxes in tilings():
        grid = _grid(shape, boxes, 2, 16, 0 if len(boxes) % 2 else 64)
        for wanted in _wishes(shape):
            case: dict[str, Any] = {"shape": shape, "arrays": _arrays(grid), "wanted": list(wanted)}
            found.append({**case, "reads": list(_reads(grid, shape, wanted))})
    return found


def _wishes(shape: list[int]) -> Iterator[Box]:
    yield [0] * len(shape), list(shape)
    if shape and 0 not in shape:
        yield [size // 2 for size in shape], [1] * len(shape)
        yield [size // 3 for size in shape], [size - size // 3 for size in shape]


def _reads(grid: Grid, shape: list[int], wanted: Box) -> Iterator[dict[str, object]]:
    if 0 in shape:
        return
    pairs = zip(grid.arrays, grid.chunks.tolist(), strict=True)
    firsts = list(accumulate((count_cells(box.sizes, chunk) for box, chunk in pairs), initial=0))
    _, numbers, shared = intersect(Boxes.of([wanted], rank=len(shape)), grid.arrays)
    for number, part in zip(numbers.tolist(), shared, strict=True):
        array, chunk = grid.arrays[number], grid.chunks[number].tolist()
        low = [a - b for a, b in zip(part.offsets, array.offsets, strict=True)]
        high = [a + n for a, n in zip(low, part.sizes, strict=True)]
        for cell, box in zip(*cells(low, high, array.sizes, chunk), strict=True):
            offsets = [a + b for a, b in zip(box.offsets, array.offsets, strict=True)]
            unit = grid.units[number].tolist()
            key = ["c", *(str(o // u) for o, u in zip(box.offsets, unit, strict=True))]
            yield {
                "array": number,
                "chunk": int(cell),
                "digest": firsts[number] + int(cell),
                "key": "/".join(key if grid.is_regular(shape) else [str(number), *key]),
                "box": [offsets, list(box.sizes)],
            }


def cases() -> dict[str, object]:
    """File name -> content."""
    return {
        "names.json": names(),
        "values.json": values(),
        "grids.json": grids(),
        "reads.json": reads(),
    }
