"""hibari, a small English voice, as two stages: text to spectral features, and features to a waveform."""

from __future__ import annotations

from omni_actors.stages.hibari.acoustic import AcousticEngine
from omni_actors.stages.hibari.vocoder import VocoderEngine

__all__ = ["AcousticEngine", "VocoderEngine"]
