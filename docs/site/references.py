"""Where a reference in a docstring leads, if not to what Sphinx itself finds."""

# Sphinx is in an environment of its own.
# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import builtins
import contextlib
import functools
import importlib
import pkgutil
import sys
from typing import TYPE_CHECKING, Any

import xckpt

if TYPE_CHECKING:
    from docutils.nodes import Element
    from sphinx.addnodes import pending_xref
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment

OTHERS: tuple[str, ...] = (
    "collections",
    "dask",
    "dcp",
    "jax",
    "msgspec",
    "np",
    "numpy",
    "os",
    "tensorstore",
)
OTHERS += ("torch", "ts", "typing", "zarr")
"""Libraries whose names are only text here."""


def resolve(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, content: Element
) -> Element | None:
    """The link, or the plain text, for a reference that Sphinx does not know.

    Returns:
        None if there is nothing of the name: Sphinx then warns.
    """
    if node.get("refdomain") != "py":
        return None
    target = str(node["reftarget"])
    found = _public(env, target)
    if found is not None:
        domain: Any = env.get_domain("py")
        return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", found, node, content)
    here = [str(node.get(key) or "") for key in ("py:module", "py:class")]
    return content if exists(target, *here) else None


def _public(env: BuildEnvironment, target: str) -> str | None:
    """The documented object that a name means: by its last part, or its last two."""
    parts = target.split(".")
    objects: dict[str, Any] = env.domaindata["py"]["objects"]
    known = [name for name, entry in objects.items() if not entry.aliased]
    for count in (2, 1):
        ending = ".".join(parts[-count:])
        meant = [name for name in known if name == ending or name.endswith(f".{ending}")]
        if len(meant) == 1 and (len(parts) == 1 or parts[0] == "xckpt"):
            return meant[0]
    return None


def exists(target: str, module: str = "", holder: str = "") -> bool:
    """Whether a name is one of Python's, of another library, or anywhere in the package.

    Args:
        target: the name, or a call of it.
        module: where the docstring stands.
        holder: the class there that the docstring is about.

    Example:
        >>> exists("xckpt.core.plan"), exists("xckpt.no_such_thing"), exists("Path")
        (True, False, True)
    """
    target = target.partition("(")[0].partition("[")[0]
    first, _, rest = target.partition(".")
    if first in OTHERS or hasattr(builtins, first) or _importable(target):
        return True
    if module and _importable(f"{module}.{holder}.{target}"):
        return True
    homes = [name for name in _modules() if hasattr(sys.modules[name], first)]
    return any(not rest or _importable(f"{home}.{target}") for home in homes)


@functools.cache
def _modules() -> list[str]:
    """All modules of the package that can be imported here."""
    for found in pkgutil.walk_packages(xckpt.__path__, "xckpt.", lambda _: None):
        if not found.name.endswith("__main__"):
            with contextlib.suppress(Exception):  # a trainer or torch_xla is missing
                importlib.import_module(found.name)
    return [name for name in sys.modules if name.split(".")[0] == "xckpt"]


def _importable(name: str) -> bool:
    parts = [part for part in name.split(".") if part]
    for count in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        for part in parts[count:]:
            if not hasattr(found, part):
                return part in getattr(found, "__annotations__", {})
            found = getattr(found, part)
        return True
    return False
