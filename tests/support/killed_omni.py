"""The tiny omni pipelines with killed workers, and what their answers must be (``killed_stages``).

They route each token to all of their experts. A router's near tie is no decision of the journal, and noise would turn
it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from omni_actors import OmniSystem
from omni_actors.config import Pipeline, Restart, Stage
from tests.support.closeness import assert_same_sound
from tests.support.forced_omni import STEPS, ForcedQwen3, ForcedQwen25, ForcedReference
from tests.support.killed_stages import DTYPES, Heard, Killed, hear
from tests.support.omni_questions import STORY, Ask

MARGINS = {
    # Two logits that move by AMPLITUDE (decision_noise) of the largest, times 1.05 for a repetition penalty.
    ("float32", "thinker"): 1.1e-3,
    # The noise of the rows moves the talker's logits by up to 1.4e-2, measured with the reference.
    ("float32", "talker"): 3e-2,
    ("float32", "predictor"): 3e-2,
    # A resumed incarnation's logits deviate by up to 2.1e-2 of the largest in a thinker, 0.13 in a talker and 2.7e-2 in
    # a predictor, by the rounding of other shapes (``rounding``). A lag is at most the deviation. On a CPU with AMX,
    # behind a thinker on vLLM, one decision of a talker lagged by 0.19. The mean of that answer's lags was 2.6e-3.
    ("bfloat16", "thinker"): 4e-2,
    ("bfloat16", "talker"): 0.3,
    ("bfloat16", "predictor"): 5e-2,
}
"""The largest lag of a decision. Decisions of another answer lag by 0.3 on average, which ``OF_MEAN`` tells apart."""
OF_MEAN = 0.2
"""The largest mean of an answer's lags, as a part of its margin: most decisions are clear."""

DECODERS = {"qwen3": "code2wav", "qwen2_5": "token2wav"}
DECODER_OPTIONS: dict[str, dict[str, Any]] = {
    "qwen3": {"chunk_frames": [1]},
    "qwen2_5": {"chunk_blocks": 1, "steps": STEPS},
}
TOKENS = {"qwen3": 32, "qwen2_5": 64}
CODES = {"qwen3": 33, "qwen2_5": 240}
"""Of each answer."""
SEEDS = {"qwen3": 2, "qwen2_5": 5}
"""Of the weights: the greedy answers do not repeat themselves."""
BLOCK = 5
"""Positions of a prefill chunk where prefill and decode are two stages: of the question, several."""
SPEAKERS = {"qwen3": "ethan", "qwen2_5": "Ethan"}
REFERENCES: dict[str, type[ForcedReference]] = {"qwen3": ForcedQwen3, "qwen2_5": ForcedQwen25}


def checkpoint(family: str, root: Path, save: Callable[..., Path] | None = None) -> Path:
    """Return the family's checkpoint, which is saved once. save: a function of ``tiny_models``; None: the family's."""
    directory = root / family
    if not directory.exists():
        more = {"experts": 2, "experts_per_token": 2} if family == "qwen3" else {}
        save = save or REFERENCES[family].tiny.save
        save(directory, seed=SEEDS[family], text_eos=0.0, codec_eos=0.0, **more)
    return directory


class Omni(Killed):
    """A tiny omni pipeline in one configuration. model: its checkpoint. device: of all its stages."""

    stages = ("thinker", "talker", "decoder")
    greedy: ClassVar = {"temperature": 0.0, "talker_temperature": 0.0, "seed": 7}
    sampled: ClassVar = {
        "temperature": 1.0,
        "talker_temperature": 0.9,
        "talker_top_k": 0,
        "talker_top_p": 1.0,
        "seed": 7,
    }

    def __init__(self, configuration: str, family: str, model: Path, device: str = "cpu") -> None:
        super().__init__(configuration)
        self.family, self.model, self.dtype, self.device = family, model, DTYPES[configuration], device
        self.question = Ask(STORY, speaker=SPEAKERS[family])

    edges: ClassVar[dict[str, dict[str, Any]]] = {
        "thinker": {"accepts": ("messages",), "emits": "text"},
        "talker": {"inputs": ("thinker",)},
        "decoder": {"inputs": ("talker",), "emits": "audio"},
    }

    def open(self) -> AbstractAsyncContextManager[OmniSystem]:
        often = Restart(intensity=1000, backoff_s=0.01, backoff_max_s=0.01)
        stages = {
            name: Stage(
                engine=engine,
                model=str(self.model),
                device=self.device,
                threads=1,
                restart=often,
                options=options,
                **self.edges[name],
            )
            for name, (engine, options) in self.engines().items()
        }
        return OmniSystem.open(Pipeline(name=self.family, stages=stages))

    def engines(self) -> dict[str, tuple[str, dict[str, Any]]]:
        """Return each stage's engine and options."""
        options: dict[str, Any] = {"dtype": self.dtype}
        return {
            "thinker": (f"{self.family}_thinker", options),
            "talker": (f"{self.family}_talker", options),
            "decoder": (f"{self.family}_{DECODERS[self.family]}", DECODER_OPTIONS[self.family]),
        }

    async def hear(self, omni: OmniSystem, params: Mapping[str, Any], *stages: str, at: int = 0) -> Heard:
        return await hear(
            omni,
            *stages,
            at=at,
            prompt=self.question.messages,
            modalities=("text", "audio"),
            max_tokens=TOKENS[self.family],
            talker_max_tokens=CODES[self.family],
            speaker=self.question.speaker,
            **params,
        )

    def check(self, heard: Heard, params: Mapping[str, Any]) -> None:
        tokens, codes = heard.decided("thinker"), heard.codes
        answer, lags = reference(self.family, self.model, self.dtype).follow(self.question, tokens, codes, params)
        is_complete = len(tokens) == TOKENS[self.family]
        assert heard.finish_reason == ("length" if is_complete else "stop")
        assert is_complete or self.configuration == "noisy", "noise may flip a decision to the end of the answer"
        assert heard.text == REFERENCES[self.family].tiny.TOKENIZER.decode(tokens, skip_special_tokens=True)
        assert answer.codes.reshape(len(codes), -1).tolist() == [list(frame) for frame in codes]
        assert_same_sound(heard.sound, answer.wave)
        for part, each in lags.items():
            margin = MARGINS[self.dtype, part]
            assert self.note(part, each) < margin, f"{part}: decision {np.argmax(each)} lags by {max(each):.1e}"
            assert self.note(f"{part}, mean", np.mean(each)) < OF_MEAN * margin


class SplitOmni(Omni):
    """The same, with a thinker of two stages: "prefill", and "thinker" with the role "decode"."""

    stages = ("prefill", *Omni.stages)
    done_early: ClassVar = frozenset({"prefill"})
    edges: ClassVar = {
        **Omni.edges,
        "prefill": {"accepts": ("messages",)},
        "thinker": {"inputs": ("prefill",), "emits": "text"},
    }

    def engines(self) -> dict[str, tuple[str, dict[str, Any]]]:
        engines = super().engines()
        name, options = engines.pop("thinker")
        roles = {"prefill": "prefill", "thinker": "decode"}
        thinkers = {stage: (name, {**options, "role": role, "prefill_chunk": BLOCK}) for stage, role in roles.items()}
        return {**thinkers, **engines}


@functools.cache
def reference(family: str, model: Path, dtype: str) -> ForcedReference:
    return REFERENCES[family](model, getattr(torch, dtype))
