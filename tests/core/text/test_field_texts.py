"""What `help` says of the fields of public classes."""

from __future__ import annotations

import copy
import io
import pickle
import pydoc
from dataclasses import fields, make_dataclass
from typing import Any

import pytest

import xckpt
from xckpt.core.text.shown import documented
from xckpt.progress import Metrics, Progress

CLASSES: list[Any] = [
    *(xckpt.SaveOptions, xckpt.LoadOptions),
    *(xckpt.LoadReport, xckpt.StepRecord, Progress, Metrics),
]


def said_by_help(thing: object) -> str:
    output = io.StringIO()
    pydoc.Helper(output=output).help(thing)
    return output.getvalue()


@pytest.mark.parametrize("kind", CLASSES)
def test_help_explains_each_field(kind: Any) -> None:
    """`help(xckpt.SaveOptions)` named the options, and explained none."""
    lines = said_by_help(kind).splitlines()
    for field in fields(kind):
        (at,) = (n for n, line in enumerate(lines) if line.rstrip() == f" |  {field.name}")
        assert lines[at + 1].startswith(" |      "), field.name


def test_the_text_is_that_below_the_field() -> None:
    text = said_by_help(xckpt.SaveOptions)
    assert "True compares all, shards too, in a pass over the state; False none." in text
    assert "``XCKPT_RETRIES``, 16." in text  # of a base
    assert pydoc.getdoc(xckpt.LoadOptions.host).startswith("The name of this rank's host, where")


def test_options_are_copied_and_pickled_as_before() -> None:
    options = xckpt.SaveOptions(threads=3, dimension_names={"w": ("x", "y")})
    for again in (copy.copy(options), copy.deepcopy(options), pickle.loads(pickle.dumps(options))):
        assert again == options and type(again) is xckpt.SaveOptions
    with pytest.raises(AttributeError):
        object.__setattr__(options, "unknown", 1)


def test_a_class_without_source_has_no_texts() -> None:
    frozen: Any = documented(make_dataclass("Frozen", [("a", int)], slots=True))
    assert pydoc.getdoc(frozen.a) == "" and frozen(3) == frozen(3)
