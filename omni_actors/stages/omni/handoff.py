"""The handoff from a thinker to its talker: which rows of hidden states go downstream, and when.

Rules
1. The family's header goes once, with the first output.
2. Prompt rows go in order of position. Positions that the talker does not take are left out.
3. The row of a generated token goes once no stop string can cut off the token's text: the talker must not speak what
   the client does not get. Rows may be added before that or, where they come out of a later forward, after it.

This module needs no model. The talker's side is in ``omni.talker``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from omni_actors.stages.base import TensorLike
from omni_actors.stages.tensors import to_wire


class TalkerHandoff:
    """The rows of one request that its thinker has computed and not sent yet.

    size: positions of the prompt. selected: bool (size,), the prompt positions that the talker takes; None: all.
    """

    def __init__(self, size: int, selected: Tensor | None = None) -> None:
        self.size, self.selected = size, selected
        self.waiting = self.taken = 0
        """Prompt positions whose rows wait here, and those whose rows were taken."""
        self._prompt: list[Tensor] = []
        self._answer: list[Tensor] = []
        self._answer_taken = 0
        self._header_taken = False

    def add_prompt(self, rows: Tensor) -> None:
        """Add the rows, (k, hidden), of the next k prompt positions."""
        self._prompt.append(rows)
        self.waiting += len(rows)

    @property
    def newest_prompt(self) -> Tensor:
        """The rows that ``add_prompt`` added last and ``take`` has not taken."""
        return self._prompt[-1]

    def add_token(self, row: Tensor) -> None:
        """Add the row, (1, hidden), of the answer's next token."""
        self._answer.append(row)

    def take(
        self, header: Callable[[], Mapping[str, Tensor]], certain_tokens: int = 0, prompt: int | None = None
    ) -> dict[str, TensorLike]:
        """Take what can go now, as tensors for ``StageOutput.downstream``; empty if nothing can.

        header: makes the tensors of rule 1. certain_tokens: the answer's tokens of rule 3, counted from its start.
        prompt: prompt positions to take; None: all that wait.
        """
        tensors = {} if self._header_taken else dict(header())
        self._header_taken = True
        wired: dict[str, TensorLike] = {name: to_wire(tensor) for name, tensor in tensors.items()}
        rows = [*self._take_prompt(self.waiting if prompt is None else prompt), *self._take_answer(certain_tokens)]
        if rows:
            wired["rows"] = to_wire(torch.cat(rows), deferred=True)  # a new tensor, which nothing else changes
        return wired

    def _take_prompt(self, count: int) -> list[Tensor]:
        if not count:
            return []
        waiting = torch.cat(self._prompt)
        rows, self._prompt = waiting[:count], [waiting[count:]]
        if self.selected is not None:
            rows = rows[self.selected[self.taken : self.taken + count].to(rows.device)]
        self.taken += count
        self.waiting -= count
        return [rows] if len(rows) else []

    def _take_answer(self, certain_tokens: int) -> list[Tensor]:
        count = max(0, certain_tokens - self._answer_taken)
        rows, self._answer = self._answer[:count], self._answer[count:]
        self._answer_taken += len(rows)
        return rows
