"""The rules of a run as texts: each policy comes back, and what is none is never asked."""

from __future__ import annotations

from dataclasses import is_dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.run.test_policies import keeping, runs
from xckpt.core.run.keeping import kept
from xckpt.core.run.policies import All, Best, EveryMinutes, EverySteps, KeepPolicy, Latest, OnSteps
from xckpt.core.run.record import StepRecord
from xckpt.core.run.rules import kept_by, rule_texts

listed = keeping.filter(is_dataclass)
"""The policies that have a text: not the functions."""
RUN = [StepRecord(step, 60.0 * step, {"loss": 1 / step}) for step in (1, 2, 3, 4)]


@pytest.mark.parametrize(
    "policy",
    [
        *(All(), Best("loss"), Best("loss", 2, "max"), EveryMinutes(2), EverySteps(2), Latest(2)),
        OnSteps([1, 4]),
    ],
)
def test_a_policy_comes_back(policy: KeepPolicy) -> None:
    (text,) = rule_texts([policy])
    run = [*RUN[:-1], StepRecord(4, 240.0, {"loss": 0.25}, keep=(text,))]
    found = kept_by(run)
    assert {number for number, by in found.items() if by == [text]} == set(policy(run))


@settings(max_examples=30)
@given(runs, st.lists(listed, max_size=3))
def test_the_rules_keep_what_the_policies_keep(
    run: list[StepRecord], asked: list[KeepPolicy]
) -> None:
    run = [replace(each, keep=rule_texts(asked)) for each in sorted(run, key=lambda r: r.number)]
    found = {number for number, by in kept_by(run).items() if by}
    assert found == kept(run, asked) or not any(record.managed for record in run)


@pytest.mark.parametrize(
    "text",
    [
        *("len", "All(1)", "Latest(0)", "Latest(true)", "Latest(1e999)", "EverySteps(0.5)"),
        *("OnSteps(7)", 'Best(["loss"], 1, "min")', "Best(null)", 'Best("loss", 1, "up")'),
        *(
            "OnSteps([[1]])",
            "EveryMinutes(-1)",
            f"EveryMinutes({10**400})",
            "Latest",
            "os.system(1)",
            "",
        ),
        *("Latest(" + "[" * 100_000 + end + ")" for end in ("", "]" * 100_000)),
    ],
)
def test_what_is_no_policy_is_not_asked(text: str) -> None:
    run = [*RUN[:-1], StepRecord(4, 240.0, {"loss": 0.25}, keep=(text,))]
    assert kept_by(run) == {1: [f"{text}?"], 2: [f"{text}?"], 3: [f"{text}?"], 4: ["newest"]}
