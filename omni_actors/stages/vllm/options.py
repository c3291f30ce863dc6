"""The options and request parameters of the ``vllm`` engines."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from omni_actors.stages.autoregressive.options import Role, TextParams
from omni_actors.stages.bounds import ChatTemplateKwargs, Positive, Settings, StopString, TokenId
from omni_actors.stages.llm.options import Tools
from omni_actors.stages.omni.options import MMProcessorKwargs, TalkerOptions


class VLLMOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of a language model, or of an omni model's thinker, on vLLM."""

    engine_args: dict[str, Any] = msgspec.field(default_factory=dict)
    """Fields of vLLM's EngineArgs (dtype, max_model_len, kv_cache_memory_bytes, …); checked in the worker."""
    system_prompt: str = ""
    """System message for a conversation that has none."""


class VLLMSplitOptions(VLLMOptions, frozen=True, forbid_unknown_fields=True):
    """The options of a language model on vLLM that may prefill and decode in two stages (see ``roles``)."""

    role: Role = "both"
    """"prefill": the stage computes prompts, and sends the blocks of its cache to a stage of the same model with the
    role "decode", which writes the answers."""
    waiting_prompts_mb: Positive | None = None
    """With the role "decode": megabytes of host memory for blocks that are not in the cache yet; None: 1024. A prompt
    whose blocks have no room is computed again by this stage."""


class VLLMTalkerOptions(TalkerOptions, frozen=True, forbid_unknown_fields=True):
    """The options of a talker whose layers run on vLLM."""

    engine_args: dict[str, Any] = msgspec.field(default_factory=dict)
    """Fields of vLLM's EngineArgs that the other options do not set; checked in the worker."""


# Lists and mappings are also bounded by the size of a request's encoded parameters.
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Logprobs = Annotated[int, Meta(ge=-1, le=100_000)]
"""-1: the whole vocabulary. vLLM's own limit (max_logprobs) is 20 unless ``engine_args`` sets it."""
TokenIds = Annotated[list[TokenId], Meta(max_length=16_384)]


class VLLMSampling(TextParams, frozen=True, forbid_unknown_fields=True):
    """The fields of vLLM's SamplingParams. Those that other engines have too keep our defaults."""

    logprobs: Logprobs | None = None
    """How many of the most likely tokens each output token reports with their log probabilities."""
    prompt_logprobs: Logprobs | None = None
    prompt_logprob_start: Count | None = None
    prompt_logprob_token_ids: Annotated[list[TokenIds], Meta(max_length=4096)] | None = None
    logprob_token_ids: TokenIds | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Annotated[list[StopString], Meta(max_length=256)] | None = None
    extra_args: Settings | None = None
    """Arguments for the custom logits processors that ``engine_args`` names. vLLM's own are dropped."""
    skip_reading_prefix_cache: bool | None = None
    thinking_token_budget: Annotated[int, Meta(ge=-1, le=1_000_000)] | None = None
    repetition_detection: Settings | None = None
    watermarking: bool | None = None
    stream_interval: Annotated[int, Meta(ge=1, le=1000)] | None = None
    routed_experts_prompt_start: Count = 0
    trace_decode_token_ids: TokenIds | None = None


class VLLMParams(VLLMSampling, frozen=True, forbid_unknown_fields=True):
    """The request parameters of ``vllm``."""

    n: Annotated[int, Meta(ge=1, le=128)] = 1
    """Number of answers. With several, each piece has the number of its answer in ``index``."""
    tools: Tools = ()
    chat_template_kwargs: ChatTemplateKwargs = msgspec.field(default_factory=dict)
    """As for ``llm``."""
    detokenize: bool = True
    """False: pieces have ``token_ids`` instead of ``text``."""
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False


class VLLMThinkerParams(VLLMSampling, frozen=True, forbid_unknown_fields=True):
    """The request parameters of a thinker on vLLM."""

    use_audio_in_video: bool = False
    """Whether the model also gets the sound of each video."""
    mm_processor_kwargs: MMProcessorKwargs = MMProcessorKwargs()
    """How images and videos are prepared for the model."""
    chat_template_kwargs: ChatTemplateKwargs = msgspec.field(default_factory=dict)
    """As for ``llm``."""
