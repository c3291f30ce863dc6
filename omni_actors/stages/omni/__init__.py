"""What the omni model families share: thinkers, talkers, and the handoff from the one to the other."""
