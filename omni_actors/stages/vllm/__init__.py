"""vLLM as a stage engine: its ``LLMEngine``, in the worker's own process and thread.

``_internals`` is the only file that names what vLLM does not publish.
"""
