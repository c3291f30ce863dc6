"""A complete prompt to the arguments of a Qwen-Omni thinker's forward.

Rules
1. transformers' own processor makes the ids and features. It needs no torchvision here, because ``FrameProcessor``
   replaces its video processor.
2. A message is text. A control token in it ("<|im_start|>", "<|image_pad|>") is encoded as plain characters, so that a
   client can write neither a turn of another role nor a placeholder for an image that was not sent.
3. A raw prompt bypasses the template, and its control tokens count. Its placeholders stand for the media of their kind
   in order of index. An embedding needs no processing.
4. An input beyond a limit is refused before it is decoded, resized or tokenized, if its size is known by then.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import AutoTokenizer, Qwen2_5OmniProcessor, Qwen3OmniMoeProcessor, WhisperFeatureExtractor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.video_processing_utils import VideoProcessorMixin
from transformers.video_utils import VideoMetadata

from omni_actors.stages.autoregressive.options import DEFAULT_TOKENIZATION, TokenizationKwargs
from omni_actors.stages.base import InvalidRequest
from omni_actors.stages.checkpoint import whole_config
from omni_actors.stages.llm.chat_template import applied
from omni_actors.stages.llm.control_tokens import ControlTokens
from omni_actors.stages.multimodal.conversation import Message, TextPart, with_system_prompt
from omni_actors.stages.multimodal.decoding import Decoded, Decoder
from omni_actors.stages.multimodal.frames import FrameProcessor
from omni_actors.stages.multimodal.limits import MediaLimits
from omni_actors.stages.multimodal.prompt import Media, OmniPrompt
from omni_actors.stages.omni.options import DEFAULT_MEDIA, MMProcessorKwargs
from omni_actors.stages.refusal import beyond_context, refuse_unknown_tokens

_NONE: Mapping[str, Any] = {}
NO_TOKEN = -1
"""In the place of a token id: the position has only an embedding."""


class OmniInputs(msgspec.Struct, frozen=True):
    """The processed prompt.

    ids: its tokens, with a placeholder for each row of an encoder's output. tensors: by the names of the forward's
    arguments. use_audio_in_video: whether videos have their sound in the prompt; false if none of them has any.
    is_embedded: the prompt is embeddings (``RawPrompt.embeds``), and each of ``ids`` is ``NO_TOKEN``.
    """

    ids: list[int]
    tensors: dict[str, torch.Tensor]
    use_audio_in_video: bool
    is_embedded: bool = False


class _WithoutTorchvision:
    """Changes to transformers' processors: any object may process videos, and each video has its own frame rate."""

    video_processor: FrameProcessor

    def check_argument_for_proper_class(self, name: str, argument: Any) -> Any:
        if name == "video_processor":
            return type(argument)
        return super().check_argument_for_proper_class(name, argument)  # type: ignore[misc]

    def _process_videos(self: Any, videos: Sequence[torch.Tensor], **kwargs: Any) -> tuple[Any, list[str]]:
        processed = self.video_processor(videos, **kwargs["videos_kwargs"])
        patch = self.video_processor.temporal_patch_size
        processed["video_second_per_grid"] = [patch / about.fps for about in kwargs["videos_kwargs"]["video_metadata"]]
        return processed, [self.replace_video_token(processed, index, **kwargs) for index in range(len(videos))]


class _Qwen3Processor(_WithoutTorchvision, Qwen3OmniMoeProcessor):  # type: ignore[misc]
    pass


class _Qwen25Processor(_WithoutTorchvision, Qwen2_5OmniProcessor):  # type: ignore[misc]
    pass


_FAMILIES: Mapping[str, type[Any]] = {"qwen3_omni_moe": _Qwen3Processor, "qwen2_5_omni": _Qwen25Processor}


class OmniProcessor:
    """Processes prompts with the tokenizer, chat template and feature extractors of one checkpoint."""

    def __init__(self, directory: Path, *, tokenizer: Path | None = None, limits: MediaLimits | None = None) -> None:
        """Load from a checkpoint directory. Nothing is downloaded. tokenizer: its directory, if it is another one.

        Raises ValueError: the checkpoint is of another family or has no chat template. OSError: its files cannot be
        read.
        """
        config = whole_config(directory)
        if config.model_type not in _FAMILIES:
            known = ", ".join(_FAMILIES)
            raise ValueError(f"{directory}: found a model of type {config.model_type!r}; accepted: {known}")
        family = _FAMILIES[config.model_type]
        processor_config, _ = family.get_processor_dict(directory, local_files_only=True)
        video_config, _ = VideoProcessorMixin.get_video_processor_dict(directory, local_files_only=True)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(tokenizer or directory, local_files_only=True)
        self._template = processor_config.get("chat_template") or self.tokenizer.chat_template
        if self._template is None:
            raise ValueError(f"{directory}: there is no chat template")
        images = Qwen2VLImageProcessorPil.from_pretrained(directory, local_files_only=True)
        sound_features: Any = WhisperFeatureExtractor.from_pretrained(directory, local_files_only=True)
        frames = FrameProcessor(video_config)
        self._processor: Any = family(images, frames, sound_features, self.tokenizer, self._template)
        # These are attributes because a processor's ``__call__`` does not pass on all arguments.
        self._processor.audio_kwargs = {**family.audio_kwargs, "return_tensors": "np"}  # the processor counts in numpy
        self._processor.images_kwargs = {"return_tensors": "np", "input_data_format": "channels_last"}
        if config.model_type == "qwen3_omni_moe":
            self._processor.n_window = config.thinker_config.audio_config.n_window
        kinds = ("audio", "image", "video")
        self._placeholders: dict[str, str] = {kind: getattr(self._processor, f"{kind}_token") for kind in kinds}
        self._placeholder_ids: dict[int, str] = {getattr(self._processor, f"{kind}_token_id"): kind for kind in kinds}
        vocabulary = self.tokenizer.get_vocab()
        rows = config.thinker_config.text_config.vocab_size
        self._longest, self._size = max(map(len, vocabulary)), min(max(vocabulary.values()) + 1, rows)
        """Characters of the longest token in the vocabulary, and how many tokens the tokenizer and the model have."""
        self._limits = limits or MediaLimits()
        truncates = family.audio_kwargs.get("truncation", True)
        """Whether the feature extractor cuts recordings at the length of its window."""
        longest_s = min(self._limits.audio_s, sound_features.chunk_length) if truncates else self._limits.audio_s
        self._decoder = Decoder(
            images,
            frames,
            image_size=images.size,
            frame_size=family.videos_kwargs["size"],
            sample_rate=sound_features.sampling_rate,
            longest_s=longest_s,
            limits=self._limits,
        )

    def __call__(
        self,
        prompt: OmniPrompt,
        *,
        system_prompt: str = "",
        use_audio_in_video: bool = False,
        tokenization: TokenizationKwargs = DEFAULT_TOKENIZATION,
        media: MMProcessorKwargs = DEFAULT_MEDIA,
        template_kwargs: Mapping[str, Any] = _NONE,
    ) -> OmniInputs:
        """Decode and process a complete prompt.

        system_prompt: for a conversation without one. use_audio_in_video: whether videos bring their sound.
        tokenization, media: the request's own arguments. template_kwargs: variables of the chat template.
        Raises InvalidRequest.
        """
        decoder = self._decoder.changed(media)
        if prompt.raw:
            return self._raw(prompt, decoder, tokenization, use_audio_in_video=use_audio_in_video)
        conversation = with_system_prompt(prompt.messages, system_prompt)
        places = _places(prompt.messages, prompt.media, may_be_empty=prompt.may_be_empty)
        # Each message has at least one token besides those of its text.
        least = sum(1 + math.ceil(sum(map(len, m.texts)) / self._longest) for m in conversation)
        self._check_length(tokenization.least(least))
        decoded = decoder.decode(places, prompt.media, use_audio_in_video)
        return self._with_media(tokenization.cut(self._tokens(conversation, template_kwargs)), places, decoded)

    def text_tokens(
        self, prompt: OmniPrompt, system_prompt: str, template_kwargs: Mapping[str, Any] = _NONE
    ) -> list[int]:
        """Return the ids of a conversation without media. The arguments are those of a call. Raises InvalidRequest."""
        conversation = with_system_prompt(prompt.messages, system_prompt)
        _places(prompt.messages, prompt.media)
        return self._tokens(conversation, template_kwargs)

    def _raw(
        self, prompt: OmniPrompt, decoder: Decoder, tokenization: TokenizationKwargs, *, use_audio_in_video: bool
    ) -> OmniInputs:
        least = prompt.raw.least_tokens(self._longest, tokenization)
        self._check_length(least)
        if prompt.raw.is_embedded:
            if prompt.media:
                raise InvalidRequest("embeds: they are a whole prompt: no media come with them", param="embeds")
            return OmniInputs([NO_TOKEN] * least, {}, use_audio_in_video=False, is_embedded=True)
        if not (ids := prompt.raw.tokens(self.tokenizer, self._size, tokenization)):
            raise InvalidRequest("the prompt has no tokens", param="prompt")
        counts = dict.fromkeys(self._placeholders, 0)
        places = []
        for kind in (self._placeholder_ids[id_] for id_ in ids if id_ in self._placeholder_ids):
            places.append((kind, counts[kind]))
            counts[kind] += 1
        _check_places(places, prompt.media, "placeholder")
        return self._with_media(ids, places, decoder.decode(places, prompt.media, use_audio_in_video))

    def _with_media(self, ids: Sequence[int], places: Sequence[tuple[str, int]], decoded: Decoded) -> OmniInputs:
        """Process the media, and put what they take among the ids in place of their placeholders."""
        expansions, tensors = self._process(places, decoded) if places else ([], {})
        expanded = self._expanded(ids, places, expansions)
        self._check_length(len(expanded))
        refuse_unknown_tokens(expanded, self._size, "prompt")
        return OmniInputs(expanded, tensors, decoded.has_video_sound)

    def _process(
        self, places: Sequence[tuple[str, int]], decoded: Decoded
    ) -> tuple[list[list[int]], dict[str, torch.Tensor]]:
        """Return the ids for each place, and the model's tensors."""
        outputs = self._processor(
            text=[self._placeholders[kind] for kind, _ in places],
            images=decoded.images or None,
            images_kwargs={"size": dict(decoded.image_size)},
            audio=decoded.sounds or None,
            videos=[video.pixels for video in decoded.videos] or None,
            audio_from_video_indices=decoded.video_of_sound if decoded.has_video_sound else None,
            load_audio_from_video=decoded.has_video_sound,
            videos_kwargs={
                "video_metadata": [VideoMetadata(len(video.pixels), fps=video.fps) for video in decoded.videos]
            },
        )
        expansions = outputs.pop("input_ids")
        del outputs["attention_mask"]
        return expansions, {name: torch.as_tensor(value) for name, value in outputs.items()}

    def _tokens(self, conversation: Sequence[Message], template_kwargs: Mapping[str, Any]) -> list[int]:
        """Return the conversation's ids, with one placeholder for each of its media."""
        messages = [{"role": message.role, "content": _content(message)} for message in conversation]
        if template_kwargs:
            template_kwargs = ControlTokens.of(self.tokenizer, self._template).marked_kwargs(template_kwargs)
        ids: list[int] = applied(
            self.tokenizer,
            messages,
            template_kwargs,
            chat_template=self._template,
            return_dict=False,
            sanitize_control_tokens=True,
        )
        return ids

    def _expanded(
        self, ids: Sequence[int], places: Sequence[tuple[str, int]], expansions: Sequence[Sequence[int]]
    ) -> list[int]:
        """Replace each placeholder in ``ids`` by the ids of its place. Raises InvalidRequest."""
        found = [self._placeholder_ids[id_] for id_ in ids if id_ in self._placeholder_ids]
        if found != [kind for kind, _ in places]:
            raise _refusal("the model's chat template leaves out some of the conversation's media")
        rest = iter(expansions)
        return [each for id_ in ids for each in (next(rest) if id_ in self._placeholder_ids else (id_,))]

    def _check_length(self, tokens: int) -> None:
        if tokens > self._limits.tokens:
            raise beyond_context(f"the prompt has at least {tokens} tokens; the limit is {self._limits.tokens}")


def _refusal(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="messages")


def _places(conversation: Sequence[Message], media: Media, *, may_be_empty: bool = False) -> list[tuple[str, int]]:
    """Return kind and index of the media that the conversation has places for, in order.

    Raises InvalidRequest: a place has no input, an input has no place, or the prompt is empty and must not be.
    """
    places = [(part.kind, part.index) for message in conversation for part in message.media]
    for message in conversation:
        if message.role != "user" and any(message.media):
            # A talker gets the user's turns only, and would look for all media in those.
            raise _refusal(f"a message of the role {message.role!r} has media; only user messages may have media")
    _check_places(places, media)
    turns = [message for message in conversation if message.role != "system"]
    has_text = any(text.strip() for message in turns or conversation for text in message.texts)
    if not (places or has_text or may_be_empty):
        raise _refusal("the prompt is empty: no message has text or media")
    return places


def _check_places(places: Sequence[tuple[str, int]], media: Media, place: str = "message") -> None:
    """Raise InvalidRequest if a place has no input, or an input no place. place: what a place is called."""
    param = "messages" if place == "message" else "prompt"
    for kind, index in places:
        if index not in media.of(kind):
            raise InvalidRequest(f"a {place} refers to {kind} {index}, which was not sent", param=param)
    media.require_placed(places, place, param)


def _content(message: Message) -> str | list[dict[str, str]]:
    """Return a message's content in the form that chat templates expect."""
    if isinstance(message.content, str):
        return message.content
    return [
        {"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": part.kind, part.kind: ""}
        for part in message.content
    ]
