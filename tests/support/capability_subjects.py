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

SPOKEN = {"talker_max_tokens": 6, "seed": 0}


class Subject(NamedTuple):
    """An engine in a running pipeline.

    engine: its name. stage: its stage. ask: arguments of ``generate`` for a short request that uses the stage.
    """

    engine: str
    stage: str
    omni: OmniSystem
    ask: Mapping[str, Any]


class Family(NamedTuple):
    """A pipeline, and the requests that reach its engines. requests: by stage, arguments of ``generate``."""

    open: Callable[[Path], AbstractAsyncContextManager[OmniSystem]]
    requests: Mapping[str, Mapping[str, Any]]

    def subjects(self, omni: OmniSystem) -> list[Subject]:
        """Return the engines of the running pipeline."""
        return [Subject(omni.pipeline.stages[stage].engine, stage, omni, ask) for stage, ask in self.requests.items()]


def _echo(_: Path) -> AbstractAsyncContextManager[OmniSystem]:
    return OmniSystem.open("echo")


def _voice(_: Path) -> AbstractAsyncContextManager[OmniSystem]:
    return OmniSystem.open("voice", **{"stages.llm.threads": 1})


def _vllm(_: Path) -> AbstractAsyncContextManager[OmniSystem]:
    options = {"engine_args": {**ENGINE_ARGS, "enable_prompt_embeds": True, "scheduling_policy": "priority"}}
    stage = Stage(
        engine="vllm", model="smollm2-135m-instruct", accepts=("messages",), emits="text", threads=1, options=options
    )
    return OmniSystem.open(Pipeline(name="text", stages={"llm": stage}))


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
_PICTURE_FROM_PICTURE = {**_PICTURE, "multi_modal_data": {"image": np.zeros((32, 32, 3), np.uint8)}, "strength": 1.0}

FAMILIES = {
    "bagel": Family(_bagel, {"context": _TEXT, "denoiser": _PICTURE}),
    "diffusers": Family(_diffusers, {"diffusers": _PICTURE}),
    "vllm": Family(_vllm, {"llm": _TEXT}),
    "vllm_qwen3": Family(_vllm_omni("qwen3"), {"thinker": _TEXT, "talker": _SPEECH}),
    "vllm_qwen2_5": Family(_vllm_omni("qwen2_5"), {"thinker": _TEXT}),
    "echo": Family(_echo, {"first": {"prompt": "hello"}}),
    "voice": Family(_voice, {"whisper": _RECORDING, "llm": _TEXT, "acoustic": _SCRIPT, "vocoder": _SCRIPT}),
    "qwen3": Family(_omni("qwen3", "code2wav"), {"thinker": _TEXT, "talker": _SPEECH, "code2wav": _SPEECH}),
    "qwen_image": Family(
        _qwen_image,
        {
            "text_encoder": _PICTURE,
            "image_encoder": _PICTURE_FROM_PICTURE,
            "denoiser": _PICTURE,
            "vae": _PICTURE,
        },
    ),
    "qwen2_5": Family(_omni("qwen2_5", "token2wav"), {"thinker": _TEXT, "talker": _SPEECH, "token2wav": _SPEECH}),
}
