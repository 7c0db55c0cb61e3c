"""A page for each public module, made of its docstrings."""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from docs.site.members import members, shown_bases

MODULES: Final = (
    "xckpt",
    "xckpt.adapters",
    "xckpt.convert",
    "xckpt.errors",
    "xckpt.mapping.operations",
    "xckpt.metadata",
    "xckpt.planner",
    "xckpt.policies",
    "xckpt.staging",
    "xckpt.storage",
    "xckpt.torch.dcp",
)
"""Public modules; their ``__all__`` says which names are public."""

PAGE = """# {module}

{summary}

```{{eval-rst}}
.. currentmodule:: {module}

{entries}
```
"""


def public_names(module: str) -> list[str]:
    """The documented names of a module, in the order of its ``__all__``."""
    names: list[str] = importlib.import_module(module).__all__
    return [name for name in names if name != "__version__"]


def home(name: str, module: str) -> str:
    """The public module on whose page a name is described: the most special one that has it."""
    thing = getattr(importlib.import_module(module), name)
    holders = [
        other
        for other in MODULES
        if getattr(importlib.import_module(other), name, None) is thing
        and name in public_names(other)
    ]
    # Errors have a page of their own; the rest is where most people import it from.
    return "xckpt.errors" if "xckpt.errors" in holders else holders[0]


def classes() -> dict[type, str]:
    """The classes that have entries of their own -> the name of each on its first page."""
    return {
        thing: name
        for module in reversed(MODULES)
        for name in public_names(module)
        if inspect.isclass(thing := getattr(importlib.import_module(module), name))
        and home(name, module) == module
    }


def name_classes() -> None:
    """Give each class the name that its entry has, or Sphinx writes "alias of" in its place."""
    for thing, name in classes().items():
        thing.__name__ = name


def entry(name: str, module: str) -> str:
    """What Sphinx is to do for a name."""
    thing = getattr(importlib.import_module(module), name)
    if home(name, module) != module:
        return f"* `{home(name, module)}.{name}`\n"
    if inspect.isclass(thing):
        kind = "exception" if issubclass(thing, BaseException) else "class"
        shown = shown_bases(thing, classes())
        rest = ", ".join(base.__name__ for base in thing.__mro__ if base not in shown)
        inherited = f"   :inherited-members: {rest}\n" if len(shown) > 1 else ""
        return f".. auto{kind}:: {name}\n   :members:\n{inherited}   :show-inheritance:\n"
    if inspect.isroutine(thing):
        return f".. autofunction:: {name}\n"
    return f".. autodata:: {name}\n"


def write(folder: Path) -> None:
    """Write the pages to a folder, one for each of `MODULES`."""
    folder.mkdir(parents=True, exist_ok=True)
    for module in MODULES:
        summary = (inspect.getdoc(importlib.import_module(module)) or "").split("\n")[0]
        entries = [entry(name, module) for name in public_names(module)]
        entries.sort(key=lambda text: text.startswith("* "))
        page = PAGE.format(module=module, summary=summary, entries="\n".join(entries))
        (folder / f"{module}.md").write_text(page, encoding="utf-8")


def as_markdown(module: str) -> Iterator[str]:
    """The same page as plain Markdown, which needs no Sphinx."""
    yield f"# {module}\n"
    for name in public_names(module):
        thing = getattr(importlib.import_module(module), name)
        yield f"## {module}.{name}\n"
        if callable(thing):
            with contextlib.suppress(TypeError, ValueError):
                yield f"```python\n{name}{inspect.signature(thing)}\n```\n"
        yield f"{inspect.getdoc(thing) or ''}\n"
        for each in members(thing, classes()) if inspect.isclass(thing) else ():
            yield f"### {name}.{each.name}\n"
            if each.signature:
                yield f"```python\n{each.name}{each.signature}\n```\n"
            yield f"{each.text}\n"
