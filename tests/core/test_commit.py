"""The rules of a commit, cell by cell."""

from __future__ import annotations

import itertools

import pytest

from xckpt.core.commit import Found, Place, Step, decide
from xckpt.errors import CheckpointExistsError

WITH_OVERWRITE: dict[Found, dict[Place, Step | str]] = {
    Found.NOTHING: {
        Place.KEYS: Step.IN_PLACE,
        Place.FOLDER: Step.RENAME,
        Place.PLAIN_FOLDER: Step.RENAME,
        Place.OUTPUT: Step.RENAME,
        Place.PLAIN_OUTPUT: Step.RENAME,
        Place.FILE: Step.RENAME,
    },
    Found.CHECKPOINT: {
        Place.KEYS: Step.GENERATION,
        Place.FOLDER: Step.EXCHANGE,
        Place.PLAIN_FOLDER: Step.GENERATION,
        Place.OUTPUT: Step.EXCHANGE,
        Place.PLAIN_OUTPUT: "cannot be replaced in one step",
        Place.FILE: Step.REPLACE,
    },
    Found.UNFINISHED: {
        Place.KEYS: Step.GENERATION,
        Place.FOLDER: Step.GENERATION,
        Place.PLAIN_FOLDER: Step.GENERATION,
        Place.OUTPUT: "cannot be replaced in one step",
        Place.PLAIN_OUTPUT: "cannot be replaced in one step",
        Place.FILE: "cannot be replaced in one step",
    },
    Found.FOREIGN: {
        Place.KEYS: Step.GENERATION,
        Place.FOLDER: Step.EXCHANGE,
        Place.PLAIN_FOLDER: Step.GENERATION,
        Place.OUTPUT: "holds no checkpoint; nothing there was touched",
        Place.PLAIN_OUTPUT: "holds no checkpoint; nothing there was touched",
        Place.FILE: "holds no checkpoint; nothing there was touched",
    },
}
"""What is done, or a part of the refusal's words."""

WITHOUT: dict[Found, Step | str] = {
    Found.CHECKPOINT: "holds a checkpoint already; pass overwrite=True",
    Found.UNFINISHED: "claimed by a save that has not committed; .* pass overwrite=True",
    Found.FOREIGN: "holds no checkpoint; nothing there was touched",
}
"""The same, where nothing may be replaced."""


@pytest.mark.parametrize(
    ("found", "place", "overwrite"), list(itertools.product(Found, Place, (False, True)))
)
def test_each_cell(found: Found, place: Place, overwrite: bool) -> None:
    free = found is Found.NOTHING
    expected = WITH_OVERWRITE[found][place] if overwrite or free else WITHOUT[found]
    if isinstance(expected, Step):
        assert decide("p", found, place, overwrite=overwrite) is expected
        return
    with pytest.raises(CheckpointExistsError, match=f"^p .*{expected}"):
        decide("p", found, place, overwrite=overwrite)


def test_a_reason_takes_the_place_of_the_usual_one() -> None:
    with pytest.raises(CheckpointExistsError, match=r"^p holds a\.txt; nothing there was touched"):
        decide("p", Found.FOREIGN, Place.OUTPUT, overwrite=True, reason="holds a.txt")
