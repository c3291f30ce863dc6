"""Fields of OpenAI's API and of other open servers that this server ignores, does not implement, or has elsewhere.

Tables only: ``schemas`` reads them.
"""

from __future__ import annotations

from typing import Any

IGNORED_FIELDS = frozenset(
    {
        *("user", "metadata", "store", "service_tier"),
        *("safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    }
)
"""Fields that have no effect on an answer."""

UNSUPPORTED_FIELDS: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "priority": (0,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "prediction": (),
    "reasoning_effort": ("none",),
    "add_special_tokens": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
    "moderation": (),
    "instructions": ("",),
    "prompt": ("",),
    **dict.fromkeys(("complexity", "frame_count", "frame_duration_ms", "input_fidelity", "style", "svg"), ()),
    **dict.fromkeys(("context_management", "conversation", "max_tool_calls", "prompt_cache_options"), ()),
    **dict.fromkeys(("mask", "markup", "previews", "progress"), ()),
}
"""Fields that this server does not implement, and the values that are accepted because they have no effect. The
chat template of a model adds its special tokens, so ``add_special_tokens`` would repeat them."""
WITHOUT_EFFECT: dict[str, Any] = {
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), 0),
    **dict.fromkeys(
        ("continue_final_message", "include_stop_str_in_output", "use_beam_search", "early_stopping"), False
    ),
    **dict.fromkeys(("return_token_ids", "return_token_offsets", "return_tokens_as_token_ids"), False),
    **dict.fromkeys(("add_generation_prompt", "include_reasoning", "spaces_between_special_tokens"), True),
    **{name: [] for name in ("bad_words", "documents")},
    **{name: {} for name in ("logit_bias", "chat_template_kwargs", "media_io_kwargs", "vllm_xargs", "extra_params")},
    "embed_dtype": "float32",
    "enable_response_messages": False,
    "endianness": "native",
    "length_penalty": 1,
    "mm_payload": "tensors",
    "routed_experts_prompt_start": 0,
}
"""Parameters of some engines, and fields that clients of vLLM send; the value of each that changes nothing."""
_BY_STAGE = "the stages' parameters as fields of the body, such as temperature of the text and talker_temperature"
ELSEWHERE: dict[str, str] = {
    **dict.fromkeys(("sampling_params", "sampling_params_list", "stage_params", "stage_sampling"), _BY_STAGE),
    **{f"{kind}s": f"a part of a message's content, of the type '{kind}_url'" for kind in ("audio", "image", "video")},
    **{f"guided_{form}": f"structured_outputs: {{{form!r}: …}}" for form in ("choice", "grammar", "json", "regex")},
    **dict.fromkeys(("height", "width"), "size"),
    **dict.fromkeys(("guidance_scale", "true_cfg_scale"), "guidance"),
    "extra_body": "its fields in the body itself",
    "num_inference_steps": "steps",
    "num_outputs_per_prompt": "n to /v1/images/generations",
    "request_id": "the header X-Request-ID",
    "session_id": "the header X-Session-ID",
    "truncate_prompt_tokens": "tokenization_kwargs: {'truncation': true, 'max_length': …, 'truncation_side': …}",
    "url": "the file as image",
}
"""Fields of vLLM, vLLM-Omni and SGLang-Omni that have another name or place here, and what to send instead.

One that is the name of a parameter counts for pipelines whose engines have it.
"""
