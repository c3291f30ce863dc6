"""Qwen-Image on diffusers' modules: text encoder, picture encoder, denoiser and picture decoder, a stage each."""
