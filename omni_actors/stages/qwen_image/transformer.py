"""Qwen-Image's transformer for a batch of requests: each at a step of its own, with a prompt of its own.

Rules
1. A request that runs alone is computed as diffusers' pipeline computes it, the same operations in the same order:
   the prompt, then the negative prompt, one row each. The result is the same to the bit.
2. Otherwise requests share forwards (``forwards``), and the companions (the rows of negative prompts) are rows of the
   same forward as their requests. Shorter prompts, and smaller pictures, are padded and masked (``padding``). The
   result differs from rule 1's by rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from diffusers import QwenImageTransformer2DModel
from torch import Tensor

from omni_actors.stages import weights
from omni_actors.stages.adapters.batched import BatchedAdapters
from omni_actors.stages.adapters.options import Adapter
from omni_actors.stages.checkpoint import WrongCheckpoint
from omni_actors.stages.qwen_image.forwards import Need, forwards
from omni_actors.stages.qwen_image.latents import Grid
from omni_actors.stages.qwen_image.padding import Padded, PaddedAttention, pad

Layout: TypeAlias = tuple[Grid, ...]
"""The picture that is made, and the pictures that the transformer looks at."""


class Job(Protocol):
    """What the transformer must know of a request's step."""

    @property
    def layout(self) -> Layout:
        """The sizes of its latents."""
        ...

    @property
    def hidden(self) -> Tensor:
        """The packed latents of all pictures, (1, rows, channels)."""
        ...

    @property
    def timestep(self) -> Tensor:
        """The step's timestep, a scalar."""
        ...

    @property
    def prompt(self) -> Tensor:
        """The prompt's hidden states, (n, width)."""
        ...

    @property
    def negative(self) -> Tensor | None:
        """The states of the negative prompt; None: the request has no guidance."""
        ...

    @property
    def guidance(self) -> float:
        """The scale of the guidance."""
        ...

    @property
    def adapter(self) -> Adapter | None:
        """The request's LoRA adapter."""
        ...


class Transformer:
    """The transformer of a checkpoint.

    directory: the pipeline's. idle_loras: as in ``DenoiserOptions``.
    Raises OSError, WrongCheckpoint, and ValueError for a variant of the transformer that is not supported.
    """

    def __init__(self, directory: Path, device: torch.device, dtype: torch.dtype, *, idle_loras: int) -> None:
        self.device, self.dtype = device, dtype
        self._model = _load(directory, device, dtype)
        self._model.set_attn_processor(PaddedAttention())
        self.adapters = BatchedAdapters(self._model, part="", idle=idle_loras)
        config: Any = self._model.config
        self.channels: int = config.in_channels // 4
        """Channels of the latents."""
        self.width: int = config.joint_attention_dim
        """Numbers in a row of a prompt."""
        self.positions: int = len(self._model.pos_embed.pos_freqs)
        """Text positions follow the positions of the largest picture and must be below this."""

    @torch.inference_mode()
    def velocity(self, job: Job) -> Tensor:
        """Return the velocity of the latents of a request that runs alone, (1, rows, channels)."""
        [positive] = self._forward([job], [job.prompt])
        if job.negative is None:
            return positive
        [negative] = self._forward([job], [job.negative])
        return _guided(positive, negative, job.guidance)

    @torch.inference_mode()
    def velocities(self, jobs: Sequence[Job]) -> list[Tensor]:
        """Return the velocity of each job's latents, (1, rows, channels), in as few forwards as it pays."""
        found: dict[int, Tensor] = {}
        for alike in self._sharing(jobs):
            for places in forwards(tuple(_need(jobs[n]) for n in alike)):
                shared = [alike[n] for n in places]
                found.update(zip(shared, self._together([jobs[n] for n in shared]), strict=True))
        return [found[n] for n in range(len(jobs))]

    def _sharing(self, jobs: Sequence[Job]) -> list[list[int]]:
        """Return the positions of jobs that may share a forward."""
        if not self._model.config.get("zero_cond_t"):
            return [[*range(len(jobs))]]
        # Such a transformer knows the pictures of all rows by one layout. It has two timesteps for each row, one behind
        # the other, among which an adapter would not find its rows.
        alike: dict[tuple[Layout, Adapter | None], list[int]] = {}
        for n, job in enumerate(jobs):
            alike.setdefault((job.layout, job.adapter), []).append(n)
        return [*alike.values()]

    def _together(self, jobs: Sequence[Job]) -> list[Tensor]:
        """Return the velocities of jobs whose rows, with those of their companions, are one forward."""
        companions = [job for job in jobs if job.negative is not None]
        prompts = [job.prompt for job in jobs] + [job.negative for job in companions if job.negative is not None]
        rows = self._forward([*jobs, *companions], prompts)
        negatives = iter(rows[len(jobs) :])
        return [
            row if job.negative is None else _guided(row, next(negatives), job.guidance)
            for row, job in zip(rows, jobs, strict=False)
        ]

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compute the smallest picture once."""
        grid, on_device = Grid(2, 2), dict[str, Any](device=self.device, dtype=self.dtype)
        self._model(
            hidden_states=torch.zeros(1, grid.rows, self.channels * 4, **on_device),
            timestep=torch.zeros(1, **on_device),
            encoder_hidden_states=torch.zeros(1, 1, self.width, **on_device),
            img_shapes=[[grid.shape]],
        )

    def _forward(self, jobs: Sequence[Job], prompts: Sequence[Tensor]) -> list[Tensor]:
        """Return the velocities of one row for each job and its prompt, each (1, rows, channels)."""
        layout = jobs[0].layout
        timesteps = torch.stack([job.timestep for job in jobs]).to(self.dtype)
        states, mask = pad(prompts)
        if all(job.layout == layout for job in jobs):
            hidden, padded = torch.cat([job.hidden for job in jobs]), None
        else:
            hidden, seen = pad([job.hidden[0] for job in jobs])
            padded = self._padded(jobs, prompts, torch.cat([mask, seen], dim=1))
        with self.adapters.applied([job.adapter for job in jobs]):
            velocities: Tensor = self._model(
                hidden_states=hidden,
                timestep=timesteps / 1000,
                encoder_hidden_states=states,
                encoder_hidden_states_mask=mask if len({len(prompt) for prompt in prompts}) > 1 else None,
                img_shapes=[_shapes(layout)] * len(jobs),
                attention_kwargs=None if padded is None else {"padded": padded},
                return_dict=False,
            )[0]
        return [row[None, : job.layout[0].rows] for row, job in zip(velocities, jobs, strict=True)]

    def _padded(self, jobs: Sequence[Job], prompts: Sequence[Tensor], mask: Tensor) -> Padded:
        """Return what tells rows of different layouts apart. mask: of their tokens, (rows, tokens)."""
        rotations = [
            self._model.pos_embed([_shapes(job.layout)], max_txt_seq_len=len(prompt), device=self.device)
            for job, prompt in zip(jobs, prompts, strict=True)
        ]
        image, text = (pad(each)[0] for each in zip(*rotations, strict=True))
        return Padded(image, text, mask[:, None, None])

    def replace(self, files: weights.Files) -> dict[str, Any]:
        """Replace weights by those of safetensors files, as ``Engine._replace_weights`` says. Raises InvalidRequest."""
        tensors, targets = weights.read(files), dict(self._model.named_parameters())
        found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        weights.check(found, {name: tuple(target.shape) for name, target in targets.items()})
        weights.check_floating(tensors)
        with torch.no_grad():
            for name, tensor in tensors.items():
                targets[name].copy_(tensor)
        return {"updated": len(tensors), "complete": tensors.keys() >= targets.keys()}


def _load(directory: Path, device: torch.device, dtype: torch.dtype) -> Any:
    network: Any = QwenImageTransformer2DModel
    part = directory / "transformer"
    config = network.load_config(part, local_files_only=True)
    for name in ("guidance_embeds", "use_additional_t_cond", "use_layer3d_rope"):
        if config.get(name):
            raise ValueError(f"{directory}: a transformer with {name} is not supported")
    with torch.device("meta"):
        needed = network.from_config(config).state_dict().keys()
    if missing := sorted(needed - weights.shapes(weights.checkpoint_files(part)).keys()):
        raise WrongCheckpoint(directory, "transformer", f"there are no weights for {', '.join(missing[:3])}")
    model = network.from_pretrained(part, dtype=dtype, device_map={"": str(device)}, local_files_only=True)
    return model.eval().requires_grad_(requires_grad=False)


def _guided(positive: Tensor, negative: Tensor, scale: float) -> Tensor:
    """Return the velocity under true classifier-free guidance, with the length that each row had without it."""
    combined = negative + scale * (positive - negative)
    guided: Tensor = combined * (_norm(positive) / _norm(combined))
    return guided


def _norm(rows: Tensor) -> Tensor:
    norm: Tensor = torch.norm(rows, dim=-1, keepdim=True)
    return norm


def _shapes(layout: Layout) -> list[tuple[int, int, int]]:
    return [grid.shape for grid in layout]


def _need(job: Job) -> Need:
    prompts = [len(each) for each in (job.prompt, job.negative) if each is not None]
    return Need(len(prompts), job.hidden.shape[1], max(prompts))
