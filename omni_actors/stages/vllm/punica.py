"""vLLM's application of LoRA adapters on a CPU, with one correction.

vLLM marks the rows of requests without an adapter by the index -1. Its kernels for GPUs leave these rows out. Those for
CPUs take -1 as the last slot, so that in a batch with other requests these rows get that slot's adapter
(vllm-project/vllm#48421). Here the rows keep their values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU


class PunicaWrapper(PunicaWrapperCPU):  # type: ignore[misc]
    """Adds the updates of adapters to the rows that have one."""

    def add_lora_linear(self, y: Tensor, *args: Any, **kwargs: Any) -> None:
        _keep_rows(y, self.token_lora_indices, lambda: super(PunicaWrapper, self).add_lora_linear(y, *args, **kwargs))

    def add_lora_logits(self, y: Tensor, *args: Any, **kwargs: Any) -> None:
        _keep_rows(y, self.sampler_indices, lambda: super(PunicaWrapper, self).add_lora_logits(y, *args, **kwargs))

    def add_lora_embedding(self, y: Tensor, *args: Any, **kwargs: Any) -> None:
        _keep_rows(
            y, self.token_lora_indices, lambda: super(PunicaWrapper, self).add_lora_embedding(y, *args, **kwargs)
        )


def _keep_rows(y: Tensor, indices: Tensor, update: Callable[[], None]) -> None:
    """Call ``update``, which changes ``y``, and restore the rows without an adapter."""
    rows = y.view(-1, y.shape[-1])
    plain = (indices[: len(rows)] == -1).nonzero()[:, 0]
    before = rows[plain]
    update()
    rows[plain] = before
