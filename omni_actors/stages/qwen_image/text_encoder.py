"""Qwen-Image's text encoder: a prompt to the hidden states of a Qwen2.5-VL language model.

Input: a conversation, of which the last user message is the prompt, and for a model that looks at pictures the pictures
(see ``multimodal.prompt``). Output: one chunk with ``prompt``, (n, width), and if the request has a negative
prompt and does not turn guidance off, ``negative``, (m, width).

Each prompt is computed by itself, one in a step: the rows do not depend on other requests, and there is no padding.
They are diffusers' rows to the bit. The output layer is not loaded, and without pictures neither is the vision tower.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import torch
from torch import Tensor
from transformers import Qwen2_5_VLForConditionalGeneration
from transformers.utils import logging

from omni_actors.stages import weights
from omni_actors.stages.base import Chunk, InvalidRequest, StageContext, StageOutput, StageRequest
from omni_actors.stages.checkpoint import WrongCheckpoint
from omni_actors.stages.diffusion.pipeline_index import read_index
from omni_actors.stages.engine import PausableEngine
from omni_actors.stages.multimodal.prompt import OmniPrompt
from omni_actors.stages.qwen_image.options import TextEncoderOptions, TextEncoderParams
from omni_actors.stages.qwen_image.prompts import EncoderInput, PromptReader
from omni_actors.stages.refusal import request_work, validated
from omni_actors.stages.tensors import to_wire


class _Request:
    def __init__(self, request: StageRequest) -> None:
        self.id, self.params = request.request_id, validated(request.params, TextEncoderParams)
        self.prompt = OmniPrompt(request.sources)
        self.inputs: deque[EncoderInput] = deque()
        """The prompts that are not computed yet, once all input is there."""
        self.rows: dict[str, Tensor] = {}
        self.paused = False

    @property
    def ready(self) -> bool:
        return bool(self.inputs) and not self.paused

    @property
    def negative(self) -> str | None:
        """The negative prompt, unless the request turns guidance off. The denoiser decides whether it takes effect."""
        params = self.params
        return None if params.guidance is not None and params.guidance <= 1 else params.negative_prompt


class TextEncoder(PausableEngine[_Request]):
    """Encodes prompts, with the ``text_encoder`` of ``context.model``, a directory of diffusers."""

    def __init__(self, context: StageContext) -> None:
        """Raises msgspec.ValidationError (options), WrongCheckpoint, OSError (the checkpoint's files)."""
        super().__init__()
        self._options = msgspec.convert(context.options, TextEncoderOptions)
        torch.set_num_threads(context.threads)
        torch.backends.cudnn.deterministic = True
        index = read_index(context.model_directory)
        context.report("reading the tokenizer")
        self._reader = PromptReader(context.model_directory, index, self._options, context.tokenizer)
        context.report("reading the weights of the text encoder")
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # it would fill the end of stderr, which explains a crash
        self._weights = _Weights(context, self._options, sees=index.looks_at_pictures)
        self._model = self._weights.model.model
        self._capabilities["update_weights"] = self._update_weights

    def _new_request(self, request: StageRequest) -> _Request:
        return _Request(request)

    def _take(self, request: _Request, chunk: Chunk) -> None:
        if request.prompt.feed(chunk):
            with request_work("prompt"):
                request.inputs.extend(self._reader.read(request.prompt, request.negative))
            request.prompt = OmniPrompt(())

    def step(self) -> Iterator[StageOutput]:
        """Compute the next prompt of the first request that has one."""
        request = next(each for each in self._requests.values() if each.ready)
        given = request.inputs.popleft()
        request.rows[given.name] = self._encode(given)
        if not request.inputs:
            self.abort(request.id)
            yield StageOutput(request.id, {name: to_wire(rows) for name, rows in request.rows.items()}, last=True)

    @torch.inference_mode()
    def _encode(self, given: EncoderInput) -> Tensor:
        """Return the prompt's hidden states, (n, width)."""
        tensors = {name: tensor.to(self._model.device) for name, tensor in given.tensors.items()}
        states: Tensor = self._model(**tensors, use_cache=False).last_hidden_state
        return states[0, self._reader.template.dropped :]

    def _replace_weights(self, files: Mapping[str, tuple[int, int]]) -> dict[str, Any]:
        return self._weights.replace(files)


def _model_class(*, sees: bool) -> Any:
    """Return transformers' class without its output layer, and unless it ``sees``, without its vision tower."""
    original: Any = Qwen2_5_VLForConditionalGeneration

    def make(self: Any, config: Any) -> None:
        original.__init__(self, config)
        del self.lm_head
        if not sees:
            del self.model.visual

    changes = {
        "__init__": make,
        "__module__": original.__module__,  # by it and the class name, transformers finds how to rename weights
        "get_output_embeddings": lambda self: None,
        "_keys_to_ignore_on_load_unexpected": ["lm_head", "visual"],
        "_tied_weights_keys": {},
    }
    return type(original.__name__, (original,), changes)


class _Weights:
    """The model of the text encoder, whose weights can be replaced in place. sees: whether it has a vision tower."""

    def __init__(self, context: StageContext, options: TextEncoderOptions, *, sees: bool) -> None:
        self._directory = context.model_directory / "text_encoder"
        self._class = _model_class(sees=sees)
        self._dtype = getattr(torch, options.dtype)
        model, info = self._class.from_pretrained(self._directory, device_map={"": context.device}, **self._how_to_load)
        if missing := sorted(info["missing_keys"]):
            raise WrongCheckpoint(context.model_directory, "text_encoder", f"there are no weights for {missing[:3]}")
        self.model: Any = model.eval().requires_grad_(requires_grad=False)
        self._config = copy.deepcopy(model.config)

    @property
    def _how_to_load(self) -> dict[str, Any]:
        return {
            "dtype": self._dtype,
            "attn_implementation": "sdpa",
            "local_files_only": True,
            "output_loading_info": True,
        }

    def replace(self, files: weights.Files) -> dict[str, Any]:
        """Replace weights, as ``Engine._replace_weights`` says. Names and shapes are those of the checkpoint."""
        own = weights.shapes(weights.checkpoint_files(self._directory))
        tensors = weights.read(files)
        weights.check({name: tuple(tensor.shape) for name, tensor in tensors.items()}, own)
        weights.check_floating(tensors)
        try:
            loaded, info = self._class.from_pretrained(
                None, config=copy.deepcopy(self._config), state_dict=tensors, **self._how_to_load
            )
        except RuntimeError as error:
            raise InvalidRequest(f"the weights do not fit: {error}", param="path") from error
        missing, targets = set(info["missing_keys"]), self.model.state_dict()
        with torch.no_grad():
            for name, tensor in loaded.state_dict().items():
                if name not in missing:
                    targets[name].copy_(tensor)
        return {"updated": len(tensors), "complete": not missing}
