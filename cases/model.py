"""Cases and suites: frozen values with stable identities.

A case's hash identifies it over time. It covers the question only: layer, cache, batch, path, inputs, strides, the
generator's version, batches before and layers beside it. Fields equal to their default are left out, so that a new key
with a default changes no hash.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass, replace
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from attncheck.errors import SpecError
from attncheck.reference.spec import GENERATOR_VERSION, LayerSpec
from attncheck.reference.step_spec import BatchSpec, CacheSpec, InputName, RequestSpec, StridesSpec


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """A budget of a case's own: the harness multiplies its budget by ``factor``, visibly, for ``reason``."""

    __pydantic_config__: ClassVar = {"extra": "forbid", "strict": True, "allow_inf_nan": False}

    factor: float = field(metadata={"description": "multiplies the error budget", "gt": 0})
    reason: str = field(metadata={"description": "why this case needs a budget of its own"})

    def __post_init__(self) -> None:
        if not self.reason.strip():
            raise SpecError(
                "a budget of one's own needs a reason", field="reason", value=self.reason, allowed="say why in a line"
            )


@dataclass(frozen=True, kw_only=True)
class Case:
    """One case. ``checks`` and ``inputs`` of None select all that apply; ``strides`` of None follows ``inputs``."""

    suite: str
    id: str
    layer: LayerSpec
    cache: CacheSpec
    batch: BatchSpec
    checks: tuple[str, ...] | None = None
    tolerance: Tolerance | None = None
    inputs: tuple[InputName, ...] | None = None
    after: tuple[BatchSpec, ...] = ()
    """Batches run before this one on the same impl and builder."""
    layers: tuple[LayerSpec, ...] = ()
    """The other layers of the step."""
    strides: StridesSpec | None = None
    weight: float | None = None
    """Frequency of the case in recorded traffic, which weights its times. The hash does not cover it."""
    description: str = ""
    notes: tuple[str, ...] = ()
    origin: str = field(default="", compare=False)
    """``file:line`` of the case."""

    def __hash__(self) -> int:
        return hash(self.hash)  # cached; hashing all fields costs 50 us each time the case is used as a key

    @property
    def key(self) -> str:
        """``suite/id``: unique among the suites of a run."""
        return f"{self.suite}/{self.id}"

    @cached_property
    def hash(self) -> str:
        """12 hex digits of the SHA-256 of :func:`question`; equal cases have equal hashes, however they are written."""
        return _digest(question(self))


@dataclass(frozen=True, kw_only=True)
class Suite:
    """The cases of one file, and the file's defaults for a run."""

    name: str
    description: str
    cases: tuple[Case, ...]
    path: Path
    default_backends: tuple[str, ...] = ()
    """Backends to examine if the command line names none."""
    default_device: str | None = None
    """Device to use if the command line names none."""
    notes: tuple[str, ...] = ()
    """Notes for readers of a run, such as keys of the file that are not used."""
    page_defaults: Mapping[str, str] = field(default_factory=dict)
    """``cache.block_size`` and ``cache.layout`` of cases that leave them out, except keys given by ``--set``."""

    def __iter__(self) -> Iterator[Case]:
        return iter(self.cases)

    def __len__(self) -> int:
        return len(self.cases)

    @cached_property
    def hash(self) -> str:
        """12 hex digits over the ids and hashes of the cases, for a run's header."""
        return _digest([[case.id, case.hash] for case in self.cases])


def question(case: Case) -> dict[str, Any]:
    """Return what a case's hash covers, as plain JSON values without fields that equal their default.

    Adjacent equal requests are merged, because ``q1_q1`` equals ``2q1``. Inputs are sorted, because their order does
    not matter.
    """
    name, options = case.batch.path.name, _spare(case.batch.path.options)
    path = {} if name == "paged" else {"name": name} | ({"options": options} if options else {})
    content: dict[str, Any] = {
        "generator": GENERATOR_VERSION,
        "layer": _spare(case.layer),
        "cache": _spare(case.cache),
        "requests": [_spare(request) for request in _merged(case.batch.requests)],
        "padding": _spare(case.batch.padding),
        "block_table": _spare(case.batch.block_table),
        "path": path,
        "inputs": None if case.inputs is None else sorted(case.inputs),
        "after": [_spare(batch) for batch in case.after] or None,
        "layers": [_spare(layer) for layer in case.layers] or None,
        "strides": None if case.strides is None else asdict(case.strides),
    }
    return {key: value for key, value in content.items() if value not in (None, {})}


def _merged(requests: tuple[RequestSpec, ...]) -> list[RequestSpec]:
    merged: list[RequestSpec] = []
    for request in requests:
        if merged and replace(merged[-1], count=request.count) == request:
            merged[-1] = replace(request, count=merged[-1].count + request.count)
        else:
            merged.append(request)
    return merged


def _spare(value: Any) -> Any:
    """Return ``value`` as JSON values; of a dataclass, only the fields that differ from their default."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple):
        return [_spare(item) for item in value]
    if is_dataclass(value):
        given = {f.name: (getattr(value, f.name), f.default) for f in fields(value)}
        return {name: _spare(own) for name, (own, default) in given.items() if default is MISSING or own != default}
    return value


def _digest(content: object) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]
