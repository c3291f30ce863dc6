"""What streaming between the stages of an omni model is worth. See ``bench.omni.__main__``."""
