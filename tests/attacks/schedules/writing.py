"""Saves under schedules."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import xckpt
from tests.attacks.schedules.states import (
    KINDS,
    SIZES,
    SMALL,
    THREADS,
    Tree,
    changed,
    mapped,
    same,
    state,
)
from tests.support.schedules import at_once, fuzzed
from xckpt.staging import BlockingAsyncStager
from xckpt.torch.dcp import XckptStorageReader, XckptStorageWriter


class _Fails(xckpt.planner.DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> object:
        if write_item.index.fqn == "w1":
            raise ArithmeticError("of this leaf")
        return super().resolve_data(write_item)


def failing(kind: str, place: str, seed: int) -> None:
    """What a planner raises in a thread is raised, and nothing is left of the save."""
    with fuzzed(seed), pytest.raises(ArithmeticError, match="of this leaf"):
        xckpt.save(place, state(seed), planner=_Fails(), options=KINDS[kind])
    assert os.listdir(Path(place).parent) == []


def save(kind: str, place: str, seed: int) -> None:
    tree = state(seed)
    with fuzzed(seed):
        xckpt.save(place, tree, options=KINDS[kind])
    assert xckpt.open(place).verify() == []
    same(xckpt.load(place), tree)


def share(kind: str, place: str, seed: int, *, verify: bool = False) -> None:
    """A save that shares with a base."""
    tree = state(seed)
    options = replace(KINDS[kind], verify_base=verify)
    xckpt.save(f"{place}-base", tree, options=options)
    tree["w1"] = tree["w1"] + 1
    tree["small"]["s3"] = tree["small"]["s3"] + 1
    with fuzzed(seed):
        xckpt.save(place, tree, base=f"{place}-base", options=options)
    assert xckpt.open(place).verify() == []
    same(xckpt.load(place), tree)


def save_async(kind: str, place: str, seed: int) -> None:
    """Saves in a row, of a state that changes as soon as it may."""
    tree, saved, saving = state(seed), list[Tree](), list[Any]()
    with fuzzed(seed):
        for n in range(2):
            saved.append(mapped(tree, np.copy))
            saving.append(xckpt.save_async(f"{place}{n}", tree, options=KINDS[kind]))
            saving[-1].staged()
            changed(tree)
        for each in saving:
            each.result()
    for n in range(2):
        same(xckpt.load(f"{place}{n}"), saved[n])


def two_async(place: str, seed: int, *, shared: bool) -> None:
    """Two threads save in the background, with stagers of their own or with one."""
    stager = BlockingAsyncStager(cache_staged_state_dict=True) if shared else None

    def run(n: int) -> None:
        tree = state(seed + n)
        saving = xckpt.save_async(f"{place}{n}", tree, stager=stager, options=SMALL)
        saving.staged()
        changed(tree)
        saving.result()

    with fuzzed(seed):
        at_once(partial(run, 0), partial(run, 1))
    for n in range(2):
        same(xckpt.load(f"{place}{n}"), state(seed + n))


def two_paths(place: str, seed: int) -> None:
    trees = [state(seed + n) for n in range(3)]
    paths = [f"{place}{n}" for n in range(3)]
    with fuzzed(seed):
        saves = (
            partial(xckpt.save, *each, options=SMALL) for each in zip(paths, trees, strict=True)
        )
        at_once(*saves)
        loaded = at_once(*(partial(xckpt.load, path, options=THREADS) for path in paths))
    for each, tree in zip(loaded, trees, strict=True):
        same(each, tree)


def one_path(place: str, seed: int, *, overwrite: bool) -> None:
    """Of saves to one path one is there, whole; without ``overwrite`` the others are refused."""
    trees = [{"w": np.full((20, 40), n + 1)} for n in range(3)]

    def run(n: int) -> bool:
        try:
            xckpt.save(place, trees[n], options=SMALL, overwrite=overwrite)
        except xckpt.CheckpointExistsError:
            return False
        return True

    with fuzzed(seed):
        saved = at_once(*(partial(run, n) for n in range(3)))
    assert sum(saved) >= 1 if overwrite else sum(saved) == 1
    (number,) = set(np.unique(xckpt.load(place)["w"]))
    assert overwrite or saved[number - 1]
    assert xckpt.open(place).verify() == []
    assert place.startswith("memory") or os.listdir(Path(place).parent) == [Path(place).name]


def one_path_async(place: str, seed: int) -> None:
    """Threads overwrite one path in the background."""

    def run(number: int) -> bool:
        tree = {"w": np.full(SIZES, number)}
        try:
            xckpt.save_async(place, tree, overwrite=True, options=SMALL).result()
        except xckpt.CheckpointExistsError:
            return False
        return True

    with fuzzed(seed):
        assert any(at_once(*(partial(run, number) for number in (1, 2, 3))))
    assert len(np.unique(xckpt.load(place)["w"])) == 1


def copies(place: str, seed: int) -> None:
    """Threads copy one checkpoint."""
    tree = state(seed)
    xckpt.save(place, tree, options=KINDS["packs"])
    with fuzzed(seed):
        at_once(*(partial(xckpt.copy, place, f"{place}{n}") for n in range(3)))
    for n in range(3):
        same(xckpt.load(f"{place}{n}"), tree)


def by_dcp(place: str, seed: int) -> None:
    """Two threads share a writer of DCP; a load of it casts."""

    def tensors(number: int) -> Tree:
        leaves = state(number).items()
        return {n: torch.from_numpy(leaf) for n, leaf in leaves if isinstance(leaf, np.ndarray)}

    writer = XckptStorageWriter(place, options=SMALL)
    with fuzzed(seed):
        about = {"storage_writer": writer, "no_dist": True}
        ids = [f"{place}{n}" for n in range(2)]
        at_once(*(partial(dcp.save, tensors(n), checkpoint_id=ids[n], **about) for n in range(2)))
        loaded = {name: torch.zeros(SIZES, dtype=torch.float64) for name in tensors(0)}
        dcp.load(loaded, storage_reader=XckptStorageReader(ids[1], options=THREADS), no_dist=True)
    for name, tensor in tensors(1).items():
        assert torch.equal(loaded[name].to(tensor.dtype), tensor)
