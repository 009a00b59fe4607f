"""What an engine does, as the observer receives it, and what the observer returns."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from torch import Tensor

from attncheck.harness.problem.storage import UpProjections
from attncheck.reference import AttentionParams
from attncheck.reports.run_file.header import BackendInfo

CheckKind = Literal["output", "token", "position", "prefix_hit", "count", "write"]
"""What is compared.

output: the output of a layer for a row. token, position: what the model is given for a row. prefix_hit: a block that a
prefix hit maps. count: the scheduler's number of computed tokens. write: a page that a step wrote.
"""

MAX_FINDINGS = 2000
"""Findings that an observer keeps."""

OTHER_CACHES = "layers of the KV-cache spec"
"""Begins the reason of layers that are not judged since their cache has no key for each token."""

FOLLOW_OPTION = "--follow"
"""Begins the reason of requests that the user leaves out."""

WritePages = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""Writes ``(key, value, kv_cache, slot_mapping)``, as a layer does."""


@dataclass(frozen=True)
class ObserverSettings:
    """What of an engine is followed and judged.

    judge_every: outputs and pages of every Nth step are judged. follow_one_of: one of M first blocks of prompts is
    chosen by its hash, and the requests that begin with it are followed.
    max_row_bytes: keys and values that are kept, in bytes of all layers; a request that needs more is not followed. It
    is also the limit of a step's queries and outputs; a step with more is not judged.
    max_explained: findings for which a cause is sought.
    """

    judge_every: int = 1
    follow_one_of: int = 1
    max_row_bytes: int = 2 * 2**30
    max_explained: int = 40


@dataclass(frozen=True)
class KVGroup:
    """A KV-cache group: layers that share block ids. ``block_size``: tokens of a block.

    not_followed: why its blocks are not followed, such as a state instead of keys; None if they are.
    """

    block_size: int
    layers: tuple[str, ...]
    not_followed: str | None = None


@dataclass(frozen=True)
class LayerFacts:
    """An attention layer, as the judge needs it.

    params: its settings; for a latent layer, those of the naive form, whose keys have ``qk_head_dim`` columns.
    up_projections: the weights of a latent layer, whose rows are ``kv_c_normed`` and ``k_pe``; None for other layers.
    kv_sharing_target: the layer whose keys and values it reads. page_size: tokens of a page of its cache, a divisor of
    the block size, by default the block size itself. not_judged: why its outputs cannot be judged, or None.
    code: what the cache makes of ``(key, value)``, such as FP8 codes and their values; None if it keeps them.
    write: writes ``(key, value, kv_cache, slot_mapping)`` as the layer does; None if pages cannot be compared.
    """

    params: AttentionParams
    up_projections: UpProjections | None = None
    kv_sharing_target: str | None = None
    page_size: int | None = None
    not_judged: str | None = None
    code: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    write: WritePages | None = None

    @property
    def row_size(self) -> int:
        """How many numbers of a row are kept: of its key and value, if it has its own and they are judged."""
        if self.kv_sharing_target is not None or self.not_judged is not None:
            return 0
        if self.up_projections is not None:  # kv_c_normed and k_pe
            rank, _, nope = self.up_projections.w_uk.shape
            return rank + self.params.head_size - nope
        return self.params.num_kv_heads * (self.params.head_size + self.params.value_head_size)

    def attended(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys ``[N, Hkv, D]`` and values that attention reads: up-projected, or those of the codes."""
        if self.up_projections is not None:
            latent, rotary = key.reshape(len(key), 1, -1), value.reshape(len(value), 1, -1)
            return self.up_projections.keys(latent, rotary), self.up_projections.values(latent)
        return (key, value) if self.code is None else self.code(key, value)


@dataclass(frozen=True)
class EngineFacts:
    """The engine that was observed.

    backend: the classes that served its layers, as ``vllm:CPU_ATTN``, or several names joined by ``+``. shape: dtypes,
    blocks and runner in one line. dtype: of the model, by torch's name. is_async: with async scheduling, so that steps
    begin before the tokens of the step before are known.
    """

    backend: BackendInfo = field(default_factory=lambda: BackendInfo(name="vllm", ref="vllm"))
    shape: str = ""
    dtype: str = ""
    is_async: bool = False


@dataclass(frozen=True)
class ScheduledRequest:
    """A request that the scheduler chose for a step.

    block_ids: one tuple a group, or empty: of all its blocks if it ``starts``, else of those that it gets for this
    step. num_computed_tokens: as the scheduler counts; of a request that starts, those that a prefix hit maps.
    starts: it is new, or starts again after preemption (``is_resumed``).
    """

    request_id: str
    block_ids: tuple[tuple[int, ...], ...]
    num_computed_tokens: int
    starts: bool = False
    is_resumed: bool = False


@dataclass(frozen=True)
class StepPlan:
    """What the scheduler wants of a step. Its requests are in the order in which they were scheduled.

    drafts: draft tokens of a request; -1 for a draft that was dropped, or is on the device. block_copies: the ids of
    blocks that are copied before the step, and of those that they are copied to.
    """

    requests: tuple[ScheduledRequest, ...]
    num_scheduled_tokens: Mapping[str, int]
    drafts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    block_copies: tuple[tuple[int, int], ...] = ()


class LayerRows(NamedTuple):
    """The arguments and the output of a layer's ``impl.forward``, ``[T, ...]`` each.

    Without ``kv_cache``, no page is compared. Of a latent layer, ``query`` is not absorbed, ``key`` is ``kv_c_normed``
    and ``value`` is ``k_pe``. is_part: the layer computes a part of the rows of the step.
    """

    layer: str
    query: Tensor
    key: Tensor | None
    value: Tensor | None
    output: Tensor
    kv_cache: Tensor | None = None
    is_part: bool = False


@dataclass(frozen=True)
class EngineFinding:
    """Something wrong in one step.

    position: of the first row or key. num_rows: rows of this request, layer and step that are wrong; of a write, pages
    of the block. block_id: the physical block; block_index: its place in the request's table. budget_share: the largest
    error in budgets. cause: what was tried and gives the same output; None if nothing does. is_sought: whether causes
    were tried.
    """

    kind: CheckKind
    step: int
    request_id: str
    position: int
    layer: str = ""
    group: int | None = None
    block_id: int | None = None
    block_index: int | None = None
    num_rows: int = 1
    budget_share: float | None = None
    cause: str | None = None
    is_sought: bool = True
    note: str = ""


@dataclass
class ObserverResult:
    """What was observed so far.

    steps: how many; while one is judged, its number. checks: how many things of each kind were compared.
    findings: at most :data:`MAX_FINDINGS`, and the first of each kind; ``findings_left_out``: further ones.
    not_followed: rows of the model's input whose requests are not followed, by reason, in words. not_compared: what
    else a check left out, by reason; of ``output`` rows of layers, of ``write`` requests of layers. counts: other
    figures, such as all rows of the model's input, drafts, tokens of prefix hits and resumed requests.
    worst_share: the largest share of the error budget. failure: why the observer stopped, or None.
    """

    steps: int = 0
    checks: Counter[CheckKind] = field(default_factory=Counter)
    findings: tuple[EngineFinding, ...] = ()
    not_followed: Counter[str] = field(default_factory=Counter)
    not_compared: Counter[tuple[CheckKind, str]] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    worst_share: float = 0.0
    failure: str | None = None
    findings_left_out: int = 0
    engine: EngineFacts = field(default_factory=EngineFacts)

    def find(self, kind: CheckKind, request_id: str, position: int, **more: Any) -> None:
        """Keep a finding of this step, or count it if there are too many. ``more``: its other fields."""
        is_first = all(each.kind != kind for each in self.findings)
        if is_first or len(self.findings) < MAX_FINDINGS:
            self.findings += (EngineFinding(kind, self.steps, request_id, position, **more),)
        else:
            self.findings_left_out += 1

    def copy(self) -> "ObserverResult":
        """Return what was observed up to now, which does not change any more."""
        checks, counts = Counter(self.checks), Counter(self.counts)
        lost, left_out = +self.not_followed, +self.not_compared  # without counts of 0
        return replace(self, checks=checks, counts=counts, not_followed=lost, not_compared=left_out)
