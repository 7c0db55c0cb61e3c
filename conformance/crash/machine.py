"""Save, overwrite, load, delete, crash, verify: in any order, against a dict of NumPy arrays.

`machine` makes a Hypothesis state machine for an implementation. It has a few paths; of each the
model (`CheckpointMachine.there`) knows the arrays that are there, or that nothing is.

1. Each rule does something at a path and holds the implementation to the model: whole arrays under
   another sharding, parts, the listing, the verification.
2. What must fail (a save onto a checkpoint, a load from nothing, a leaf that was not saved) must
   raise and change nothing.
3. A crash is a save in a process that is killed before its n-th operation on files
   (`conformance.crash.recording`): the path then holds exactly what it held, or exactly the new
   arrays, and the model takes what it finds. Where processes cannot be traced, nothing crashes.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test
from numpy.typing import NDArray

from conformance.cases import Case, cases, numpy_dtype
from conformance.crash.recording import CannotRecordError, Recorder, memory
from conformance.implementation import Array, Held, Implementation, Refused, Wanted
from conformance.laws.properties import check_loaded, difference, everything
from conformance.outcome import Outcome

__all__ = ["CheckpointMachine", "machine", "run", "try_machine"]

State = Mapping[str, NDArray[np.generic]]

PATHS = ("a", "b", "run/7")
STEPS = 12
MOST_OPERATIONS = 100
"""A crash comes within this many file operations; a save of a few small leaves has fewer."""

_paths = st.sampled_from(PATHS)
_states = st.one_of(cases(most_ranks=3), cases(most_ranks=3, even=True))


class CheckpointMachine(RuleBasedStateMachine):
    """The machine; `machine` binds it to an implementation."""

    implementation: Implementation
    recorder: Recorder | None = None
    """Where saves crash; without it none does."""
    runs: int = 0
    """How many machines have come to their end."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="machine-", dir=memory()))
        (self.folder / "run").mkdir()
        self.there: dict[str, Case] = {}

    def teardown(self) -> None:
        type(self).runs += 1
        shutil.rmtree(self.folder)

    @rule(name=_paths, case=_states)
    def save(self, name: str, case: Case) -> None:
        if name in self.there:
            again = partial(self.implementation.save, self.path(name), case.held())
            self.raises("a save onto a checkpoint", again)
            self.check_whole(name)
        elif self.save_case(name, case):
            self.there[name] = case

    @rule(name=_paths, case=_states)
    def overwrite(self, name: str, case: Case) -> None:
        if self.save_case(name, case, overwrite=True):
            self.there[name] = case
            self.check_whole(name)

    @rule(name=_paths)
    def load_resharded(self, name: str) -> None:
        """Boxes as other ranks want them: a tiling, or any parts."""
        if name in self.there:
            self.check_load(name, self.there[name].wanted())

    @rule(name=_paths, pick=st.integers(0, 7))
    def load_one_leaf(self, name: str, pick: int) -> None:
        if name in self.there:
            saved = self.there[name].leaves
            leaf = saved[pick % len(saved)]
            self.check_load(name, everything({leaf.name: leaf.array}))

    @rule(name=_paths)
    def load_what_is_not_there(self, name: str) -> None:
        wanted = everything({"never saved": Array((2,), "int8")})
        self.raises("a load of a leaf that was not saved", lambda: self.load(name, wanted))

    @rule(name=_paths)
    def load_whole(self, name: str) -> None:
        if name in self.there:
            self.check_whole(name)
        else:
            self.check_nothing(name)

    @rule(name=_paths)
    def verify(self, name: str) -> None:
        if name not in self.there:
            return
        try:
            damaged = self.implementation.verify(self.path(name))
        except Refused:
            return
        assert not damaged, f"verify says of a sound checkpoint: {damaged[0]}"

    @rule(name=_paths)
    def delete(self, name: str) -> None:
        if name not in self.there:
            return
        try:
            self.implementation.delete(self.path(name))
        except Refused:
            return
        del self.there[name]
        self.check_nothing(name)

    @rule(name=_paths, case=_states, most=st.integers(0, MOST_OPERATIONS))
    def crash(self, name: str, case: Case, most: int) -> None:
        """A save is killed before one of its operations."""
        if self.recorder is None:
            return
        arguments = (self.path(name), case.held())
        try:
            recording = self.recorder.record(self.folder, overwrite, *arguments, most=most)
        except Refused:
            return
        except CannotRecordError:
            type(self).recorder = None  # nor could the next one be
            return
        found = self.look(name)
        if found is not None and same(found, case.whole()):
            self.there[name] = case
            return
        assert recording.killed, "a save returned, and its arrays are not there"
        if name in self.there:
            assert found is not None, "a crash has lost what was there"
            assert same(found, self.there[name].whole()), "a crash has left a mixture"
        else:
            assert found is None, "after a crash something loads that was never saved"

    # What the rules are made of.

    def path(self, name: str) -> Path:
        return self.folder / name

    def save_case(self, name: str, case: Case, *, overwrite: bool = False) -> bool:
        """Save; False if that is refused."""
        try:
            self.implementation.save(self.path(name), case.held(), overwrite=overwrite)
        except Refused:
            return False
        return True

    def load(self, name: str, wanted: Sequence[Mapping[str, Wanted]]) -> Any:
        return self.implementation.load(self.path(name), wanted)

    def look(self, name: str) -> State | None:
        """All that is at a path; None if the implementation says that nothing is."""
        try:
            wanted = everything(self.implementation.list(self.path(name)))
            loaded = self.load(name, wanted)[0]
        except Exception:
            return None
        return {leaf: loaded[leaf][0] for leaf in wanted[0]}

    def check_whole(self, name: str) -> None:
        """What is listed and loaded is what the model says."""
        case = self.there[name]
        listed = self.implementation.list(self.path(name))
        expected = {leaf.name: leaf.array for leaf in case.leaves}
        assert _plain(listed) == _plain(expected), f"{listed} is listed, not {expected}"
        self.check_load(name, everything(expected))

    def check_load(self, name: str, wanted: Sequence[Mapping[str, Wanted]]) -> None:
        """What is loaded is what the model says, unless the implementation refuses."""
        try:
            loaded = self.load(name, wanted)
        except Refused:
            return
        check_loaded(self.there[name].whole(), wanted, loaded)

    def check_nothing(self, name: str) -> None:
        wanted = everything({"w": Array((2,), "int8")})
        self.raises("a listing of nothing", lambda: self.implementation.list(self.path(name)))
        self.raises("a load of nothing", lambda: self.load(name, wanted))

    def raises(self, what: str, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception:
            return
        raise AssertionError(f"{what} raised nothing")


def overwrite(
    implementation: Implementation, path: Path, ranks: Sequence[Mapping[str, Held]]
) -> None:
    implementation.save(path, ranks, overwrite=True)


def same(found: State, expected: State) -> bool:
    """Whether two states are equal, bit for bit."""
    return found.keys() == expected.keys() and not any(
        difference(expected[name], found[name]) for name in expected
    )


def _plain(arrays: Mapping[str, Array]) -> dict[str, tuple[tuple[int, ...], str]]:
    return {
        name: (tuple(array.shape), numpy_dtype(array.dtype).name) for name, array in arrays.items()
    }


def machine(judged: Implementation, crashes: Recorder | None = None) -> type[CheckpointMachine]:
    """The state machine of an implementation; its saves crash in a recorder's processes."""

    class Machine(CheckpointMachine):
        implementation = judged
        recorder = crashes

    return Machine


def try_machine(made: type[CheckpointMachine], *, examples: int, seed: int) -> None:
    """Run a state machine a given number of times.

    Raises:
        Exception: what the smallest run that failed raised; its notes are the steps.
    """
    hypothesis.seed(seed)(made)
    chosen = settings(
        max_examples=examples,
        stateful_step_count=STEPS,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        phases=(Phase.generate, Phase.shrink),
        print_blob=False,
    )
    run_state_machine_as_test(made, settings=chosen)


def run(
    implementation: Implementation, *, examples: int, seed: int, only: str = ""
) -> Iterator[Outcome]:
    """Any order of actions; see `conformance.outcome.Part`. The law is ``any-order``."""
    outcome = Outcome("any-order")
    if only not in ("", outcome.law):
        return
    try:
        with Recorder(implementation) as recorder:
            if not recorder.forks:
                raise CannotRecordError("a new process for each would take too long")
            recorder.can_record()
            _count(machine(implementation, recorder), examples, seed, outcome)
    except CannotRecordError as refusal:
        outcome.refusals[f"without crashes: {refusal}"] += 1
        _count(machine(implementation), examples, seed, outcome)
    yield outcome


def _count(made: type[CheckpointMachine], examples: int, seed: int, outcome: Outcome) -> None:
    """Run a machine; its runs passed, or it failed."""
    try:
        try_machine(made, examples=examples, seed=seed)
    except Exception as error:
        outcome.failed += 1
        outcome.error = f"{type(error).__name__}: {error}"
        outcome.smallest = "\n".join(getattr(error, "__notes__", []))
    else:
        outcome.passed += made.runs
