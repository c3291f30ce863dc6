"""docs/api.md is what tests/api found, and the methods that it names exist."""

from __future__ import annotations

import re

from omni_actors import OmniSystem
from tests.api.document import FILE, OURS, text


def test_the_document_is_what_the_capabilities_were_found_to_be() -> None:
    assert FILE.read_text() == text(), "run: python -m tests.api.document"


def test_every_method_that_the_document_names_exists() -> None:
    for theirs, ours in OURS.items():
        names = re.findall(r"\w+", theirs) if ours == "the same names" else re.findall(r"`(\w+)`", ours)
        fields = {"retry_after_s", "Overloaded", "weights_version", "replicas"}
        assert [name for name in names if not hasattr(OmniSystem, name) and name not in fields] == [], theirs
