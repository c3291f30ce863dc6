"""Trains the model "shapes" and writes it as a directory of diffusers' QwenImagePipeline, with weights in float16.

``python -m shapes.train DIRECTORY``: about 25 minutes on one core. Each phase keeps its result in DIRECTORY/parts, and
is left out where that is there. The model in the package was trained by this code in several runs that went on from one
another, of about as many steps in all, so one run does not give the same bytes. The hashes in
``omni_actors/model_files/shapes/SHA256SUMS`` pin it.
"""

from __future__ import annotations

import copy
import hashlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from diffusers import AutoencoderKLQwenImage, QwenImagePipeline, QwenImageTransformer2DModel

from shapes import autoencoder, captions, denoiser, text
from shapes.drawings import SIDE, bank

BABBLE = ("", "", "", " ", "a picture", "blurry", "nothing", "x")
"""Texts that say nothing about the picture; the first one is the usual negative prompt."""


class Lengths(NamedTuple):
    """Steps of each phase, drawings of each thing, and captions."""

    autoencoder: int = 2100
    decoder: int = 1200
    denoiser: int = 4500
    drawings: int = 96
    captions: int = 2500


DEFAULT = Lengths()


def reporting(phase: str, each: int = 50, then: Callable[[], None] | None = None) -> Callable[[int, float], None]:
    """Return what prints the mean loss of ``each`` steps, and calls ``then`` after ten times as many."""
    begin, losses = time.monotonic(), list[float]()

    def report(step: int, loss: float) -> None:
        losses.append(loss)
        if (step + 1) % each == 0:
            print(f"{phase} {step + 1}: {np.mean(losses[-each:]):.4f} ({time.monotonic() - begin:.0f} s)", flush=True)
        if then is not None and (step + 1) % (10 * each) == 0:
            then()

    return report


def train_autoencoder(parts: Path, lengths: Lengths) -> None:
    vae = autoencoder.build()
    masks = bank(lengths.drawings, seed=0).reshape(-1, SIDE, SIDE)
    autoencoder.train(vae, masks, lengths.autoencoder, reporting("autoencoder"))
    autoencoder.normalise(vae, masks[::8])
    vae.save_pretrained(parts / "autoencoder")


def train_decoder(parts: Path, lengths: Lengths) -> None:
    vae = AutoencoderKLQwenImage.from_pretrained(parts / "autoencoder")
    masks = bank(lengths.drawings, seed=0).reshape(-1, SIDE, SIDE)
    autoencoder.train(vae, masks, lengths.decoder, reporting("decoder"), decoder_only=True, rate=2e-3, seed=1)
    vae.save_pretrained(parts / "decoder")


def train_denoiser(parts: Path, lengths: Lengths) -> None:
    vae = AutoencoderKLQwenImage.from_pretrained(parts / "autoencoder")
    tokens = text.tokenizer()
    encoder = text.encoder(tokens)
    random = np.random.default_rng(0)
    drawn = [captions.draw(random) for _ in range(lengths.captions)]
    rows = text.encode(encoder, tokens, [each.text for each in drawn])
    short = [(caption, row) for caption, row in zip(drawn, rows, strict=True) if len(row) <= 36]
    pictures = denoiser.latents(vae, bank(lengths.drawings // 2, seed=0))
    examples = denoiser.Examples(pictures, short, text.encode(encoder, tokens, list(BABBLE)), seed=0)
    print("denoiser: captions and latents are there", flush=True)
    model = denoiser.build()
    averaged = copy.deepcopy(model).requires_grad_(False)
    report = reporting("denoiser", then=lambda: averaged.save_pretrained(parts / "denoiser.part"))
    denoiser.train(model, averaged, examples, lengths.denoiser, report)
    averaged.save_pretrained(parts / "denoiser")


PHASES = {"autoencoder": train_autoencoder, "denoiser": train_denoiser, "decoder": train_decoder}


def assemble(parts: Path, directory: Path) -> None:
    """Write the pipeline's directory, and the hashes of its files."""
    tokens = text.tokenizer()
    QwenImagePipeline(
        scheduler=denoiser.scheduler(),
        vae=AutoencoderKLQwenImage.from_pretrained(parts / "decoder"),
        text_encoder=text.encoder(tokens),
        tokenizer=tokens,
        transformer=QwenImageTransformer2DModel.from_pretrained(parts / "denoiser"),
    ).to(dtype=torch.float16).save_pretrained(directory)
    for file in directory.glob("*/config.json"):  # where the parts were loaded from says nothing
        config = json.loads(file.read_text())
        config.pop("_name_or_path", None)
        file.write_text(json.dumps(config, indent=2) + "\n")
    weights = sorted(directory.glob("*/*.safetensors"))
    sums = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.relative_to(directory)}\n" for file in weights]
    (directory / "SHA256SUMS").write_text("".join(sums))


def main(directory: Path, phases: tuple[str, ...] = tuple(PHASES), lengths: Lengths = DEFAULT) -> None:
    """Train what is not there yet, and write the model."""
    torch.set_num_threads(1)
    parts = directory / "parts"
    for phase in phases:
        if not (parts / phase).is_dir():
            PHASES[phase](parts, lengths)
    if all((parts / phase).is_dir() for phase in PHASES):
        assemble(parts, directory / "model")


if __name__ == "__main__":
    main(Path(sys.argv[1]), tuple(sys.argv[2:]) or tuple(PHASES))
