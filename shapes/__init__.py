"""The model "shapes": a small Qwen-Image that draws coloured shapes and digits, and the scripts that made it.

Nothing here is part of the distribution; the trained model is, in ``omni_actors/model_files/shapes``.
"""

from __future__ import annotations
