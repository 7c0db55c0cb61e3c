"""Libraries in place of CUDA's: torch's wheel is linked against them, nothing calls them on a CPU.

torch_xla needs the torch of PyPI. To import that, the loader looks up each function of CUDA's
libraries that torch names: 4 GB of wheels. `python tests/xla/stand_ins.py` puts libraries of these
names, whose functions end the process, beside torch's own. It needs a C compiler and `nm`.

1. A function that a library versions is listed by torch as ``name@library``.
2. NCCL and cuSPARSELt version nothing: their functions begin with their names.
"""

from __future__ import annotations

import subprocess
import sysconfig
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

LIBRARIES = {
    "libcublas.so.12": "libcublas.so.12",
    "libcublasLt.so.12": "libcublasLt.so.12",
    "libcudnn.so.9": "libcudnn.so.9",
    "libcufft.so.11": "libcufft.so.11",
    "libcurand.so.10": "libcurand.so.10",
    "libcusparse.so.12": "libcusparse.so.12",
    "libcusparseLt.so.0": "",
    "libnccl.so.2": "",
    "libnvshmem_host.so.3": "NVSHMEM",
}
"""Each, and the version that its functions have, if any."""

PREFIXES = {"nccl": "libnccl.so.2", "cusparseLt": "libcusparseLt.so.0"}


def wanted(folder: Path) -> Mapping[str, set[str]]:
    """The functions that torch wants of each library."""
    by_version = {version: name for name, version in LIBRARIES.items() if version}
    found: dict[str, set[str]] = defaultdict(set)
    for path in folder.glob("lib*.so"):
        command = ["nm", "--dynamic", "--undefined-only", path]
        listed = subprocess.run(command, check=True, capture_output=True, text=True)
        for line in listed.stdout.splitlines():
            name, _, version = line.split()[-1].partition("@")
            for prefix, library in PREFIXES.items():
                if name.startswith(prefix):
                    found[library].add(name)
            if version in by_version:
                found[by_version[version]].add(name)
    return found


def make(library: Path, functions: set[str], version: str) -> None:
    """A library whose functions end the process."""
    code = "".join(f"void {name}(void) {{ __builtin_trap(); }}\n" for name in sorted(functions))
    with tempfile.TemporaryDirectory() as scratch:
        source, exports = Path(scratch, "library.c"), Path(scratch, "exports")
        source.write_text(code)
        exports.write_text(f"{version} {{ global: *; }};\n")
        command = ["cc", "-shared", "-fPIC", "-nostdlib", "-w", source, "-o", library]
        command += [f"-Wl,-soname,{library.name}"]
        command += [f"-Wl,--version-script={exports}"] if version else []
        subprocess.run(command, check=True)


def main() -> None:
    folder = Path(sysconfig.get_path("purelib")) / "torch" / "lib"
    functions = wanted(folder)
    for name, version in LIBRARIES.items():
        make(folder / name, functions[name], version)


if __name__ == "__main__":
    main()
