from __future__ import annotations

import doctest

import pytest

from omni_actors.protocol import messages
from omni_actors.protocol.journal import slices
from omni_actors.stages import base


def test_the_example_engine_of_the_protocol_runs() -> None:
    result = doctest.testmod(base)
    assert result.attempted
    assert not result.failed


def test_an_output_has_no_more_decisions_than_a_control_message_can_have() -> None:
    entry = (2**63,) * base.MOST_DECISIONS
    assert base.StageOutput(1, decisions=entry).decisions == entry
    (part,) = slices("stage", 0, [entry])
    assert messages.encode(messages.JournalPart(1, part))
    with pytest.raises(ValueError, match="an output has 10001 decisions; the limit is 10000"):
        base.StageOutput(1, decisions=(*entry, 0))
