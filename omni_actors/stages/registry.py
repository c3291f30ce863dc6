"""The engines that ship with omni_actors, by name: import path, options, request parameters.

Importing this module loads no engine and no model library: it imports the ``options`` module of each engine only.
Another engine needs no row; a configuration names it by import path ("package.module:factory"). The parent then passes
its options and parameters on unchecked, and the engine validates them in the worker.
"""

from __future__ import annotations

from functools import partial

import msgspec

from omni_actors.stages.autoregressive.options import TextParams
from omni_actors.stages.base import NoOptions, NoParams
from omni_actors.stages.echo.options import EchoOptions
from omni_actors.stages.hibari.options import AcousticOptions, AcousticParams, VocoderParams
from omni_actors.stages.llm.options import LLMOptions
from omni_actors.stages.omni.options import TalkerOptions, TalkerParams, ThinkerOptions, ThinkerParams
from omni_actors.stages.qwen2_5.options import (
    Qwen25TalkerOptions,
    Qwen25TalkerParams,
    Token2WavOptions,
    Token2WavParams,
)
from omni_actors.stages.qwen3.options import Code2WavOptions
from omni_actors.stages.vllm.options import VLLMOptions, VLLMParams, VLLMTalkerOptions, VLLMThinkerParams
from omni_actors.stages.whisper.options import WhisperOptions, WhisperParams

__all__ = ["ENGINES", "EngineSpec"]


class EngineSpec(msgspec.Struct, frozen=True):
    """What the parent must know of an engine.

    Who validates what: the parent converts options and parameters to these structs, so that a wrong configuration
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

    The last digits of a language model's logits do depend on the batch, so a near tie in a long answer may be decided
    differently in a replay. The consumer compares replayed chunks with the originals (``chunks.ChunkSequence``): a
    request whose replay differs ends with StageCrashed, and two different answers are never joined."""
    libraries: tuple[str, ...] = ()
    """Import names of the libraries that the engine needs besides those of a plain install."""
    extra: str = "voice"
    """The extra of the distribution that installs ``libraries``: omni-actors[extra]."""
    checkpoint_part: str | None = None
    """The engine loads the checkpoint's tensors whose names begin with this word and a dot; "" means all tensors.
    None: not known, so ``memory`` cannot count them."""


_omni = partial(EngineSpec, deterministic=True, libraries=("torch", "transformers"), extra="omni")
_vllm = partial(EngineSpec, deterministic=True, libraries=("vllm",), extra="vllm")

ENGINES: dict[str, EngineSpec] = {
    "echo": EngineSpec("omni_actors.stages.echo.engine:EchoEngine", EchoOptions, needs_model=False, deterministic=True),
    "llm": EngineSpec(
        "omni_actors.stages.llm.engine:open_engine",
        LLMOptions,
        TextParams,
        deterministic=True,
        libraries=("torch", "transformers"),
        checkpoint_part="",
    ),
    "whisper": EngineSpec(
        "omni_actors.stages.whisper.engine:WhisperEngine",
        WhisperOptions,
        WhisperParams,
        deterministic=True,
        libraries=("faster_whisper",),
    ),
    "hibari_acoustic": EngineSpec(
        "omni_actors.stages.hibari.acoustic:AcousticEngine",
        AcousticOptions,
        AcousticParams,
        deterministic=True,
        libraries=("hibari", "onnxruntime"),
    ),
    "hibari_vocoder": EngineSpec(
        "omni_actors.stages.hibari.vocoder:VocoderEngine", params=VocoderParams, needs_model=False, deterministic=True
    ),
    "qwen3_thinker": _omni(
        "omni_actors.stages.qwen3.thinker:ThinkerEngine", ThinkerOptions, ThinkerParams, checkpoint_part="thinker"
    ),
    "qwen3_talker": _omni(
        "omni_actors.stages.qwen3.talker:TalkerEngine", TalkerOptions, TalkerParams, checkpoint_part="talker"
    ),
    "qwen3_code2wav": _omni(
        "omni_actors.stages.qwen3.code2wav:Code2WavEngine", Code2WavOptions, checkpoint_part="code2wav"
    ),
    "qwen2_5_thinker": _omni(
        "omni_actors.stages.qwen2_5.thinker:ThinkerEngine", ThinkerOptions, ThinkerParams, checkpoint_part="thinker"
    ),
    "qwen2_5_talker": _omni(
        "omni_actors.stages.qwen2_5.talker:TalkerEngine",
        Qwen25TalkerOptions,
        Qwen25TalkerParams,
        checkpoint_part="talker",
    ),
    "qwen2_5_token2wav": _omni(
        "omni_actors.stages.qwen2_5.token2wav:Token2WavEngine",
        Token2WavOptions,
        Token2WavParams,
        checkpoint_part="token2wav",
    ),
    "vllm": _vllm("omni_actors.stages.vllm.factories:open_text", VLLMOptions, VLLMParams),
    "vllm_qwen3_thinker": _vllm("omni_actors.stages.vllm.factories:open_qwen3_thinker", VLLMOptions, VLLMThinkerParams),
    "vllm_qwen3_talker": _vllm("omni_actors.stages.vllm.factories:open_qwen3_talker", VLLMTalkerOptions, TalkerParams),
    "vllm_qwen2_5_thinker": _vllm(
        "omni_actors.stages.vllm.factories:open_qwen2_5_thinker", VLLMOptions, VLLMThinkerParams
    ),
}
