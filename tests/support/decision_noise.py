"""Noise on what a model decides by, so that a computation that is repeated may decide otherwise.

Another GPU, another kernel or another batch moves the logits of a bfloat16 model by parts of a thousand. On one machine
a worker that starts again would compute nearly the same logits, and a journal that is not followed would go unnoticed.
So the workers that a test starts within ``worker_environment.noisy_workers`` have this noise:

Rules
1. Each logit is multiplied by ``1 + e`` before a token or a code is chosen, and so is each number of a row that a
   thinker hands to its talker, each spectral feature that a voice's acoustic network computes, each number that
   whisper's encoder gives to its decoder, and each number by which a pipeline of diffusers denoises. ``|e|`` is at most
   ``AMPLITUDE``. The pitch has none: it would add up in the phase of the sound, whose samples are compared.
2. ``e`` is drawn anew each time, from a seed and the number of the process. No two incarnations have the same noise.
3. What was decided already, by a journal, is not decided again, so it has no noise.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

AMPLITUDE = 1e-3


class DecisionNoise:
    """The noise of one process."""

    def __init__(self, seed: str) -> None:
        import numpy as np

        self._random = np.random.default_rng([int(seed), os.getpid()])

    def on_array(self, array: Any) -> Any:
        """A numpy array of floats with noise."""
        factors = 1 + AMPLITUDE * self._random.uniform(-1, 1, array.shape)
        return (array * factors).astype(array.dtype)

    def on_tensor(self, tensor: Any, dtype: Any = None) -> Any:
        """A torch tensor of floats with noise. dtype: of the result; None: that of the tensor."""
        import torch

        factors = 1 + AMPLITUDE * torch.from_numpy(self._random.uniform(-1, 1, tuple(tensor.shape)))
        return (tensor.double() * factors.to(tensor.device)).to(dtype or tensor.dtype)

    def patch(self, module: ModuleType) -> None:
        """Let this module, of ``process_hooks.sitecustomize.CHOOSERS`` or ``NOISY``, have the noise."""
        match module.__name__.rpartition(".")[2]:
            case "acoustic":
                self._wrap(module.AcousticEngine, "_features", self._on_features)
            case "handoff":
                for name in ("add_prompt", "add_token"):
                    self._wrap(module.TalkerHandoff, name, self._on_tensor)
            case "loading":
                self._wrap(module, "load", self._on_pipeline(module.denoiser))
            case "windows":
                self._wrap(module.Recognizer, "encode", self._on_encoded)
            case "decided":  # the logits processor of every language model on vLLM
                self._wrap(module.DecidedTokens, "apply", self._on_tensor)
            case _:
                self._wrap(module, "choose", self._on_logits)

    @staticmethod
    def _wrap(owner: Any, name: str, noisy: Callable[..., Any]) -> None:
        original = getattr(owner, name)
        setattr(owner, name, functools.wraps(original)(lambda *args: noisy(original, *args)))

    def _on_features(self, features: Callable[..., list[Any]], *args: Any) -> list[Any]:
        *spectral, pitch = features(*args)
        return [*map(self.on_array, spectral), pitch]

    def _on_pipeline(self, denoiser: Callable[..., Any]) -> Callable[..., Any]:
        def on_output(_: Any, __: Any, output: tuple[Any, ...]) -> tuple[Any, ...]:
            return (self.on_tensor(output[0], output[0].dtype), *output[1:])

        def noisy(load: Callable[..., Any], *args: Any) -> Any:
            pipeline = load(*args)
            denoiser(pipeline).register_forward_hook(on_output)
            return pipeline

        return noisy

    def _on_encoded(self, encode: Callable[..., Any], *args: Any) -> Any:
        import ctranslate2
        import numpy as np

        return ctranslate2.StorageView.from_array(self.on_array(np.array(encode(*args))))

    def _on_tensor(self, method: Callable[..., Any], owner: Any, tensor: Any) -> Any:
        return method(owner, self.on_tensor(tensor))

    def _on_logits(self, choose: Callable[..., Any], logits: Any, samplers: Any) -> Any:
        import torch

        return choose(self.on_tensor(logits, torch.float32), samplers)


@functools.cache
def of_process(seed: str) -> DecisionNoise:
    """Return the one noise of this process."""
    return DecisionNoise(seed)
