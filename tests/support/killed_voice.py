"""The voice pipeline with killed workers and the real models, and what its answers must be (``killed_stages``).

Whisper decodes the question in one window, and has finished before the client has an output: see
``tests/test_killed_recordings.py`` for its death during its work.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, closing
from typing import Any, ClassVar

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from omni_actors import AudioChunk, OmniSystem
from omni_actors.stages import assets
from omni_actors.stages.autoregressive.sampling import RandomNumbers, Sampler, Sampling
from omni_actors.stages.autoregressive.text import Vocabulary
from omni_actors.stages.base import CLIENT, Chunk, StageContext
from omni_actors.stages.hibari.acoustic import AcousticEngine
from omni_actors.stages.hibari.vocoder import VocoderEngine
from omni_actors.stages.llm.prompt import Prompt
from tests.support.engine_driver import Driver, run_chain
from tests.support.forced_decoding import lag
from tests.support.killed_stages import DTYPES, Heard, Killed, hear

MARGINS = {
    # The amplitude of the noise, and a tenth for rounding.
    "float32": 1.1e-3,
    # Logits of prompt and answer in one forward deviate by up to 3.5e-2 of the largest from those token by token.
    "bfloat16": 5e-2,
}
"""The largest lag of a token (``forced_decoding``)."""
SOUND_MARGIN = 0.05
"""How far a sample may be off: the noise of the features moves it by less."""
QUESTION = "Why is the sky blue?"


class ForcedLLM:
    """The language model of the pipeline. dtype: in which it computes."""

    def __init__(self, dtype: torch.dtype) -> None:
        directory = assets.prepare("smollm2-135m-instruct", print)
        model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
        self._model = model.eval()
        tokenizer = AutoTokenizer.from_pretrained(directory)
        self.vocabulary = Vocabulary(tokenizer, self._model.generation_config.eos_token_id)

    @torch.inference_mode()
    def lags(self, question: str, tokens: list[int], params: Mapping[str, Any]) -> list[float]:
        """Return how far each token of the answer lags behind the model's own choice (``forced_decoding``)."""
        prompt = Prompt((CLIENT,))
        messages = [{"role": "user", "content": question}]
        prompt.feed(Chunk(source=CLIENT, seq=0, last=True, tensors={}, data={"messages": messages}))
        asked = prompt.encode(self.vocabulary, "", 2048)
        logits = self._model(torch.tensor([asked + tokens])).logits[0, len(asked) - 1 : -1].float()
        sampler = Sampler(Sampling(temperature=params["temperature"]), RandomNumbers(params["seed"]))
        return [lag(values, sampler, token) for values, token in zip(logits, tokens, strict=True)]

    def text(self, tokens: list[int]) -> str:
        return self.vocabulary.decode(tokens)


@functools.cache
def reference(dtype: str) -> ForcedLLM:
    return ForcedLLM(getattr(torch, dtype))


def spoken(text: str, seed: int) -> np.ndarray[Any, Any]:
    """Return the sound of a text, without a death."""
    context = StageContext(
        stage="acoustic", model=assets.prepare("hibari", print), options={}, threads=1, device="cpu", report=print
    )
    with closing(AcousticEngine(context)) as acoustic, closing(VocoderEngine(context)) as vocoder:
        stages = {"acoustic": Driver(acoustic), "vocoder": Driver(vocoder)}

        def arrive() -> None:
            stages["vocoder"].start(1, ("acoustic",), seed=seed)
            stages["acoustic"].start(1, ("llm",))
            stages["acoustic"].feed(1, {"text": text}, last=True, source="llm")

        outputs = run_chain(stages, [arrive])["vocoder"][1]
    return np.concatenate([np.zeros(0, np.float32), *(o.tensors["audio"] for o in outputs if o.tensors)])


class Voice(Killed):
    """The pipeline in one configuration."""

    name = "voice"
    stages = ("whisper", "llm", "acoustic", "vocoder")
    done_early: ClassVar = frozenset({"whisper"})
    greedy: ClassVar = {"temperature": 0.0, "seed": 7}
    sampled: ClassVar = {"temperature": 1.0, "seed": 7}

    def __init__(self, configuration: str) -> None:
        super().__init__(configuration)
        for model in assets.NAMES:
            assets.prepare(model, print)
        self.dtype = DTYPES[configuration]
        self.question = AudioChunk(spoken(QUESTION, 0), 24_000)

    def open(self) -> AbstractAsyncContextManager[OmniSystem]:
        often = {f"stages.{stage}.restart.intensity": 1000 for stage in self.stages}
        return OmniSystem.open(self.name, overrides={**often, **self.options()})

    def options(self) -> dict[str, Any]:
        """Return what the language model's stage has besides the pipeline's configuration."""
        return {"stages.llm.threads": 1, "stages.llm.options.dtype": self.dtype}

    async def hear(self, omni: OmniSystem, params: Mapping[str, Any], *stages: str, at: int = 0) -> Heard:
        return await hear(
            omni,
            *stages,
            at=at,
            multi_modal_data={"audio": self.question},
            modalities=("transcript", "text", "audio"),
            max_tokens=40,
            **params,
        )

    def check(self, heard: Heard, params: Mapping[str, Any]) -> None:
        model, tokens = reference(self.dtype), heard.decided("llm")
        assert heard.texts["text"] == model.text(tokens)
        lags = model.lags(heard.texts["transcript"].strip(), tokens, params)
        assert self.note("llm", lags) < MARGINS[self.dtype], f"token {np.argmax(lags)} lags by {max(lags):.1e}"
        sound = spoken(heard.texts["text"], params["seed"])
        assert heard.sound.shape == sound.shape
        assert self.note("sound", np.abs(heard.sound - sound)) < SOUND_MARGIN
