"""What measuring CUDA-graph levels leaves in a record: the level declared, the one measured, and every probe.

Pure values: nothing here measures.
"""

from typing import Literal

from attncheck.reports.run_file.timings import RunFileValue

CUDAGRAPH = "cudagraph"
"""The check whose records carry CUDA-graph levels."""

GraphLevel = Literal["NEVER", "UNIFORM_SINGLE_TOKEN_DECODE", "UNIFORM_BATCH", "ALWAYS"]
"""vLLM's ``AttentionCGSupport`` by name."""

GRAPH_LEVELS: tuple[GraphLevel, ...] = ("NEVER", "UNIFORM_SINGLE_TOKEN_DECODE", "UNIFORM_BATCH", "ALWAYS")
"""Every level, lowest first: what a backend of one level can do, it can do at every level below."""

GraphRecorder = Literal["cuda", "emulated"]
"""How graphs were made: real ones on a GPU, or their emulation on a machine without one."""


class GraphProbe(RunFileValue):
    """One sequence of captures and replays that a backend of ``level`` must get right, and what came of it.

    ``reason``: why it failed, was not run, or could not be examined here; empty where it passed.
    """

    name: str
    level: GraphLevel
    outcome: Literal["passed", "failed", "not examined", "not run"]
    reason: str = ""


class GraphLevels(RunFileValue):
    """The CUDA-graph level a backend declares and the one measured (None: cannot be said here), and its probes.

    ``probes``: those played on the layer and cache of the case. ``played_in_full``: the case (``suite/id``) whose layer
    and cache played every probe, where this one played a part; empty: this one played all. ``notes``: what a reader
    should know of how it was measured.
    """

    declared: GraphLevel
    measured: GraphLevel | None
    recorder: GraphRecorder
    probes: tuple[GraphProbe, ...] = ()
    played_in_full: str = ""
    notes: tuple[str, ...] = ()
