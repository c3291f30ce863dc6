"""From what a request brings (a conversation, sound, images, videos) to the inputs of a model that takes all of it.

The parts are imported by name: ``prompt`` and ``audio`` need numpy only, ``processor`` needs transformers.
"""
