"""Converts a processed prompt of an omni model to vLLM's input.

``OmniProcessor`` makes the ids and the features, as for the thinkers on transformers; vLLM's own processor is not used.
vLLM gets each recording, image and video as an item with its place among the ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, groupby
from typing import Any

import torch
from torch import Tensor
from transformers import BatchFeature
from vllm.inputs.engine import MultiModalInput, TokensInput, mm_input, tokens_input

from omni_actors.stages.base import InvalidRequest
from omni_actors.stages.multimodal.processor import OmniInputs
from omni_actors.stages.vllm._internals import MultiModalKwargsItems, PlaceholderRange, batched_field, omni_fields
from omni_actors.stages.vllm.recordings import PADDED_FRAMES, padded_frames

MARKS = "prompt: each recording, image and video needs its marks around it"
"""Why a prompt is refused. A raw prompt may lack marks, and so may a conversation that was cut (``truncation``)."""
_item_numbers = count()
"""Number the items of all requests: vLLM caches encoded items by name, so no two items may share one."""


def to_prompt(inputs: OmniInputs, thinker: Any) -> TokensInput | MultiModalInput:
    """Return vLLM's input for a prompt. thinker: the configuration of that part of the model. Raises InvalidRequest."""
    if not inputs.tensors:
        return tokens_input(inputs.ids)
    merge = thinker.vision_config.spatial_merge_size
    features = _features(inputs, thinker)
    fields = {**omni_fields(merge)(features), PADDED_FRAMES: batched_field("audio", keep_on_cpu=True)}
    items = MultiModalKwargsItems.from_hf_inputs(BatchFeature(features), fields)
    places: dict[str, list[PlaceholderRange]] = {}
    for kind, place in _places(inputs, thinker):
        places.setdefault(kind, []).append(place)
    names = {kind: [f"item-{next(_item_numbers)}" for _ in places[kind]] for kind in places}
    if {kind: len(places[kind]) for kind in places} != {kind: len(items[kind]) for kind in items}:
        raise InvalidRequest(MARKS, param="prompt")  # several of one kind in a row
    return mm_input(inputs.ids, items, names, places)


def _features(inputs: OmniInputs, thinker: Any) -> dict[str, Tensor]:
    """Return the features under vLLM's names. The frames of all recordings are concatenated, without padding."""
    tensors = dict(inputs.tensors)
    if (padded := tensors.pop("input_features", None)) is not None:
        mask = tensors["feature_attention_mask"]
        tensors["input_audio_features"] = padded.permute(0, 2, 1)[mask.bool()].T.contiguous()
        tensors["audio_feature_lengths"] = mask.sum(1)
        tensors[PADDED_FRAMES] = padded_frames(tensors["audio_feature_lengths"], thinker.audio_config)
    if (seconds := tensors.pop("video_second_per_grid", None)) is not None:
        tensors["second_per_grid_ts"] = seconds
        tensors["use_audio_in_video"] = torch.tensor(inputs.use_audio_in_video)
    return tensors


def _places(inputs: OmniInputs, thinker: Any) -> Iterator[tuple[str, PlaceholderRange]]:
    """Yield each item's kind and range. A video's sound lies among its frames: both have its range, and a mask each.

    vLLM takes a token behind each item for its mark, and one more on each side of a video with its sound. If there is
    none, its step fails. Raises InvalidRequest.
    """
    kinds = {thinker.audio_token_id: "audio", thinker.image_token_id: "image", thinker.video_token_id: "video"}
    at = 0
    for is_medium, run in groupby(inputs.ids, kinds.__contains__):
        ids = list(run)
        found = {kinds[id_] for id_ in ids if is_medium}
        is_mixed = len(found) > 1
        is_video = inputs.use_audio_in_video and found == {"audio", "video"}
        if found and (is_mixed != is_video or at < is_mixed or at + len(ids) + is_mixed >= len(inputs.ids)):
            raise InvalidRequest(MARKS, param="prompt")
        if len(found) == 1:
            yield found.pop(), PlaceholderRange(at, len(ids))
        for kind in sorted(found):
            # vLLM counts the marks around it, too.
            whole = torch.tensor(inputs.ids[at - 1 : at + len(ids) + 1])
            token = getattr(thinker, f"{kind}_token_id")
            yield kind, PlaceholderRange(at - 1, len(whole), whole == token)
        at += len(ids)
