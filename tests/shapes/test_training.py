"""The scripts that trained the model "shapes", for a few steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import QwenImagePipeline

from shapes import autoencoder, denoiser, text, train
from shapes.captions import Caption
from shapes.drawings import SIDE, bank

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Two threads for two cores take many times as long while other processes compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def losses(into: list[float]):
    return lambda step, loss: into.append(loss)


@pytest.mark.exhaustive
def test_the_loss_of_the_autoencoder_falls() -> None:
    masks = bank(2, seed=0).reshape(-1, SIDE, SIDE)
    seen: list[float] = []
    autoencoder.train(autoencoder.build(), masks, 40, losses(seen), batch=4)
    assert np.mean(seen[-5:]) < 0.8 * np.mean(seen[:5])


def test_the_loss_of_the_denoiser_falls() -> None:
    tokens = text.tokenizer()
    encoder = text.encoder(tokens)
    rows = text.encode(encoder, tokens, ["a red circle", "a blue square", ""])
    captioned = [(Caption("a red circle", 0, 0), rows[0]), (Caption("a blue square", 1, 4), rows[1])]
    torch.manual_seed(0)
    pictures = torch.randn(2, 5, 1, denoiser.GRID**2, 4 * autoencoder.CHANNELS)
    examples = denoiser.Examples(pictures, captioned, rows[2:], seed=0)
    model, averaged = denoiser.build(), denoiser.build()
    before = [each.clone() for each in averaged.parameters()]
    seen: list[float] = []
    denoiser.train(model, averaged, examples, 60, losses(seen), batch=16)
    assert np.mean(seen[-10:]) < 0.8 * np.mean(seen[:5])
    assert any(not torch.equal(old, new) for old, new in zip(before, averaged.parameters(), strict=True))


def test_the_phases_leave_a_directory_of_diffusers_pipeline(tmp_path: Path) -> None:
    train.main(tmp_path, lengths=train.Lengths(autoencoder=1, decoder=1, denoiser=1, drawings=2, captions=20))
    pipeline = QwenImagePipeline.from_pretrained(tmp_path / "model", local_files_only=True, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    picture = pipeline("a red circle", width=SIDE, height=SIDE, num_inference_steps=1, output_type="np").images[0]
    assert picture.shape == (SIDE, SIDE, 3)
    assert not any("_name_or_path" in file.read_text() for file in (tmp_path / "model").glob("*/config.json"))
    sums = (tmp_path / "model" / "SHA256SUMS").read_text().splitlines()
    assert [line.split()[1].split("/")[0] for line in sums] == ["text_encoder", "transformer", "vae"]
