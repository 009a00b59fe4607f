"""Values of the check ``cudagraph`` in a record: the declared level, the measured level, and every probe."""

from collections.abc import Iterable, Mapping
from typing import Literal, get_args

from attncheck.reports.run_file.timings import RunFileValue

CUDAGRAPH = "cudagraph"
"""The check whose records have CUDA-graph levels."""

GraphLevel = Literal["NEVER", "UNIFORM_SINGLE_TOKEN_DECODE", "UNIFORM_BATCH", "ALWAYS"]
"""Names of vLLM's ``AttentionCGSupport``."""

GRAPH_LEVELS: tuple[GraphLevel, ...] = ("NEVER", "UNIFORM_SINGLE_TOKEN_DECODE", "UNIFORM_BATCH", "ALWAYS")
"""All levels, lowest first; a backend of one level supports every lower level."""

"""The source of graphs: real CUDA graphs on a GPU, or their emulation on a CPU."""

PaddingRows = Literal["not examined", "untouched", "finite", "written", "NaN or Inf"]
"""States of the output's padding rows after a step, best first; ``written``: although they are declared untouched."""

PADDING_FAULTS: Mapping[PaddingRows, str] = {
    "written": "padding rows of the output were written, although declared untouched",
    "NaN or Inf": "padding rows of the output hold NaN or Inf",
}
"""The states that are faults, in words."""

PADDING_EFFECT = "harmless unless a later layer reduces over all rows"
"""The effect of such a fault where the rows of requests are right."""


class GraphProbe(RunFileValue):
    """One sequence of captures and replays that a backend of ``level`` must get right, and what came of it.

    ``reason``: why it failed, was not run, or could not be examined here; empty where it passed.
    """

    name: str
    level: GraphLevel
    outcome: Literal["passed", "failed", "not examined", "not run"]
    reason: str = ""


class GraphClaim(RunFileValue):
    """A member of vLLM's builder or backend that declares more about graphs than the level, and what a probe showed.

    ``value``: its value. ``reason``: why the probe failed, or why none was played; empty if it passed.
    """

    name: str
    value: bool | int
    outcome: Literal["passed", "failed", "not examined"]
    reason: str = ""


class GraphLevels(RunFileValue):
    """The CUDA-graph level a backend declares and the one measured (None: cannot be measured here), and its probes.

    ``recorder``: the type of the device that captured the graphs, or ``emulated``.
    ``probes``: those played on the layer and cache of the case. ``played_in_full``: the case (``suite/id``) whose layer
    and cache played every probe, where this one played a part; empty: this one played all. ``notes``: what a reader
    should know of how it was measured. ``padding_rows``: the worst state after replays that were right. ``claims``:
    what is declared besides the level. Neither decides the level.
    """

    declared: GraphLevel
    measured: GraphLevel | None
    recorder: str
    probes: tuple[GraphProbe, ...] = ()
    played_in_full: str = ""
    notes: tuple[str, ...] = ()
    padding_rows: PaddingRows = "not examined"
    claims: tuple[GraphClaim, ...] = ()


def worst_padding(states: Iterable[PaddingRows]) -> PaddingRows:
    """Return the worst of ``states``."""
    return max(states, key=get_args(PaddingRows).index, default="not examined")
