"""Tokens that rounding cannot change, so that tests may compare them exactly on any machine.

An engine's next token depends on logits whose last digits differ between machines and between batches. Within the
fixture ``clear_choices`` of ``tests/stages``:

Rules
1. The model's most likely token must lead the next one by ``CLEAR`` of the largest logit: a choice that rounding could
   turn fails the test, on every machine alike. Such a test needs another prompt or another seed of its weights. The
   experts that a reference's router chooses must lead the others in the same way.
2. Samplers draw from logits of the test's own: a fixed table, of which the most likely token selects the row. So a
   sampled text depends on everything before it, as it does in the model, and on no rounding at all.
3. A greedy choice stays what it is.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from omni_actors.stages.autoregressive.sampling import Sampler, choose
from tests.support.process_hooks.sitecustomize import CHOOSERS

CLEAR = 2e-5
"""The least lead, as a part of the largest logit. Rounding moves logits by up to 1e-5 of it."""


class UnclearChoice(AssertionError):
    """Two tokens are so nearly as likely that rounding decides between them."""


def own_logits(logits: Tensor) -> Tensor:
    """Rule 2: the row of the table, for logits (vocabulary,)."""
    return _row(len(logits), int(logits.argmax()))


@functools.cache
def _row(size: int, token: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(token))


def check_lead(values: Tensor) -> None:
    """Raise UnclearChoice unless the largest of these logits, (vocabulary,), leads the next one by ``CLEAR``."""
    best, second = values.topk(2).values
    largest = values[values.isfinite()].abs().max()
    if best - second < CLEAR * largest:
        raise UnclearChoice(f"the lead is {float((best - second) / largest):.1e} of the largest logit")


def watch_head(head: torch.nn.Module, allowed: Sequence[int] | slice = slice(None)) -> None:
    """Let a reference's head check the lead of each greedy choice. allowed: the tokens that may be chosen."""

    def check(module: torch.nn.Module, inputs: Any, logits: Tensor) -> None:
        for values in logits[..., -1, :].float().reshape(-1, logits.shape[-1]):
            check_lead(values[allowed])

    head.register_forward_hook(check)


def watch_router(router: Any) -> None:
    """Let a reference's router check the lead of the experts that it chooses over the others."""

    def check(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        logits = output[0].float()
        values = logits.topk(router.top_k + 1).values
        leads = (values[:, -2] - values[:, -1]) / logits.abs().amax(-1)
        if float(leads.min()) < CLEAR:
            raise UnclearChoice(f"the lead of an expert is {float(leads.min()):.1e} of the largest logit")

    router.register_forward_hook(check)


def clear_choose(logits: Tensor, samplers: Sequence[Sampler | None], *, strict: bool = True) -> list[int | None]:
    """``choose`` by the rules of this module."""
    own = logits.detach().to("cpu", torch.float32, copy=True)
    for row, sampler in enumerate(samplers):
        is_drawn = sampler is not None and sampler.sampling.temperature > 0
        values = own[row] if is_drawn or sampler is None else sampler.allowed(own[row])
        if not bool(values.max().isfinite()):
            continue  # the engine handles it
        if strict:
            check_lead(values)
        if is_drawn:
            own[row] = own_logits(values)
    return choose(own, samplers)


@contextmanager
def patched_choices(*, strict: bool = True) -> Iterator[None]:
    """Let all engines of this process choose by ``clear_choose``. strict: whether rule 1 holds."""
    with ExitStack() as stack:
        for name in CHOOSERS:
            patch = mock.patch.object(import_module(name), "choose", functools.partial(clear_choose, strict=strict))
            stack.enter_context(patch)
        yield
