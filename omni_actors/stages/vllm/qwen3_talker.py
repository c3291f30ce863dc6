"""Qwen3-Omni's talker with its layers on vLLM. All else is ``qwen3.talker``'s.

Rules
1. A request is a session of vLLM (``_internals.Sessions``). Its positions are sent when their inputs have arrived.
   Between two of them the session waits and keeps its cache, and delays no other.
2. vLLM returns hidden states. The samplers and the code predictor of ``qwen3.talker`` choose the codes.
3. vLLM's cache has room for ``max_batch`` requests of ``context`` positions. vLLM cannot preempt a waiting session, so
   with less room all sessions could wait for each other.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeTalkerForConditionalGeneration
from vllm import LLMEngine
from vllm.config import PoolerConfig
from vllm.platforms import current_platform

from omni_actors.stages.adapters.options import KEEP, LOAD
from omni_actors.stages.autoregressive.cache import SlottedCache
from omni_actors.stages.autoregressive.scheduler import Scheduler
from omni_actors.stages.base import StageContext
from omni_actors.stages.omni.talker_request import TalkerRequest
from omni_actors.stages.qwen3.talker import TalkerEngine
from omni_actors.stages.vllm import _internals
from omni_actors.stages.vllm.arguments import engine_args
from omni_actors.stages.vllm.options import VLLMTalkerOptions
from omni_actors.stages.vllm.qwen3_talker_model import register

UNCHANGEABLE = "its weights are in two models, vLLM's layers and the rest; both load them at the start only"


class _TalkerWithoutLayers(Qwen3OmniMoeTalkerForConditionalGeneration):  # type: ignore[no-untyped-call]
    def __init__(self, config: Any) -> None:
        config.text_config.num_hidden_layers = 0
        super().__init__(config)


@dataclass
class _Session:
    """One request's session."""

    name: str
    first_id: int
    """The id of its first position. The ids of later positions follow."""


class Qwen3Talker(TalkerEngine):
    """Chooses frames of codes for a thinker's rows. ``context.model``: a checkpoint directory of Qwen3-Omni."""

    MODEL = _TalkerWithoutLayers

    def __init__(self, context: StageContext) -> None:
        """Raises as ``TalkerEngine`` does, WrongEngineArgument, UnsupportedVLLMVersion, and what vLLM raises."""
        options = msgspec.convert(context.options, VLLMTalkerOptions)
        own_options = {name: value for name, value in context.options.items() if name != "engine_args"}
        device = context.device.partition(":")[0]  # the worker sees only its own of several devices
        super().__init__(msgspec.structs.replace(context, options=own_options, device=device))
        rows, block = options.max_batch, options.engine_args.get("block_size", 32 if current_platform.is_cpu() else 16)
        fixed = {
            "worker_cls": "omni_actors.stages.vllm._internals.StageWorker",
            "hf_overrides": register(rows * options.context),
            "runner": "pooling",
            "pooler_config": PoolerConfig(seq_pooling_type="LAST", use_activation=False),
            "skip_tokenizer_init": True,
            "dtype": options.dtype,
            "max_model_len": options.context,
            "max_num_seqs": rows,
            "block_size": block,
            "num_gpu_blocks_override": rows * math.ceil(options.context / block) + 1,  # vLLM reserves one
            "enable_prefix_caching": False,
            "watermark": 0.0,
            "disable_log_stats": True,  # vLLM counts only what passes through ``LLMEngine``
            "async_scheduling": False,
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
        }
        context.report("vLLM is reading the weights of the talker's layers")
        arguments = engine_args(context.stage, context.model_directory, options.engine_args, fixed)
        self._llm = LLMEngine.from_engine_args(arguments)
        [self._layers] = self._llm.apply_model(lambda model: model)
        self._vllm_sessions = _internals.Sessions(self._llm)
        self._sessions: dict[TalkerRequest, _Session] = {}
        why = "vLLM runs its layers as sessions, which take no adapters"
        self._capabilities |= {LOAD: why, KEEP: why, "update_weights": UNCHANGEABLE}
        self._names = map(str, itertools.count())
        self._free_ids = [row * options.context for row in range(rows)]
        # The keys and values are in vLLM's cache. This one only counts positions.
        self._cache = SlottedCache(rows, options.context, self._model.dtype, self._device)
        self._scheduler = Scheduler(self._cache, rows, options.prefill_chunk)

    @torch.inference_mode()
    def _forward(self, rows: list[int], inputs: Tensor, axes: Tensor | None = None) -> Tensor:
        count = inputs.shape[1]
        requests = [self._scheduler.rows[row] for row in rows]
        sessions = [self._session(request) for request in requests]
        positions, _ = self._cache.extend(rows, count)
        if axes is None:
            deltas = torch.tensor([request.delta for request in requests], device=positions.device)
            axes = (positions + deltas[:, None]).expand(3, -1, -1)
        cos, sin = self._model.model.rotary_emb(inputs, axes.to(inputs.device))
        first = torch.tensor([session.first_id for session in sessions], device=positions.device)
        self._layers.write(first[:, None] + positions, inputs, cos, sin)
        for request, session in zip(requests, sessions, strict=True):
            begin = session.first_id + request.cached
            self._vllm_sessions.send(session.name, list(range(begin, begin + count)))
            request.cached += count
        hidden: dict[str, Tensor] = {}
        for _ in range(len(sessions) * count):  # each step computes at least one position
            hidden |= self._vllm_sessions.step()
            if len(hidden) == len(sessions):
                break
        else:
            raise RuntimeError(f"vLLM answered {len(hidden)} of {len(sessions)} sessions and then stopped")
        found = torch.stack([hidden[session.name] for session in sessions])
        return found.to(self._device, self._model.dtype)

    def _session(self, request: TalkerRequest) -> _Session:
        if request not in self._sessions:
            self._sessions[request] = _Session(next(self._names), self._free_ids.pop())
        return self._sessions[request]

    def _leave_batch(self, request: Any) -> None:
        super()._leave_batch(request)
        if session := self._sessions.pop(request, None):
            self._vllm_sessions.end(session.name)
            self._free_ids.append(session.first_id)

    def close(self) -> None:
        super().close()
        _internals.close(self._llm)
        del self._llm, self._vllm_sessions, self._layers
