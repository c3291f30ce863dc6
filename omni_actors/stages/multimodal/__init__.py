"""A request's conversation, sound, images and videos, and their conversion to the inputs of an omni model.

Import the modules by name: ``prompt`` and ``audio`` need numpy only, ``processor`` needs transformers.
"""
