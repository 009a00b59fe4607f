"""Compare the speed of the metadata utilities with vLLM's, and the slots of a batch with a loop over its requests.

    OMP_NUM_THREADS=1 python -m pytest benchmarks/utilities_against_vllm.py -k promise          asserts the ratios
    OMP_NUM_THREADS=1 python -m pytest benchmarks/utilities_against_vllm.py --benchmark-only    prints the times

Needs an interpreter with both vLLM and attncheck; without vLLM the comparisons with it are skipped. Both sides run in
one process on one batch: half decodes, then prefills of up to 63 tokens, with contexts of up to 4032. The asserted
ratios: a median of at most 1.1 times vLLM's, argument checks included. Where the other side loops over the requests, at
most half of its median at 4096 requests. Calls alternate, since the speed of a shared machine drifts. Results are
compared before the times.

Excluded: a pure decode that ``max_query_len`` identifies. There vLLM's ``split_decodes_and_prefills`` answers from
three numbers in 0.1 us, while the reference first validates the start locations, for about 5 us.
"""

import gc
import importlib
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from attncheck import reference

SIZES = (8, 256, 4096)
CHUNK, BLOCK_SIZE = 1024, 16
MAX_MODEL_LEN, LONGEST_PREFILL = 4096, 64
ROUNDS = 101


@dataclass(frozen=True)
class Sides:
    """Two calls that compute the same; ``read`` turns the result of either into a comparable value."""

    ours: Callable[[], Any]
    theirs: Callable[[], Any]
    read: Callable[[Any], Any]


class Batch:
    """A batch of one step, decodes first, with metadata for both sides over the same tensors."""

    def __init__(self, num_reqs: int, pages: int = MAX_MODEL_LEN // BLOCK_SIZE) -> None:
        rng = np.random.default_rng(num_reqs)
        self.query_lens = np.ones(num_reqs, dtype=np.int64)
        self.query_lens[num_reqs // 2 :] = rng.integers(2, LONGEST_PREFILL, num_reqs - num_reqs // 2)
        self.computed = rng.integers(1, MAX_MODEL_LEN - LONGEST_PREFILL, num_reqs)
        self.starts = np.concatenate([[0], self.query_lens.cumsum()])
        self.table = rng.integers(0, 100_000, (num_reqs, pages))
        seq_lens = torch.tensor(self.computed + self.query_lens, dtype=torch.int32)
        starts = torch.tensor(self.starts, dtype=torch.int32)
        shared: dict[str, Any] = {
            "query_start_loc": starts,
            "query_start_loc_cpu": starts.clone(),
            "seq_lens": seq_lens,
            "num_reqs": num_reqs,
            "num_actual_tokens": int(starts[-1]),
            "max_query_len": int(self.query_lens.max()),
            "max_seq_len": int(seq_lens.max()),
            "block_table_tensor": torch.tensor(self.table, dtype=torch.int32),
            "slot_mapping": torch.arange(int(starts[-1])),
        }
        self.ours = reference.CommonAttentionMetadata(
            **shared,
            seq_lens_cpu=seq_lens.clone(),
            num_computed_tokens_cpu=torch.tensor(self.computed, dtype=torch.int32),
        )
        self.shared = shared

    @property
    def theirs(self) -> Any:
        """The batch as vLLM's ``CommonAttentionMetadata``."""
        metadata = vllm_module("vllm.v1.attention.backend").CommonAttentionMetadata
        return metadata(**self.shared, seq_lens_cpu_upper_bound=self.ours.seq_lens_cpu)


def local_attention(num_reqs: int, pages: int = MAX_MODEL_LEN // BLOCK_SIZE) -> Sides:
    """Compare the virtual batches of local attention; vLLM returns a pair, and its first item is compared."""
    batch, vllm = Batch(num_reqs, pages), vllm_utils()
    ours, theirs = batch.ours, batch.theirs
    return Sides(
        lambda: reference.make_local_attention_virtual_batches(CHUNK, ours, BLOCK_SIZE),
        lambda: vllm.make_local_attention_virtual_batches(CHUNK, theirs, BLOCK_SIZE)[0],
        lambda virtual: [
            tensor.tolist() for tensor in (virtual.query_start_loc, virtual.seq_lens, virtual.block_table_tensor)
        ],
    )


def local_attention_at_the_edge(num_reqs: int) -> Sides:
    """Compare the same where the last chunk of a quarter of the requests reaches past the block table."""
    return local_attention(num_reqs, MAX_MODEL_LEN // BLOCK_SIZE - 1)


def decode_boundary(num_reqs: int) -> Sides:
    """Compare the boundary between decodes and prefills."""
    batch, vllm = Batch(num_reqs), vllm_utils()
    ours, theirs = batch.ours, batch.theirs
    return Sides(
        lambda: reference.split_decodes_and_prefills(ours), lambda: vllm.split_decodes_and_prefills(theirs), tuple
    )


def uniform_boundary(num_reqs: int) -> Sides:
    """Compare the same where decodes must have one length."""
    batch, vllm = Batch(num_reqs), vllm_utils()
    ours, theirs = batch.ours, batch.theirs
    return Sides(
        lambda: reference.split_decodes_and_prefills(ours, 4, require_uniform=True),
        lambda: vllm.split_decodes_and_prefills(theirs, 4, require_uniform=True),
        tuple,
    )


def causal_conv1d(num_reqs: int) -> Sides:
    """Compare the programs of the short convolution; vLLM loops over requests and takes the device as an argument."""
    starts, vllm, cpu = Batch(num_reqs).ours.query_start_loc_cpu, vllm_utils(), torch.device("cpu")
    return Sides(
        lambda: reference.compute_causal_conv1d_metadata(starts),
        lambda: vllm.compute_causal_conv1d_metadata(starts, device=cpu),
        lambda result: [tensor.tolist() for tensor in result[1:]],
    )


def reordering(num_reqs: int) -> Sides:
    """Compare the reordering of a batch with half of its requests on the wrong side; both sides loop over requests.

    The swaps do nothing, so every call sees the same order.
    """
    vllm = vllm_utils()
    counts = np.random.default_rng(num_reqs).permutation(np.arange(num_reqs) % 2 * 8 + 1)
    ids = [f"request-{i}" for i in range(num_reqs)]
    scheduled = SimpleNamespace(num_scheduled_tokens=dict(zip(ids, counts.tolist(), strict=True)))

    def stay(i: int, j: int) -> None: ...

    beyond_the_prompt = {"num_computed_tokens_cpu": np.full(num_reqs, 9), "num_prompt_tokens": np.full(num_reqs, 9)}
    batch = SimpleNamespace(req_ids=ids, swap_states=stay, **beyond_the_prompt)
    return Sides(
        lambda: reference.reorder_batch_to_split_decodes_and_prefills(batch, scheduled),
        lambda: vllm.reorder_batch_to_split_decodes_and_prefills(batch, scheduled),
        bool,
    )


def slot_mapping(num_reqs: int) -> Sides:
    """Compare the slots of all tokens with a numpy loop over the requests."""
    batch = Batch(num_reqs)
    request = np.repeat(np.arange(num_reqs), batch.query_lens)
    position = np.arange(len(request)) - batch.starts[request] + batch.computed[request]
    tokens = (torch.from_numpy(position), torch.from_numpy(request), batch.ours.block_table_tensor)

    def loop() -> torch.Tensor:
        slots = np.empty(len(request), dtype=np.int64)
        for r in range(num_reqs):
            mine = np.arange(batch.computed[r], batch.computed[r] + batch.query_lens[r])
            pages, offsets = np.divmod(mine, BLOCK_SIZE)
            slots[batch.starts[r] : batch.starts[r + 1]] = batch.table[r, pages] * BLOCK_SIZE + offsets
        return torch.from_numpy(slots)

    return Sides(lambda: reference.compute_slot_mapping(*tokens, BLOCK_SIZE), loop, torch.Tensor.tolist)


COMPARISONS = {
    f.__name__: f
    for f in (
        local_attention,
        local_attention_at_the_edge,
        decode_boundary,
        uniform_boundary,
        causal_conv1d,
        reordering,
        slot_mapping,
    )
}
LOOPS_OVER_REQUESTS = {"causal_conv1d", "reordering", "slot_mapping"}


@pytest.mark.parametrize("num_reqs", SIZES)
@pytest.mark.parametrize("name", COMPARISONS)
@pytest.mark.parametrize("side", ["ours", "theirs"])
def test_times(benchmark: Any, name: str, num_reqs: int, side: str) -> None:
    """Time one side of one comparison, a row of the table."""
    benchmark.group = f"{name}, {num_reqs} requests"
    benchmark(getattr(COMPARISONS[name](num_reqs), side))


@pytest.mark.parametrize("num_reqs", SIZES)
@pytest.mark.parametrize("name", COMPARISONS)
def test_promise(name: str, num_reqs: int) -> None:
    """Check that both sides agree, and the ratio of their medians."""
    sides = COMPARISONS[name](num_reqs)
    assert sides.read(sides.ours()) == sides.read(sides.theirs())
    ours, theirs = medians(sides)
    print(f"\n{name}, {num_reqs} requests: {ours * 1e6:.1f} us, theirs {theirs * 1e6:.1f} us, {ours / theirs:.2f}")
    if name in LOOPS_OVER_REQUESTS and num_reqs == SIZES[-1]:
        assert ours <= theirs / 2
    else:
        assert ours <= 1.1 * theirs


def medians(sides: Sides) -> tuple[float, float]:
    """Return the median seconds a call of each side; the calls alternate."""
    times: tuple[list[float], list[float]] = ([], [])
    gc.disable()
    try:
        for _ in range(ROUNDS):
            for call, taken in zip((sides.ours, sides.theirs), times, strict=True):
                began = time.perf_counter()
                call()
                taken.append(time.perf_counter() - began)
    finally:
        gc.enable()
    return statistics.median(times[0]), statistics.median(times[1])


def vllm_utils() -> Any:
    """Return the module of vLLM's utilities."""
    return vllm_module("vllm.v1.attention.backends.utils")


def vllm_module(name: str) -> Any:
    """Import a module of vLLM; skip the test if that fails."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(name)
        except ImportError as error:
            pytest.skip(f"vLLM cannot be imported here: {error}")
