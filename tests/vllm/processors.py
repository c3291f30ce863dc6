"""Logits processors as users write them. A stage names them in ``engine_args``; a request's ``extra_args`` is theirs.

Only    ``only``: token ids; no other token is drawn
Own     ``own_logits``: true, to draw from the test's own logits (``tests.support.clear_choices``)
Faulty  ``fault``: "raise" or "hang", when the request's logits are processed for the ``at``-th time. A hang first opens
        the FIFO ``notify``. If that is gone nothing happens, so a replay succeeds
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from tests.support.clear_choices import check_lead, own_logits

Process = Callable[[list[int], torch.Tensor], torch.Tensor]


class Only(AdapterLogitsProcessor):  # type: ignore[misc]
    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Process | None:
        only = (params.extra_args or {}).get("only")
        if only is None:
            return None

        def process(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            masked = torch.full_like(logits, -torch.inf)
            masked[only] = logits[only]
            return masked

        return process


class Own(AdapterLogitsProcessor):  # type: ignore[misc]
    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Process | None:
        return _own if (params.extra_args or {}).get("own_logits") else None


def _own(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    check_lead(logits)
    return own_logits(logits)


class Faulty(AdapterLogitsProcessor):  # type: ignore[misc]
    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Process | None:
        requested: dict[str, Any] = params.extra_args or {}
        if "fault" not in requested:
            return None
        times = itertools.count(1)

        def process(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            if next(times) != requested["at"]:
                return logits
            if requested["fault"] == "raise":
                raise ArithmeticError("the request asked for a crash in a step")
            if Path(requested["notify"]).exists():
                Path(requested["notify"]).write_bytes(b"")
                while True:
                    time.sleep(3600)
            return logits

        return process
