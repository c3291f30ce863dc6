"""What the thinkers of omni models share on vLLM: text, sound and pictures to text, and rows for the talker as they come.

Rules
1. Hidden states come out of vLLM's own forward (``private.RowWorker``), keyed by position: those that it computes again,
   after it preempted a request, are not sent again.
2. The prompt's rows go out in pieces that end at multiples of ``PIECE``, however vLLM cuts it between other requests';
   what is left goes with the answer's first token.
3. Prefix caching is off: of what is found in a cache there would be no rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from omni_actors.stages.base import InvalidRequest, StageContext, StageOutput, TensorLike
from omni_actors.stages.multimodal.processor import OmniProcessor
from omni_actors.stages.multimodal.prompt import OmniPrompt
from omni_actors.stages.omni.positions import grids_of, is_heard
from omni_actors.stages.registry import VLLMThinkerParams
from omni_actors.stages.tensors import to_wire
from omni_actors.stages.vllm.engine import Request, VLLMEngine
from omni_actors.stages.vllm.media import to_prompt
from omni_actors.stages.vllm.private import Captured

__all__ = ["Thinker", "ThinkerRequest"]

PIECE = 256


class ThinkerRequest(Request):
    """Tensors of a prompt of n positions."""

    collector: OmniPrompt
    params: VLLMThinkerParams
    ids: Tensor
    """int64 (n,)."""
    grids: dict[str, Tensor]
    heard: Tensor
    """Which positions are sound or picture, bool (n,)."""
    rows: Tensor
    """Of the positions from ``given`` on, (k, hidden)."""
    given = 0
    """Positions whose rows are on their way."""
    introduced = False
    """Whether the talker has what comes once."""

    @property
    def seen(self) -> int:
        return self.given + len(self.rows)


R = TypeVar("R", bound=ThinkerRequest)


class Thinker(VLLMEngine[R]):
    """``context.model``: a checkpoint directory of all parts."""

    PARAMS = VLLMThinkerParams

    def __init__(self, context: StageContext, config: Any, layers: Sequence[int], ends: Sequence[int]) -> None:
        """config: of the whole model. layers: whose hidden states are captured. ends: tokens that end an answer.

        Raises as ``VLLMEngine`` and ``OmniProcessor`` do.
        """
        assert context.model is not None
        super().__init__(
            context,
            worker_cls="omni_actors.stages.vllm.private.RowWorker",
            additional_config={"row_layers": list(layers)},
            enable_prefix_caching=False,
            async_scheduling=False,
        )
        context.report("reading the processor")
        self._config, self._ends = config, list(ends)
        self._processor = OmniProcessor(context.model)
        self._hears_videos = bool(self._options.engine_args.get("disable_chunked_mm_input"))

    # what a family says for itself

    def _prepared(self, request: R, *, use_audio_in_video: bool) -> None:
        """Take from the request's ids and grids what it needs of them."""

    def _opening(self, request: R) -> dict[str, Tensor]:
        """What the talker gets once, beside the first rows."""
        raise NotImplementedError

    def _rows(self, request: R, captured: Captured) -> Tensor:
        """The talker's rows of these positions, (k, hidden)."""
        raise NotImplementedError

    def _chosen(self, request: R, rows: Tensor) -> Tensor:
        """Of rows of the positions from ``given`` on, those that the talker gets."""
        return rows

    def _written(self, tokens: list[int]) -> list[Tensor]:
        """Rows of new tokens that need no forward."""
        return []

    # VLLMEngine

    def _prompt(self, request: R) -> Any:
        if request.params.use_audio_in_video and not self._hears_videos:
            # vLLM 0.32.0 mixes up sound and frames where a piece of the prompt ends among them.
            message = "a video is heard only by a stage with engine_args.disable_chunked_mm_input: true"
            raise InvalidRequest(message, param="use_audio_in_video")
        inputs = self._processor(
            request.collector,
            system_prompt=self._options.system_prompt,
            use_audio_in_video=request.params.use_audio_in_video,
        )
        request.ids, request.grids = torch.tensor(inputs.ids), grids_of(inputs.tensors)
        request.heard = is_heard(request.ids, self._config)
        request.rows = self._embed([])
        self._prepared(request, use_audio_in_video=inputs.use_audio_in_video)
        request.sampling.stop_token_ids = [*(request.sampling.stop_token_ids or ()), *self._ends]
        return to_prompt(inputs, self._config.thinker_config)

    def _embed(self, ids: Any) -> Tensor:
        rows: Tensor = self._llm.collective_rpc("embed", args=(torch.as_tensor(ids, dtype=torch.int64),))[0]
        return rows

    @torch.inference_mode()
    def _stepped(self) -> Iterator[StageOutput]:
        by_name = {request.internal: request for request in self._requests.values()}
        for captured in self._llm.collective_rpc("take_rows")[0]:
            if (request := by_name.get(captured.request)) is not None:
                known = request.seen - captured.position
                if known < len(captured.last):
                    new = Captured(captured.request, request.seen, captured.layers[known:], captured.last[known:])
                    request.rows = torch.cat([request.rows, self._rows(request, new)])
                yield from self._pieces(request)

    def _pieces(self, request: R) -> Iterator[StageOutput]:
        while len(request.rows) > PIECE or (len(request.rows) == PIECE and request.seen < len(request.ids)):
            if onward := self._introduced(request, self._take(request, PIECE)):
                yield StageOutput(request.id, onward=onward)

    @torch.inference_mode()
    def _onward(self, request: R, tokens: list[int], *, last: bool) -> Mapping[str, TensorLike]:
        rows = self._take(request, len(request.rows))
        return self._introduced(request, [*rows, *self._written(tokens[:-1] if last else tokens)])

    def _take(self, request: R, count: int) -> list[Tensor]:
        rows, request.rows = request.rows[:count], request.rows[count:]
        chosen = self._chosen(request, rows)
        request.given += count
        return [chosen] if len(chosen) else []

    def _introduced(self, request: R, rows: Sequence[Tensor]) -> Mapping[str, TensorLike]:
        """As it goes onward; the first time with what comes once."""
        onward = {} if request.introduced else self._opening(request)
        request.introduced = True
        if rows:
            onward["rows"] = torch.cat(list(rows))
        return {name: to_wire(tensor) for name, tensor in onward.items()}
