"""What the talkers of omni models share: what the thinker read and writes, to codes of speech, as it comes.

Prompt rows are prefilled as they come, while the thinker is still prefilling or writing. The position of the answer's
first token is the first that is decoded: when its row is here, one step is left to the first code. The step behind code
k needs the row of the answer's token k + 1, or its end; a request whose row is not here waits, and no other does. A
request whose answer has no row of text ends without a code.

Wire: the first chunk of a request has tensors ``ids``, int64 (n,): the tokens of all prompt rows to come. Each chunk
may bring ``rows``, (k, width) in the thinker's dtype: the next prompt rows, and behind them the answer's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from omni_actors.stages.autoregressive.cache import SlottedCache
from omni_actors.stages.autoregressive.sampling import Sampler, Sampling, choose, generator, not_finite
from omni_actors.stages.autoregressive.scheduler import Scheduler, Sequence
from omni_actors.stages.base import (
    Chunk,
    InvalidRequest,
    RequestId,
    StageContext,
    StageFailure,
    StageOutput,
    StageRequest,
)
from omni_actors.stages.checkpoint import load_part, whole_config
from omni_actors.stages.omni.options import TalkerOptions, TalkerParams
from omni_actors.stages.refusal import request_work
from omni_actors.stages.sources import OpenSources
from omni_actors.stages.tensors import to_torch


class TalkerRequest(Sequence):
    """Inputs here are (k, width), of one width, in the talker's dtype."""

    left: int
    """Prompt rows to come."""
    positions: Tensor
    """Of the prompt, (3, n)."""
    delta: float
    """What a later place is from its position."""
    opening: Tensor
    """What comes between the prompt and the answer's first token; the last one is added to that."""
    text_end: Tensor
    """(1, width)."""
    silence: Tensor
    """(1, width): beside each code after the text."""
    limit: int
    """Codes that may be chosen."""

    def __init__(self, request: StageRequest, params: TalkerParams, suppressed: Tensor) -> None:
        self.id, self.params = request.request_id, params
        self.open = OpenSources(request.sources)
        self.inputs: list[Tensor] = []
        """Of positions that are ready."""
        self.text: deque[Tensor] = deque()
        """Of the answer, for codes to come."""
        self.introduced = self.opened = False
        """Whether the first chunk is here; whether the answer's first row is."""
        self.cached = self.codes = 0
        """Positions in the cache; codes chosen."""
        self.frame: Tensor | None = None
        """The last code as an input, which waits for its text."""
        sampling = Sampling(
            params.talker_temperature, params.talker_top_k, params.talker_top_p, params.talker_repetition_penalty
        )
        self.random = generator(params.seed)
        self.sampler = Sampler(sampling, self.random, suppressed)

    def add(self, rows: Tensor) -> None:
        self.inputs.append(rows)
        self.ready += len(rows)

    def take(self, count: int) -> Tensor:
        rows = torch.cat(self.inputs)
        self.inputs = [rows[count:]]
        self.ready -= count
        return rows[:count]

    def advance(self) -> None:
        """The next position is ready where its text is, or where no more text comes."""
        if self.frame is not None and (self.text or not self.open):
            self.add(self.frame + (self.text.popleft() if self.text else self.silence))
            self.frame = None


R = TypeVar("R", bound=TalkerRequest)


class OmniTalker(Generic[R]):
    """``context.model``: a checkpoint directory; its ``talker`` weights are read."""

    MODEL: ClassVar[type[PreTrainedModel]]
    HANDOFF_HEADER: ClassVar[frozenset[str]]
    """What a first chunk must bring, besides ids and rows."""

    def __init__(self, context: StageContext, options: TalkerOptions) -> None:
        """Raises WrongCheckpoint, OSError (the checkpoint's files)."""
        self._options = options
        if context.model is None:
            raise ValueError(f"stage {context.stage!r}: a talker needs a model, a checkpoint directory")
        torch.set_num_threads(context.threads)
        context.report("reading the weights of the talker")
        dtype: torch.dtype = getattr(torch, options.dtype)
        model: Any = load_part(self.MODEL, context.model, "talker", dtype, context.device)
        self._whole: Any = whole_config(context.model)
        self._model, self._config, self._device = model, model.config, model.device
        self._width: int = self._whole.thinker_config.text_config.hidden_size
        """Of the thinker's rows."""
        positions = model.config.get_text_config().max_position_embeddings
        if options.context > positions:
            raise ValueError(f"context: found {options.context}; the talker has {positions} positions")
        self._cache = SlottedCache(options.max_batch, options.context, model.dtype, model.device)
        self._scheduler: Scheduler[R] = Scheduler(self._cache, options.max_batch, options.prefill_chunk)
        self._requests: dict[RequestId, R] = {}
        self._silent: list[RequestId] = []
        """To be ended without a code."""

    # what a family says for itself

    def _open(self, request: StageRequest) -> R:
        """Raises ``InvalidRequest``."""
        raise NotImplementedError

    def _accept_header(self, request: R, tensors: dict[str, Tensor]) -> None:
        """Take what comes once, with the first chunk: set ``left``, ``positions`` and all up to ``silence``."""
        raise NotImplementedError

    def _read(self, request: R, rows: Tensor) -> Tensor:
        """The inputs of the next prompt rows."""
        return rows

    def _said(self, rows: Tensor) -> Tensor:
        """The inputs of rows of the answer."""
        return rows

    def _project(self, inputs: Tensor) -> Tensor:
        """Inputs as the model takes them."""
        return inputs

    def _emit(self, requests: list[R], codes: list[int], hidden: Tensor) -> Iterator[StageOutput | StageFailure]:
        """Go on behind the codes that were chosen by hidden (rows, hidden): end a request, or set its ``frame``."""
        raise NotImplementedError

    # StageEngine

    @property
    def busy(self) -> bool:
        return bool(self._silent) or self._scheduler.busy

    def start(self, request: StageRequest) -> None:
        self._requests[request.request_id] = self._open(request)

    def feed(self, request_id: RequestId, chunk: Chunk) -> None:
        request = self._requests[request_id]
        try:
            with request_work("rows"):
                self._take_in(request, {name: to_torch(tensor) for name, tensor in chunk.tensors.items()})
        except InvalidRequest:
            self.abort(request_id)
            raise
        request.open.update(chunk)
        if chunk.last and not request.open:
            if request.opened:
                request.text.append(request.text_end)
            else:
                self._scheduler.remove(request)
                self._silent.append(request_id)
        request.advance()

    def abort(self, request_id: RequestId) -> None:
        if request := self._requests.pop(request_id, None):
            self._scheduler.remove(request)
        if request_id in self._silent:
            self._silent.remove(request_id)

    def step(self) -> Iterator[StageOutput | StageFailure]:
        for request_id in self._silent:
            del self._requests[request_id]
            yield StageOutput(request_id, last=True)
        self._silent.clear()
        for row, count in self._scheduler.prefill_chunks():
            request = self._scheduler.rows[row]
            axes = request.positions[:, None, request.cached : request.cached + count]
            self._forward([row], request.take(count)[None], axes)
            request.prefill_left -= count
        if rows := self._scheduler.decode_rows():
            yield from self._decode(rows)

    def close(self) -> None:
        self._requests.clear()
        del self._scheduler, self._cache, self._model

    # in

    @torch.inference_mode()
    def _take_in(self, request: R, tensors: dict[str, Tensor]) -> None:
        if "ids" in tensors and not request.introduced:
            self._check_header(tensors)
            self._accept_header(request, tensors)
            self._admit(request)
        rows = tensors.get("rows")
        if rows is None:
            return
        if not request.introduced or rows.dim() != 2 or rows.shape[1] != self._width:
            message = f"rows (n, {self._width}) behind a first chunk were expected, not {tuple(rows.shape)}"
            raise InvalidRequest(message, param="rows")
        require_finite("rows", rows, tuple(rows.shape))
        rows = rows.to(self._device, self._model.dtype)
        count = min(len(rows), request.left)
        if count:
            request.add(self._read(request, rows[:count]))
            request.left -= count
            if not request.left:
                request.add(request.opening[:-1])
        for row in self._said(rows[count:])[:, None]:
            if request.opened:
                request.text.append(row)
            else:
                request.opened = True
                request.add(row + request.opening[-1:])

    def _check_header(self, tensors: dict[str, Tensor]) -> None:
        """Raises ``InvalidRequest`` where a first chunk lacks something, or brings something else than expected."""
        if missing := sorted(self.HANDOFF_HEADER - tensors.keys()):
            raise InvalidRequest(f"a first chunk without {', '.join(missing)}", param="rows")
        ids = tensors["ids"]
        if ids.dtype != torch.int64 or ids.dim() != 1 or not len(ids):
            raise InvalidRequest(f"ids: int64 (n,) was expected, not {ids.dtype} {tuple(ids.shape)}", param="rows")

    def _admit(self, request: R) -> None:
        size = request.positions.shape[1]
        request.limit = min(request.params.talker_max_tokens, self._options.context - size)
        if request.limit < 1:
            raise InvalidRequest(
                f"the prompt takes {size} positions of the talker's context, which has {self._options.context}",
                param="messages",
                code="context_length_exceeded",
            )
        request.prefill_left = size - 1
        request.introduced = True
        self._scheduler.add(request)

    # out

    def _end(self, request: R) -> None:
        del self._requests[request.id]
        self._scheduler.remove(request)

    @torch.inference_mode()
    def _decode(self, rows: list[int]) -> Iterator[StageOutput | StageFailure]:
        requests = [self._scheduler.rows[row] for row in rows]
        hidden = self._forward(rows, torch.stack([request.take(1) for request in requests]))
        logits = self._model.codec_head(hidden)
        chosen = choose(logits, [request.sampler for request in requests])
        codes = {at: code for at, code in enumerate(chosen) if code is not None}
        for at, request in enumerate(requests):
            if at in codes:
                request.codes += 1
            else:
                yield self._failed(request)
        if codes:
            yield from self._emit([requests[at] for at in codes], [*codes.values()], hidden[[*codes]])

    def _failed(self, request: R) -> StageFailure:
        """End a request for which no code can be chosen."""
        self._end(request)
        return StageFailure(request.id, not_finite())

    @torch.inference_mode()
    def _forward(self, rows: list[int], inputs: Tensor, axes: Tensor | None = None) -> Tensor:
        """Bring rows on by their inputs, (rows, count, width); their last hidden states, (rows, hidden).

        axes: positions on the three axes, (3, rows, count), where they are not the places behind the prompt.
        """
        count = inputs.shape[1]
        positions, mask = self._cache.extend(rows, count)
        requests = [self._scheduler.rows[row] for row in rows]
        if axes is None:
            deltas = torch.tensor([request.delta for request in requests], device=positions.device)
            axes = (positions + deltas[:, None]).expand(3, -1, -1)
        for request in requests:
            request.cached += count
        hidden: Tensor = self._model.model(
            inputs_embeds=self._project(inputs),
            position_ids=axes.to(inputs.device),
            attention_mask=mask,
            past_key_values=self._cache,
            use_cache=True,
        ).last_hidden_state[:, -1]
        return hidden


def require_finite(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Raises ``InvalidRequest`` where this is not a tensor of finite floats of that shape."""
    if not tensor.is_floating_point() or tensor.shape != shape:
        found = f"{tensor.dtype} {tuple(tensor.shape)}"
        raise InvalidRequest(f"{name}: floats {shape} were expected, not {found}", param="rows")
    if not tensor.float().isfinite().all():
        raise InvalidRequest(f"{name}: some numbers are not finite", param="rows")
