"""Tests that need an NVIDIA GPU, and are skipped elsewhere."""

from __future__ import annotations

import pytest
import torch

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU")
ON_GPU = [pytest.mark.gpu, pytest.mark.slow, on_gpu]
