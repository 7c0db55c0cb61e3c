"""Which step a save shares with: the last of its root, and now and then none."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from xckpt.core.run.bases import Bases

COUNTS = st.one_of(st.none(), st.integers(1, 5))


@given(COUNTS, st.lists(st.booleans(), max_size=40))
def test_each_root_has_full_saves_so_often(full_every: int | None, roots: list[bool]) -> None:
    bases = Bases(full_every)
    full: dict[bool, list[bool]] = {False: [], True: []}
    newest: dict[bool, str] = {}
    for number, temporary in enumerate(roots):
        base = bases.base_for(temporary)
        assert base is None or base.path == newest[temporary]
        full[temporary].append(base is None)
        bases.saved(str(number), shared=base is not None, root=temporary)
        newest[temporary] = str(number)
    for saves in full.values():
        every = full_every or len(saves) + 1
        assert saves == [n % every == 0 for n in range(len(saves))]


@given(COUNTS)
def test_a_restored_step_is_the_base(full_every: int | None) -> None:
    bases = Bases(full_every)
    bases.saved("7", shared=False)
    bases.restored("3")
    base = bases.base_for()
    assert (base and base.path) == (None if full_every == 1 else "3")
    assert bases.base_for(True) is None
    bases.restored(None)
    assert bases.base_for() is None
