"""BAGEL's vision tower: SigLIP on pictures of any size, and the connector to the language model."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from omni_actors.stages.bagel.config import VisionConfig


class _Attention(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self._heads = config.num_attention_heads
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            self.add_module(name, nn.Linear(config.hidden_size, config.hidden_size))

    def forward(self, states: Tensor) -> Tensor:
        queries, keys, values = (
            self.get_submodule(f"{name}_proj")(states).unflatten(-1, (self._heads, -1)).transpose(0, 1)[None]
            for name in "qkv"
        )
        seen = functional.scaled_dot_product_attention(queries, keys, values)[0]
        result: Tensor = self.get_submodule("out_proj")(seen.transpose(0, 1).flatten(1))
        return result


class _MLP(nn.Module):
    def __init__(self, inputs: int, inner: int, outputs: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(inputs, inner), nn.Linear(inner, outputs)

    def forward(self, states: Tensor) -> Tensor:
        result: Tensor = self.fc2(functional.gelu(self.fc1(states), approximate="tanh"))
        return result


class _Layer(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.self_attn = _Attention(config)
        self.layer_norm1 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = _MLP(config.hidden_size, config.intermediate_size, config.hidden_size)
        self.layer_norm2 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, states: Tensor) -> Tensor:
        states = states + self.self_attn(self.layer_norm1(states))
        return states + self.mlp(self.layer_norm2(states))  # type: ignore[no-any-return]


class _Embeddings(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.patch_embedding = nn.Linear(config.num_channels * config.patch_size**2, config.hidden_size)
        self.position_embedding = nn.Embedding((config.image_size // config.patch_size) ** 2, config.hidden_size)


class _Encoder(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.num_hidden_layers - 1))


class _Transformer(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.embeddings, self.encoder = _Embeddings(config), _Encoder(config)
        self.post_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)


class VisionTower(nn.Module):
    """One picture's patches to hidden states."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.vision_model = _Transformer(config)

    def forward(self, patches: Tensor, places: Tensor) -> Tensor:
        """Return (n, hidden). patches: (n, patch numbers). places: int64 (n,), each patch's place in the largest grid.

        The last layer of the configuration is left out, as in BAGEL's training.
        """
        model = self.vision_model
        states = model.embeddings.patch_embedding(patches) + model.embeddings.position_embedding(places)
        for layer in model.encoder.layers:
            states = layer(states)
        result: Tensor = model.post_layernorm(states)
        return result


class Connector(_MLP):
    """From the vision tower's hidden states to embeddings of the language model."""

    def __init__(self, vision: int, hidden: int) -> None:
        super().__init__(vision, hidden, hidden)
