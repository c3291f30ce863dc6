"""Linear layers with their weights in the order in which the CPU's matrix kernels read them.

Rules
1. Ordering them once, at loading, serves a small batch about half again as fast: torch's own path copies the weights
   into that order again and again, at each call.
2. This does not make a sequence's numbers independent of its company. One layer by itself mostly does give a row the
   same bits alone and among 2 to 8 (SmolLM2-135M's widths; x86 with AVX-512, one thread): all but the one that sums
   over 1536 inputs, in float32 from 2 rows on and in bfloat16 from 4. As they come, the layers of float32 never do
   and those of bfloat16 all do.
3. Attention also changes the last bits, with the padding that longer neighbours bring. So the whole model's logits,
   25 at the largest, moved by up to 0.0002 in float32 and by up to 0.8 in bfloat16, packed or not; those after the
   prefill, which is done alone, are equal to the bit. The greedy tokens were the same in 8 conversations of up to
   12 tokens. That is what was seen, not a guarantee: where two tokens are nearly as likely, company can decide,
   and in bfloat16 it sooner does.
4. The operators are torch's inductor's, not its public face. They are named here and nowhere else.
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


def pack_linears(model: nn.Module, rows: int) -> bool:
    """Replace the linear layers of a model for inference, where its device and dtype allow; rows: the usual batch.

    Returns whether there were any.
    """
    packed = False
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and _can_pack(module.weight):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, _PackedLinear(module, rows))
            packed = True
    return packed


def _can_pack(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32
