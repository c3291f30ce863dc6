"""Engines on vLLM, whose ``LLMEngine`` runs in the worker's own process and engine loop.

``_internals`` is the only file that uses unpublished names of vLLM.
"""
