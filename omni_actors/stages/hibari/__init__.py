"""The ``hibari`` engines: a small English voice in two stages, text to spectral features and features to a waveform."""
