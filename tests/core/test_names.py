"""Key paths, leaf names and zarr paths: inverse, injective, safe."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from xckpt.core.names import join_keys, split_name, zarr_path

NASTY = (
    "", "0", "-1", "-0", "00", "01", "1e3", "/", "a/b", "//", "%", "%25", "%2F", "%30", "%root",
    ".", "..", "...", "a.", "a ", " ", ".hidden", ".generations", "zarr.json", "xckpt.json",
    "xckpt.digests", "xckpt.saving", "__a", "__xarray", "a.__lock", ".__lock", "c", "CON",
    "naïve", "e\u0301", "日本",
    "🜁", "\n", "\x00", "\\", "a\\b", ":", "*", "~", "a" * 160, "a" * 161, "ü" * 60,
)  # fmt: skip

keys = st.one_of(
    st.integers(-(2**63), 2**63),
    st.sampled_from(NASTY),
    st.text(max_size=8),
    st.text(alphabet="0123456789-%/._ aA2F5", max_size=6),
    st.text(min_size=90, max_size=200),
)
paths = st.lists(keys, max_size=4).map(tuple)


def typed(path: tuple[str | int, ...]) -> list[tuple[type, str | int]]:
    return [(type(key), key) for key in path]


@given(paths)
@example(NASTY)
@example((0, "0", -1, "-1"))
def test_split_inverts_join(path):
    assert typed(split_name(join_keys(path))) == typed(path)


@given(paths, paths)
@example(("a", "b"), ("a/b",))
@example(("a", "b"), ("a.b",))
@example((0,), ("0",))
@example((), ("",))
@example(("a", ""), ("a",))
@example(("x" * 200,), ("x" * 200 + "y",))
@example(("a" * 161,), ("a" * 100 + "~",))
def test_different_paths_have_different_names_and_places(one, other):
    if typed(one) != typed(other):
        assert join_keys(one) != join_keys(other)
        assert zarr_path(join_keys(one)) != zarr_path(join_keys(other))


def test_every_nasty_key_has_a_place_of_its_own():
    assert len({zarr_path(join_keys((key,))) for key in NASTY}) == len(NASTY)


@given(paths)
@example(NASTY)
def test_places_are_safe_to_store(path):
    place = zarr_path(join_keys(path))
    for part in place.split("/"):
        assert re.fullmatch(r"[A-Za-z0-9\-_.%+@=,() ~]+", part)
        assert len(part) <= 160
        assert not part.startswith(("__", ".")) and not part.endswith(".__lock")
        assert part[-1] not in " ."
        assert part not in ("zarr.json", "xckpt.json", "xckpt.digests", "xckpt.saving")
    assert len(place.split("/")) == max(1, len(path))


@pytest.mark.parametrize(
    "path, name, place",
    [
        ((), "", "%root"),
        (("a", "b"), "a/b", "a/b"),
        (("a.b",), "a.b", "a.b"),
        (("a/b",), "a%2Fb", "a%2Fb"),
        (("opt", 0, "mu"), "opt/0/mu", "opt/0/mu"),
        (("opt", "0", "mu"), "opt/%30/mu", "opt/%30/mu"),
        (("ï",), "ï", "%C3%AF"),
        (("__a",), "__a", "%5F_a"),
        ((".",), ".", "%2E"),
        (("end.",), "end.", "end%2E"),
    ],
)
def test_names_and_places_are_those_of_the_format(path, name, place):
    assert join_keys(path) == name
    assert zarr_path(name) == place


def test_a_long_component_keeps_its_beginning():
    place = zarr_path("layer." * 50)
    assert place.startswith("layer." * 16) and re.fullmatch(r".{100}~[0-9a-f]{32}", place)
