"""The ``whisper`` engine: speech recognition on faster-whisper (see ``engine``)."""
