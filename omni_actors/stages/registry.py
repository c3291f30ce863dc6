"""The engines that ship with omni_actors: import path, options and request parameters, by name.

Only data: importing this loads no engine. Another engine needs no entry; a configuration names it by import path
("package.module:Factory"), and then its options and parameters are validated by the engine itself, in the worker.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from omni_actors.stages.base import NoOptions, NoParams

Positive = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(ge=0)]

# What a request may ask for. Every number has two finite bounds (so NaN is refused, too), and everything else a size.
Tokens = Annotated[int, Meta(ge=1, le=1_000_000)]
Temperature = Annotated[float, Meta(ge=0, le=2)]
TopP = Annotated[float, Meta(gt=0, le=1)]
TopK = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Penalty = Annotated[float, Meta(ge=0.1, le=10)]
"""A factor. Within these bounds no logit of a float16 model overflows; those in use are between 0.5 and 2."""
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
"""What torch's generators, vLLM and OpenAI's API take."""
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
StopString = Annotated[str, Meta(min_length=1, max_length=256)]
Name = Annotated[str, Meta(max_length=128)]


class EngineSpec(msgspec.Struct, frozen=True):
    """How to open an engine (``factory(context) -> StageEngine``) and what it understands."""

    factory: str
    options: type[msgspec.Struct] | None = NoOptions
    params: type[msgspec.Struct] | None = NoParams
    """None: the engine validates its own, in the worker."""
    needs_model: bool = True
    replays: bool = False
    """Its outputs (bytes, and how they are cut into chunks) are a function of the parameters and the input chunks of
    their request: not of time, of what else is in the batch, nor of how chunks of several sources come between.

    A language model's logits move in their last digits with the company that a request has in its batch, so one near
    tie in a long answer may be decided otherwise the second time. A replay is checked as it goes (``chunks.Intake``):
    such a request ends with StageCrashed, and is never spliced."""
    libraries: tuple[str, ...] = ()
    """What the engine imports that a plain install lacks."""
    extra: str = "voice"
    """What brings them: omni-actors[extra]."""


class EchoOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A deterministic stage for tests and benches: repeats its input at a configurable cost."""

    step_s: Seconds = 0.0
    """How long each step takes."""
    spin: bool = False
    """Burn CPU for ``step_s`` (as compute does) instead of sleeping (as waiting for an accelerator does)."""
    fan_out: Positive = 1
    """Output chunks for each input chunk."""
    payload_bytes: Annotated[int, Meta(ge=0)] = 0
    """Size of a uint8 tensor ``payload`` added to each output."""
    load_s: Seconds = 0.0
    """How long loading takes."""


class TextOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of an engine that answers in text, with continuous batching."""

    max_batch: Positive = 8
    """Requests decoded in one forward; more wait their turn."""
    context: Positive = 2048
    """Tokens, prompt and completion together, that one request may use."""
    prefill_chunk: Positive = 256
    """Prompt tokens prefilled in one step, so that a long prompt does not hold up the others' decoding."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    system_prompt: str = ""
    """Put before a conversation that brings no system message of its own."""


class LLMOptions(TextOptions, frozen=True, forbid_unknown_fields=True):
    """A causal language model on transformers."""


class ThinkerOptions(TextOptions, frozen=True, forbid_unknown_fields=True):
    """The part of an omni model that hears, sees and writes."""


class TextParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    max_tokens: Tokens = 256
    temperature: Temperature = 0.0
    """0 is greedy."""
    top_p: TopP = 1.0
    top_k: TopK = 0
    """0 means no limit."""
    seed: Seed | None = None
    """None: drawn when the request is admitted, so that a replay draws the same tokens."""
    stop: Annotated[tuple[StopString, ...], Meta(max_length=16)] = ()
    """Each new piece of text is compared with all of them."""
    repetition_penalty: Penalty = 1.0
    """Of tokens that the prompt or the answer has already; 1 is none."""


class ThinkerParams(TextParams, frozen=True, forbid_unknown_fields=True):
    use_audio_in_video: bool = False
    """Hear the sound of each video too."""


class TalkerOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The part of an omni model that turns its text into codes of speech."""

    max_batch: Positive = 8
    """Requests decoded in one forward; more wait their turn."""
    context: Positive = 4096
    """Positions, of the prompt and of the frames, that one request may use."""
    prefill_chunk: Positive = 256
    """Positions of the prompt prefilled in one step."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"


class TalkerParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Names of their own where the thinker has the same: what is said of the text must not change the voice."""

    speaker: Name | None = None
    """One of the checkpoint's, in any case; None: "Ethan", or its first."""
    talker_max_tokens: Tokens = 4096
    """Frames, one less where it ends by this."""
    talker_temperature: Temperature = 0.9
    talker_top_k: TopK = 50
    talker_top_p: TopP = 1.0
    talker_repetition_penalty: Penalty = 1.05
    """Of first codes that were generated already."""
    seed: Seed | None = None


class WhisperOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Speech recognition on faster-whisper."""

    compute_type: str = "int8"
    beam_size: Positive = 1


class WhisperParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    language: Name | None = None


class AcousticOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """hibari's acoustic network: text to spectral features, a sentence at a time."""

    chunk_frames: Annotated[tuple[Positive, ...], Meta(min_length=1)] = (40, 80, 160)
    """Frames (80 a second) in a sentence's first chunk, the second …; the last number goes on."""


class AcousticParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    speed: Annotated[float, Meta(ge=0.25, le=4)] = 1.0


class VocoderParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    seed: Seed = 0
    """Of the noise in the voice."""


class Code2WavOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Qwen3-Omni's codec decoder."""

    decode: Literal["exact", "reference"] = "exact"
    """exact: streamed, samples as of one forward over all frames. reference: at the end, in the reference's chunks."""
    chunk_frames: Annotated[tuple[Positive, ...], Meta(min_length=1)] = (2, 4, 8, 16, 25)
    """Frames (12.5 a second) in the first chunk, the second …; the last number goes on."""
    max_batch: Positive = 1
    """Requests in one forward. With more than one, the last digits of a sample move with the company it has: a replay
    that comes out otherwise ends with StageCrashed (see ``EngineSpec.replays``)."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"


class Qwen25TalkerOptions(TalkerOptions, frozen=True, forbid_unknown_fields=True):
    """Qwen2.5-Omni's."""

    prompt: Literal["reference", "trained"] = "reference"
    """reference: as transformers 5.23 has it, codes alike. trained: as the model's authors run it, with what that
    leaves out: the embeddings of the codec's pad and bos, and positions on three axes."""


class Qwen25TalkerParams(TalkerParams, frozen=True, forbid_unknown_fields=True):
    """The defaults are the authors'."""

    talker_max_tokens: Tokens = 4096
    """Codes."""
    talker_top_k: TopK = 40
    talker_top_p: TopP = 0.8


class Token2WavOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Qwen2.5-Omni's codec decoder."""

    decode: Literal["exact", "reference"] = "exact"
    """exact: streamed, 9.1 s of speech behind the codes, with the samples of all codes decoded together. reference: all
    codes together, at the end: the reference's call, bit for bit."""
    chunk_blocks: Positive = 2
    """Blocks (0.24 s of speech each) that are decoded, and given out, at a time."""
    steps: Annotated[int, Meta(ge=2)] = 10
    """Points in time of the solver. Fewer are coarser, faster, and closer behind the codes."""


class Token2WavParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    speaker: Name | None = None
    """One of the checkpoint's, in any case; None: its default. The talker is told the same."""
    seed: Seed | None = None
    """Of the noise that the sound is made of."""


class VLLMOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A language model, or an omni model's thinker, on vLLM."""

    engine_args: dict[str, Any] = {}
    """Of vLLM's EngineArgs, by its names (dtype, max_model_len, kv_cache_memory_bytes, …); checked in the worker."""
    system_prompt: str = ""
    """Put before a conversation that brings no system message of its own."""


class VLLMTalkerOptions(TalkerOptions, frozen=True, forbid_unknown_fields=True):
    """A talker whose layers run on vLLM."""

    engine_args: dict[str, Any] = {}
    """Of vLLM's EngineArgs, by its names, what the other options do not say; checked in the worker."""


# Of vLLM's parameters. Both its lists and its mappings also end at the size of a request's parameters.
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Logprobs = Annotated[int, Meta(ge=-1, le=100_000)]
"""-1: of the whole vocabulary. The engine's own limit (max_logprobs) is 20 unless ``engine_args`` says otherwise."""
Bias = Annotated[float, Meta(ge=-100, le=100)]
TokenIds = Annotated[list[TokenId], Meta(max_length=16_384)]
Settings = Annotated[dict[Name, Any], Meta(max_length=64)]


class VLLMSampling(TextParams, frozen=True, forbid_unknown_fields=True):
    """vLLM's SamplingParams, by its names, with our defaults where the other engines have the same."""

    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    stop_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=256)] = ()
    ignore_eos: bool = False
    min_tokens: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    logprobs: Logprobs | None = None
    """How many of the likeliest tokens come with each one, and how likely they are."""
    prompt_logprobs: Logprobs | None = None
    prompt_logprob_start: Count | None = None
    prompt_logprob_token_ids: Annotated[list[TokenIds], Meta(max_length=4096)] | None = None
    logprob_token_ids: TokenIds | None = None
    structured_outputs: Settings | None = None
    """One of json, regex, choice, grammar, json_object, structural_tag, and what goes with it."""
    logit_bias: Annotated[dict[Name | TokenId, Bias], Meta(max_length=1024)] | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Annotated[list[StopString], Meta(max_length=256)] | None = None
    extra_args: Settings | None = None
    """What custom logits processors, named in ``engine_args``, read."""
    skip_reading_prefix_cache: bool | None = None
    thinking_token_budget: Annotated[int, Meta(ge=-1, le=1_000_000)] | None = None
    repetition_detection: Settings | None = None
    watermarking: bool | None = None
    stream_interval: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    routed_experts_prompt_start: Count = 0
    trace_decode_token_ids: TokenIds | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] = 0
    """Lower comes first, where ``engine_args`` has scheduling_policy: priority."""


class VLLMParams(VLLMSampling, frozen=True, forbid_unknown_fields=True):
    n: Annotated[int, Meta(ge=1, le=128)] = 1
    """Answers; each piece says in ``index`` of which it is, where there are several."""
    detokenize: bool = True
    """False: ``token_ids`` come in place of ``text``."""
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False


class VLLMThinkerParams(VLLMSampling, frozen=True, forbid_unknown_fields=True):
    use_audio_in_video: bool = False
    """Hear the sound of each video too."""


ENGINES: dict[str, EngineSpec] = {
    "echo": EngineSpec("omni_actors.stages.echo:EchoEngine", EchoOptions, needs_model=False, replays=True),
    "llm": EngineSpec(
        "omni_actors.stages.llm:open_engine",
        LLMOptions,
        TextParams,
        replays=True,
        libraries=("torch", "transformers"),
    ),
    "qwen3_thinker": EngineSpec(
        "omni_actors.stages.qwen3.thinker:ThinkerEngine",
        ThinkerOptions,
        ThinkerParams,
        replays=True,
        libraries=("torch", "transformers"),
        extra="omni",
    ),
    "qwen3_talker": EngineSpec(
        "omni_actors.stages.qwen3.talker:TalkerEngine",
        TalkerOptions,
        TalkerParams,
        replays=True,
        libraries=("torch", "transformers"),
        extra="omni",
    ),
    "qwen3_code2wav": EngineSpec(
        "omni_actors.stages.qwen3.code2wav:Code2WavEngine",
        Code2WavOptions,
        replays=True,
        libraries=("torch", "transformers"),
        extra="omni",
    ),
    "qwen2_5_thinker": EngineSpec(
        "omni_actors.stages.qwen2_5.thinker:ThinkerEngine",
        ThinkerOptions,
        ThinkerParams,
        replays=True,
        libraries=("torch", "transformers"),
        extra="omni",
    ),
    "qwen2_5_talker": EngineSpec(
        "omni_actors.stages.qwen2_5.talker:TalkerEngine",
        Qwen25TalkerOptions,
        Qwen25TalkerParams,
        replays=True,
        libraries=("torch", "transformers"),
        extra="omni",
    ),
    "qwen2_5_token2wav": EngineSpec(
        "omni_actors.stages.qwen2_5.token2wav:Token2WavEngine",
        Token2WavOptions,
        Token2WavParams,
        replays=True,
        libraries=("torch", "transformers"),
        extra="omni",
    ),
    "whisper": EngineSpec(
        "omni_actors.stages.whisper:WhisperEngine",
        WhisperOptions,
        WhisperParams,
        replays=True,
        libraries=("faster_whisper",),
    ),
    "hibari_acoustic": EngineSpec(
        "omni_actors.stages.hibari:AcousticEngine",
        AcousticOptions,
        AcousticParams,
        replays=True,
        libraries=("hibari", "onnxruntime"),
    ),
    "hibari_vocoder": EngineSpec(
        "omni_actors.stages.hibari:VocoderEngine",
        NoOptions,
        VocoderParams,
        needs_model=False,
        replays=True,
        libraries=("scipy",),
    ),
    "vllm": EngineSpec(
        "omni_actors.stages.vllm.opening:open_text",
        VLLMOptions,
        VLLMParams,
        replays=True,
        libraries=("vllm",),
        extra="vllm",
    ),
    "vllm_qwen3_thinker": EngineSpec(
        "omni_actors.stages.vllm.opening:open_qwen3_thinker",
        VLLMOptions,
        VLLMThinkerParams,
        replays=True,
        libraries=("vllm",),
        extra="vllm",
    ),
    "vllm_qwen3_talker": EngineSpec(
        "omni_actors.stages.vllm.opening:open_qwen3_talker",
        VLLMTalkerOptions,
        TalkerParams,
        replays=True,
        libraries=("vllm",),
        extra="vllm",
    ),
    "vllm_qwen2_5_thinker": EngineSpec(
        "omni_actors.stages.vllm.opening:open_qwen2_5_thinker",
        VLLMOptions,
        VLLMThinkerParams,
        replays=True,
        libraries=("vllm",),
        extra="vllm",
    ),
}
