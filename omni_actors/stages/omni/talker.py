"""What the talkers of omni models share: a thinker's rows to codes of speech, while the thinker is still writing.

Rules
1. Prompt rows are prefilled as they arrive, while the thinker is prefilling or writing.
2. The position of the answer's first token is the first one to be decoded: once its row has arrived, one step is left
   to the first code.
3. The step after code k needs the row of the answer's token k + 1, or the end of the answer. A request whose row is
   missing waits, and delays no other.
4. A request whose answer has no row ends without a code.
5. An output's decisions are its codes, then ``END`` if it is the last one. So a journal's outputs are put out at once,
   before any input. The positions behind decided codes are prefilled together with the prompt, as far as their rows
   have arrived; the position after them is the first one to be decoded.

Wire: the first chunk of a request has tensors ``ids``, int64 (n,): the tokens of all prompt rows to come. Each chunk
may have ``rows``, (k, width) in the thinker's dtype: the next prompt rows, and after them the answer's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from omni_actors.stages import base
from omni_actors.stages.adapters.batched import BatchedAdapters
from omni_actors.stages.adapters.engine import AdaptedEngine
from omni_actors.stages.autoregressive.cache import SlottedCache
from omni_actors.stages.autoregressive.sampling import choose, not_finite
from omni_actors.stages.autoregressive.scheduler import Scheduler
from omni_actors.stages.checkpoint import PartWeights, load_part, whole_config
from omni_actors.stages.omni.options import TalkerOptions
from omni_actors.stages.omni.talker_request import TalkerRequest
from omni_actors.stages.refusal import beyond_context, request_work
from omni_actors.stages.tensors import to_torch

R = TypeVar("R", bound=TalkerRequest)

END = -1
"""The decision that an output is the last one."""


class OmniTalker(AdaptedEngine[R, BatchedAdapters]):
    """A talker. ``context.model``: a checkpoint directory, of which it loads the ``talker`` weights."""

    MODEL: ClassVar[type[PreTrainedModel]]
    HANDOFF_HEADER: ClassVar[frozenset[str]]
    """The tensors that a first chunk must have, besides ``ids``."""

    def __init__(self, context: base.StageContext, options: TalkerOptions) -> None:
        """Raises WrongCheckpoint, ValueError (options), OSError (the checkpoint's files)."""
        super().__init__()
        self._options = options
        model: Any = load_part(self.MODEL, context, "talker", options.dtype)
        self._weights = PartWeights(model, context, "talker")
        self._capabilities["update_weights"] = self._update_weights
        self._adapters = BatchedAdapters(model, part="talker", idle=options.idle_loras)
        self._whole: Any = whole_config(context.model_directory)
        self._model, self._config, self._device = model, model.config, model.device
        self._width: int = self._whole.thinker_config.text_config.hidden_size
        """Width of the thinker's rows."""
        positions = model.config.get_text_config().max_position_embeddings
        if options.context > positions:
            raise ValueError(f"context: found {options.context}; the talker has {positions} positions")
        self._cache = SlottedCache(options.max_batch, options.context, model.dtype, model.device)
        self._scheduler: Scheduler[R] = Scheduler(self._cache, options.max_batch, options.prefill_chunk)
        self._due: list[base.StageOutput] = []
        """Outputs of rules 4 and 5, which the next step puts out."""

    # for the families, besides ``_new_request``

    def _accept_header(self, request: R, tensors: dict[str, Tensor]) -> None:
        """Take the first chunk's tensors: set the request's fields from ``prompt_rows_left`` to ``text_pad``."""
        raise NotImplementedError

    def _embed_prompt(self, request: R, rows: Tensor) -> Tensor:
        """Return the inputs, (k, width), of the next prompt rows."""
        return rows

    def _embed_text(self, rows: Tensor) -> Tensor:
        """Return the inputs, (k, width), of rows of text."""
        return rows

    def _embed_codes(self, codes: Tensor) -> Tensor:
        """Return the code inputs, (n, width), of outputs with these codes, int64 (n, groups)."""
        raise NotImplementedError

    def _replay(self, request: R, codes: base.Decisions) -> None:
        """Let the request's samplers count the codes of an output that was decided earlier."""
        request.sampler.replay(codes[0])

    def _project(self, inputs: Tensor) -> Tensor:
        """Return inputs as the model takes them, (…, hidden)."""
        return inputs

    def _emit(
        self, requests: list[R], codes: list[int], hidden: Tensor
    ) -> Iterator[base.StageOutput | base.StageFailure]:
        """Yield the outputs of the codes that were just chosen. End each request, or set its ``code_input``.

        hidden: (requests, hidden), what the codes were chosen from.
        """
        raise NotImplementedError

    # StageEngine

    @property
    def busy(self) -> bool:
        return bool(self._due) or self._scheduler.busy

    @torch.inference_mode()
    def start(self, request: base.StageRequest) -> None:
        super().start(request)
        if not request.journal:
            return
        opened = self._requests[request.request_id]
        for codes in request.journal:
            last = codes[-1] == END
            self._due.append(spoken(opened.id, codes[: len(codes) - last], last=last))
        opened.ended = self._due[-1].last
        if not opened.ended:
            for codes in request.journal:
                self._replay(opened, codes)
            opened.decided.extend(self._embed_codes(torch.tensor(request.journal, device=self._device))[:, None])
            opened.codes = len(request.journal)

    def _device_of(self, name: str) -> torch.device | None:
        """Return where to put a received tensor: rows go to the model, and what the host computes with stays there."""
        return self._device if name == "rows" else None

    def _take(self, request: R, chunk: base.Chunk) -> None:
        if request.ended:
            return
        with request_work("rows"), self._adapters.applied([request.adapter]):
            tensors = {name: to_torch(each, self._device_of(name)) for name, each in chunk.tensors.items()}
            self._accept(request, tensors)
        request.open.update(chunk)
        if chunk.last and not request.open:
            if request.has_answer:
                request.text.append(request.text_eos)
            else:
                self._due.append(spoken(request.id, (), last=True))
        request.advance()

    def abort(self, request_id: base.RequestId) -> None:
        if request := self._requests.get(request_id):
            self._leave_batch(request)
        super().abort(request_id)
        self._due = [output for output in self._due if output.request_id != request_id]

    def step(self) -> Iterator[base.StageOutput | base.StageFailure]:
        due, self._due = self._due, []
        for output in due:
            if output.last:
                self.abort(output.request_id)
            yield output
        for row, count in self._scheduler.prefill_chunks():
            request = self._scheduler.rows[row]
            axes = request.positions[:, None, request.cached : request.cached + count]
            self._forward([row], request.take(count)[None], axes)
            request.prefill_left -= count
        if rows := self._scheduler.decode_rows():
            yield from self._decode(rows)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Speak an answer of one token with two codes: the first run of each kernel is slow."""
        request = self._requests[0] = self._new_request(base.StageRequest(0, (), {"talker_max_tokens": 2}))
        row = self._embed_text(torch.zeros(1, self._width, dtype=self._model.dtype, device=self._device))
        request.prompt_rows_left, request.positions, request.delta = 1, torch.arange(3).expand(3, -1), 0.0
        request.prefix, request.text_pad = row.expand(2, -1), row
        self._join_batch(request)
        request.add_prompt(row)
        request.add_answer(row)
        while self.busy:
            for _ in self.step():
                pass

    def close(self) -> None:
        super().close()
        del self._scheduler, self._cache, self._model, self._adapters, self._weights

    def _replace_weights(self, files: Mapping[str, tuple[int, int]]) -> dict[str, Any]:
        return self._weights.replace(files)

    @torch.inference_mode()
    def _accept(self, request: R, tensors: dict[str, Tensor]) -> None:
        if "ids" in tensors and not request.has_header:
            self._check_header(tensors)
            self._accept_header(request, tensors)
            self._join_batch(request)
        rows = tensors.get("rows")
        if rows is None:
            return
        if not request.has_header or rows.dim() != 2 or rows.shape[1] != self._width:
            message = f"rows (n, {self._width}) after a first chunk were expected, not {tuple(rows.shape)}"
            raise base.InvalidRequest(message, param="rows")
        require_finite("rows", rows, tuple(rows.shape))
        rows = rows.to(self._device, self._model.dtype)
        count = min(len(rows), request.prompt_rows_left)
        if count:
            request.add_prompt(self._embed_prompt(request, rows[:count]))
        request.add_answer(self._embed_text(rows[count:]))

    def _check_header(self, tensors: dict[str, Tensor]) -> None:
        """Raise ``InvalidRequest`` if a first chunk's tensors are not as the wire has them."""
        if missing := sorted(self.HANDOFF_HEADER - tensors.keys()):
            raise base.InvalidRequest(f"a first chunk needs {', '.join(missing)}", param="rows")
        ids = tensors["ids"]
        if ids.dtype != torch.int64 or ids.dim() != 1 or not len(ids):
            raise base.InvalidRequest(f"ids: int64 (n,) was expected, not {ids.dtype} {tuple(ids.shape)}", param="rows")

    def _join_batch(self, request: R) -> None:
        size = request.positions.shape[1]
        request.max_codes = min(request.params.talker_max_tokens, self._options.context - size)
        if request.max_codes < 1:
            found = f"the prompt takes {size} positions of the talker's context, which has {self._options.context}"
            raise beyond_context(found)
        decided = len(request.decided)
        behind = torch.arange(size, size + decided, device=request.positions.device) + request.delta
        request.positions = torch.cat([request.positions, behind.expand(3, -1)], 1)
        request.prefill_left = size - 1 + decided
        request.has_header = True
        self._scheduler.add(request)

    def _leave_batch(self, request: R) -> None:
        """Free what the batch has of a request that ends, waits for a row, or has no header yet."""
        self._scheduler.remove(request)

    @torch.inference_mode()
    def _decode(self, rows: list[int]) -> Iterator[base.StageOutput | base.StageFailure]:
        requests = [self._scheduler.rows[row] for row in rows]
        hidden = self._forward(rows, torch.stack([request.take(1) for request in requests]))
        with self._adapters.applied([request.adapter for request in requests]):
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

    def _failed(self, request: R) -> base.StageFailure:
        """End a request for which no code can be chosen; return its failure."""
        self.abort(request.id)
        return base.StageFailure(request.id, not_finite())

    @torch.inference_mode()
    def _forward(self, rows: list[int], inputs: Tensor, axes: Tensor | None = None) -> Tensor:
        """Compute the next positions of some rows; return the hidden states of the last ones, (rows, hidden).

        inputs: (rows, count, width). axes: rotary positions, (3, rows, count); None: those after the prompt.
        """
        count = inputs.shape[1]
        positions, mask = self._cache.extend(rows, count)
        requests = [self._scheduler.rows[row] for row in rows]
        if axes is None:
            deltas = torch.tensor([request.delta for request in requests], device=positions.device)
            axes = (positions + deltas[:, None]).expand(3, -1, -1)
        for request in requests:
            request.cached += count
        with self._adapters.applied([request.adapter for request in requests]):
            hidden: Tensor = self._model.model(
                inputs_embeds=self._project(inputs),
                position_ids=axes.to(inputs.device),
                attention_mask=mask,
                past_key_values=self._cache,
                use_cache=True,
            ).last_hidden_state[:, -1]
        return hidden


def spoken(request_id: base.RequestId, codes: Sequence[int], *, last: bool) -> base.StageOutput:
    """Return the output with these codes, one of each group; none: it only ends the request."""
    tensors = {"codes": np.array([codes], np.int16)} if codes else {}
    return base.StageOutput(request_id, tensors, last=last, decisions=(*codes, END) if last else tuple(codes))


def require_finite(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Raise ``InvalidRequest`` unless this is a tensor of finite floats of that shape. name: for the message."""
    if not tensor.is_floating_point() or tensor.shape != shape:
        found = f"{tensor.dtype} {tuple(tensor.shape)}"
        raise base.InvalidRequest(f"{name}: floats {shape} were expected, not {found}", param="rows")
    if not tensor.float().isfinite().all():
        raise base.InvalidRequest(f"{name}: some numbers are not finite", param="rows")
