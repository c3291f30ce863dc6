"""The speakers of a Qwen2.5-Omni checkpoint, from its file ``spk_dict.pt``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from omni_actors.stages.base import InvalidRequest

DEFAULT = "Chelsie"
"""The default speaker, if the checkpoint has it; else its first speaker is the default."""


class Speaker(NamedTuple):
    """One speaker."""

    number: int
    """The index in the file."""
    bos_token: int
    """The token of the text vocabulary that ends the talker's prompt."""
    cond: Tensor
    """float32 (1, size): the speaker embedding."""
    ref_mel: Tensor
    """float32 (1, frames, mel): the mel spectrogram of some of the speaker's speech."""


def load_speakers(directory: Path) -> dict[str, Speaker]:
    """Return the speakers of a checkpoint directory by name, in the order of the file.

    Raises OSError, and pickle.UnpicklingError for a file that contains more than tensors and numbers.
    """
    found = torch.load(directory / "spk_dict.pt", map_location="cpu", weights_only=True)
    return {
        name: Speaker(number, int(voice["bos_token"]), voice["cond"].float(), voice["ref_mel"].float())
        for number, (name, voice) in enumerate(found.items())
    }


def speaker_named(name: str | None, speakers: Mapping[str, Speaker]) -> Speaker:
    """Return the speaker of this name, in upper or lower case; None: the default. Raises ``InvalidRequest``."""
    if name is None:
        return speakers.get(DEFAULT) or next(iter(speakers.values()))
    for found, speaker in speakers.items():
        if found.lower() == name.lower():
            return speaker
    raise InvalidRequest(f"found speaker {name!r}; the model has {', '.join(speakers)}", param="speaker")
