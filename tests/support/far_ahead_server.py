"""``python -m tests.support.far_ahead_server PIPELINE``: a server whose realtime sound leaves long before it is played.

It also waits for a transcriber that is to check a language for as long as it takes.

The last sound of a response leaves 2 s before it is played. What a test does while an ended response plays on has to be
over by then, however slow the machine is. Here sound leaves ``AHEAD_S`` before.
"""

from __future__ import annotations

from functools import partial
from unittest import mock

from omni_actors.serve.command import serve_command
from omni_actors.serve.realtime import pipeline, response
from omni_actors.serve.realtime.pacer import Pacer

AHEAD_S = 30.0
CHECK_S = 60.0

if __name__ == "__main__":
    with (
        mock.patch.object(response, "Pacer", partial(Pacer, AHEAD_S)),
        mock.patch.object(pipeline, "TRANSCRIPTION_CHECK_S", CHECK_S),
    ):
        serve_command()
