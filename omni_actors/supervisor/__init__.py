"""Parent process: starts, watches and restarts the workers of every stage."""
