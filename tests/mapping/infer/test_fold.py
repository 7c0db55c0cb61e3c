"""Folding: whatever the numbers do, the rules make of each finding's leaves what it says."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hypothesis import given
from hypothesis import strategies as st

from tests.support.steps import steps
from xckpt.convert import Mapping, Rule, TensorSpec
from xckpt.mapping.infer.decide import Finding
from xckpt.mapping.infer.fold import fold
from xckpt.mapping.operations import Operation, Tie, Untie

Number = Callable[[int], int]
"""What a number of a name is in the n-th finding."""

NUMBERS: tuple[Number, ...] = (
    lambda n: n,
    lambda n: 2 * n,
    lambda n: n + 1,
    lambda n: n // 2,
    lambda n: n % 2,
    lambda n: 7,
)


def name(word: str, numbers: Sequence[Number], n: int) -> str:
    """A name of the n-th finding."""
    return "/".join([word, *(f"{'xyz'[place]}_{of(n)}" for place, of in enumerate(numbers))])


def finding(sources: Sequence[str], targets: Sequence[str], *operations: Operation) -> Finding:
    """A finding of leaves that are not stacked."""
    return Finding(
        tuple((each,) for each in sources), tuple((each,) for each in targets), operations
    )


sides = st.lists(st.lists(st.sampled_from(NUMBERS), max_size=2), min_size=1, max_size=3)


@given(sides, sides, st.integers(1, 7), st.integers(0, 2))
def test_the_rules_make_what_the_links_say(
    sources: list[list[Number]], targets: list[list[Number]], count: int, others: int
) -> None:
    rows: list[tuple[list[str], list[str]]] = []
    seen: set[str] = set()
    for n in range(count + others):
        taken = [name(f"s{place}", numbers, n) for place, numbers in enumerate(sources)]
        made = [name(f"t{place}", numbers, n) for place, numbers in enumerate(targets)]
        if seen.isdisjoint((*taken, *made)):
            rows.append((taken, made))
            seen.update(taken, made)
    one = [Untie(len(sources))] if len(sources) > 1 else []
    several = [Tie(len(targets))] if len(targets) > 1 else []
    # The last rows belong to nothing: no rule may match them.
    findings = [finding(a, b, *one, *several) for a, b in rows[:count]]
    rules = fold(findings, [n for row, _ in rows for n in row], [n for _, row in rows for n in row])
    specs = {
        each: TensorSpec((place,), "int8") for place, row in enumerate(rows) for each in row[0]
    }
    resolved = Mapping(rules).resolve(specs)
    assert {each: spec.shape for each, spec in resolved.targets.items()} == {
        each: (place,) for place, (_, made) in enumerate(rows[:count]) for each in made
    }


def test_two_numbers_of_a_name_that_go_different_ways_are_no_one_index() -> None:
    """a_0/b_0, a_2/b_1, a_4/b_2: an index for the one number is none for the other."""
    names = {f"h.{2 * n}.w.weight": f"a_{2 * n}/b_{n}/w/kernel" for n in range(3)}
    findings = [finding([one], [other]) for one, other in names.items()]
    assert fold(findings, list(names), list(names.values())) == [
        Rule(one, other) for one, other in names.items()
    ]


def test_all_names_of_a_side_have_the_index() -> None:
    numbers = range(3)
    findings = [finding([f"h.{n}.q", f"h.{n}.k"], [f"g_{2 * n}/q"], Untie(2)) for n in numbers]
    sources = [f"h.{n}.{part}" for n in numbers for part in "qk"]
    assert fold(findings, sources, [f"g_{2 * n}/q" for n in numbers]) == [
        Rule(["h.{layer}.q", "h.{layer}.k"], "g_{2*layer}/q", [Untie(2)])
    ]


def test_a_rule_costs_the_same_among_many() -> None:
    def fold_kinds(count: int) -> None:
        kinds = [chr(ord("a") + each) for each in range(count)]
        names = {f"h.{n}.{kind}": f"h/{n}/{kind}" for kind in kinds for n in range(2)}
        found = [finding([one], [other]) for one, other in names.items()]
        assert len(fold(found, list(names), list(names.values()))) == count

    each = steps(lambda: fold_kinds(5)) / 5
    assert steps(lambda: fold_kinds(20)) / 20 < 1.2 * each
