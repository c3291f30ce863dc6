"""Run the public reference of BAGEL on the tiny checkpoint and store its numbers in ``reference.npz``.

    python make_reference.py CHECKOUT CHECKPOINT

CHECKOUT: a checkout of github.com/ByteDance-Seed/Bagel. CHECKPOINT: what ``tiny_models.bagel.save`` wrote. The
environment has torch, transformers 4.49 and einops. Stand-ins replace what the reference needs a GPU or torchvision
for: attention is torch's, resizing is Pillow's, and its bfloat16 is float32, so that its numbers are exact.
"""

from __future__ import annotations

import json
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerFast, modeling_utils  # noqa: F401  # before the stand-ins

sys.path.insert(0, str(Path(__file__).parent))
import cases  # type: ignore[import-not-found]

SEEDED = torch.manual_seed


def attention(q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, causal: bool, **_: Any) -> Any:
    """Stand in for flash attention on packed sequences; a causal mask is aligned to the end of the keys."""
    results = []
    for i in range(len(cu_seqlens_q) - 1):
        queries = q[cu_seqlens_q[i] : cu_seqlens_q[i + 1]].transpose(0, 1)
        keys, values = (each[cu_seqlens_k[i] : cu_seqlens_k[i + 1]].transpose(0, 1) for each in (k, v))
        offset = keys.shape[1] - queries.shape[1]
        seen = torch.ones(queries.shape[1], keys.shape[1], dtype=torch.bool)
        seen = seen.tril(offset) if causal else seen
        found = torch.nn.functional.scaled_dot_product_attention(
            queries[None], keys[None], values[None], attn_mask=seen, enable_gqa=True
        )
        results.append(found[0].transpose(0, 1))
    return torch.cat(results)


def stand_ins() -> None:
    """Install modules for what the environment lacks."""

    def module(name: str, **contents: Any) -> types.ModuleType:
        made = types.ModuleType(name)
        made.__spec__ = ModuleSpec(name, None)
        made.__dict__.update(contents)
        sys.modules[name] = made
        return made

    def packed(*args: Any, **kwargs: Any) -> Any:
        names = dict(zip(("q", "k", "v"), args, strict=False))
        return attention(**names, **kwargs)

    module("flash_attn", flash_attn_varlen_func=packed)
    module("cv2")
    interpolation = types.SimpleNamespace(BICUBIC=Image.Resampling.BICUBIC)
    resize = lambda image, size, how, antialias: image.resize(size[::-1], how)  # noqa: E731
    functional = module("torchvision.transforms.functional", resize=resize)
    to_tensor = lambda: lambda i: torch.from_numpy(np.array(i)).permute(2, 0, 1).contiguous().float() / 255  # noqa: E731
    normalise = lambda mean, std, inplace: lambda t: (t - mean[0]) / std[0]  # noqa: E731
    contents = {"ToTensor": to_tensor, "Normalize": normalise, "InterpolationMode": interpolation}
    transforms = module("torchvision.transforms", functional=functional, **contents)
    module("torchvision", transforms=transforms)
    torch.compile = lambda function, **_: function
    torch.bfloat16 = torch.float32


def load(directory: Path) -> Any:
    """Return the reference's inferencer on the checkpoint."""
    from data.transforms import ImageTransform  # type: ignore[import-not-found]
    from inferencer import InterleaveInferencer  # type: ignore[import-not-found]
    from modeling import bagel  # type: ignore[import-not-found]
    from modeling.autoencoder import AutoEncoder, AutoEncoderParams  # type: ignore[import-not-found]

    whole, vae = json.loads((directory / "config.json").read_text()), {"resolution": 128, "in_channels": 3, "out_ch": 3}
    vae |= {**whole["vae_config"], "scale_factor": 0.3611, "shift_factor": 0.1159}
    language = bagel.Qwen2Config.from_json_file(directory / "llm_config.json")
    language.qk_norm, language.tie_word_embeddings, language.layer_module = True, False, "Qwen2MoTDecoderLayer"
    language._attn_implementation = "eager"
    vision = bagel.SiglipVisionConfig.from_json_file(directory / "vit_config.json")
    vision.rope, vision._attn_implementation = False, "eager"
    vision.num_hidden_layers -= 1
    names = ("latent_patch_size", "max_latent_size", "vit_max_num_patch_per_side", "connector_act")
    config = bagel.BagelConfig(
        llm_config=language,
        vit_config=vision,
        vae_config=AutoEncoderParams(**vae),
        **{name: whole[name] for name in names},
    )
    model = bagel.Bagel(bagel.Qwen2ForCausalLM(language), bagel.SiglipVisionModel(vision), config)
    model.vit_model.vision_model.embeddings.convert_conv2d_to_linear(vision)
    model.load_state_dict(load_file(directory / "ema.safetensors"))
    autoencoder = AutoEncoder(AutoEncoderParams(**vae))
    autoencoder.load_state_dict(load_file(directory / "ae.safetensors"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))
    marks = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>")
    ids = map(tokenizer.convert_tokens_to_ids, marks)
    (least, most), (vision_least, vision_most) = whole["vae_image_size"], whole["vit_image_size"]
    return InterleaveInferencer(
        model=model.eval(),
        vae_model=autoencoder.eval(),
        tokenizer=tokenizer,
        vae_transform=ImageTransform(most, least, vae["downsample"] * 2),
        vit_transform=ImageTransform(vision_most, vision_least, vision.patch_size),
        new_token_ids=dict(zip(("bos_token_id", "eos_token_id", "start_of_image", "end_of_image"), ids, strict=True)),
    )


def terms(given: list[Any]) -> list[Any]:
    return [each if isinstance(each, str) else Image.fromarray(cases.picture(*each[1:])) for each in given]


def main() -> None:
    checkout, directory = sys.argv[1:]
    stand_ins()
    sys.path.insert(0, checkout)
    inferencer = load(Path(directory))
    flow, write = inferencer.model._forward_flow, inferencer.model.generate_text
    seen: list[Any] = []
    written: list[Any] = []
    velocities: list[Any] = []

    def recorded_flow(x_t: Any, **more: Any) -> Any:
        seen.append(x_t)
        velocities.append(flow(x_t=x_t, **more))
        return velocities[-1]

    def recorded_text(**more: Any) -> Any:
        written.append(write(**more))
        return written[-1]

    inferencer.model._forward_flow, inferencer.model.generate_text = recorded_flow, recorded_text
    numbers: dict[str, Any] = {}
    for name, case in cases.PICTURES.items():
        SEEDED(cases.SEED)
        seen.clear()
        written.clear()
        found = (
            inferencer.interleave_inference(
                terms(case["terms"]),
                think=False,
                cfg_text_scale=case["guidance"],
                cfg_img_scale=case["image_guidance"],
                cfg_interval=[case.get("from", 0.0), 1.0],
                timestep_shift=cases.SHIFT,
                num_timesteps=cases.STEPS + 1,
                cfg_renorm_min=case.get("renorm_min", 0.0),
                cfg_renorm_type=case.get("renorm", "global"),
                image_shapes=case.get("size", (0, 0)),
            )
            if not case.get("think")
            else thought(inferencer, case)
        )
        numbers[f"{name}/latents"] = torch.stack(seen).numpy()
        numbers[f"{name}/velocity"] = velocities[-1].numpy()
        numbers[f"{name}/picture"] = np.asarray(found[-1])
        if written:
            numbers[f"{name}/tokens"] = written[0][1:, 0].numpy()
    for name, given in cases.TEXTS.items():
        written.clear()
        inferencer.interleave_inference(terms(given), understanding_output=True, max_think_token_n=cases.TOKENS)
        numbers[f"{name}/tokens"] = written[0][1:, 0].numpy()
    np.savez_compressed(Path(__file__).with_name("reference.npz"), **numbers)


def thought(inferencer: Any, case: dict[str, Any]) -> list[Any]:
    """A text of the model's own comes before the picture. The reference's own system prompt is left out."""
    import inferencer as module

    module.GEN_THINK_SYSTEM_PROMPT = cases.THINK
    return inferencer.interleave_inference(  # type: ignore[no-any-return]
        terms(case["terms"]),
        think=True,
        max_think_token_n=cases.TOKENS,
        cfg_text_scale=case["guidance"],
        cfg_img_scale=case["image_guidance"],
        cfg_interval=[0.0, 1.0],
        timestep_shift=cases.SHIFT,
        num_timesteps=cases.STEPS + 1,
        image_shapes=case["size"],
    )


if __name__ == "__main__":
    main()
