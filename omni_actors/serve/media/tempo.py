"""Change the speed of speech and keep its pitch, with FFmpeg's filter ``atempo`` (WSOLA)."""

from __future__ import annotations

import av
import numpy as np
from av.filter import Graph

from omni_actors.outputs import AudioChunk

_SLOWEST = 0.5
"""The smallest factor of one filter."""


class TimeStretch:
    """Changes the speed of one sound, chunk by chunk. factor: 2 makes it half as long; at least 0.25."""

    def __init__(self, factor: float) -> None:
        self._factors = [factor] if factor >= _SLOWEST else [_SLOWEST, factor / _SLOWEST]
        self._graph: Graph | None = None
        self._rate = self._pushed = 0

    def push(self, chunk: AudioChunk) -> AudioChunk:
        """Add a chunk; return what is complete, which may be no samples. All chunks have one sample rate."""
        if self._graph is None:
            self._rate = chunk.sample_rate
            self._graph = self._new_graph()
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(chunk.samples)[None], format="flt", layout="mono")
        frame.sample_rate, frame.pts = self._rate, self._pushed
        self._pushed += len(chunk.samples)
        self._graph.push(frame)
        return self._pull()

    def finish(self) -> AudioChunk | None:
        """Return the end of the sound; None if there was none."""
        if self._graph is None:
            return None
        self._graph.push(None)
        return self._pull()

    def _new_graph(self) -> Graph:
        graph = Graph()
        nodes = [graph.add_abuffer(format="flt", sample_rate=self._rate, layout="mono")]
        nodes += [graph.add("atempo", f"{factor:.6f}") for factor in self._factors]
        graph.link_nodes(*nodes, graph.add("abuffersink")).configure()
        return graph

    def _pull(self) -> AudioChunk:
        assert self._graph is not None
        found = [np.zeros(0, np.float32)]
        while True:
            try:
                frame = self._graph.pull()
            except (av.error.BlockingIOError, av.error.EOFError):
                return AudioChunk(np.concatenate(found), self._rate)
            assert isinstance(frame, av.AudioFrame)
            found.append(frame.to_ndarray()[0])
