"""Requests: their lifecycle (a pure table), their routes (a pure graph), and the trio shell that runs both."""
