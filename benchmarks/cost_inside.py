"""Measure the parts of ``cost.py`` that run within one process, and print seconds by name as JSON.

python benchmarks/cost_inside.py truths
"""

import json
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from attncheck.backends.registry import LoadedBackend
    from attncheck.cases.model import Case

CASES = {
    "decode": ("page-edges.bfloat16-NHD", "residues", "single", "ragged", "many", "verify.3q4s70"),
    "mixed": ("usual-order.bfloat16-NHD", "shuffled.16", "one-of-each", "ragged"),
}
"""Ten batches, short and long: pure decodes, and mixes of decodes and prefills."""

GRAPHS = "cudagraph"


def best(work: Callable[[], object], repeats: int = 5) -> float:
    """Return the CPU seconds of the fastest of several calls; CPU time excludes other processes."""
    times = []
    for _ in range(repeats):
        began = time.process_time()
        work()
        times.append(time.process_time() - began)
    return min(times)


def yardsticks() -> dict[str, float]:
    """Time a small torch operation, and a float64 matmul of one GFLOP."""
    few, square = torch.ones(4), torch.ones(1024, 1024, dtype=torch.float64)

    def small_operations() -> None:
        for _ in range(1000):
            few + few

    return {
        "small operation": best(small_operations) / 1000,
        "float64 matmul of 1 GFLOP": best(lambda: square @ square) * 1e9 / (2 * 1024**3),
    }


def truths() -> dict[str, float]:
    """Compute problems, truths and budgets of suite smoke, without a cache of earlier results."""
    from attncheck.cases.loader import load_suite
    from attncheck.harness.problem.problem import build_problem
    from attncheck.harness.truth.truth import truth_of

    cases = load_suite("smoke").cases
    device = torch.device("cpu")
    for case in cases[:3]:  # warm-up: the first call loads modules
        truth_of(build_problem(case, 1), device)
    return {"truths of smoke": best(lambda: [truth_of(build_problem(case, 0), device) for case in cases], repeats=2)}


def prefill() -> dict[str, float]:
    """Time the reference on one causal prefill of 4,096 tokens; operations are counted for the visible keys only."""
    from attncheck.reference import AttentionParams, paged_attention

    tokens, heads, head_size, block_size = 4096, 8, 64, 16
    generator = torch.Generator().manual_seed(0)
    blocks = tokens // block_size
    query = torch.randn(tokens, heads, head_size, generator=generator, dtype=torch.float64)
    key, value = torch.randn(2, blocks, block_size, heads, head_size, generator=generator, dtype=torch.float64)
    table = torch.randperm(blocks, generator=generator)[None].to(torch.int32)
    lengths, starts = torch.tensor([tokens]), torch.tensor([0, tokens])
    params = AttentionParams(num_heads=heads, num_kv_heads=heads, head_size=head_size)

    size = 2048
    left, right = torch.ones(2, size, size, dtype=torch.float64)
    matmul_rate = 2 * size**3 / best(lambda: left @ right)
    operations = 2 * heads * head_size * tokens * (tokens + 1)
    return {
        "float64 prefill": best(lambda: paged_attention(query, key, value, table, lengths, starts, params)),
        "one float64 matmul of as many operations": operations / matmul_rate,
    }


def examination() -> dict[str, float]:
    """Time the examination of ten cases, after one warm-up in this process, and a test in vLLM's style of each.

    Such a test builds metadata, calls ``forward`` once, computes each request with torch's own attention and compares
    once. Its tensors and its cache are prepared before the clock starts.
    """
    from attncheck.backends.registry import load
    from attncheck.cases.loader import load_suite
    from attncheck.harness.run.evaluate import Examiner, RunPlan
    from attncheck.reference.spec import DEFAULT_CHECKS

    backend = load("torch_sdpa")
    cases = tuple(case for name, ids in CASES.items() for case in load_suite(name).cases if case.id in ids)
    assert len(cases) == sum(map(len, CASES.values()))
    others = tuple(check for check in DEFAULT_CHECKS if check != GRAPHS)

    def examine(checks: tuple[str, ...]) -> None:
        examiner = Examiner(RunPlan(cases, (backend,), checks))
        found = [record for case in cases for record in examiner.records(case, backend)]
        assert all(record.outcome in {"passed", "unsupported"} for record in found)

    examine((*others, GRAPHS))
    tests = [_vllm_style(backend, case) for case in cases]
    return {
        "ten cases in full": best(lambda: examine((*others, GRAPHS)), repeats=3),
        "ten cases, no CUDA graphs": best(lambda: examine(others), repeats=3),
        "a test in vLLM's style of the same batches": sum(best(test, 20) for test in tests),
    }


def _vllm_style(backend: "LoadedBackend", case: "Case") -> Callable[[], None]:
    from attncheck.harness.driver.session import Session
    from attncheck.harness.problem.problem import build_problem

    problem = build_problem(case, 0)
    session = Session(backend.backend, problem, torch.device("cpu"))
    (call,) = session.prepared().calls
    assert session.pool is not None
    kv_cache = session.pool.filled(0.0)
    buffers = session.layer.output_buffers(problem, call)
    starts_q, starts_k = problem.cu_seqlens_q.tolist(), problem.cu_seqlens_k.tolist()
    requests = [(starts_q[n], starts_q[n + 1], starts_k[n], starts_k[n + 1]) for n in session.order]

    def attend(q0: int, q1: int, k0: int, k1: int) -> Tensor:
        query, key, value = (
            rows.transpose(0, 1)[None] for rows in (problem.query[q0:q1], problem.keys[k0:k1], problem.values[k0:k1])
        )
        rows, keys = q1 - q0, k1 - k0
        mask = torch.ones(rows, keys, dtype=torch.bool).tril(diagonal=keys - rows)
        out = scaled_dot_product_attention(query, key, value, mask, scale=problem.layer.scale, enable_gqa=True)
        return out[0].transpose(0, 1)

    def test() -> None:
        metadata = session.builder.build(common_prefix_len=0, common_attn_metadata=call.common)
        session.layer.enter(call, kv_cache, metadata, buffers)
        expected = torch.cat([attend(*request) for request in requests])
        assert torch.allclose(buffers.out.rows, expected, rtol=1e-2, atol=1e-2)

    return test


_PLACES = {
    "call_backend": "calls of the backend",
    "truth_of": "truths",
    "build_problem": "problems",
    "diagnosis/": "explanations",
    "checks/cudagraph/": "emulated graphs",
    "load": "loading of backends",
    "records": "checks and the driver",
}
"""Parts of an examination, by a function or a folder of attncheck in the innermost frames."""

_EVERY_S = 0.005
"""CPU seconds between two samples."""


def smoke_parts() -> dict[str, float]:
    """Return the CPU seconds of each part of smoke with five backends, which share stored truths.

    Work belongs to the part whose function or folder is innermost. Samples give the shares of the parts.
    """
    from cost import ON_CPU

    from attncheck.backends.registry import load
    from attncheck.cases.loader import load_suite
    from attncheck.harness.run.evaluate import Examiner, RunPlan
    from attncheck.reference.spec import DEFAULT_CHECKS

    samples: Counter[str] = Counter()

    def sample(_signal: int, frame: FrameType | None) -> None:
        samples[_part_of(frame)] += 1

    cases = load_suite("smoke").cases
    signal.signal(signal.SIGPROF, sample)
    began = time.process_time()
    signal.setitimer(signal.ITIMER_PROF, _EVERY_S, _EVERY_S)
    with tempfile.TemporaryDirectory() as folder:
        for name in ON_CPU:
            backend = load(name)
            examiner = Examiner(RunPlan(cases, (backend,), DEFAULT_CHECKS, truths=Path(folder)), stores_truths=True)
            for case in cases:
                for _ in examiner.records(case, backend):
                    pass
    signal.setitimer(signal.ITIMER_PROF, 0.0)
    each_s = (time.process_time() - began) / samples.total()  # the system may leave samples out
    return {f"smoke of five: {part}": count * each_s for part, count in samples.most_common()}


def _part_of(frame: FrameType | None) -> str:
    while frame is not None:
        code = frame.f_code
        _, is_ours, file = code.co_filename.rpartition("/attncheck/")
        for place, part in _PLACES.items() if is_ours else ():
            if code.co_name == place or place in file:
                return part
        frame = frame.f_back
    return "the rest"


PARTS = {part.__name__: part for part in (yardsticks, truths, prefill, examination, smoke_parts)}

if __name__ == "__main__":
    print(json.dumps(PARTS[sys.argv[1]]()))
