"""What the omni models take on a device, with random weights: ``python -m bench.gpu``."""
