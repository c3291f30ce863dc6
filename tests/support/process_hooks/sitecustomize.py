"""What tests change in every process, workers included.

With this directory on ``PYTHONPATH``, Python imports this module at the start of a process. Environment variables
select what it does:

``OMNI_ACTORS_TEST_NOISE``           a seed: rounding noise as other machines have it, for `make test-portable`
``OMNI_ACTORS_TEST_CLEAR_CHOICES``   engines choose tokens by the rules of ``tests.support.clear_choices``
``OMNI_ACTORS_TEST_DECISION_NOISE``  a seed: the noise of ``tests.support.decision_noise``

The results of matrix kernels differ from machine to machine in their last bits: instruction sets, thread counts and
batch shapes change the order of summation. The noise imitates that.

Rules of the noise
1. The result of every linear layer, matrix product, convolution, attention and Fourier transform is multiplied by
   ``1 + e``, elementwise, with ``|e|`` at most ``AMPLITUDE`` of float32, and one unit in the last place of the narrower
   types. What happens inside onnxruntime and CTranslate2 cannot be reached; their results get the noise.
2. ``e`` is a function of the seed, the operator, the shapes of its operands and the number of threads. So a process
   that repeats a computation gets the same bits, as on a real machine, and one that computes the same row in another
   batch, or with another number of threads, does not.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import os
import sys
import zlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

AMPLITUDE = 1e-6
"""About 8 units in the last place of float32."""
CACHED_ELEMENTS = 1 << 24
"""The patterns kept for reuse: 64 MiB."""

FUNCTIONAL = ("linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "grouped_mm")
FUNCTIONAL += ("scaled_dot_product_attention",)
PRODUCTS = ("matmul", "mm", "bmm", "mv", "addmm", "baddbmm", "einsum", "dot", "_grouped_mm")
CHOOSERS = (
    "omni_actors.stages.autoregressive.language",
    "omni_actors.stages.omni.talker",
    "omni_actors.stages.qwen3.predictor",
)
"""The modules that choose tokens, each by its name ``choose``."""
NOISY = (
    "omni_actors.stages.diffusers.loading",
    "omni_actors.stages.hibari.acoustic",
    "omni_actors.stages.omni.handoff",
    "omni_actors.stages.vllm.decided",
    "omni_actors.stages.whisper.windows",
)
"""The other modules that get the noise of ``tests.support.decision_noise``."""
METHODS = ("__matmul__", "__rmatmul__", "matmul", "mm", "bmm", "mv", "addmm", "baddbmm", "dot")


class Noise:
    """Patterns of factors close to 1."""

    def __init__(self, seed: str) -> None:
        self._seed = seed
        self._patterns: dict[Any, Any] = {}
        self._elements = 0

    def pattern(self, shape: tuple[int, ...], amplitude: float, *key: Any) -> Any:
        """float32 factors of this shape: always the same ones for the same key."""
        import numpy as np

        key = (shape, amplitude, *key)
        found = self._patterns.get(key)
        if found is None:
            rng = np.random.Generator(np.random.SFC64(zlib.crc32(repr((self._seed, key)).encode())))
            found = 1 + amplitude * (2 * rng.random(shape, np.float32) - 1)
            found = np.asarray(found, np.float32)
            self._elements += found.size
            if self._elements > CACHED_ELEMENTS:
                self._patterns.clear()
                self._elements = found.size
            self._patterns[key] = found
        return found

    def on_tensor(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, which returns a torch tensor, with noise."""
        import torch

        @functools.wraps(function, updated=())
        def noisy(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            if type(result) is not torch.Tensor or not result.is_floating_point() or "out" in kwargs:
                return result
            if result.device.type != "cpu" or not result.numel():
                return result
            amplitude = max(AMPLITUDE, torch.finfo(result.dtype).eps) if result.dtype != torch.float64 else 1e-15
            shapes = tuple(tuple(a.shape) for a in args if isinstance(a, torch.Tensor))
            factors = self.pattern(tuple(result.shape), amplitude, name, shapes, torch.get_num_threads())
            return (result * torch.from_numpy(factors)).to(result.dtype)

        return noisy

    def on_array(self, name: str, array: Any) -> Any:
        """A numpy array with noise."""
        if array.dtype.kind not in "fc" or not array.size:
            return array
        return (array * self.pattern(array.shape, AMPLITUDE, name)).astype(array.dtype, copy=False)


def patch_torch(torch: ModuleType, noise: Noise) -> None:
    def replace(owner: Any, names: tuple[str, ...]) -> None:
        for name in names:
            if hasattr(owner, name):
                setattr(owner, name, noise.on_tensor(name, getattr(owner, name)))

    replace(torch.nn.functional, FUNCTIONAL)
    replace(torch, PRODUCTS + FUNCTIONAL)
    replace(torch.Tensor, METHODS)
    if torch.backends.mkldnn.is_available():
        replace(torch.ops.mkldnn, ("_linear_pointwise",))


def patch_fft(fft: ModuleType, noise: Noise) -> None:
    def noisy(name: str, transform: Callable[..., Any]) -> Callable[..., Any]:
        return functools.wraps(transform)(lambda *args, **kwargs: noise.on_array(name, transform(*args, **kwargs)))

    for name in ("rfft", "irfft"):
        setattr(fft, name, noisy(name, getattr(fft, name)))


def patch_onnxruntime(onnxruntime: ModuleType, noise: Noise) -> None:
    class InferenceSession(onnxruntime.InferenceSession):  # type: ignore[misc, name-defined]
        def run(self, *args: Any, **kwargs: Any) -> Any:
            return [noise.on_array("onnxruntime", result) for result in super().run(*args, **kwargs)]

    onnxruntime.InferenceSession = InferenceSession


def patch_ctranslate2(ctranslate2: ModuleType, noise: Noise) -> None:
    whisper = ctranslate2.models.Whisper
    encode = whisper.encode

    def noisy(self: Any, *args: Any, **kwargs: Any) -> Any:
        import numpy as np

        encoded = np.array(encode(self, *args, **kwargs))
        return ctranslate2.StorageView.from_array(noise.on_array("encode", encoded))

    whisper.encode = noisy


def patch_choices(module: ModuleType) -> None:
    from tests.support.clear_choices import clear_choose

    module.choose = clear_choose  # type: ignore[attr-defined]


def patch_decisions(module: ModuleType, seed: str) -> None:
    from tests.support.decision_noise import of_process

    of_process(seed).patch(module)


class PatchingFinder(importlib.abc.MetaPathFinder):
    """Patches modules once each has been imported."""

    def __init__(self, patches: dict[str, Callable[[ModuleType], None]]) -> None:
        self._patches = patches

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        patch = self._patches.pop(name, None)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target) if patch else None
        if patch is None or spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_patch(module: ModuleType) -> None:
            execute(module)
            patch(module)

        spec.loader.exec_module = execute_and_patch  # type: ignore[method-assign]
        return spec


def patches() -> dict[str, Callable[[ModuleType], None]]:
    """The modules to patch in this process, and how."""
    found: dict[str, Callable[[ModuleType], None]] = {}
    if seed := os.environ.get("OMNI_ACTORS_TEST_NOISE"):
        noise = Noise(seed)
        found["torch"] = functools.partial(patch_torch, noise=noise)
        found["numpy.fft"] = functools.partial(patch_fft, noise=noise)
        found["onnxruntime"] = functools.partial(patch_onnxruntime, noise=noise)
        found["ctranslate2"] = functools.partial(patch_ctranslate2, noise=noise)
    if os.environ.get("OMNI_ACTORS_TEST_CLEAR_CHOICES"):
        found |= dict.fromkeys(CHOOSERS, patch_choices)
    if seed := os.environ.get("OMNI_ACTORS_TEST_DECISION_NOISE"):
        found |= dict.fromkeys((*CHOOSERS, *NOISY), functools.partial(patch_decisions, seed=seed))
    return found


if __name__ == "sitecustomize" and (to_patch := patches()):
    sys.meta_path.insert(0, PatchingFinder(to_patch))
