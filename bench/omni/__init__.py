"""Benchmark of streaming between the stages of an omni model. See ``bench.omni.__main__``."""
