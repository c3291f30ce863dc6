"""LoRA adapters (Hu et al., 2021) in PEFT's format, chosen by each request."""
