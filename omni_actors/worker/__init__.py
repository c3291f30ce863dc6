"""Worker process: the engine loop and what runs around it."""
