"""A KV connector of vLLM (``KVConnectorBase_V1``) whose blocks an engine takes and offers, for stages joined by rings.

vLLM makes two connectors in one process: one for its scheduler, which decides, and one for its worker, which copies.
They talk by metadata of vLLM's steps. A request tells the scheduler's connector by ``kv_transfer_params`` what to do:

params of a request            meaning
-----------------------------  ---------------------------------------------------------------------------------------
``do_remote_decode: true``     Another stage decodes: save the blocks of the prompt.
``do_remote_prefill: true``    Another stage has prefilled: load ``positions`` positions that were offered as
                               ``transfer``.

A request that prefills returns params with which another stage can load its blocks.

Rules
1. A block is saved behind the forward that completes it, once, also if vLLM computes it again after a preemption. The
   last block of a prompt is complete with the prompt. The engine takes saved blocks after each step.
2. Blocks are loaded between steps, at most ``STEP_BYTES`` in each, so that the tokens of other requests do not wait for
   a long prompt. vLLM keeps the request waiting meanwhile (``WAITING_FOR_REMOTE_KVS``).
3. A transfer that does not fit is reported as failed. vLLM then computes the prompt itself (``recompute``). So it does
   after a preemption, because blocks are dropped when they are loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import vllm
from torch import Tensor
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorTransferResults,
)

from omni_actors.stages.vllm._internals import StageWorker

STEP_BYTES = 16 << 20
"""Bytes that are copied into the cache in one step; at least one block is."""


def transfer_config(role: str) -> KVTransferConfig:
    """Return vLLM's configuration of this connector. role: "prefill" or "decode"."""
    return KVTransferConfig(
        kv_connector=RingConnector.__name__,
        kv_connector_module_path=__name__,
        kv_role="kv_producer" if role == "prefill" else "kv_consumer",
        kv_load_failure_policy="recompute",
    )


@dataclass(frozen=True)
class SavedBlock:
    """A block of a prompt. request: vLLM's internal id. tensor: (layers, …), as ``transfer`` has it."""

    request: str
    number: int
    tensor: Tensor


@dataclass
class _Save:
    request: str
    number: int
    """The number of the first block."""
    ids: list[int]
    """Places of the blocks in the cache."""


@dataclass
class _Load:
    request: str
    transfer: str
    number: int
    ids: list[int]
    done: int = 0
    """Blocks that are loaded."""


@dataclass
class _Step(KVConnectorMetadata):  # type: ignore[misc]  # vLLM has no types where it is not installed
    """What the scheduler's connector tells the worker's about one step."""

    saves: list[_Save] = field(default_factory=list)
    loads: list[_Load] = field(default_factory=list)


class RingConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """See the module."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        cache = vllm_config.cache_config
        self._block_size: int = cache.block_size
        cpu = torch.backends.cpu.get_cpu_capability() if vllm_config.device_config.device_type == "cpu" else ""
        self.layout = (
            f"{vllm.__version__} {vllm_config.model_config.dtype} {cache.cache_dtype} {self._block_size} {cpu}"
        )
        """What blocks depend on besides the model. Blocks of another layout may have the same shape."""
        # of the scheduler
        self._prefilling: dict[str, Any] = {}
        """vLLM's requests whose blocks are saved, by internal id."""
        self._saved_blocks: dict[str, int] = {}
        self._step = _Step()
        # of the worker
        self._caches: list[Tensor] = []
        """The cache of each layer, (blocks, …)."""
        self._saved: list[SavedBlock] = []
        self._offered: dict[str, list[Tensor]] = {}
        """Blocks by the name of their transfer."""
        self._loading: dict[str, _Load] = {}
        self._results = KVConnectorTransferResults()

    # of the scheduler

    def on_new_request(self, request: Any) -> None:
        if (request.kv_transfer_params or {}).get("do_remote_decode"):
            self._prefilling[request.request_id] = request

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_prefill"):
            return 0, False
        count = max(0, params["positions"] - num_computed_tokens)
        return count, count > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if not num_external_tokens:
            return
        name, params = request.request_id, request.kv_transfer_params
        params["do_remote_prefill"] = False  # it is loaded once
        first = (params["positions"] - num_external_tokens) // self._block_size
        (ids,) = blocks.get_block_ids()
        self._step.loads.append(_Load(name, params["transfer"], first, ids[first : self._blocks(params["positions"])]))

    def build_connector_meta(self, scheduler_output: Any) -> _Step:
        for name, count in scheduler_output.num_scheduled_tokens.items():
            if (request := self._prefilling.get(name)) is not None:
                self._save(request, request.num_computed_tokens + count)
        step, self._step = self._step, _Step()
        return step

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        name = request.request_id
        self._saved_blocks.pop(name, None)
        if self._prefilling.pop(name, None) is None:
            return False, None
        return False, {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "positions": request.num_prompt_tokens,
        }

    def _save(self, request: Any, computed: int) -> None:
        """Let the worker save the blocks that are complete with ``computed`` positions."""
        name, size = request.request_id, request.num_prompt_tokens
        begin = self._saved_blocks.get(name, 0)
        end = self._blocks(size) if computed >= size else computed // self._block_size
        if end > begin:
            (ids,) = self._kv_cache_manager.get_block_ids(name)
            self._step.saves.append(_Save(name, begin, ids[begin:end]))
            self._saved_blocks[name] = end

    def _blocks(self, positions: int) -> int:
        return -(-positions // self._block_size)

    # of the worker

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """Raises ValueError: the cache does not consist of blocks that all have the same places."""
        order = sorted(kv_caches, key=lambda name: [int(part) for part in name.split(".") if part.isdigit()])
        self._caches = [kv_caches[name] for name in order]
        if any(len(cache) != self._kv_cache_config.num_blocks for cache in self._caches):
            raise ValueError("role: the attention of this model keeps keys and values otherwise than in vLLM's blocks")

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._loading |= {load.request: load for load in self._get_connector_metadata().loads}
        left = STEP_BYTES
        for load in list(self._loading.values()):
            blocks = self._offered.get(load.transfer, [])[load.number :]
            if not self._fits(blocks, load.ids):
                self._end(load, failed=True)
                continue
            while load.done < len(load.ids) and left > 0:
                block = blocks[load.done]
                for cache, layer in zip(self._caches, block, strict=True):
                    cache[load.ids[load.done]].copy_(layer)
                load.done += 1
                left -= block.nbytes
            if load.done == len(load.ids):
                del self._offered[load.transfer]
                self._end(load)

    def wait_for_save(self) -> None:
        for save in self._get_connector_metadata().saves:
            for number, place in enumerate(save.ids, save.number):
                block = torch.stack([cache[place] for cache in self._caches])
                self._saved.append(SavedBlock(save.request, number, block))

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        for name in finished_req_ids & self._loading.keys():  # aborted; vLLM frees its blocks now
            self._end(self._loading[name])
        results, self._results = self._results, KVConnectorTransferResults()
        return results

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass  # a request computes nothing before it is loaded

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        pass  # blocks are saved behind the forward, because no chunk leaves a worker during a step

    def take_saved(self) -> list[SavedBlock]:
        """Return what was saved since the last call."""
        saved, self._saved = self._saved, []
        return saved

    def offer(self, transfer: str, blocks: list[Tensor]) -> None:
        """Let a request load these blocks of a prompt, in order of position."""
        self._offered[transfer] = blocks

    def withdraw(self, transfer: str) -> bool:
        """Drop what was offered; return whether it was not loaded."""
        return self._offered.pop(transfer, None) is not None

    def _fits(self, blocks: Sequence[Tensor], ids: Sequence[int]) -> bool:
        expected = len(self._caches), *self._caches[0].shape[1:]
        dtype = self._caches[0].dtype
        return len(blocks) == len(ids) and all((b.shape, b.dtype) == (expected, dtype) for b in blocks)

    def _end(self, load: _Load, *, failed: bool = False) -> None:
        del self._loading[load.request]
        self._results.finished_recving.add(load.request)
        if failed:
            self._results.failed_recving.add(load.request)


class TransferWorker(StageWorker):
    """vLLM's worker, with calls to its connector."""

    def layout(self) -> str:
        """Return the layout of the blocks."""
        layout: str = get_kv_transfer_group().layout
        return layout

    def take_saved(self) -> list[SavedBlock]:
        """Return the blocks that were saved since the last call."""
        saved: list[SavedBlock] = get_kv_transfer_group().take_saved()
        return saved

    def offer(self, transfer: str, blocks: list[Tensor]) -> None:
        """Let a request load these blocks."""
        get_kv_transfer_group().offer(transfer, blocks)

    def withdraw(self, transfer: str) -> bool:
        """Drop what was offered; return whether it was not loaded."""
        dropped: bool = get_kv_transfer_group().withdraw(transfer)
        return dropped
