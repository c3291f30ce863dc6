"""Linear layers whose weights are packed once into the layout that the CPU's matrix kernels (oneDNN) read.

Rules
1. Packing at load time serves a small batch about half again as fast: torch's own path copies the weights into that
   layout on every call.
2. Packed layers are not batch-invariant. Most of them give a row the same bits alone and in a batch of 2 to 8
   (measured with SmolLM2-135M's widths on x86 with AVX-512 and one thread). The exception is the layer that sums over
   1536 inputs, in float32 from 2 rows and in bfloat16 from 4. Unpacked, no float32 layer is batch-invariant, and all
   bfloat16 layers are.
3. Attention also changes the last bits, by the padding that longer neighbours cause. The whole model's logits (at most
   25) differed by up to 0.0002 in float32 and up to 0.8 in bfloat16, packed or not. The logits after the prefill,
   which runs each prompt alone, were equal to the bit. The greedy tokens of 8 conversations of up to 12 tokens were
   equal. None of this is guaranteed: where two tokens are nearly equally likely, the batch can decide, and in bfloat16
   more often.
4. The packing operators belong to torch's inductor and are not public. No other file names them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class PackedLinear(nn.Module):
    """A linear layer on packed weights."""

    def __init__(self, linear: nn.Linear, rows: int) -> None:
        super().__init__()
        self._rows, self.dtype = rows, linear.weight.dtype
        self.pack(linear.weight.detach())
        self.bias = linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def pack(self, weight: Tensor) -> None:
        """Take a weight, (out, in), of the layer's dtype."""
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, self._rows)

    def forward(self, states: Tensor) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise(states, self.weight, self.bias, "none", [], "")
        return result


def pack_linears(model: nn.Module, rows: int) -> bool:
    """Replace the linear layers of a model, for inference only, where their device and dtype allow it.

    rows: the batch size that the packed layout is chosen for; other sizes work too. Returns whether it replaced any.
    """
    packed = False
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and _can_pack(module.weight):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, PackedLinear(module, rows))
            packed = True
    return packed


def _can_pack(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32
