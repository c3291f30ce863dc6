"""The gaps that a realtime session's listener hears are counted as sound leaves."""

from __future__ import annotations

import pytest

from tests.support.http_server import Start
from tests.support.realtime import session


@pytest.mark.slow
def test_a_slow_answer_has_underruns(start: Start) -> None:
    """A word lasts 0.1 s, and each of the three takes 4 s, so that two come apart although the server stands still."""
    with start("-s", "stages.mouth.options.step_s=4") as server, session(server) as talk:
        talk.ask("word")
        talk.send("response.create")
        talk.until("response.output_audio.delta")
        assert server.metric("omni_speech_streams") == 1
        assert talk.until("response.done")[-1]["response"]["status"] == "completed"
        assert server.metric("omni_speech_underruns_total") == 2
        assert server.metric("omni_speech_streams") == 0
        requests = server.http.get("/v1/state").json()["requests"].values()
        assert sum(each.get("underruns", 0) for each in requests) == 2
