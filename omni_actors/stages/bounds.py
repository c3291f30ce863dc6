"""Types with bounds, for the options and the request parameters of engines.

Every number of a request parameter has a lower and an upper bound, which also refuses NaN and infinity; every string
and every collection has a largest length.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta

# Options, chosen by the operator.
Positive = Annotated[int, Meta(ge=1)]
Count = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(ge=0)]
PositiveSeconds = Annotated[float, Meta(gt=0)]
Dtype: TypeAlias = Literal["float32", "bfloat16", "float16"]
ChunkSizes = Annotated[tuple[Positive, ...], Meta(min_length=1)]
"""Frames in the first output chunk, in the second, and so on; the last number is for all further chunks."""

# Request parameters, chosen by a client.
MAX_TOKENS = 1_000_000
Tokens = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
Temperature = Annotated[float, Meta(ge=0, le=2)]
TopP = Annotated[float, Meta(gt=0, le=1)]
TopK = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
"""0 means no limit, and so does -1, which clients of vLLM send."""
Penalty = Annotated[float, Meta(ge=0.1, le=10)]
"""A factor on logits. Within these bounds no float16 logit overflows; values in use lie between 0.5 and 2."""
CountPenalty = Annotated[float, Meta(ge=-2, le=2)]
"""A difference of logits, in OpenAI's range."""
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
"""The range that torch's generators, vLLM and OpenAI's API accept."""
Priority = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
StopString = Annotated[str, Meta(min_length=1, max_length=256)]
Name = Annotated[str, Meta(max_length=128)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
LogitBias = Annotated[dict[Name | TokenId, Bias], Meta(max_length=1024)]
"""What is added to logits, by token id. JSON has ids as strings."""
Settings = Annotated[dict[Name, Any], Meta(max_length=64)]
"""A mapping that the engine checks. It is also bounded by the size of a request's encoded parameters."""

SET_BY_RENDERER = (
    *("messages", "conversation", "conversations", "tools", "documents", "chat_template", "compiled_template"),
    *("add_generation_prompt", "continue_final_message", "sanitize_control_tokens"),
    *("tokenize", "tokenizer_kwargs", "padding", "truncation", "max_length"),
    *("return_tensors", "return_dict", "return_assistant_tokens_mask"),
    *("self", "range", "dict", "lipsum", "cycler", "joiner", "namespace", "raise_exception", "strftime_now"),
)
"""The arguments of transformers' renderer of chat templates, and what it and Jinja define for each template."""
_NUMBER = Meta(ge=-1_000_000, le=1_000_000)
_Scalar: TypeAlias = bool | Annotated[int, _NUMBER] | Annotated[float, _NUMBER]
_TemplateValue: TypeAlias = (
    _Scalar
    | Annotated[str, Meta(max_length=1024)]
    | Annotated[list[_Scalar | Annotated[str, Meta(max_length=64)] | None], Meta(max_length=16)]
    | None
)
"""A template may put a text wherever it likes, and may repeat one as many times as a number says."""
ChatTemplateKwargs = Annotated[
    dict[
        Annotated[str, Meta(pattern=rf"^(?!({'|'.join(SET_BY_RENDERER)}|\w*_token)$)[A-Za-z]\w*$", max_length=64)],
        _TemplateValue,
    ],
    Meta(
        max_length=16,
        description=(
            "up to 16 names that the chat template reads, each with null, true, false, a number from -1000000 to "
            "1000000, a text of up to 1024 characters, or up to 16 such values with texts of up to 64; not the names "
            "that the renderer sets, such as messages, tools, documents, chat_template, add_generation_prompt or "
            "bos_token"
        ),
    ),
]
"""The variables of a chat template that a client may set ("enable_thinking"). Names end in "_token" if the tokenizer
sets them."""
