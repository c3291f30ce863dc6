"""Tests that need an NVIDIA GPU and a torch that uses it, and are skipped elsewhere."""

from __future__ import annotations

import pytest
import torch

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
ON_GPU = [pytest.mark.gpu, pytest.mark.slow, on_gpu]
