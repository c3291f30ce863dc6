"""Packed linear layers, against plain ones."""

from __future__ import annotations

import pytest
import torch

from omni_actors.stages.autoregressive.packed import pack_linears


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@torch.inference_mode()
def test_packed_layers_compute_what_plain_layers_compute(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(48, 64), torch.nn.Sequential(torch.nn.Linear(64, 16, bias=False)))
    model.to(dtype)
    states = torch.randn(3, 5, 48, dtype=dtype)
    plain = model(states)
    pack_linears(model, rows=4)
    units = {torch.float32: 1e-5, torch.bfloat16: 2**-5, torch.float16: 2**-8}  # four units in the last place, and more
    torch.testing.assert_close(model(states), plain, rtol=units[dtype], atol=units[dtype])


@torch.inference_mode()
def test_packing_reaches_every_linear_layer() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Sequential(torch.nn.Linear(8, 8)))
    pack_linears(model, rows=4)
    assert not [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
