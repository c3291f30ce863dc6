"""JSON merge patches."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from omni_actors.serve.api.merge_patch import apply_patch, merge_patch

VALUES = st.recursive(
    st.booleans() | st.integers(0, 3) | st.sampled_from("ab") | st.lists(st.integers(0, 2), max_size=2),
    lambda inner: st.dictionaries(st.sampled_from("abcd"), inner, max_size=4),
    max_leaves=12,
)
DOCUMENTS = st.dictionaries(st.sampled_from("abcd"), VALUES, max_size=4)


@given(before=DOCUMENTS, after=DOCUMENTS)
def test_a_patch_turns_one_document_into_the_other(before: dict[str, Any], after: dict[str, Any]) -> None:
    patch = merge_patch(before, after)
    assert apply_patch(before, patch) == after
    assert (patch == {}) == (before == after)


def test_a_patch_has_only_what_differs() -> None:
    before = {"at": 1, "stages": {"a": {"pid": 5, "note": "x"}, "b": {}}, "bars": [1]}
    after = {"at": 2, "stages": {"a": {"note": "x"}, "b": {}, "c": {"pid": 7}}, "bars": [1]}
    assert merge_patch(before, after) == {"at": 2, "stages": {"a": {"pid": None}, "c": {"pid": 7}}}
