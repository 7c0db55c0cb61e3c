"""What converting a model costs: memory above the interpreter, and speed beside a plain copy.

1. The model is a decoder of a given size in torch's layout, as a checkpoint of xckpt: fused query,
   key and value, fused gate and up, all linear weights to be transposed, and one projection to be
   stacked over the layers. Its elements are random bits, made as they are written, so that a model
   of any size takes no memory.
2. Memory: a process converts a small model first, so that imports and threads are paid for, then
   the large one, while another watches (see `probe`). The figure that is held to its bar is counted
   from a bare interpreter: the imports are in it.
3. Speed: in one process, by turns, the conversion and two plain copies: a load and a save, and a
   conversion without a mapping, which streams. The bar is held against the faster of the two.
   Everything lies in memory-backed files where there are any, so that the disk is not an excuse.
4. Speed beside transformers' own loader: see `oracle_loader`.

``python -m benchmarks.run --section conversion`` runs this part alone.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import oracle_loader
from benchmarks.oracle_loader import Loading
from benchmarks.probe import memory_of, serve, watch

WIDTH, HEADS_WIDTH, HIDDEN, WORDS = 2048, 512, 5632, 32000
QUICK = 16
"""How many times a quick model is narrower."""
SIZES = (4, 8)
"""GiB of the models whose memory is watched."""
SPEED_SIZE = 2
"""GiB of the model that is timed."""
DTYPES = ("bfloat16", "float32")
CONVERSION, LOAD_SAVE, STREAMED = "by a mapping", "xckpt.load and save", "without a mapping"
CONTENDERS = (CONVERSION, LOAD_SAVE, STREAMED)

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Memory:
    """What one conversion took, in bytes."""

    size: int
    """Bytes of the model."""
    above_imports: int
    """Allocated memory at its peak, above what the process held when it began."""
    above_interpreter: int
    """The same above a bare interpreter."""
    seconds: float


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds of each contender, by turns, for one dtype."""

    dtype: str
    size: int
    seconds: dict[str, list[float]]

    def median(self, contender: str) -> float:
        """The usual seconds of one contender."""
        return statistics.median(self.seconds[contender])

    def ratio(self) -> float:
        """Speed of the conversion in that of the faster plain copy."""
        return min(self.median(LOAD_SAVE), self.median(STREAMED)) / self.median(CONVERSION)


@dataclass(frozen=True, slots=True)
class Conversion:
    """All figures of this part."""

    memory: list[Memory]
    speed: list[Speed]
    loading: list[Loading]


def shapes(gibibytes: float, item: int, quick: bool = False) -> Shapes:
    """Names and shapes of a model of about ``gibibytes`` GiB with ``item`` bytes an element."""
    width, heads, hidden, words = (
        size // QUICK if quick else size for size in (WIDTH, HEADS_WIDTH, HIDDEN, WORDS)
    )
    layer: Shapes = {
        "attention.qkv.weight": (width + 2 * heads, width),
        "attention.out.weight": (width, width),
        "mlp.gate_up.weight": (2 * hidden, width),
        "mlp.down.weight": (width, hidden),
        "norm.weight": (width,),
    }
    outside: Shapes = {"embed.weight": (words, width), "head.weight": (words, width)}
    room = gibibytes * (1 << 30) / (QUICK**2 if quick else 1) / item - _elements(outside)
    layers = max(1, round(room / _elements(layer)))
    blocks = {f"layers.{n}.{name}": shape for n in range(layers) for name, shape in layer.items()}
    return outside | blocks


def _elements(shapes: Shapes) -> int:
    return sum(prod(shape) for shape in shapes.values())


def write_model(path: Path, shapes: Shapes, dtype: str) -> None:
    """Save a model of random bits without holding it in memory."""
    import xckpt
    from xckpt.core.dtypes import numpy_dtype
    from xckpt.core.geometry.box import Boxes
    from xckpt.core.leaf import LazySource

    item = numpy_dtype(dtype).itemsize
    # Below 2: no NaN, so that a difference would be seen.
    noise = np.random.default_rng(0).integers(0, 0x3F, 1 << 26, np.uint8)

    def bits(number: int, shape: tuple[int, ...], index: int) -> np.ndarray:
        size = prod(shape) * item
        shift = number * 4099 % len(noise)
        return np.resize(noise[shift:], size).view(numpy_dtype(dtype)).reshape(shape)

    state: dict[str, Any] = {
        name: LazySource(shape, dtype, Boxes.whole(shape), partial(bits, number, shape))
        for number, (name, shape) in enumerate(shapes.items())
    }
    xckpt.save(path, state)


def mapping(shapes: Shapes) -> Any:
    """The mapping to a layout of the other framework: every linear weight is transposed."""
    from xckpt.convert import Mapping, Rule
    from xckpt.mapping.operations import Split, Stack, Transpose

    width = shapes["embed.weight"][1]
    heads = (shapes["layers.0.attention.qkv.weight"][0] - width) // 2
    hidden = shapes["layers.0.mlp.gate_up.weight"][0] // 2
    layers = sum(name.endswith("norm.weight") for name in shapes)
    turned = Transpose((1, 0))
    block = "layers/{layer}/"
    return Mapping(
        [
            Rule("embed.weight", "embed/embedding"),
            Rule("head.weight", "head/kernel", [turned]),
            Rule(
                "layers.{layer}.attention.qkv.weight",
                [f"{block}{part}/kernel" for part in ("query", "key", "value")],
                [Split((width, heads, heads)), turned],
            ),
            Rule("layers.{layer}.attention.out.weight", f"{block}out/kernel", [turned]),
            Rule(
                "layers.{layer}.mlp.gate_up.weight",
                [f"{block}{part}/kernel" for part in ("gate", "up")],
                [Split((hidden, hidden)), turned],
            ),
            Rule(
                "layers.{layer}.mlp.down.weight",
                "layers/down/kernel",
                [turned, Stack("layer")],
                {"layer": (0, layers)},
            ),
            Rule("layers.{layer}.norm.weight", f"{block}norm/scale"),
        ]
    )


def run(
    in_memory: Path, on_disk: Path, rounds: int, quick: bool, tell: Callable[[str], None]
) -> Conversion:
    """Watch the memory of conversions on disk, and time others in memory; quick: one of each."""
    memory: list[Memory] = []
    for size in SIZES[:1] if quick else SIZES:
        tell(f"memory of converting {size} GiB")
        with tempfile.TemporaryDirectory(prefix="xckpt-bench-", dir=on_disk) as folder:
            _ask("write", folder, str(size), quick)
            memory.append(_watch(Path(folder), size, quick))
    speed: list[Speed] = []
    for dtype in DTYPES[:1] if quick else DTYPES:
        tell(f"speed of converting {SPEED_SIZE} GiB of {dtype}")
        with tempfile.TemporaryDirectory(prefix="xckpt-bench-", dir=in_memory) as folder:
            found = _ask("time", folder, dtype, quick, str(rounds))
            speed.append(Speed(dtype, found["size"], found["seconds"]))
    return Conversion(memory, speed, oracle_loader.run(in_memory, rounds, quick, tell))


def _ask(what: str, folder: str, choice: str, quick: bool, *more: str) -> dict[str, Any]:
    """What a separate process measures."""
    command = [sys.executable, "-m", "benchmarks.conversion", what, folder, choice, *more]
    done = subprocess.run(
        [*command, *(["quick"] if quick else [])], stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def _watch(folder: Path, size: int, quick: bool) -> Memory:
    arguments = ("benchmarks.conversion", "watched", str(folder), str(size))
    peak = watch((*arguments, "quick") if quick else arguments)
    held = peak.answer["held"] - peak.answer["bare"]
    return Memory(
        peak.answer["size"], peak.anonymous, peak.anonymous + held, peak.answer["seconds"]
    )


def _write(folder: Path, size: int, quick: bool) -> dict[str, Any]:
    write_model(folder / "source", shapes(size, 2, quick), DTYPES[0])
    write_model(folder / "small", shapes(0.1, 2, quick=True), DTYPES[0])
    return {}


def _watched(folder: Path, size: int, quick: bool, bare: int) -> None:
    from xckpt.convert import convert

    small = shapes(0.1, 2, quick=True)
    convert(folder / "small", folder / "small-converted", mapping=mapping(small))
    model = shapes(size, 2, quick)
    rules = mapping(model)
    held = memory_of()["RssAnon"]

    def work() -> dict[str, Any]:
        start = time.perf_counter()
        done = convert(folder / "source", folder / "converted", mapping=rules)
        seconds = time.perf_counter() - start
        return {"bare": bare, "held": held, "size": done.bytes, "seconds": seconds}

    serve(work)


def _time(folder: Path, dtype: str, rounds: int, quick: bool) -> dict[str, Any]:
    import xckpt
    from xckpt.convert import convert
    from xckpt.core.dtypes import item_size

    model = shapes(SPEED_SIZE, item_size(dtype), quick)
    rules = mapping(model)
    source, target = folder / "source", folder / "target"
    write_model(source, model, dtype)
    work: dict[str, Callable[[], object]] = {
        CONVERSION: lambda: convert(source, target, mapping=rules),
        LOAD_SAVE: lambda: xckpt.save(target, xckpt.load(source)),
        STREAMED: lambda: convert(source, target),
    }
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for number in range(rounds + 1):
        for name, once in work.items():
            start = time.perf_counter()
            once()
            # The first round pays for imports and for memory that the machine has not given yet.
            if number:
                seconds[name].append(time.perf_counter() - start)
            shutil.rmtree(target)
    return {"size": _elements(model) * item_size(dtype), "seconds": seconds}


def main(arguments: Sequence[str]) -> None:
    """One of this part's processes."""
    bare = memory_of()["RssAnon"]
    quick = "quick" in arguments
    what, folder, choice = arguments[0], Path(arguments[1]), arguments[2]
    if what == "watched":
        _watched(folder, int(choice), quick, bare)
        return
    if what == "write":
        found = _write(folder, int(choice), quick)
    else:
        found = _time(folder, choice, int(arguments[3]), quick)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
