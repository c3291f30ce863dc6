"""Models in ONNX format that all conversations of a process share."""

from __future__ import annotations

import threading
from typing import Any

from omni_actors.stages import assets


class SharedModel:
    """A model that is loaded once in a process: by the first thread that needs it, while other threads wait.

    Args:
        asset: the name of the asset that the file is a part of (see ``stages.assets``).
        file: the name of the file.
    """

    def __init__(self, asset: str, file: str) -> None:
        self._asset, self._file = asset, file
        self._lock = threading.Lock()
        self._session: Any = None

    def session(self) -> Any:
        """Return the session of onnxruntime. It computes in the calling thread, and several threads may use it.

        Raises assets.ModelNotFound: onnxruntime, or the package of the model, is not installed. A later call tries
        again.
        """
        with self._lock:
            if self._session is None:
                self._session = self._open()
            return self._session

    def _open(self) -> Any:
        try:
            import onnxruntime  # only the extra "voice" has it
        except ImportError as error:
            package = assets.Package("onnxruntime")
            raise assets.ModelNotFound(self._file, "onnxruntime is not installed", package=package) from error

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.enable_cpu_mem_arena = False  # an arena keeps the most memory that was ever used
        path = assets.resolve(self._asset) / self._file
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
