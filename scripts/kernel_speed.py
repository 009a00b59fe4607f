"""How long candidates take for one step, in this process: a JSON line each, written as it is known.

    python kernel_speed.py RESULTS DEVICE SEED LIMIT_S QUESTION/NAME/PAGE ...

``QUESTION/copy/0`` and ``QUESTION/matmul/0`` measure what the device can do at most. Every candidate is driven through
the contract, by attncheck's own construction of impl and builder, on tensors drawn on the device; some rows of its
output are held against the float64 reference before it is timed. Timed is the write of the new rows and ``forward``, as
called from Python, with the metadata built before. On a GPU: CUDA events, the L2 cache flushed before each repeat. On a
CPU everything is tiny and says nothing; it shows that this works. A candidate that takes longer than LIMIT_S ends the
process by SIGALRM; the last line then says which.
"""

import json
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from attncheck.backends.caches.packings import allocate_kv_cache
from attncheck.backends.dtypes import DTYPES
from attncheck.cases.model import Case
from attncheck.errors import QuestionError
from attncheck.harness.driver.construction import construct_builder, construct_impl
from attncheck.harness.driver.vllm_config import LayerStub
from attncheck.harness.problem.page_layout import lay_out
from attncheck.harness.problem.problem import Problem
from attncheck.harness.problem.random_stream import RandomStream
from attncheck.harness.run.backend_loading import load_backend, usable_here
from attncheck.harness.run.evaluation import UnavailableBackend
from attncheck.reference import AttentionParams, CommonAttentionMetadata, paged_attention
from attncheck.reference.spec import BatchSpec, CacheSpec, LayerSpec, RequestSpec

CHECKED_ROWS = 8
"""Rows of the output that are compared with the reference, spread over the step."""

MOST_REPEATS = 50
LONGEST_S = 1.0
"""What the repeats of one candidate may take together; there are five at least."""

WARM_UP_S = 0.3
"""Of every candidate on a GPU, whose clocks rise with the load."""

FLUSH_BYTES, FLUSHES = 2**30, 4
"""Written before each repeat: many times the L2 cache, and so often that the host gets ahead of the device."""


class RefusalError(Exception):
    """Why a candidate is not timed."""

    def __init__(self, reasons: Sequence[str]) -> None:
        super().__init__("; ".join(reasons))


@dataclass(frozen=True)
class Size:
    """What is asked on a device. requests, seq_len: by question; copied: bytes; matmul: rows of a square matrix."""

    layer: LayerSpec
    requests: dict[str, tuple[int, int]]
    copied: int
    matmul: int


FULL = Size(
    layer=LayerSpec(num_heads=32, num_kv_heads=8, head_size=128, dtype="bfloat16"),
    requests={"decode": (64, 8192), "prefill": (8, 4096)},
    copied=2**32,
    matmul=8192,
)
TINY = Size(
    layer=LayerSpec(num_heads=4, num_kv_heads=2, head_size=32, dtype="float16"),
    requests={"decode": (2, 20), "prefill": (2, 6)},
    copied=2**20,
    matmul=64,
)


class Question:
    """One step of equal requests: ``decode`` asks one row of each, ``prefill`` all; the tensors on the device."""

    def __init__(self, name: str, size: Size, device: torch.device, seed: int) -> None:
        self.size, self.device, self.seed = size, device, seed
        self.num_requests, self.seq_len = size.requests[name]
        self.query_len = 1 if name == "decode" else self.seq_len
        self.name, layer = name, size.layer
        generator = torch.Generator(device).manual_seed(seed)

        def drawn(rows: int, heads: int) -> Tensor:
            shape = (self.num_requests, rows, heads, layer.head_size)
            return torch.randn(shape, generator=generator, device=device, dtype=DTYPES[layer.dtype])

        self.query = drawn(self.query_len, layer.num_heads)
        self.keys, self.values = (drawn(self.seq_len, layer.num_kv_heads) for _ in range(2))

    @property
    def work(self) -> dict[str, float]:
        """The least that has to be done: ``bytes`` read and written once, ``operations`` of the two products."""
        tensors = (self.query, self.query, self.keys, self.values)  # the output is as large as the query
        pairs = sum(range(self.seq_len - self.query_len + 1, self.seq_len + 1)) * self.num_requests
        layer = self.size.layer
        return {
            "bytes": sum(tensor.nbytes for tensor in tensors),
            "operations": 4 * layer.num_heads * layer.head_size * pairs,
        }

    def case(self, page: int) -> Case:
        """The question over pages of ``page`` tokens."""
        request = RequestSpec(query_len=self.query_len, seq_len=self.seq_len, count=self.num_requests)
        batch, cache = BatchSpec(requests=(request,)), CacheSpec(block_size=page)
        return Case(suite="speed", id=self.name, layer=self.size.layer, cache=cache, batch=batch)

    @cached_property
    def _truth(self) -> tuple[Tensor, Tensor]:
        """Some rows (int64) and their outputs in float64; every row is asked as a request that ends with it."""
        rows = torch.linspace(0, self.num_requests * self.query_len - 1, CHECKED_ROWS, device=self.device).long()
        last = self.seq_len - self.query_len + rows % self.query_len
        layer, count = self.size.layer, len(rows)
        params = AttentionParams(num_heads=layer.num_heads, num_kv_heads=layer.num_kv_heads, head_size=layer.head_size)
        starts = torch.arange(count + 1, device=self.device)
        requests = (rows // self.query_len)[:, None]  # all keys of a request are one block
        query = self.query.flatten(0, 1)[rows]
        return rows, paged_attention(query, self.keys, self.values, requests, last + 1, starts, params)[0]

    def error_of(self, output: Tensor) -> float:
        """The largest relative error of the checked rows: the norm of the difference over the norm of the truth."""
        rows, truth = self._truth
        difference = (output[rows].double() - truth).flatten(1).norm(dim=1)
        return float((difference / truth.flatten(1).norm(dim=1)).max())

    def common_metadata(self, table: Tensor, slots: Tensor) -> CommonAttentionMetadata:
        """``table``: the requests' pages; ``slots``: ``[requests, seq_len]``, where every key lies."""
        count, rows = self.num_requests, self.query_len
        starts = torch.arange(0, (count + 1) * rows, rows, dtype=torch.int32)
        lengths = torch.full((count,), self.seq_len, dtype=torch.int32)
        return CommonAttentionMetadata(
            query_start_loc=starts.to(self.device, copy=True),
            query_start_loc_cpu=starts,
            seq_lens=lengths.to(self.device, copy=True),
            seq_lens_cpu=lengths,
            num_computed_tokens_cpu=lengths - rows,
            num_reqs=count,
            num_actual_tokens=count * rows,
            max_query_len=rows,
            max_seq_len=self.seq_len,
            block_table_tensor=table.to(self.device, copy=True),
            slot_mapping=slots[:, -rows:].flatten().contiguous(),
        )


def step_of(name: str, page: int, question: Question) -> tuple[Callable[[], object], Tensor]:
    """A call that makes the step, and the output it writes. Raises RefusalError."""
    device, case = question.device, question.case(page)
    loaded = usable_here(load_backend(name), str(device))
    if isinstance(loaded, UnavailableBackend):
        raise RefusalError(loaded.reasons)
    backend = loaded.backend
    asked = (case.layer, case.cache, case.batch)
    reasons = backend.unavailable_reasons(str(device)) or [
        *backend.unsupported_reasons(*asked),
        *backend.unavailable_case_reasons(str(device), *asked),
    ]
    codec = None if reasons else backend.kv_cache_codec(case.layer, case.cache)
    if codec is None:
        raise RefusalError(reasons or ["it brings no cache codec"])
    layout = lay_out(case, [question.seq_len] * question.num_requests, RandomStream("speed", question.seed))()
    query = question.query.flatten(0, 1)
    problem = Problem(case, question.seed, (), query, question.keys, question.values, layout)
    attn_layer = LayerStub(case.cache, device)
    impl = attn_layer.impl = construct_impl(backend, problem, device)
    builder = construct_builder(backend, (problem,), device, attn_layer)
    kv_cache = allocate_kv_cache(backend, case.layer, case.cache, layout.num_blocks, device)
    slots = layout.key_slots.to(device).unflatten(0, (question.num_requests, -1))
    num_cached = question.seq_len - question.query_len
    if num_cached:
        held = [rows[:, :num_cached].flatten(0, 1) for rows in (slots, question.keys, question.values)]
        codec.write(kv_cache, *held)
    key, value = (rows[:, num_cached:].flatten(0, 1).contiguous() for rows in (question.keys, question.values))
    common = question.common_metadata(layout.block_table, slots)
    metadata = builder.build(common_prefix_len=0, common_attn_metadata=common)
    output = torch.full_like(query, torch.nan)
    updates = not backend.forward_includes_kv_cache_update

    def step() -> object:
        with torch.no_grad():
            if updates:
                impl.do_kv_cache_update(attn_layer, key, value, kv_cache, common.slot_mapping)
            return impl.forward(attn_layer, query, key, value, kv_cache, metadata, output=output)

    return step, output


def ceiling_of(name: str, size: Size, device: torch.device) -> tuple[Callable[[], object], dict[str, float]]:
    """A call that does as much as the device can, and how much that is. On random data: zeros can be faster."""
    dtype = DTYPES[size.layer.dtype]
    if name == "copy":
        source = torch.randn(size.copied // dtype.itemsize // 2, device=device, dtype=dtype)
        target = torch.empty_like(source)
        return lambda: target.copy_(source), {"bytes": 2 * source.nbytes}
    a, b = torch.randn(2, size.matmul, size.matmul, device=device, dtype=dtype)
    return lambda: a @ b, {"operations": 2 * size.matmul**3}


def seconds_of(call: Callable[[], object], device: torch.device) -> list[float]:
    """Of each repeat, after a warm-up."""
    if device.type != "cuda":
        return [_clocked(call) for _ in range(3)][1:]

    def call_and_wait() -> None:
        call()
        torch.cuda.synchronize(device)

    warm_up = [_clocked(call_and_wait) for _ in range(3)]
    while sum(warm_up) < WARM_UP_S:
        warm_up.append(_clocked(call_and_wait))
    repeats = max(5, min(MOST_REPEATS, int(LONGEST_S / min(warm_up))))
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
    pairs = []
    for _ in range(repeats):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(FLUSHES):
            flush.zero_()
        began.record()
        call()
        ended.record()
        pairs.append((began, ended))
    torch.cuda.synchronize(device)
    return [began.elapsed_time(ended) / 1000 for began, ended in pairs]


def _clocked(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def measured(unit: str, question: Question) -> dict[str, object]:
    """What is found of ``question/name/page``: times, or why there are none."""
    _, name, page = unit.split("/")
    try:
        if page == "0":
            call, work = ceiling_of(name, question.size, question.device)
            facts: dict[str, object] = {**work}
        else:
            call, output = step_of(name, int(page), question)
            call()
            facts = {**question.work, "error": question.error_of(output)}
    except (RefusalError, QuestionError) as refusal:
        return {"refused": str(refusal)}
    times = seconds_of(call, question.device)
    return {"seconds": statistics.median(times), "repeats": len(times), **facts}


def main(words: list[str]) -> None:
    """Measure every unit; one that raises is told, and the next is tried."""
    results, device, seed, limit, *units = words
    size = FULL if torch.device(device).type == "cuda" else TINY
    question = None
    with Path(results).open("a", encoding="utf-8") as lines:

        def tell(unit: str, **facts: object) -> None:
            lines.write(json.dumps({"unit": unit, "seed": int(seed), **facts}) + "\n")
            lines.flush()

        for unit in units:
            name = unit.split("/")[0]
            signal.alarm(int(limit))
            tell(unit, begun=True)
            try:
                if question is None or question.name != name:
                    question = None  # the memory of the one before is free first
                    question = Question(name, size, torch.device(device), int(seed))
                found = measured(unit, question)
            except Exception as error:  # noqa: BLE001 (whatever a candidate raises)
                found = {"raised": f"{type(error).__name__}: {error}"[:2000]}
            tell(unit, **found)
            if torch.device(device).type == "cuda":
                torch.cuda.synchronize()  # raises where the candidate has lost the device: nothing can follow here
                torch.cuda.empty_cache()
    signal.alarm(0)


if __name__ == "__main__":
    main(sys.argv[1:])
