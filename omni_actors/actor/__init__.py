"""Worker processes: spawned, connected by rings, supervised."""
