"""Checks that every request passes before a route handler runs: host and origin, API key, admission."""
