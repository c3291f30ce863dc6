"""What a directory of diffusers says about its pipeline: ``model_index.json``. No model library is imported here."""

from __future__ import annotations

from pathlib import Path

import msgspec

INDEX = "model_index.json"
EDIT, EDIT_PLUS = "QwenImageEditPipeline", "QwenImageEditPlusPipeline"
"""The pipelines of Qwen-Image whose models look at a request's pictures: at one, or at several."""


class PipelineIndex(msgspec.Struct, frozen=True):
    """The fields of ``model_index.json`` that decide what runs it, and how."""

    class_name: str = msgspec.field(name="_class_name")
    """The class of diffusers that runs the pipeline."""

    @property
    def looks_at_pictures(self) -> bool:
        """Whether a Qwen-Image model looks at a request's pictures. Otherwise the new picture starts from one."""
        return self.class_name in (EDIT, EDIT_PLUS)


def read_index(directory: Path) -> PipelineIndex:
    """Return a pipeline's index.

    Raises OSError: there is none. ValueError, RecursionError: it is no JSON, or names no class.
    """
    return msgspec.json.decode((directory / INDEX).read_bytes(), type=PipelineIndex)


def unused_by_text_encoder(directory: Path) -> tuple[str, ...]:
    """Return what the names begin with of those tensors in ``text_encoder`` that the engine does not load.

    Raises as ``read_index`` does.
    """
    if read_index(directory).looks_at_pictures:
        return ("lm_head.",)
    return ("lm_head.", "visual.", "model.visual.")
