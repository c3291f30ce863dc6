"""The ``bagel`` engine: reading, writing and drawing in one worker, with one copy of the weights.

Input: that of ``bagel_context``. Outputs: those of ``bagel_denoiser``, behind a text if the request has ``think``.

Decisions: those of a text are its tokens; those of a picture are (-step,), so that a journal tells them apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

import msgspec

from omni_actors.stages.adapters.options import Adapter
from omni_actors.stages.bagel.context import ContextEngine, ContextRequest
from omni_actors.stages.bagel.contexts import Contexts
from omni_actors.stages.bagel.denoiser import Denoiser, copied
from omni_actors.stages.bagel.options import DenoiserParams, OneStageOptions, OneStageParams
from omni_actors.stages.base import InvalidRequest, RequestId, StageContext, StageOutput, StageRequest
from omni_actors.stages.diffusion.denoiser import Event


class OneStageEngine(ContextEngine):
    """The engine. ``context.model``: a checkpoint of BAGEL."""

    PARAMS = OneStageParams
    OPTIONS = OneStageOptions
    WARM_UP: ClassVar[Mapping[str, Any]] = {"max_tokens": 2, "size": "64x64", "steps": 2}

    def __init__(self, context: StageContext) -> None:
        """Raises as ``ContextEngine``."""
        super().__init__(context, draws=True)
        options = msgspec.convert(context.options, OneStageOptions)
        self._denoiser = Denoiser(self._model, self._marks, options, self._adapters)

    def _draws(self, request: StageRequest) -> bool:
        return True

    def _new_request(self, request: StageRequest) -> ContextRequest:
        of_text = tuple(decisions for decisions in request.journal if not _of_picture(decisions))
        made = super()._new_request(msgspec.structs.replace(request, journal=of_text, checkpoint=None))
        made.of_picture = _of_denoiser(request)
        return made

    def _hand_off(self, request: ContextRequest, contexts: Contexts) -> Iterable[StageOutput]:
        self._denoiser.start(request.of_picture)
        self._denoiser.take_contexts(request.id, contexts)
        super().abort(request.id)  # now: its adapter stays
        return ()

    @property
    def busy(self) -> bool:
        return super().busy or self._denoiser.busy

    def abort(self, request_id: RequestId) -> None:
        self._denoiser.abort(request_id)
        super().abort(request_id)  # it frees the adapters that no request uses

    def step(self) -> Iterator[Event]:  # type: ignore[override]
        """Read and write as ``bagel_context``, then do one denoising step of every running request."""
        if super().busy:
            yield from super().step()
        if self._denoiser.busy:
            for event in self._denoiser.step():
                if isinstance(event, StageOutput):
                    yield msgspec.structs.replace(event, decisions=(-event.decisions[0],))
                else:
                    yield event
            if self._adapters.loaded:
                self._adapters.trim(self._adapters_in_use())

    def gauges(self) -> Mapping[str, float]:
        """Return the figures of the denoiser."""
        return self._denoiser.gauges()

    def _adapters_in_use(self) -> set[Adapter]:
        return super()._adapters_in_use() | self._denoiser.used_adapters

    def _replace_weights(self, files: Mapping[str, tuple[int, int]]) -> dict[str, Any]:
        if self._denoiser.has_requests:
            raise InvalidRequest("requests are running, and would be computed with two versions", code="busy")
        return super()._replace_weights(files)

    def close(self) -> None:
        self._denoiser.close()
        super().close()


def _of_denoiser(request: StageRequest) -> StageRequest:
    """Return a request as the denoiser takes it. The checkpoint is a copy: the denoiser starts in a later step."""
    known = DenoiserParams.__struct_fields__
    params = {name: value for name, value in request.params.items() if name in known}
    journal = tuple((-decisions[0],) for decisions in request.journal if _of_picture(decisions))
    checkpoint = None if request.checkpoint is None else copied(request.checkpoint)
    return msgspec.structs.replace(request, params=params, journal=journal, checkpoint=checkpoint)


def _of_picture(decisions: tuple[int, ...]) -> bool:
    return bool(decisions) and decisions[0] < 0
