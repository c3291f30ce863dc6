"""What thinkers share, whatever runs the model: a prompt with media becomes a request of the batch.

Rules
1. Media are decoded, and their features computed, in the thread of a ``MediaThread``. A prompt without media does not
   wait for that thread.
2. A prompt that cannot be read ends its own request: in ``feed``, or in a step if the thread read it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from omni_actors.stages.autoregressive.prompt_engine import PromptEngine, PromptRequest
from omni_actors.stages.base import CLIENT, Chunk, InvalidRequest, RequestId, StageContext, StageFailure, StageOutput
from omni_actors.stages.multimodal.limits import MediaLimits
from omni_actors.stages.multimodal.processor import OmniInputs, OmniProcessor
from omni_actors.stages.multimodal.prompt import OmniPrompt
from omni_actors.stages.omni.handoff import TalkerHandoff
from omni_actors.stages.omni.media_thread import MediaThread
from omni_actors.stages.omni.positions import is_media, position_grids
from omni_actors.stages.refusal import request_work


class OmniRequest(PromptRequest[OmniPrompt]):
    """One request, with a prompt of n positions once it is read."""

    ids: Tensor
    """The prompt's token ids, int64 (n,)."""
    grids: dict[str, Tensor]
    """The tensors of ``omni.positions.GRIDS`` that the prompt has."""
    is_media: Tensor
    """The positions that are audio, images or video, bool (n,)."""
    handoff: TalkerHandoff | None = None
    """None: no downstream stage takes part in the request."""


R = TypeVar("R", bound=OmniRequest)
_HEADER = "<|im_start|>assistant\n"
"""The beginning of the answer's turn, for a talker that takes some of the prompt's positions."""


class OmniPromptEngine(PromptEngine[R]):
    """The input side of a thinker. A thinker lists it before the base class that has the batch."""

    _config: Any
    """The whole model's configuration."""

    def _open_processors(self, stage: StageContext, context: int, system_prompt: str) -> None:
        """Load the processors of the stage's checkpoint. context: the most tokens of a prompt, plus 1."""
        limits = MediaLimits(tokens=context - 1)
        model, tokenizer = stage.model_directory, stage.tokenizer
        self._processor = OmniProcessor(model, tokenizer=tokenizer, limits=limits)
        self._media_processor = OmniProcessor(
            model, tokenizer=tokenizer, limits=limits
        )  # a tokenizer must not be used in two threads
        self._media_thread = MediaThread()
        self._system_prompt = system_prompt
        self._header: list[int] = self._processor.tokenizer.encode(_HEADER, add_special_tokens=False)

    def _conversation_tokens(self, chunk: Chunk, tools: Sequence[Any], kwargs: Mapping[str, Any]) -> list[int]:
        """Return the tokens of a conversation without media, a chunk with messages. Raises InvalidRequest."""
        if tools:
            raise InvalidRequest("tools: this model's conversations have no tools", param="tools")
        prompt = OmniPrompt([CLIENT])
        prompt.feed(chunk)
        return self._processor.text_tokens(prompt, self._system_prompt, kwargs)

    # for subclasses

    def _prepare(self, request: R, inputs: OmniInputs) -> Any:
        """Compute what else the prompt needs; return what ``_join_batch`` takes.

        Any exception ends this request only. If the prompt has media, this runs in the ``MediaThread``, so it must not
        change what requests share.
        """
        raise NotImplementedError

    def _talker_positions(self, request: R) -> Tensor | None:
        """Return the prompt positions that the talker takes, bool (n,); None: all."""
        return None

    def _handoff_header(self, request: R) -> dict[str, Tensor]:
        """Return the tensors that the talker gets once, with the first rows."""
        raise NotImplementedError

    # StageEngine

    @property
    def busy(self) -> bool:
        return self._media_thread.pending or super().busy

    def abort(self, request_id: RequestId) -> None:
        super().abort(request_id)
        self._media_thread.forget(request_id)

    def step(self) -> Iterator[StageOutput | StageFailure]:
        for request_id, reading in self._media_thread.take():
            try:
                with request_work("messages"):
                    prompt = reading.result()
                self._join_batch(self._requests[request_id], prompt)
            except InvalidRequest as error:
                self.abort(request_id)
                yield StageFailure(request_id, error)
        if super().busy:
            yield from super().step()
        elif self._media_thread.pending:
            self._media_thread.wait()

    def close(self) -> None:
        super().close()
        self._media_thread.close()

    def _complete(self, request: R) -> None:
        if request.collector.media:
            self._media_thread.begin(request.id, lambda: self._read(request, self._media_processor))
        else:
            super()._complete(request)

    def _encode(self, request: R) -> Any:
        return self._read(request, self._processor)

    def _read(self, request: R, processor: OmniProcessor) -> Any:
        params = request.params
        inputs = processor(
            request.collector,
            system_prompt=self._system_prompt,
            use_audio_in_video=params.use_audio_in_video,
            tokenization=params.tokenization_kwargs,
            media=params.mm_processor_kwargs,
            template_kwargs=params.chat_template_kwargs,
        )
        request.ids, request.grids = torch.tensor(inputs.ids), position_grids(inputs.tensors)
        request.is_media = is_media(request.ids, self._config)
        prompt = self._prepare(request, inputs)
        self._open_handoff(request, embedded=inputs.is_embedded)
        return prompt

    def _open_handoff(self, request: R, *, embedded: bool) -> None:
        """Begin what goes to the talker, if one takes part. embedded: whether the client has sent embeddings.

        Raises InvalidRequest: the prompt does not have what a talker takes.
        """
        if not request.downstream:
            return
        if embedded:
            raise InvalidRequest("embeds: the talker needs the tokens of the prompt", param="embeds")
        positions = self._talker_positions(request)
        if positions is not None:
            _check_positions(positions, request, self._header)
        request.handoff = TalkerHandoff(len(request.ids), positions)


def _check_positions(positions: Tensor, request: OmniRequest, header: list[int]) -> None:
    """Raise InvalidRequest if a prompt, raw or of a chat template with variables, does not have what a talker takes.

    positions: of ``_talker_positions``. header: the tokens with which the prompt has to end.
    """
    if request.ids[-len(header) :].tolist() != header:
        rendered = request.params.chat_template_kwargs and not request.collector.raw
        param = "chat_template_kwargs" if rendered else "prompt"
        message = f"{param}: for speech the prompt has to end with the beginning of the answer's turn"
        raise InvalidRequest(message, param=param)
    if (request.is_media & ~positions).any():
        raise InvalidRequest("prompt: for speech, media may be in the user's turns only", param="prompt")
