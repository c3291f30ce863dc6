"""Short questions that several benchmarks ask."""

from __future__ import annotations

QUESTIONS = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "Name a famous painter.",
    "What is the largest ocean?",
    "How many days are in a week?",
    "What do bees make?",
    "Who wrote Hamlet?",
    "What is ice made of?",
)
