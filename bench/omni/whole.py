"""`python -m bench.omni.whole DIRECTORY THREADS`: transformers' own ``generate`` on the same checkpoint, in one
process.

Each line of input requests an answer. Each line of output is the seconds that it took; all samples come at its end.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from transformers import Qwen3OmniMoeForConditionalGeneration
from transformers.utils import logging

from bench.omni.pipelines import FRAMES, PROMPT, TOKENS
from tiny_models import qwen3 as tiny


def main() -> None:
    directory, threads = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(threads)
    logging.set_verbosity_error()
    model: Any = Qwen3OmniMoeForConditionalGeneration.from_pretrained(directory).eval()
    prompt = tiny.TOKENIZER(f"<|im_start|>user\n{PROMPT}<|im_end|>\n<|im_start|>assistant\n", return_tensors="pt")
    print("ready", flush=True)
    for _ in sys.stdin:
        began = time.monotonic()
        model.generate(
            prompt.input_ids,
            attention_mask=prompt.attention_mask,
            return_audio=True,
            thinker_max_new_tokens=TOKENS,
            thinker_do_sample=False,
            talker_max_new_tokens=FRAMES + 1,
            talker_do_sample=False,
        )
        print(time.monotonic() - began, flush=True)


if __name__ == "__main__":
    main()
