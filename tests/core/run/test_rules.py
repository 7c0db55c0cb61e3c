"""The rules of a run as texts: each policy comes back, and what is none is never asked."""

from __future__ import annotations

import pytest

from xckpt.core.run.policies import All, Best, EveryMinutes, EverySteps, KeepPolicy, Latest, OnSteps
from xckpt.core.run.record import StepRecord
from xckpt.core.run.rules import kept_by, rule_texts

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
