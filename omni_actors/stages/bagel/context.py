"""The ``bagel_context`` engine: texts and pictures to a text, or to the contexts of a picture to draw.

Input: the client's chunks, as ``multimodal.prompt`` takes them; texts and images only. The parts of all messages, in
order, are the terms of the context; BAGEL knows no roles. Output: that of ``LanguageEngine`` for a text. If downstream
stages take part, a picture is to be drawn: the chunks of ``handoff``, behind a text if the request has ``think``.

Rules
1. A request reads its terms in the step of its first prefill chunk, in caches of its own (``contexts``). Text
   generation then copies the full context into a row of the shared cache.
2. The text that the model wrote by ``think`` is read again, as a term, before the picture is drawn: the text that the
   client gets, so without a stop string.
3. All random numbers of a picture come from one generator, seeded by the request: first the noise of each picture that
   it reads, in order, then that of the picture to draw.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor
from transformers import AutoTokenizer

from omni_actors.stages.autoregressive.cache import SlottedCache
from omni_actors.stages.autoregressive.language import LanguageEngine, TextRequest, refuse_beyond_context
from omni_actors.stages.autoregressive.scheduler import Scheduler
from omni_actors.stages.autoregressive.text import Vocabulary
from omni_actors.stages.bagel import handoff, pictures
from omni_actors.stages.bagel.contexts import Contexts, Reader, RowsAttention, Term, count_positions
from omni_actors.stages.bagel.model import BagelModel, adapters, load, marks, replace_weights
from omni_actors.stages.bagel.options import ContextOptions, ContextParams, guidances
from omni_actors.stages.base import InvalidRequest, StageContext, StageFailure, StageOutput, StageRequest
from omni_actors.stages.diffusion.options import width_and_height
from omni_actors.stages.multimodal.conversation import ImagePart, TextPart, with_system_prompt
from omni_actors.stages.multimodal.images import check_size, decode_image
from omni_actors.stages.multimodal.limits import Deadline, MediaLimits
from omni_actors.stages.multimodal.prompt import OmniPrompt, Pixels
from omni_actors.stages.refusal import validated

Picture = tuple[int, int]
"""Width and height in pixels."""


class ContextRequest(TextRequest[OmniPrompt]):
    """One request."""

    params: ContextParams
    size: Picture
    terms: Sequence[Term] | None
    """None once they are read."""
    reader: Reader
    """Kept until the picture is drawn; for a text alone, until the shared cache has what was read."""
    edits: bool
    """Whether the request has a picture."""
    position: int
    """The position of the text's next token."""
    of_picture: StageRequest
    """The request as the denoiser takes it, if the engine draws itself."""

    def __init__(self, request: StageRequest, params: ContextParams, *, draws: bool) -> None:
        super().__init__(request, params, OmniPrompt(request.sources))
        self.draws = draws
        self.written: list[str] = []
        """The pieces of the text, as the client gets them."""


class ContextEngine(LanguageEngine[ContextRequest]):
    """The engine. ``context.model``: a checkpoint of BAGEL. draws: whether its networks draw, too."""

    PARAMS: type[ContextParams] = ContextParams
    OPTIONS: type[ContextOptions] = ContextOptions
    LIMITS = MediaLimits()

    def __init__(self, context: StageContext, *, draws: bool = False) -> None:
        """Raises msgspec.ValidationError (options), WrongCheckpoint, OSError (the checkpoint's files), ValueError."""
        options = msgspec.convert(context.options, self.OPTIONS)
        if options.prefix_cache_mb:
            raise ValueError("prefix_cache_mb: this engine has no cache of prompt prefixes; remove it")
        context.report("reading the tokenizer")
        tokenizer = AutoTokenizer.from_pretrained(context.tokenizer_directory, local_files_only=True)
        self._marks, self._options = marks(tokenizer), options
        self._model: BagelModel = load(context, options.dtype, reads=True, draws=draws)
        longest = self._model.config.longest_side
        self._size = _checked_size(options.size or f"{min(longest, 1024)}x{min(longest, 1024)}", self._model)
        self._cache = SlottedCache(options.max_batch, options.context, self._model.dtype, self._model.device)
        scheduler = Scheduler[ContextRequest](self._cache, options.max_batch, options.prefill_chunk)
        vocabulary = Vocabulary(tokenizer, self._marks.text_end)
        super().__init__(scheduler, vocabulary, options, adapters(self._model, options.idle_loras))
        self._capabilities["update_weights"] = self._update_weights
        self._capabilities["reset_prefix_cache"] = "the engine has no cache of prompt prefixes"

    # for a subclass that draws itself

    def _draws(self, request: StageRequest) -> bool:
        """Return whether a picture is to be drawn for the request."""
        return request.downstream

    def _hand_off(self, request: ContextRequest, contexts: Contexts) -> Iterable[StageOutput]:
        """Pass on the contexts of a request, which ends here."""
        self.abort(request.id)
        chunks = [*handoff.chunks(contexts)]
        for i, (data, tensors) in enumerate(chunks):
            last = i == len(chunks) - 1
            decisions, request.decisions = tuple(request.decisions), []
            yield StageOutput(request.id, data=data, downstream=tensors, last=last, decisions=decisions)

    # LanguageEngine

    def _new_request(self, request: StageRequest) -> ContextRequest:
        params = validated(request.params, self.PARAMS)
        made = ContextRequest(request, params, draws=self._draws(request))
        made.size = self._size if params.size is None else _checked_size(params.size, self._model)
        return made

    def _encode(self, request: ContextRequest) -> list[int | None]:
        prompt = request.collector
        if prompt.raw:
            raise InvalidRequest("prompt: this model reads conversations only", param="prompt")
        terms: list[Term] = []
        deadline = Deadline(self.LIMITS.decode_s)
        messages = with_system_prompt(prompt.messages, self._options.system_prompt)
        size = sum(len(text) for message in messages for text in message.texts)
        least = request.params.tokenization_kwargs.least(size // self._vocabulary.longest)
        refuse_beyond_context(least, f"{size} characters", self._context)
        for message in messages:
            for part in message.parts:
                if isinstance(part, TextPart):
                    tokens = self._vocabulary.tokenizer.encode(part.text, add_special_tokens=False)
                    terms += [request.params.tokenization_kwargs.cut(tokens)] if tokens else []
                elif isinstance(part, ImagePart):
                    deadline.check("image", part.index)
                    terms.append(self._picture(prompt, part.index, deadline))
                else:
                    raise InvalidRequest(f"{part.kind} was sent; this model reads text and images", param="messages")
        prompt.media.require_placed((part.kind, part.index) for message in prompt.messages for part in message.media)
        if not terms:
            raise InvalidRequest("the prompt is empty: no message has text or an image", param="messages")
        count = count_positions(self._model, terms, draws=request.draws)
        refuse_beyond_context(count, f"{count} tokens", self._context)
        sizes = [term.shape[1::-1] for term in terms if not isinstance(term, list)]
        if sizes and request.params.size is None:
            request.size = sizes[-1]
        request.terms = terms
        return [*self._tokens(terms, draws=request.draws), self._marks.text_start]

    def _tokens(self, terms: Iterable[Term], *, draws: bool) -> Iterator[int | None]:
        """Yield the token of each position of the full context; None: a picture's."""
        for term in terms:
            if isinstance(term, list):
                yield from (self._marks.text_start, *term, self._marks.text_end)
            else:
                yield from [None] * count_positions(self._model, [term], draws=draws)

    def _picture(self, prompt: OmniPrompt, index: int, deadline: Deadline) -> Pixels:
        """Return an image of the request, resized as the model reads it."""
        if index not in prompt.media.image:
            raise InvalidRequest(f"image {index} was not sent", param="image")
        content, limit = prompt.media.image[index], self.LIMITS.image_pixels
        if isinstance(content, bytes):
            content = decode_image(content, index, limit, deadline)
        height, width = content.shape[:2]
        check_size(index, width, height, limit)
        config = self._model.config
        return pictures.resized(content, config.vae_image_size, config.token_pixels)

    def _prefill(self, row: int, count: int) -> Iterator[StageOutput | StageFailure]:
        request = self._scheduler.rows[row]
        if request.terms is not None:
            self._read(request, request.terms)
            if request.draws and not request.params.think:
                yield from self._hand_off(request, self._contexts(request))
                return
            self._cache.append(row, request.reader.states)
            if not request.draws:
                del request.reader  # a second cache of the prompt
            length = self._cache.lengths[row]
            request.prefill_left -= length
            request.ready -= length
            request.uncomputed.insert(0, self._marks.text_start)
        yield from super()._prefill(row, min(count, request.prefill_left))

    def _read(self, request: ContextRequest, terms: Sequence[Term]) -> None:
        request.edits = any(not isinstance(term, list) for term in terms)
        _, image = guidances(request.params, edits=request.edits)
        request.reader = Reader(
            self._model,
            self._marks,
            2 * self._context + 2,  # a text of the model's own is read on top
            draws=request.draws,
            imageless=request.draws and request.edits and image > 1,
            noise=torch.Generator().manual_seed(request.params.seed or 0),
        )
        with self._adapters.applied([request.adapter]):
            request.reader.read(terms)
        request.position, request.terms = request.reader.mark.position, None

    @torch.inference_mode()
    def _forward(self, rows: list[int], count: int) -> Tensor:
        requests = [self._scheduler.rows[row] for row in rows]
        tokens = torch.tensor([request.take(count) for request in requests], device=self._model.device)
        starts = torch.tensor([request.position for request in requests], device=self._model.device)
        positions = starts[:, None] + torch.arange(count, device=self._model.device)
        _, mask = self._cache.extend(rows, count)
        language = self._model.language_model
        embeds, attend = language.model.embed_tokens(tokens), RowsAttention(self._cache, mask)
        with self._adapters.applied([request.adapter for request in requests]):
            hidden = language.model(embeds, positions, None, attend)
            logits: Tensor = language.lm_head(hidden[:, -1])
        for request in requests:
            request.position += count
        return logits

    def _answered(self, request: ContextRequest) -> None:
        if request.draws:
            self._scheduler.remove(request)  # its adapter stays until the contexts are passed on
        else:
            super()._answered(request)

    def _append(
        self, request: ContextRequest, token: int, logits: Tensor | None = None
    ) -> Iterator[StageOutput | StageFailure]:
        for output in super()._append(request, token, logits):
            if isinstance(output, StageOutput):
                request.written.append(output.data.get("text", ""))
            if request.draws and isinstance(output, StageOutput) and output.last:
                yield msgspec.structs.replace(output, last=False)
                yield from self._draw_thought(request)
            else:
                yield output

    def _draw_thought(self, request: ContextRequest) -> Iterator[StageOutput]:
        """Read the text that the model wrote, and pass on the contexts."""
        tokens = self._vocabulary.tokenizer.encode("".join(request.written), add_special_tokens=False)
        with self._adapters.applied([request.adapter]):
            request.reader.read_own(tokens[: self._context])
        yield from self._hand_off(request, self._contexts(request))

    def _contexts(self, request: ContextRequest) -> Contexts:
        return request.reader.contexts(*request.size, edits=request.edits)

    def _replace_weights(self, files: Mapping[str, tuple[int, int]]) -> dict[str, Any]:
        return replace_weights(self._model, files)

    def close(self) -> None:
        super().close()
        del self._model, self._cache


def _checked_size(size: str, model: Any) -> Picture:
    """Return width and height. Raises InvalidRequest: the model draws no picture of this size."""
    unit, longest = model.config.token_pixels, model.config.longest_side
    width, height = width_and_height(size)
    if width % unit or height % unit:
        raise InvalidRequest(f"size: found {size}; width and height must be multiples of {unit}", param="size")
    if max(width, height) > longest:
        raise InvalidRequest(f"size: found {size}; the limit is {longest} pixels a side", param="size")
    return width, height
