"""Prefill apart from decode for thinkers (``autoregressive.roles``): what travels besides keys and values.

Rules
1. The stage that prefills reads all media, and sends the rows of every position with each block, whether a talker takes
   part or not: it does not know. The stage that decodes selects those that its talker takes, and passes them on as a
   thinker does that has both roles. So the talker has one source, and its wire is the same.
2. The first chunk also has ``ids``, int64 (n,), ``positions``, (3, n), and the tensors of ``omni.positions.GRIDS``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from omni_actors.stages.autoregressive.prompt_states import PromptHeader
from omni_actors.stages.autoregressive.roles import Decoding, Prefilling
from omni_actors.stages.base import StageContext, TensorLike
from omni_actors.stages.omni.handoff import TalkerHandoff
from omni_actors.stages.omni.positions import GRIDS, is_media
from omni_actors.stages.omni.thinker import OmniThinker, ThinkerRequest

R = TypeVar("R", bound=ThinkerRequest)


class PrefillingThinker(Prefilling[R], OmniThinker[R]):
    """A thinker with the role "prefill"."""

    def _open_handoff(self, request: R, *, embedded: bool) -> None:
        request.embedded = embedded
        request.handoff = TalkerHandoff(len(request.ids))

    def _prompt_header(self, request: R) -> tuple[PromptHeader, Mapping[str, Tensor]]:
        header = PromptHeader(len(request.ids), self._weights_version, embedded=request.embedded, delta=request.delta)
        return header, {"ids": request.ids, "positions": request.positions, **request.grids}

    def _block_rows(self, request: R) -> Mapping[str, TensorLike]:
        assert request.handoff is not None, "it was opened"
        return request.handoff.take(dict)


class DecodingThinker(Decoding[R], OmniThinker[R]):
    """A thinker with the role "decode"."""

    def _prompt_arrived(self, request: R, header: PromptHeader, extra: Mapping[str, Tensor]) -> None:
        request.ids, request.positions, request.delta = extra["ids"], extra["positions"], header.delta
        request.grids = {name: extra[name] for name in GRIDS if name in extra}
        request.is_media = is_media(request.ids, self._config)
        self._open_handoff(request, embedded=header.embedded)

    def _encode_media(self, request: R) -> None:
        """Encode nothing: the stage that prefills has."""

    def _warm_up_extra(self) -> Mapping[str, Tensor]:
        return {"ids": torch.zeros(1, dtype=torch.int64), "positions": torch.zeros(3, 1, dtype=torch.int64)}


def opener(thinker: type[OmniThinker[R]]) -> Callable[[StageContext], OmniThinker[R]]:
    """Return the factory of a family's thinkers: it loads the engine with the role of the options.

    thinker: the family's engine with both roles. The factory raises as ``OmniThinker`` does.
    """

    class Prefill(PrefillingThinker[R], thinker):  # type: ignore[misc, valid-type]  # a class that comes as an argument
        """The engine of a stage that computes prompts."""

    class Decode(DecodingThinker[R], thinker):  # type: ignore[misc, valid-type]
        """The engine of a stage that writes answers to prompts that another stage has computed."""

    roles: dict[str, type[OmniThinker[R]]] = {"both": thinker, "prefill": Prefill, "decode": Decode}
    return lambda context: roles[str(context.options.get("role", "both"))](context)
