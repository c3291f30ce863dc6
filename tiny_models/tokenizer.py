"""A byte-level BPE tokenizer with the special tokens and the chat template of an omni model, made on the spot.

Every text has ids and every id a text; the words of ``WORDS`` are one token each, as the roles have to be: the models
know a segment's role by the one token after ``<|im_start|>``. The same each time: nothing is trained.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, pre_tokenizers
from transformers import Qwen2Tokenizer

WORDS = ("system", "user", "assistant", " the", " you", " are", "hello", " what", " sea", " hear", " story")
CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PAD, IM_START, IM_END = CHATML


class Marks(NamedTuple):
    """How a prompt writes its media; ``audio``, ``image`` or ``video`` stands once for each row of an encoder."""

    audio_bos: str
    audio: str
    audio_eos: str
    vision_bos: str
    image: str
    video: str
    vision_eos: str


QWEN3 = Marks(
    audio_bos="<|audio_start|>",
    audio="<|audio_pad|>",
    audio_eos="<|audio_end|>",
    vision_bos="<|vision_start|>",
    image="<|image_pad|>",
    video="<|video_pad|>",
    vision_eos="<|vision_end|>",
)
QWEN2_5 = Marks(
    audio_bos="<|audio_bos|>",
    audio="<|AUDIO|>",
    audio_eos="<|audio_eos|>",
    vision_bos="<|vision_bos|>",
    image="<|IMAGE|>",
    video="<|VIDEO|>",
    vision_eos="<|vision_eos|>",
)


def build(marks: Marks, *more: str, default_system: str = "", words: Sequence[str] = WORDS) -> Qwen2Tokenizer:
    """more: further special tokens. default_system: the system message of a conversation that brings none.
    words: those that are one token each; where two want different merges, the first one has its own."""
    vocabulary = {symbol: id_ for id_, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = []
    for word in words:
        symbols = word.replace(" ", "Ġ")
        for end in range(2, len(symbols) + 1):  # the first word to need a pair ranks it: the roles are never split
            if symbols[:end] not in vocabulary:
                vocabulary[symbols[:end]] = len(vocabulary)
                merges.append((symbols[: end - 1], symbols[end - 1]))
    names = {f"{name}_token": mark for name, mark in marks._asdict().items()}
    make: Any = Qwen2Tokenizer  # its annotations leave out what it takes
    tokenizer: Qwen2Tokenizer = make(
        vocabulary, merges, unk_token=None, eos_token=IM_END, pad_token=PAD, extra_special_tokens=names
    )
    tokenizer.add_tokens(
        [AddedToken(token, special=True, normalized=False) for token in (*CHATML, *marks, *more)], special_tokens=True
    )
    tokenizer.chat_template = template(marks, default_system)
    return tokenizer


def template(marks: Marks, default_system: str = "") -> str:
    """The chat template: content is a text, or parts of type text, audio, image and video."""
    system = f"<|im_start|>system\n{default_system}<|im_end|>\n"
    media = {
        "audio": marks.audio_bos + marks.audio + marks.audio_eos,
        "image": marks.vision_bos + marks.image + marks.vision_eos,
        "video": marks.vision_bos + marks.video + marks.vision_eos,
    }
    branches = "".join(f"{{% elif part['type'] == '{kind}' %}}{written}" for kind, written in media.items())
    return (
        "{% for message in messages %}"
        + (f"{{% if loop.first and message['role'] != 'system' %}}{system}{{% endif %}}" if default_system else "")
        + "<|im_start|>{{ message['role'] }}\n"
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
        "{% if part['type'] == 'text' %}{{ part['text'] }}" + branches + "{% endif %}{% endfor %}{% endif %}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


def save(tokenizer: Qwen2Tokenizer, directory: Path) -> None:
    """As the real checkpoints have it: the template in a file for processors, which a tokenizer does not read."""
    tokenizer.save_pretrained(directory)
    (directory / "chat_template.jinja").unlink()
    (directory / "chat_template.json").write_text(json.dumps({"chat_template": tokenizer.chat_template}))
