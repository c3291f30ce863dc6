"""Make PyPI's torchvision importable beside a torch without CUDA. Part of `make setup-vllm`.

Usage: PYTHON requirements/torchvision_cpu.py, with the interpreter of the environment to change.

PyPI's torchvision is built for CUDA, so its compiled operators do not load beside such a torch. torchvision allows for
that, but while it is imported it still describes two of the operators, which fails because nothing has declared them.
This appends the declarations to the installed torchvision/extension.py. They are without an implementation: what
torchvision does in Python works (vLLM and transformers need no more), and a compiled operator raises an error. With
operators that load, the addition does nothing. Running this again changes nothing.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

MARK = "# Added by requirements/torchvision_cpu.py of omni-actors."
ADDITION = f"""

{MARK}
if not _has_ops():
    _declarations = torch.library.Library("torchvision", "FRAGMENT")
    for _operator in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, _operator):
            _declarations.define(_operator + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""

if __name__ == "__main__":
    file = Path(sysconfig.get_path("purelib"), "torchvision", "extension.py")
    source = file.read_text(encoding="utf-8")
    if MARK not in source:
        file.write_text(source + ADDITION, encoding="utf-8")
