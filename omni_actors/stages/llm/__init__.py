"""The ``llm`` engine: a causal language model with continuous batching (see ``engine``)."""
