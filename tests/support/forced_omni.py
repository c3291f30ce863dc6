"""The references of the tiny omni models follow the decisions of an answer (``forced_decoding``)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from omni_actors.stages.autoregressive.sampling import RandomNumbers, Sampler, Sampling
from omni_actors.stages.multimodal.processor import OmniProcessor
from omni_actors.stages.omni.options import TalkerParams, ThinkerParams
from omni_actors.stages.qwen2_5.options import Qwen25TalkerParams
from omni_actors.stages.qwen3.talker import RESIDUAL_SAMPLING, SPECIAL
from tests.support import qwen2_5_reference, qwen3_reference
from tests.support.forced_decoding import ForcedHead
from tests.support.omni_questions import Ask
from tiny_models import qwen2_5, qwen3

STEPS = 2
"""Steps of token2wav's solver."""


class Followed(NamedTuple):
    """What a reference makes of an answer's decisions."""

    answer: Any
    """Its ``Answer``."""
    lags: dict[str, list[float]]
    """Of each decision, for the thinker, the talker and the talker's predictor."""


class ForcedReference:
    """A family's reference. dtype: in which its thinker and its talker compute."""

    def __init__(self, directory: Path, dtype: torch.dtype) -> None:
        self.reference: Any = self._load(directory)
        for part in (self.reference.model.thinker, self.reference.model.talker):
            for parameter in part.parameters():  # and no buffer: the frequencies of positions stay float32
                parameter.data = parameter.data.to(dtype)
        self._processor = OmniProcessor(directory)

    def own(self, ask: Ask) -> tuple[list[int], list[list[int]]]:
        """Return the tokens and codes of the reference's own greedy answer."""
        inputs = self._inputs(ask)
        limits = {"max_tokens": ask.max_tokens, "frames": ask.max_frames, "seed": 0}
        answer = self._answer(inputs.ids, inputs.tensors, speaker=ask.speaker, **limits)
        return answer.ids, answer.codes.reshape(len(answer.codes), -1).tolist()

    def _inputs(self, ask: Ask) -> Any:
        return self._processor(ask.prompt, system_prompt="", use_audio_in_video=False)

    @staticmethod
    def _load(directory: Path) -> Any:
        raise NotImplementedError

    def _answer(self, ids: list[int], tensors: Any, **limits: Any) -> Any:
        raise NotImplementedError

    def _heads(self, codes: Sequence[Sequence[int]], params: Mapping[str, Any]) -> dict[str, tuple[ForcedHead, Any]]:
        """Return the forced heads of the talker and of its predictor, and the modules that they are hooks of."""
        raise NotImplementedError

    def follow(
        self, ask: Ask, tokens: Sequence[int], codes: Sequence[Sequence[int]], params: Mapping[str, Any]
    ) -> Followed:
        """Repeat an answer. tokens: of its text. codes: of each frame. params: of the request."""
        inputs = self._inputs(ask)
        sampling = msgspec.convert(_taken(ThinkerParams, params), Sampling, from_attributes=True)
        thinker = Sampler(sampling, RandomNumbers(params["seed"]))
        thinker.see(inputs.ids)
        heads = self._heads(codes, params)
        heads["thinker"] = ForcedHead(tokens, thinker), [self.reference.model.thinker.lm_head]
        with _hooked(heads):
            answer = self._answer(
                inputs.ids, inputs.tensors, speaker=ask.speaker, max_tokens=len(tokens), frames=len(codes), **params
            )
        assert answer.ids == list(tokens)
        return Followed(answer, {name: head.lags for name, (head, _) in heads.items()})


class ForcedQwen3(ForcedReference):
    tiny: Any = qwen3

    @staticmethod
    def _load(directory: Path) -> Any:
        return qwen3_reference.Reference(directory, clear=False)

    def _answer(self, ids: list[int], tensors: Any, *, speaker: str, max_tokens: int, frames: int, **_: Any) -> Any:
        limits = {"max_tokens": max_tokens, "max_frames": frames + 1}  # the last one never becomes a frame
        return self.reference._generate(ids, tensors, speaker=speaker, **limits)

    def _heads(self, codes: Sequence[Sequence[int]], params: Mapping[str, Any]) -> dict[str, tuple[ForcedHead, Any]]:
        talker = self.reference.model.talker
        vocabulary = talker.config.text_config.vocab_size
        suppressed = torch.arange(vocabulary) >= vocabulary - SPECIAL
        suppressed[talker.config.codec_eos_token_id] = False
        random = RandomNumbers(params["seed"])
        first = Sampler(talker_sampling(TalkerParams, params), random, suppressed)
        others = Sampler(RESIDUAL_SAMPLING if params["talker_temperature"] else Sampling(), random)
        rest = itertools.chain.from_iterable(frame[1:] for frame in codes)
        return {
            "talker": (ForcedHead([frame[0] for frame in codes], first), [talker.codec_head]),
            "predictor": (ForcedHead(rest, others), list(talker.code_predictor.lm_head)),
        }


class ForcedQwen25(ForcedReference):
    tiny: Any = qwen2_5

    @staticmethod
    def _load(directory: Path) -> Any:
        return qwen2_5_reference.Reference(directory, clear=False)

    def _answer(
        self, ids: list[int], tensors: Any, *, speaker: str, max_tokens: int, frames: int, seed: int, **_: Any
    ) -> Any:
        limits = {"max_tokens": max_tokens, "max_codes": frames}
        return self.reference._generate(ids, tensors, speaker=speaker, seed=seed, steps=STEPS, **limits)

    def _heads(self, codes: Sequence[Sequence[int]], params: Mapping[str, Any]) -> dict[str, tuple[ForcedHead, Any]]:
        talker = self.reference.model.talker
        suppressed = torch.arange(talker.config.vocab_size) == talker.config.tts_codec_start_token_id
        sampler = Sampler(talker_sampling(Qwen25TalkerParams, params), RandomNumbers(params["seed"]), suppressed)
        config = talker.config
        sampler.see([config.tts_codec_mask_token_id, config.tts_codec_pad_token_id, config.tts_codec_start_token_id])
        return {"talker": (ForcedHead([code for [code] in codes], sampler), [talker.codec_head])}


def talker_sampling(schema: Any, params: Mapping[str, Any]) -> Sampling:
    """Return how a talker chooses its first codes."""
    given = _taken(schema, params)
    return Sampling(
        temperature=given.talker_temperature,
        top_k=given.talker_top_k,
        top_p=given.talker_top_p,
        repetition_penalty=given.talker_repetition_penalty,
    )


def _taken(schema: Any, params: Mapping[str, Any]) -> Any:
    return schema(**{name: value for name, value in params.items() if name in schema.__struct_fields__})


@contextmanager
def _hooked(heads: Mapping[str, tuple[Callable[..., Any], Any]]) -> Iterator[None]:
    with ExitStack() as stack:
        for head, modules in heads.values():
            for module in modules:
                stack.callback(module.register_forward_hook(head).remove)
        yield
