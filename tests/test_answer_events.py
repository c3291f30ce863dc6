"""What an event of an odd server does to the commands that read it."""

from __future__ import annotations

import httpx2
import pytest

from omni_actors.cli.answer_events import answer_part
from omni_actors.cli.server_client import ServerError


@pytest.mark.parametrize(
    "data",
    [
        "no JSON",
        '{"choices": 7}',
        '{"choices":[{"delta":{"audio":{"data":"é"}}}]}',
        '{"choices":[{"delta":{"audio":{"data":"a"}}}]}',
        '{"choices":[{"delta":{"content":[{"x":' + "[" * 100_000,
    ],
)
def test_an_event_of_another_form_is_a_server_error(data: str) -> None:
    with pytest.raises(ServerError):
        answer_part(httpx2.ServerSentEvent(data=data))
