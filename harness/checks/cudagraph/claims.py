"""Claims about graphs besides the level: optional members of vLLM's builders and backends, and their probes."""

from collections.abc import Mapping

import torch

from attncheck.backends.contract import AttentionBackend
from attncheck.harness.checks.cudagraph.probe import BLOCK_TABLE, DRAFT_UPDATE
from attncheck.harness.checks.cudagraph.probe_problems import ProbeProblems
from attncheck.harness.checks.cudagraph.recorder import Recorder
from attncheck.harness.checks.cudagraph.session import GraphSession
from attncheck.harness.driver.construction import builder_arguments
from attncheck.harness.driver.foreign_code import call_backend
from attncheck.reference.spec import AttentionCGSupport

_VARLEN = "get_varlen_cudagraph_max_query_len"
_MISMATCH = "supports_device_cpu_query_lens_mismatch"

PLAYED = {DRAFT_UPDATE: "drafting", BLOCK_TABLE: "buckets"}
"""Claims that a probe examines, and the name of the probe that is played with the claimed method."""


def declared_claims(
    backend: type[AttentionBackend],
    level: AttentionCGSupport,
    questions: ProbeProblems,
    device: torch.device,
    recorder: Recorder,
) -> Mapping[str, bool | int]:
    """Return the value of each claim that is declared, by name. ``level``: the declared level.

    As in vLLM, an instance of the builder declares the first two, and ``_VARLEN`` counts only between the levels NEVER
    and ALWAYS. Raise StageError.
    """
    kind = backend.get_builder_cls()
    if not (any(hasattr(kind, name) for name in (*PLAYED, _VARLEN)) or hasattr(backend, _MISMATCH)):
        return {}
    drafting = next(probe for probe in questions.probes if probe.name == PLAYED[DRAFT_UPDATE])
    problems = [questions.problem(questions.case(drafting, turn)) for turn in drafting.turns]
    builder = GraphSession(backend, drafting, problems, device, recorder).builder
    is_between = level not in (AttentionCGSupport.NEVER, AttentionCGSupport.ALWAYS)

    def read() -> dict[str, bool | int | None]:
        values: dict[str, bool | int | None] = {name: bool(getattr(builder, name, False)) for name in PLAYED}
        if is_between and hasattr(kind, _VARLEN):
            spec, config = builder_arguments(backend, problems)
            values[_VARLEN] = getattr(kind, _VARLEN)(config, spec)
        values[_MISMATCH] = bool(getattr(backend, _MISMATCH, bool)())
        return values

    return {name: value for name, value in call_backend("declaration", read).items() if value}
