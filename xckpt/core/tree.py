"""A tree of containers <-> its leaves by name.

Containers are dicts, lists, tuples, namedtuples and whatever a framework has registered (JAX
pytrees; the `Adapters` know them). Everything else is a leaf.

1. `flatten` walks the tree in its own order and names each leaf by its key path.
2. A dict needs no mention: the leaf names imply it. Any other container, and an empty dict, is
   recorded under its name with a kind: ``list``, ``tuple``, ``namedtuple:Name:field,field``,
   ``pytree:module.Class``.
3. `unflatten` builds the tree back from names and kinds. Custom classes come back as dicts and
   namedtuples as namedtuples of the same fields, since no class is imported on a checkpoint's word.
4. `rebuild` puts new leaves into a copy of a tree that the caller has: there, classes are known.
   `xckpt.core.targets.assign` puts them into the tree itself.

An object that keeps its own state (a model, an optimizer) stands for the dict that it gives: its
leaves lie below the object's name. It is asked once a walk, and nothing but a load gives it a new
state (`xckpt.core.plan.stateful`).
"""

# An object that is a mapping, a list or a tuple has keys and elements of unknown type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import keyword
from collections import namedtuple
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from xckpt.core.adapter import NO_ADAPTERS, Adapters
from xckpt.core.leaf import ObjectState
from xckpt.core.names import KeyPath, component, is_utf8, join_keys, key_of, split_name
from xckpt.core.problem import Problem
from xckpt.core.text.arguments import named
from xckpt.core.values import shown_value
from xckpt.errors import ManifestError, UnsupportedLeafError

DEEPEST = 64
"""Most containers around a leaf."""
MOST_CLASSES = 128
"""Classes of namedtuples that are remembered."""
_CLASSES: dict[tuple[str, tuple[str, ...]], Callable[..., object]] = {}
_NO_TENSORS = (dict, list, tuple, str, bytes, bool, int, float, complex, type(None), Mapping)
"""What is a container or a value, though an adapter may know its class."""


@dataclass(frozen=True, slots=True)
class FlatTree:
    """The leaves of a tree, and its containers as far as leaf names do not imply them."""

    leaves: dict[str, object] = field(default_factory=dict[str, object])
    """Leaf name -> leaf, in the tree's order."""
    containers: dict[str, str] = field(default_factory=dict[str, str])
    """Name of each container that is not a plain dict, or is empty -> its kind."""
    objects: dict[str, ObjectState] = field(default_factory=dict[str, ObjectState])
    """Name of each object that keeps its own state -> that state; its leaves are in `leaves`."""


def flatten(tree: object, adapters: Adapters = NO_ADAPTERS) -> FlatTree:
    """The leaves of a tree by name.

    Args:
        tree: containers of leaves.
        adapters: open the frameworks' containers and objects; without them these are leaves.

    Raises:
        UnsupportedLeafError: a dict key is neither a str nor an int (of 64 bits), two leaves have
            one name, or the tree contains itself; all such places are listed.

    Example:
        >>> flat = flatten({"w": 1.0, "opt": [{"mu": 2}, ()]})
        >>> flat.leaves
        {'w': 1.0, 'opt/0/mu': 2}
        >>> flat.containers
        {'opt': 'list', 'opt/1': 'tuple'}
    """
    walk = _Walk(adapters)
    walk.visit(tree, "", ())
    if walk.problems:
        raise UnsupportedLeafError.listing("the tree cannot be saved as it is", walk.problems)
    return walk.flat


@dataclass(slots=True)
class _Walk:
    """A walk through a tree, and what it has found."""

    adapters: Adapters
    flat: FlatTree = field(default_factory=FlatTree)
    problems: list[str] = field(default_factory=list[str])
    inside: bool = False
    """Whether the walk is in an object's state, where another such object is a leaf."""

    def visit(self, node: object, name: str, above: tuple[int, ...]) -> None:
        """Add the leaves of ``node``, which has this name, in containers with ids ``above``."""
        if not isinstance(node, _NO_TENSORS) and self.adapters.owner(node) is not None:
            self._add(name, node)  # as most nodes are
            return
        if not self.inside and (state := self._open_object(node, name)):
            self.flat.objects[name] = state
            self.inside = True
            self.visit(state.tree, name, above)
            self.inside = False
            return
        container = self.adapters.open_container(node)
        if container is None:
            self._add(name, node)
            return
        if id(node) in above:
            self.problems.append(Problem(name, kind="type", text="the tree contains itself"))
            return
        if len(above) >= DEEPEST:
            self.problems.append(f"{name[:80]}...: more than {DEEPEST} containers deep")
            return
        kind, entries = container
        if kind != "dict" or not entries:
            self.flat.containers[name] = kind
        for key, child in entries:
            if problem := _key_problem(key):
                text = f"dict key {shown_value(key)[:200]} {problem}"
                self.problems.append(Problem(name, kind="type", text=text))
            else:
                part = component(key)
                self.visit(child, f"{name}/{part}" if above else part, (*above, id(node)))

    def _add(self, name: str, leaf: object) -> None:
        if name in self.flat.leaves:
            self.problems.append(Problem(name, kind="type", text="two leaves have this name"))
        self.flat.leaves[name] = leaf

    def _open_object(self, node: object, name: str) -> ObjectState | None:
        try:
            return self.adapters.open_object(node, name)
        except UnsupportedLeafError as error:
            self.problems.append(Problem.about(name, str(error)))
            return None


def _key_problem(key: object) -> str:
    """Why a dict key cannot be a part of a name; empty if it can."""
    if isinstance(key, bool) or not isinstance(key, str | int):
        return f"is {named(type(key).__name__)}; use str or int keys"
    if isinstance(key, int):
        return "" if -(1 << 63) <= key < 1 << 63 else "does not fit 64 bits"
    return "" if is_utf8(key) else "is not text that UTF-8 can carry"


def unflatten(leaves: Mapping[str, object], containers: Mapping[str, str]) -> object:
    """The tree that the names describe; inverse of `flatten` for builtin containers.

    Raises:
        ManifestError: the names contradict each other, of which all are in ``problems``; or the
            kinds.

    Example:
        >>> unflatten({"w": 1.0, "opt/0/mu": 2}, {"opt": "list", "opt/1": "tuple"})
        {'w': 1.0, 'opt': [{'mu': 2}, ()]}
    """
    if "" in leaves:
        if len(leaves) > 1 or containers:
            raise ManifestError("the root is a leaf, but there are others")
        return leaves[""]
    root = Container()
    problems: dict[str, None] = {}
    parents: dict[str, tuple[Container, str]] = {}
    """Name up to the last key -> the container there, and the name of a leaf on the way, if any."""
    for name, leaf in leaves.items():
        above, _, component = name.rpartition("/")
        if above not in parents:
            parents[above] = _descend(root, split_name(above))
        parent, clash = parents[above]
        last = key_of(component)
        if clash or last in parent:
            problems[clash or name] = None
        else:
            parent[last] = leaf
    for name, kind in containers.items():
        node, clash = _descend(root, split_name(name))
        if clash:
            problems[clash] = None
        node.name, node.kind = name, kind
    if problems:
        refuse_clashes(problems)
    return close_container(root)


def refuse_clashes(names: Iterable[str]) -> None:
    """Raise the error for names that a leaf and a container have."""
    text = "a leaf and a container have this name"
    lines = [Problem(name, kind="container", text=text) for name in names]
    raise ManifestError("\n  ".join(lines), lines)


class Container(dict[str | int, object]):
    """A container of the tree; a dict that is not a `Container` is a leaf's value."""

    name, kind = "", "dict"


def _descend(root: Container, keys: Sequence[str | int]) -> tuple[Container, str]:
    """The container at a key path, made where it is missing; or the name of a leaf on the way."""
    node = root
    for depth, key in enumerate(keys, 1):
        child = node.setdefault(key, Container())
        if not isinstance(child, Container):
            return root, join_keys(keys[:depth])
        node = child
    return node, ""


def close_container(node: Container) -> object:
    """What a container of this kind is in Python.

    Raises:
        ManifestError: its keys are not those of its kind.
    """
    name, (kind, _, detail) = node.name, node.kind.partition(":")
    children = {
        k: close_container(each) if type(each) is Container else each for k, each in node.items()
    }
    if kind in ("list", "tuple"):
        if sorted(children, key=repr) != sorted(range(len(children)), key=repr):
            raise _misfit(name, f"called a {kind}, but its keys are not 0, 1, ...")
        ordered = [children[index] for index in range(len(children))]
        return ordered if kind == "list" else tuple(ordered)
    if kind == "namedtuple":
        return _namedtuple(name, detail, children)
    return children


def _misfit(name: str, text: str) -> ManifestError:
    """The error for a container whose keys are not those of its kind."""
    problems = [Problem(name, kind="container", text=text)] if name else []
    return ManifestError(f"{name or 'the root'}: {text}", problems)


def _namedtuple(name: str, detail: str, children: Mapping[str | int, object]) -> object:
    title, _, listed = detail.partition(":")
    fields = listed.split(",") if listed else []
    valid = all(part.isidentifier() and not keyword.iskeyword(part) for part in (title, *fields))
    if not valid or len(fields) != len(children) or set(fields) != set(children):
        raise _misfit(name, f"the namedtuple {detail!r} does not fit its fields")
    return _class_of(title, tuple(fields))(*(children[part] for part in fields))


def _class_of(title: str, fields: tuple[str, ...]) -> Callable[..., object]:
    """The class of namedtuples of a name and fields, made once: two loads give trees that fit."""
    if (found := _CLASSES.get((title, fields))) is not None:
        return found
    if len(_CLASSES) >= MOST_CLASSES:
        _CLASSES.clear()
    # Only the checkpoint knows the fields, so they have no types.
    made = namedtuple(title, fields, rename=True)  # pyright: ignore[reportUntypedNamedTuple]
    return _CLASSES.setdefault((title, fields), made)  # one of several threads decides


def rebuild(
    tree: object,
    replace: Callable[[str, object], object],
    adapters: Adapters = NO_ADAPTERS,
    *,
    at: KeyPath = (),
    finished: Mapping[str, object] | None = None,
) -> object:
    """A copy of a tree with each leaf replaced by ``replace(name, leaf)``.

    A dict or list of another class is copied as `copy.copy` does it, so that it stays of its class.
    An object that keeps its own state is replaced by that state, rebuilt.

    Args:
        tree: what to copy.
        replace: gives the new leaf.
        adapters: open and rebuild the frameworks' containers and objects.
        at: where the tree lies in the whole, for the names.
        finished: by name, what to put in place of a whole subtree, which is not looked at.

    Raises:
        UnsupportedLeafError: a container cannot be built with new leaves.

    Example:
        >>> rebuild({"a": [1, 2]}, lambda name, leaf: (name, leaf * 10))
        {'a': [('a/0', 10), ('a/1', 20)]}
    """
    return _Rebuilding(replace, adapters, finished or {}).visit(tree, join_keys(at), inside=False)


@dataclass(frozen=True, slots=True)
class _Rebuilding:
    """A copy of a tree in the making."""

    replace: Callable[[str, object], object]
    adapters: Adapters
    finished: Mapping[str, object]

    def visit(self, node: object, name: str, *, inside: bool) -> object:
        """The copy of ``node``, which has this name; ``inside``: in an object's state."""
        if name in self.finished:
            return self.finished[name]
        if not isinstance(node, _NO_TENSORS) and self.adapters.owner(node) is not None:
            return self.replace(name, node)  # as most nodes are
        state = None if inside else self.adapters.open_object(node, name)
        if state is not None:
            return self.visit(state.tree, name, inside=True)
        container = self.adapters.open_container(node)
        if container is None:
            return self.replace(name, node)
        kind, entries = container
        above = f"{name}/" if name else ""
        values = [
            self.visit(child, above + component(key), inside=inside) for key, child in entries
        ]
        if type(node) is list:
            return values
        if isinstance(node, list | tuple) or kind == "dict":
            from xckpt.core.targets.other_children import other_children  # loads alone need it

            keys = [key for key, _ in entries]
            return other_children(node, dict(zip(keys, values, strict=True)))
        new = self.adapters.rebuild(node, values)
        if new is None:
            what = f"{name or 'the root'}: {named(type(node).__name__)}"
            raise UnsupportedLeafError(f"{what} cannot be built with new leaves")
        return new
