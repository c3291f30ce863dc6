"""The engines that ship with omni_actors, by name: import path, options, request parameters.

Importing this module loads no engine and no model library: it imports the ``options`` module of each engine only.
Another engine needs no row; a configuration names it by import path ("package.module:factory"). The parent then passes
its options and parameters on unchecked, and the engine validates them in the worker.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from omni_actors.stages.autoregressive.options import SplitOptions
from omni_actors.stages.bagel import options as bagel
from omni_actors.stages.base import NoOptions, NoParams
from omni_actors.stages.diffusers.options import DiffusersOptions, DiffusersParams
from omni_actors.stages.diffusion.pipeline_index import unused_by_text_encoder
from omni_actors.stages.echo.options import EchoOptions, EchoParams
from omni_actors.stages.hibari import options as hibari
from omni_actors.stages.llm.options import LLMParams
from omni_actors.stages.omni import options as omni
from omni_actors.stages.qwen2_5 import options as qwen2_5
from omni_actors.stages.qwen3 import options as qwen3
from omni_actors.stages.qwen_image import options as qwen_image
from omni_actors.stages.vllm import options as vllm
from omni_actors.stages.whisper.options import WhisperOptions, WhisperParams


class RawPromptUse(msgspec.Struct, frozen=True, kw_only=True):
    """A raw prompt (``stages.raw_prompt``) that a request brings to a stage.

    Attributes:
        kind: "prompt" (text), "prompt_token_ids" or "prompt_embeds".
        options: The stage's options.
        upstream: Whether other stages feed the stage in this request.
        downstream: Whether the stage feeds other stages in this request.
    """

    kind: str
    options: Mapping[str, Any]
    upstream: bool
    downstream: bool


def _no_raw_prompt(use: RawPromptUse) -> str | None:
    return "its engine reads no prompts"


def _raw_prompt_of_template(use: RawPromptUse) -> str | None:
    return "it writes each prompt into the template of its model"


def _raw_prompt_of_text(use: RawPromptUse) -> str | None:
    return "a raw prompt has no place for what other stages send" if use.upstream else None


def _conversations_only(use: RawPromptUse) -> str | None:
    return "its engine reads conversations only"


def _raw_prompt_of_thinker(use: RawPromptUse) -> str | None:
    if use.kind == "prompt_embeds" and use.downstream and use.options.get("role") != "prefill":
        return "the talker needs the tokens of the prompt"
    return None


def _on_vllm(lacks: Callable[[RawPromptUse], str | None]) -> Callable[[RawPromptUse], str | None]:
    def lacks_on_vllm(use: RawPromptUse) -> str | None:
        if use.kind == "prompt_embeds" and not use.options["engine_args"].get("enable_prompt_embeds"):
            return "it needs engine_args.enable_prompt_embeds: true"
        if use.kind == "prompt_embeds" and use.options.get("role", "both") != "both":
            return "prefill apart from decode takes no embeddings on vLLM"
        return lacks(use)

    return lacks_on_vllm


class EngineSpec(msgspec.Struct, frozen=True):
    """What the parent must know of an engine.

    The parent converts options and parameters to these structs, so that a wrong configuration
    stops the start and a wrong request is refused before it reaches a worker. The engine converts them once more, to
    get typed values; for an engine without structs (None) that is the only check.
    """

    factory: str
    """Import path of a callable that takes a ``StageContext`` and returns a ``StageEngine``: "package.module:name"."""
    options: type[msgspec.Struct] | None = NoOptions
    params: type[msgspec.Struct] | None = NoParams
    needs_model: bool = True
    deterministic: bool = False
    """Whether the output chunks of a request are a function of its parameters and input chunks alone: not of time, of
    the other requests in a batch, nor of the order in which the chunks of several sources arrive.

    The last digits of a language model's logits do depend on the batch, and decide between nearly equal tokens: such an
    engine is resumable instead. The consumer compares replayed chunks with the originals (``chunks.ChunkSequence``): a
    request whose replay differs ends with StageCrashed, and two different answers are never joined."""
    resumable: bool = False
    """Whether a new incarnation can go on where an earlier one died, from the request's input and what was decided so
    far (``stages.base``, rule 6). No replayed chunk is compared then, and consumers get only the chunks they lack."""
    has_tokenizer: bool = False
    """Whether the engine reads a tokenizer, which a stage may name apart from its model."""
    lacks_raw_prompt: Callable[[RawPromptUse], str | None] | None = None
    """Returns why the engine cannot take a raw prompt, or None if it can. None: not known, so the engine checks it."""
    libraries: tuple[str, ...] = ()
    """Import names of the libraries that the engine needs besides those of a plain install."""
    extra: str = "voice"
    """The extra of the distribution that installs ``libraries``: omni-actors[extra]."""
    checkpoint_part: str | None = None
    """The engine loads the checkpoint's tensors whose names begin with this word and a dot; "" means all tensors.
    None: not known, so ``memory`` cannot count them."""
    checkpoint_folder: str = ""
    """The folder that has these tensors, in a directory of diffusers."""
    checkpoint_leaves_out: Callable[[Path], tuple[str, ...]] | None = None
    """Returns, for a model's directory, what the names begin with of those tensors that the engine does not load."""


def _shipped(
    factory: str,
    options: type[msgspec.Struct] = NoOptions,
    params: type[msgspec.Struct] = NoParams,
    *,
    resumable: bool = False,
    lacks_raw_prompt: Callable[[RawPromptUse], str | None] | None = _no_raw_prompt,
    **more: Any,
) -> EngineSpec:
    """Return the row of an engine of this package. factory: its path below ``omni_actors.stages``."""
    path = f"omni_actors.stages.{factory}"
    more |= {"deterministic": not resumable, "lacks_raw_prompt": lacks_raw_prompt}
    return EngineSpec(path, options, params, resumable=resumable, **more)


_torch = partial(_shipped, libraries=("torch", "transformers"), resumable=True)
_language = partial(_torch, libraries=("torch", "transformers", "llguidance"))
_thinker = partial(
    _language, extra="omni", checkpoint_part="thinker", has_tokenizer=True, lacks_raw_prompt=_raw_prompt_of_thinker
)
_talker = partial(_torch, extra="omni", checkpoint_part="talker")
_qwen_image = partial(_shipped, libraries=("diffusers", "torch", "transformers"), extra="image", checkpoint_part="")
_vllm = partial(_shipped, libraries=("vllm",), extra="vllm", resumable=True)
_vllm_thinker = partial(_vllm, has_tokenizer=True, lacks_raw_prompt=_on_vllm(_raw_prompt_of_thinker))

ENGINES: dict[str, EngineSpec] = {
    "echo": _shipped("echo.engine:EchoEngine", EchoOptions, EchoParams, needs_model=False, lacks_raw_prompt=None),
    "llm": _language(
        "llm.engine:open_engine",
        SplitOptions,
        LLMParams,
        checkpoint_part="",
        has_tokenizer=True,
        lacks_raw_prompt=_raw_prompt_of_text,
    ),
    "whisper": _shipped(
        "whisper.engine:WhisperEngine", WhisperOptions, WhisperParams, libraries=("faster_whisper",), resumable=True
    ),
    "hibari_acoustic": _shipped(
        "hibari.acoustic:AcousticEngine",
        hibari.AcousticOptions,
        hibari.AcousticParams,
        libraries=("hibari", "onnxruntime"),
        resumable=True,
    ),
    "hibari_vocoder": _shipped(
        "hibari.vocoder:VocoderEngine", params=hibari.VocoderParams, needs_model=False, resumable=True
    ),
    "qwen3_thinker": _thinker("qwen3.thinker:open_engine", SplitOptions, omni.ThinkerParams),
    "qwen3_talker": _talker("qwen3.talker:TalkerEngine", omni.TalkerOptions, omni.TalkerParams),
    "qwen3_code2wav": _torch(
        "qwen3.code2wav:Code2WavEngine", qwen3.Code2WavOptions, extra="omni", checkpoint_part="code2wav"
    ),
    "qwen2_5_thinker": _thinker("qwen2_5.thinker:open_engine", SplitOptions, omni.ThinkerParams),
    "qwen2_5_talker": _talker("qwen2_5.talker:TalkerEngine", qwen2_5.Qwen25TalkerOptions, qwen2_5.Qwen25TalkerParams),
    "qwen2_5_token2wav": _torch(
        "qwen2_5.token2wav:Token2WavEngine",
        qwen2_5.Token2WavOptions,
        qwen2_5.Token2WavParams,
        extra="omni",
        checkpoint_part="token2wav",
    ),
    "qwen_image_denoiser": _qwen_image(
        "qwen_image.denoiser:DenoiserEngine",
        qwen_image.DenoiserOptions,
        qwen_image.DenoiserParams,
        resumable=True,
        checkpoint_folder="transformer",
    ),
    "qwen_image_text_encoder": _qwen_image(
        "qwen_image.text_encoder:TextEncoder",
        qwen_image.TextEncoderOptions,
        qwen_image.TextEncoderParams,
        has_tokenizer=True,
        lacks_raw_prompt=_raw_prompt_of_template,
        checkpoint_folder="text_encoder",
        checkpoint_leaves_out=unused_by_text_encoder,
    ),
    "qwen_image_vae_encoder": _qwen_image(
        "qwen_image.picture_encoder:PictureEncoder",
        qwen_image.PictureEncoderOptions,
        qwen_image.PictureEncoderParams,
        checkpoint_folder="vae",
        checkpoint_leaves_out=lambda _: ("decoder.", "post_quant_conv."),
    ),
    "qwen_image_vae_decoder": _qwen_image(
        "qwen_image.picture_decoder:PictureDecoder",
        qwen_image.PictureDecoderOptions,
        resumable=True,
        checkpoint_folder="vae",
        checkpoint_leaves_out=lambda _: ("encoder.", "quant_conv."),
    ),
    "bagel_context": _language(
        "bagel.context:ContextEngine",
        bagel.ContextOptions,
        bagel.ContextParams,
        extra="omni",
        has_tokenizer=True,
        lacks_raw_prompt=_conversations_only,
    ),
    "bagel_denoiser": _torch(
        "bagel.denoiser:DenoiserEngine",
        bagel.DenoiserOptions,
        bagel.DenoiserParams,
        extra="omni",
        has_tokenizer=True,
    ),
    "bagel": _language(
        "bagel.one_stage:OneStageEngine",
        bagel.OneStageOptions,
        bagel.OneStageParams,
        extra="omni",
        has_tokenizer=True,
        lacks_raw_prompt=_conversations_only,
    ),
    "diffusers": _shipped(
        "diffusers.engine:DiffusersEngine",
        DiffusersOptions,
        DiffusersParams,
        resumable=True,
        lacks_raw_prompt=_conversations_only,
        libraries=("diffusers", "torch", "transformers"),
        extra="image",
    ),
    "vllm": _vllm(
        "vllm.factories:open_text",
        vllm.VLLMSplitOptions,
        vllm.VLLMParams,
        has_tokenizer=True,
        lacks_raw_prompt=_on_vllm(_raw_prompt_of_text),
    ),
    "vllm_qwen3_thinker": _vllm_thinker("vllm.factories:open_qwen3_thinker", vllm.VLLMOptions, vllm.VLLMThinkerParams),
    "vllm_qwen3_talker": _vllm("vllm.factories:open_qwen3_talker", vllm.VLLMTalkerOptions, omni.TalkerParams),
    "vllm_qwen2_5_thinker": _vllm_thinker(
        "vllm.factories:open_qwen2_5_thinker", vllm.VLLMOptions, vllm.VLLMThinkerParams
    ),
}
