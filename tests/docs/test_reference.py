"""The reference describes all of a class: also what it has from bases that no page shows."""

from __future__ import annotations

import inspect

import pytest

from docs.site import reference


def inherited(thing: type) -> set[str]:
    """The public methods and properties of a class that this package describes."""
    found = set[str]()
    for name in dir(thing):
        member = inspect.getattr_static(thing, name)
        owner = next((base for base in thing.__mro__ if name in vars(base)), object)
        is_ours = owner.__module__.split(".")[0] == "xckpt" and not name.startswith("_")
        if is_ours and (callable(member) or isinstance(member, property)) and member.__doc__:
            found.add(name)
    return found


@pytest.mark.parametrize("module", reference.MODULES)
def test_an_entry_has_every_member(module: str) -> None:
    text = "\n".join(reference.as_markdown(module))
    classes = reference.classes()
    for thing, name in classes.items():
        if name not in reference.public_names(module):
            continue
        elsewhere = [base for base in thing.__mro__[1:] if base in classes]
        of_others = {member for base in elsewhere for member in dir(base)}
        for member in inherited(thing) - of_others:
            assert f"### {name}.{member}\n" in text, f"{module}.{name}.{member}"


def test_what_a_reader_looks_for() -> None:
    text = "\n".join(line for each in reference.MODULES for line in reference.as_markdown(each))
    for entry in [
        "CheckpointManager.restore",
        "Checkpoint.array",
        "Mapping.check",
        "SaveOptions.pack_bytes",
        "LoadOptions.timeout",
    ]:
        assert f"### {entry}\n" in text
    assert "``XCKPT_RETRIES``, 16." in text
    assert "restore(self, like" in text


def test_sphinx_is_asked_for_inherited_members() -> None:
    """Up to the first base that has an entry of its own, or is of another library."""
    entry = reference.entry("CheckpointManager", "xckpt")
    assert ":inherited-members: object\n" in entry
    entry = reference.entry("Concatenate", "xckpt.mapping.operations")
    assert ":inherited-members: Operation, " in entry
    assert ":inherited-members:" not in reference.entry("PlanError", "xckpt.errors")
