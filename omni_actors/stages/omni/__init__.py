"""What the omni models share: thinkers and talkers, and what passes between them."""
