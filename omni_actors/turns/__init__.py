"""Turn taking in a spoken conversation: when a user starts and stops to speak, and how much of an answer was heard.

Rules
1. The package knows neither HTTP nor trio. Time is the position in a stream of sound; no function reads a clock.
2. The same sound gives the same events, in whatever chunks it arrives.
3. The models are loaded once in a process. Each conversation has a small state of its own.
"""

from __future__ import annotations

from omni_actors.turns.barge_in import BargeIn, Decision
from omni_actors.turns.detector import Detector, open_detector
from omni_actors.turns.events import Event, IdleTimeout, SpeechStarted, SpeechStopped
from omni_actors.turns.heard import SpokenAnswer
from omni_actors.turns.settings import SemanticVad, ServerVad, TurnDetection
from omni_actors.turns.silero import SAMPLE_RATE

__all__ = [
    "SAMPLE_RATE",
    "BargeIn",
    "Decision",
    "Detector",
    "Event",
    "IdleTimeout",
    "SemanticVad",
    "ServerVad",
    "SpeechStarted",
    "SpeechStopped",
    "SpokenAnswer",
    "TurnDetection",
    "open_detector",
]
