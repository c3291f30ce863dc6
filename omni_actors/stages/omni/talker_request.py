"""One request of a talker: which inputs its next positions have, from the rows that a thinker hands over.

The inputs are those of the prompt rows, the prefix, and the answer's first token. Then each position's input is the sum
of the last code's input and the next text input: the answer's next token, its end, or padding. This needs no model.

After the death of a worker, the first codes are decided already, so only text inputs are waited for.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from omni_actors.stages.adapters.files import named
from omni_actors.stages.autoregressive.sampling import RandomNumbers, Sampler, Sampling
from omni_actors.stages.autoregressive.scheduler import ScheduledSequence
from omni_actors.stages.base import StageRequest
from omni_actors.stages.omni.options import TalkerParams
from omni_actors.stages.sources import OpenSources


class TalkerRequest(ScheduledSequence):
    """One request. Its inputs are (k, width), of one width, in the talker's dtype.

    suppressed: bool (vocabulary,), the codes that are never chosen.
    """

    prompt_rows_left: int
    """Prompt rows that have not arrived."""
    positions: Tensor
    """Rotary positions of the prompt and of the positions behind decided codes, (3, n)."""
    delta: float
    """Rotary position minus index, of positions after the prompt."""
    prefix: Tensor
    """The inputs between the prompt and the answer's first token. The last one is added to that token's input."""
    text_eos: Tensor
    """(1, width): the text input after the answer's last token."""
    text_pad: Tensor
    """(1, width): the text input of each code after that."""
    max_codes: int

    def __init__(self, request: StageRequest, params: TalkerParams, suppressed: Tensor) -> None:
        self.id, self.params, self.priority = request.request_id, params, params.priority
        self.adapter = named(params.lora)
        self.open = OpenSources(request.sources)
        self.inputs: list[Tensor] = []
        """The inputs of positions that are not computed yet, (k, width) each."""
        self.text: deque[Tensor] = deque()
        """The answer's inputs, (1, width) each, for codes to come."""
        self.has_header = self.has_answer = False
        """Whether the first chunk has arrived, and whether the answer's first row has."""
        self.cached = self.codes = 0
        """Positions in the cache, and codes chosen."""
        self.decided: deque[Tensor] = deque()
        """The inputs, (1, width) each, of codes that an earlier incarnation chose, as far as none was needed yet."""
        self.ended = False
        """Whether an earlier incarnation chose the end."""
        self.code_input: Tensor | None = None
        """(1, width): the last code's input, which waits for its text input."""
        sampling = Sampling(
            temperature=params.talker_temperature,
            top_k=params.talker_top_k,
            top_p=params.talker_top_p,
            repetition_penalty=params.talker_repetition_penalty,
        )
        self.random = RandomNumbers(params.seed)
        self.sampler = Sampler(sampling, self.random, suppressed)

    def add(self, rows: Tensor) -> None:
        """Add the inputs of the next positions to be computed."""
        self.inputs.append(rows)
        self.ready += len(rows)

    def take(self, count: int) -> Tensor:
        """Take the inputs of the next ``count`` positions."""
        rows = torch.cat(self.inputs)
        self.inputs = [rows[count:]]
        self.ready -= count
        return rows[:count]

    def add_prompt(self, inputs: Tensor) -> None:
        """Add the inputs of the next prompt rows. The prefix follows the last prompt row."""
        self.add(inputs)
        self.prompt_rows_left -= len(inputs)
        if not self.prompt_rows_left:
            self.add(self.prefix[:-1])

    def add_answer(self, inputs: Tensor) -> None:
        """Add the text inputs of the answer's next rows. The first one becomes the first position to decode."""
        for row in inputs[:, None]:
            if self.has_answer:
                self.text.append(row)
            else:
                self.has_answer = True
                self.add(row + self.prefix[-1:])
                self._decide()

    def advance(self) -> None:
        """Add the next position's input if its text input has arrived or no text comes any more.

        If that position's code is decided, add the one behind it in the same way, and so on.
        """
        while self.code_input is not None and (self.text or not self.open):
            self.add(self.code_input + (self.text.popleft() if self.text else self.text_pad))
            self._decide()

    def _decide(self) -> None:
        self.code_input = self.decided.popleft() if self.decided else None
