"""The engines that the capabilities are tried on: each in a running pipeline, with a request that reaches it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from omni_actors import AudioChunk, OmniSystem
from omni_actors.config import Pipeline, Stage
from tests.support.vllm_options import ENGINE_ARGS

LAYERS = ("self_attn.q_proj", "self_attn.o_proj")
"""The layers that an adapter changes."""
SPOKEN = {"talker_max_tokens": 6, "seed": 0}


class Subject(NamedTuple):
    """An engine in a running pipeline.

    engine: its name, with the options of its row. stage: its stage. ask: arguments of ``generate`` for a short request
    that uses the stage. adapted: the beginning of the names of the layers that an adapter may change; None: unknown.
    """

    engine: str
    stage: str
    omni: OmniSystem
    ask: Mapping[str, Any]
    adapted: str | None = None

    @property
    def modalities(self) -> tuple[str, ...]:
        """The modalities of the request's answer."""
        return tuple(self.ask.get("modalities", ("text",)))


class Family(NamedTuple):
    """A pipeline, and the requests that reach its engines.

    requests: by stage, arguments of ``generate``. adapted: by stage, see ``Subject``. options: by stage, those that its
    row has in the document.
    """

    open: Callable[[Path], AbstractAsyncContextManager[OmniSystem]]
    requests: Mapping[str, Mapping[str, Any]]
    adapted: Mapping[str, str] = {}
    options: Mapping[str, str] = {}

    def subjects(self, omni: OmniSystem) -> list[Subject]:
        """Return the engines of the running pipeline."""
        subjects = []
        for stage, ask in self.requests.items():
            engine = omni.pipeline.stages[stage].engine + self.options.get(stage, "")
            subjects.append(Subject(engine, stage, omni, ask, self.adapted.get(stage)))
        return subjects


def _echo(_: Path) -> AbstractAsyncContextManager[OmniSystem]:
    return OmniSystem.open("echo")


def _voice(_: Path) -> AbstractAsyncContextManager[OmniSystem]:
    return OmniSystem.open("voice", **{"stages.llm.threads": 1, "stages.llm.options.prefix_cache_mb": 64})


def _vllm(**engine_args: Any) -> Callable[[Path], AbstractAsyncContextManager[OmniSystem]]:
    def open_pipeline(_: Path) -> AbstractAsyncContextManager[OmniSystem]:
        options = {"engine_args": {**ENGINE_ARGS, "scheduling_policy": "priority", **engine_args}}
        model = "smollm2-135m-instruct"
        stage = Stage(engine="vllm", model=model, accepts=("messages",), emits="text", threads=1, options=options)
        return OmniSystem.open(Pipeline(name="text", stages={"llm": stage}))

    return open_pipeline


def _vllm_omni(family: str) -> Callable[[Path], AbstractAsyncContextManager[OmniSystem]]:
    def open_pipeline(directory: Path) -> AbstractAsyncContextManager[OmniSystem]:
        from tests.support.killed_vllm import OmniOnVLLM

        return OmniOnVLLM("exact", family, directory).open()

    return open_pipeline


def _omni(family: str, decoder: str) -> Callable[[Path], AbstractAsyncContextManager[OmniSystem]]:
    def open_pipeline(directory: Path) -> AbstractAsyncContextManager[OmniSystem]:
        from tiny_models import qwen2_5, qwen3

        saved = {"qwen3": qwen3, "qwen2_5": qwen2_5}[family].save(directory, text_eos=0.0, codec_eos=0.0)

        def stage(engine: str, **more: Any) -> Stage:
            return Stage(engine=f"{family}_{engine}", model=str(saved), threads=1, **more)

        stages = {
            "thinker": stage("thinker", accepts=("audio", "image", "messages", "video"), emits="text"),
            "talker": stage("talker", inputs=("thinker",)),
            decoder: stage(decoder, inputs=("talker",), emits="audio"),
        }
        return OmniSystem.open(Pipeline(name="tiny", stages=stages))

    return open_pipeline


def _qwen_image(directory: Path) -> AbstractAsyncContextManager[OmniSystem]:
    from tiny_models import qwen_image

    threads = {f"stages.{stage}.threads": 1 for stage in ("text_encoder", "image_encoder", "denoiser", "vae")}
    return OmniSystem.open(qwen_image.save(directory), overrides=threads)


def _bagel(directory: Path) -> AbstractAsyncContextManager[OmniSystem]:
    from tiny_models import bagel

    stages = {"stages.context.threads": 1, "stages.denoiser.threads": 1}
    return OmniSystem.open(str(bagel.save(directory)), **stages)


def _bagel_in_one_stage(directory: Path) -> AbstractAsyncContextManager[OmniSystem]:
    from tiny_models import bagel

    stage = Stage(
        engine="bagel", model=str(bagel.save(directory)), accepts=("messages", "image"), emits="image", threads=1
    )
    return OmniSystem.open(Pipeline(name="bagel", stages={"bagel": stage}))


def _diffusers(directory: Path) -> AbstractAsyncContextManager[OmniSystem]:
    from tiny_models import diffusers_pipelines

    saved = diffusers_pipelines.save(directory, "flux")
    return OmniSystem.open(str(saved), **{"stages.diffusers.threads": 1})


_TEXT = {"prompt": "what is it ?", "max_tokens": 4}
_SPEECH = {**_TEXT, "modalities": ("audio",), **SPOKEN}
_SCRIPT = {"script": "Good night.", "modalities": ("audio",)}
_RECORDING = {
    "multi_modal_data": {"audio": AudioChunk(np.zeros(16_000, np.float32), 16_000)},
    "modalities": ("transcript",),
}
_PICTURE = {"prompt": "a red fox", "modalities": ("image",), "size": "32x32", "steps": 3, "seed": 0}
_PICTURE_WITH_THOUGHT = {**_PICTURE, "think": True, "max_tokens": 4}
_PICTURE_FROM_PICTURE = {**_PICTURE, "multi_modal_data": {"image": np.zeros((32, 32, 3), np.uint8)}, "strength": 1.0}

FAMILIES = {
    "bagel": Family(_bagel, {"context": _TEXT, "denoiser": _PICTURE}),
    "bagel_in_one_stage": Family(_bagel_in_one_stage, {"bagel": _PICTURE_WITH_THOUGHT}),
    "diffusers": Family(_diffusers, {"diffusers": _PICTURE}),
    "vllm": Family(_vllm(enable_prompt_embeds=True), {"llm": _TEXT}),
    "vllm_lora": Family(
        _vllm(enable_lora=True, max_loras=2, max_lora_rank=8, enable_prefix_caching=True),
        {"llm": _TEXT},
        adapted={"llm": ""},
        options={"llm": " (enable_lora, enable_prefix_caching)"},
    ),
    "vllm_qwen3": Family(_vllm_omni("qwen3"), {"thinker": _TEXT, "talker": _SPEECH}),
    "vllm_qwen2_5": Family(_vllm_omni("qwen2_5"), {"thinker": _TEXT}),
    "echo": Family(_echo, {"first": {"prompt": "hello"}}),
    "voice": Family(
        _voice,
        {"whisper": _RECORDING, "llm": _TEXT, "acoustic": _SCRIPT, "vocoder": _SCRIPT},
        adapted={"llm": ""},
        options={"llm": " (prefix_cache_mb: 64)"},
    ),
    "qwen3": Family(
        _omni("qwen3", "code2wav"),
        {"thinker": _TEXT, "talker": _SPEECH, "code2wav": _SPEECH},
        adapted={"thinker": "thinker.model."},
    ),
    "qwen_image": Family(
        _qwen_image,
        {
            "text_encoder": _PICTURE,
            "image_encoder": _PICTURE_FROM_PICTURE,
            "denoiser": _PICTURE,
            "vae": _PICTURE,
        },
    ),
    "qwen2_5": Family(
        _omni("qwen2_5", "token2wav"),
        {"thinker": _TEXT, "talker": _SPEECH, "token2wav": _SPEECH},
        adapted={"thinker": "thinker.model."},
    ),
}
