"""What Qwen2.5-Omni's thinker hands to its talker.

A row is the sum of the language model's input and its output at a position; at a media position it is the output
alone. So the row of a generated token comes out of the next forward, and the last token has none. The talker takes
all positions of the prompt.

Wire, besides what every talker takes (``omni.talker``). The first chunk of a request has:
- ``positions``, (3, n): the prompt's rotary positions
- ``tts``, (2 + speakers, hidden): the thinker's embeddings of the talker's text_eos and text_pad and of each speaker's
  bos_token, in the order of the checkpoint's file

The rules are those of ``Qwen2_5OmniForConditionalGeneration.generate`` of transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from omni_actors.stages.qwen2_5.speakers import load_speakers


def tts_tokens(config: Any, directory: Path) -> list[int]:
    """Return the tokens whose embeddings are ``tts``. config: of the whole model. Raises as ``load_speakers`` does."""
    talker = config.talker_config
    speakers = load_speakers(directory).values()
    return [talker.tts_text_end_token_id, talker.tts_text_pad_token_id, *(speaker.bos_token for speaker in speakers)]


def handoff_rows(inputs: Tensor, outputs: Tensor, is_media: Tensor) -> Tensor:
    """Return the rows, (k, hidden), of k prompt positions from the language model's inputs and outputs there.

    is_media: bool (k,).
    """
    return outputs + inputs.masked_fill(is_media[:, None].to(inputs.device), 0)
