"""Mappings of model families, from the layout of torch to that of Flax, as data.

A family is a TOML file in this folder: a mapping with parameters for a model's configuration.

1. ``[choices]``: options for the caller, with the allowed values; the first is the default.
2. ``[parameters]``: a name, and where its value comes from: a key of the configuration (the first
   of several that is there; "a.b" is b in a), or a choice.
3. ``[[group]]``: rules that hold ``when`` parameters and choices have given values, once for each
   of its ``prefixes``, a pair of what stands before every source and before every target.
4. ``[[group.rule]]``: a rule as a mapping's file has them, written once for ``each`` combination of
   words. ``<name>`` stands for a parameter, a choice or a word; in a target the dots of a word are
   slashes. An operation may have a ``when`` of its own.

A rule that finds no source does nothing, so one file serves all classes of a family, with any head.
`Mapping.check` proves that nothing is left over on either side.
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from itertools import product
from typing import Any

from xckpt.errors import MappingError
from xckpt.mapping.mapping import LeafMapping
from xckpt.mapping.operations.base import is_list, is_table

__all__ = ["Document", "check_family", "families", "family_mapping"]

_PLACE = re.compile(r"<(\w+)>")

Document = Mapping[str, Any]
"""A parsed TOML table, or a model's configuration."""


def family_mapping(name: str, config: Document, choices: Document) -> LeafMapping:
    """The mapping of a family for one configuration; see `xckpt.convert.family`.

    Raises:
        MappingError: there is no such family or choice, or the configuration lacks a key.

    Example:
        >>> sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
        >>> mapping = family_mapping("llama", sizes, {"scanned": True})
        >>> mapping.rules[0].target
        ('norm/weight',)
    """
    check_family(name)
    document = _documents()[name]
    chosen = _chosen(name, document.get("choices", {}), choices)
    values = _parameters(name, document.get("parameters", {}), config, chosen) | chosen
    rules = [rule for group in document["group"] for rule in _rules_of(group, values)]
    return LeafMapping.from_document({"rule": rules})


def check_family(name: str) -> None:
    """Refuse a name that no family has.

    Raises:
        MappingError: it is such a name; lists the others.
    """
    if name not in _documents():
        raise MappingError(
            f"no family is called {name!r}; there are {', '.join(families())}."
            " Write a mapping of your own, or have `xckpt map infer` propose one"
        )


def families() -> tuple[str, ...]:
    """The names that `family` knows.

    Example:
        >>> "bert" in families()
        True
    """
    return tuple(sorted(_documents()))


@functools.cache
def _documents() -> dict[str, Document]:
    """Name -> the file of the family, parsed."""
    paths = (path for path in files(__name__).iterdir() if path.name.endswith(".toml"))
    documents = [tomllib.loads(path.read_text(encoding="utf-8")) for path in paths]
    return {name: document for document in documents for name in document["family"]["names"]}


def _chosen(name: str, allowed: Document, choices: Document) -> dict[str, Any]:
    """Every choice with its value."""
    problems: list[str] = []
    for key, value in choices.items():
        if key not in allowed:
            problems.append(f"{key} = {value!r}: there is no such choice")
        elif value not in allowed[key]:
            problems.append(f"{key} = {value!r}: allowed are {', '.join(map(repr, allowed[key]))}")
    if problems:
        known = ", ".join(allowed) or "none"
        raise MappingError.listing(f"family {name!r} has the choices {known}", problems)
    return {key: choices.get(key, values[0]) for key, values in allowed.items()}


def _parameters(name: str, wanted: Document, config: Document, chosen: Document) -> dict[str, Any]:
    """Every parameter with its value."""
    values: dict[str, Any] = {}
    problems: list[str] = []
    for parameter, where in wanted.items():
        if "choice" in where:
            # A key of TOML is a text: "true" stands for True.
            values[parameter] = where["is"][str(chosen[where["choice"]]).lower()]
            continue
        keys = [where["config"]] if isinstance(where["config"], str) else where["config"]
        configured = (value for key in keys if (value := _configured(config, key)) is not None)
        value = next(configured, where.get("default"))
        if value is None:
            problems.append(f"{parameter}: the configuration has no {' and no '.join(keys)}")
        values[parameter] = value
    if problems:
        raise MappingError.listing(f"family {name!r} cannot be made", problems)
    return values


def _configured(config: Document, key: str) -> object:
    """What a configuration holds at "a.b"; None for nothing."""
    value: object = config
    for part in key.split("."):
        value = value.get(part) if is_table(value) else None
    return value


def _holds(when: Document, values: Document) -> bool:
    return all(values[name] == value for name, value in when.items())


@dataclass(frozen=True, slots=True)
class _Filling:
    """The values of ``<name>`` in one rule, on one side of it."""

    values: Document
    words: Mapping[str, str]
    prefix: str = ""
    slash: bool = False

    def text(self, pattern: str) -> str:
        """A pattern with everything in its place."""
        return self.prefix + _PLACE.sub(self._one, pattern)

    def value(self, node: Any) -> Any:  # noqa: ANN401  # any value of TOML
        """A value of an operation or an index; ``"<name>"`` alone keeps its type."""
        if isinstance(node, str):
            alone = _PLACE.fullmatch(node)
            if alone and alone[1] in self.values:
                return self.values[alone[1]]
            return _PLACE.sub(self._one, node)
        if is_table(node):
            return {key: self.value(value) for key, value in node.items() if key != "when"}
        return [self.value(value) for value in node] if is_list(node) else node

    def _one(self, place: re.Match[str]) -> str:
        if place[1] in self.words:
            word = self.words[place[1]]
            return word.replace(".", "/") if self.slash else word
        return str(self.values[place[1]])


def _rules_of(group: Document, values: Document) -> Iterator[dict[str, Any]]:
    """A group's rules, as a mapping's file has them."""
    if not _holds(group.get("when", {}), values):
        return
    prefixes = _Filling(values, {}).value(group.get("prefixes", [["", ""]]))
    for (before_source, before_target), rule in product(prefixes, group.get("rule", [])):
        if not _holds(rule.get("when", {}), values):
            continue
        each = rule.get("each", {})
        for combination in product(*each.values()):
            words = dict(zip(each, combination, strict=True))
            source = _Filling(values, words, before_source)
            target = _Filling(values, words, before_target, slash=True)
            yield _filled(rule, source, target)


def _filled(rule: Document, source: _Filling, target: _Filling) -> dict[str, Any]:
    filled: dict[str, Any] = {}
    for key, side in (("source", source), ("optional", source), ("target", target)):
        if key in rule:
            names = rule[key]
            filled[key] = side.text(names) if isinstance(names, str) else [*map(side.text, names)]
    filled["indices"] = source.value(rule.get("indices", {}))
    filled["operations"] = [
        source.value(operation)
        for operation in rule.get("operations", [])
        if _holds(operation.get("when", {}), source.values)
    ]
    return filled
