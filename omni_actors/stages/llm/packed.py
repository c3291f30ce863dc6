"""Linear layers with their weights in the order in which the CPU's matrix kernels read them.

Rules
1. Ordering them once, at loading, serves a small batch about half again as fast: torch's own path copies the weights
   into that order again and again, at each call.
2. The kernels then treat the rows of a batch alike, whatever their number, so a sequence's numbers hardly depend on
   its company.
3. The operators are torch's inductor's, not its public face. They are named here and nowhere else.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["pack_linears"]


class _PackedLinear(nn.Module):
    def __init__(self, linear: nn.Linear, rows: int) -> None:
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), rows)
        self.bias = linear.bias

    def forward(self, states: Tensor) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise(states, self.weight, self.bias, "none", [], "")
        return result


def pack_linears(model: nn.Module, rows: int) -> None:
    """Replace the linear layers of a model for inference, where its device and dtype allow; rows: the usual batch."""
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and _can_pack(module.weight):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, _PackedLinear(module, rows))


def _can_pack(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32
