"""The tables of figures in the pages, made from ``benchmarks/results.json`` and nothing else.

``python -m benchmarks.readme`` puts each between its two marks; a test compares them. A table whose
figures are not in the results is left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.oracle_loader import CONVERSION, FILES, PRETRAINED, XCKPT
from benchmarks.scale.summary import table

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results.json"
README = ROOT / "README.md"
PAGE = ROOT / "docs" / "why" / "performance.md"
"""All figures but those of deltas; README.md has a few of them."""
DELTAS = ROOT / "docs" / "deltas.md"
BEGIN = "<!-- figures: make bench -->\n"
BEGIN_SHORT = "<!-- figures in short: make bench -->\n"
BEGIN_SCALE = "<!-- figures of scale: python -m benchmarks.scale --all -->\n"
BEGIN_CONVERSION = "<!-- figures of conversions: make bench -->\n"
BEGIN_DELTAS = "<!-- figures of deltas: make bench -->\n"
END = "<!-- end of figures -->\n"
GIB = 1 << 30
MIB = 1 << 20
ROWS = (
    "xckpt, torch",
    "xckpt, JAX",
    "DCP, 1 thread",
    "DCP, 2 threads",
    "DCP through xckpt",
    "Orbax",
    "safetensors",
    "TensorStore, 8 MiB chunks",
    "TensorStore, a chunk a tensor",
    "plain files, 2 threads",
    "memcpy",
)
NOTES = {
    "DCP through xckpt": "DCP through **xckpt**",
    "xckpt, torch": "**xckpt**, torch",
    "xckpt, JAX": "**xckpt**, JAX",
    "safetensors": "safetensors, no digests, one process",
    "TensorStore, 8 MiB chunks": "raw TensorStore, 8 MiB chunks, no digests",
    "TensorStore, a chunk a tensor": "raw TensorStore, a chunk a tensor, no digests",
    "plain files, 2 threads": "the limit: `write` and `readinto`, 2 threads",
}
LOADER_NOTES = {
    XCKPT: "**xckpt**",
    CONVERSION: "transformers, `load_pytorch_checkpoint_in_flax_state_dict` alone",
    PRETRAINED: "transformers, `from_pretrained(from_pt=True)`",
}


IN_SHORT = ("xckpt, torch", "DCP, 2 threads", "Orbax", "safetensors", "plain files, 2 threads")


def in_short(results: Mapping[str, Any]) -> str:
    """The README's section, Markdown: the speed of the usual calls, and what resharding reads."""
    head, *table = _speed(results)
    labels = [f"| {NOTES.get(name, name)} " for name in IN_SHORT]
    # Without the last column, the memory.
    rows = [line.rsplit("|", 2)[0] + "|" for line in table if line.startswith(("| |", *labels))]
    over = {name: f"{_over(figure):.2f}" for name, figure in results["reshard"].items()}
    return "\n".join(
        [
            *(head, "", rows[0], "|---|---|---|---|", *rows[1:], ""),
            "Saved as rows by 4 ranks, loaded as columns by 4 ranks of one host: xckpt reads "
            f"{over['xckpt']} times the bytes wanted, DCP {over['DCP, 2 threads']}.",
            "",
        ]
    )


def _over(figure: Mapping[str, Any]) -> float:
    """Bytes read, over those wanted."""
    return (sum(figure["read"]) + sum(figure["mapped"])) / sum(figure["wanted"])


def section(results: Mapping[str, Any]) -> str:
    """The section of all figures, Markdown."""
    lines = [*_speed(results), "", *_reshard(results["reshard"]), ""]
    if "async" in results:
        lines += [*_async(results["async"]), ""]
    return "\n".join(lines)


def _speed(results: Mapping[str, Any]) -> Iterator[str]:
    size = results["state"]["bytes"]
    machine = results["machine"]
    yield (
        f"{size / GIB:.2f} GiB of GPT-2-medium-shaped float32, {machine['files']} files, "
        f"{machine['cores']} cores, "
        f"medians of {results['state']['rounds']} interleaved rounds, GiB/s:"
    )
    yield ""
    yield "| | save | load into memory | load new arrays | extra memory of a save, MiB |"
    yield "|---|---|---|---|---|"
    extra = {
        each["contender"]: each["anonymous"] for each in results["memory"] if each["work"] == "save"
    }
    for name in ROWS:
        if name not in results["speed"]:
            continue
        median = results["speed"][name]["median"]
        loads = [median[key] for key in median if key.startswith("load into memory")]
        into = f"{size / GIB / min(loads):.1f}" if loads else ""
        new = f"{size / GIB / median['load new arrays']:.1f}" if "load new arrays" in median else ""
        memory = f"{extra[name] / MIB:,.0f}" if name in extra else ""
        label = NOTES.get(name, name)
        yield f"| {label} | {size / GIB / median['save']:.1f} | {into} | {new} | {memory} |"


def _reshard(figures: Mapping[str, Any]) -> Iterator[str]:
    yield "Saved as rows by 4 ranks, loaded as columns by 4 ranks of one host:"
    yield ""
    yield "| | seconds | bytes read, over those wanted |"
    yield "|---|---|---|"
    for name, figure in figures.items():
        label = NOTES.get(name, "**xckpt**" if name == "xckpt" else name)
        yield f"| {label} | {figure['median']['load_columns']:.2f} | {_over(figure):.2f} |"


def _async(figures: Mapping[str, Any]) -> Iterator[str]:
    yield "How long a save in the background blocks training, in warm memory copies of the state:"
    yield ""
    yield "| | first save | later saves |"
    yield "|---|---|---|"
    for name, copies in figures["copies"].items():
        label = f"**xckpt**{name.removeprefix('xckpt')}" if name.startswith("xckpt") else name
        yield f"| {label} | {copies['first']:.2f} | {copies['later']:.2f} |"
    yield f"| **xckpt**, JAX arrays | {max(figures['jax']) * 1e3:.0f} ms at most | |"


def conversion(figures: Mapping[str, Any]) -> str:
    """The table of the loaders of a Hugging Face folder, and what a conversion takes; Markdown."""
    loading = figures["loading"]
    kinds = [f"`{FILES[each['file']]}`" for each in loading]
    lines = [
        f"BERT-base, {loading[0]['size'] / GIB:.2f} GiB, from a Hugging Face folder into Flax "
        "arrays, medians in seconds:",
        "",
        f"| | {' | '.join(kinds)} |",
        "|---" * (len(kinds) + 1) + "|",
    ]
    for loader, label in LOADER_NOTES.items():
        seconds = (f"{each['median'][loader]:.2f}" for each in loading)
        lines.append(f"| {label} | {' | '.join(seconds)} |")
    largest = max(figures["memory"], key=lambda each: each["size"])
    slowest = min(each["ratio"] for each in figures["speed"])
    lines += [
        "",
        f"`convert` takes {largest['above_interpreter'] / MIB:.0f} MiB of memory above the "
        f"interpreter for a model of {largest['size'] / GIB:.1f} GiB, and runs at {slowest:.2f} of "
        "the speed of a plain copy or better, transposes included.",
        "",
    ]
    return "\n".join(lines)


def deltas(results: Mapping[str, Any]) -> str:
    """The table of saves that write only what changed, Markdown."""
    lines = [
        f"{results['machine']['cores']} cores, {results['machine']['files']} files, medians:",
        "",
        "| what a step changes | state, MiB | written, MiB | a full save, s | with a base, s |",
        "|---|---|---|---|---|",
    ]
    for each in results["deltas"]:
        sizes = f"{each['state_bytes'] / MIB:,.0f} | {each['written_bytes'] / MIB:,.2f}"
        seconds = f"{median(each['full']):.2f} | {median(each['based']):.2f}"
        lines.append(f"| {each['case']} | {sizes} | {seconds} |")
    return "\n".join([*lines, ""])


def updated_readme(readme: str, results: Mapping[str, Any]) -> str:
    """The README with the figures of these results."""
    return _between(_between(readme, BEGIN_SHORT, in_short(results)), BEGIN_SCALE, table(results))


def updated(page: str, results: Mapping[str, Any]) -> str:
    """The page of all figures with the tables of these results."""
    converted = conversion(results["conversion"]) if "conversion" in results else ""
    return _between(_between(page, BEGIN, section(results)), BEGIN_CONVERSION, converted)


def updated_deltas(page: str, results: Mapping[str, Any]) -> str:
    """The page of deltas with the table of these results."""
    return _between(page, BEGIN_DELTAS, deltas(results))


def _between(readme: str, begin: str, text: str) -> str:
    before, rest = readme.split(begin, 1)
    return f"{before}{begin}{text}{END}{rest.split(END, 1)[1]}"


def main() -> None:
    """Bring the pages up to date."""
    results = json.loads(RESULTS.read_text())
    PAGE.write_text(updated(PAGE.read_text(), results))
    README.write_text(updated_readme(README.read_text(), results))
    DELTAS.write_text(updated_deltas(DELTAS.read_text(), results))


if __name__ == "__main__":
    main()
