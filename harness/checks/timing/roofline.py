"""Both sides of a roofline: the least memory traffic and arithmetic of a step, and what the device achieves at most.

The least work is computed from the case. Everything counts once, however often a kernel does it:

- bytes: query rows read and output rows written; new K/V rows read, and written to the cache; and K/V rows of the
  context that at least one row of the request sees under windows, chunks and the causal mask. Context rows count once
  per KV head, not per query head, and once for all requests that share them. Lengths, block tables, scales, LSE and
  intermediate results (path ``split_kv``, a cascade) do not count: they are small, or a kernel's own choice.
- flops: of the two products, two per query head, channel and pair of a row and a key it sees. The softmax and padding
  do not count.
- latent attention: cache rows are read once for all heads, and the up-projections once. For each request the cheaper
  form counts: absorbed, where queries and outputs are projected and all heads attend to rows of ``L + E``, as kernels
  do for decodes; or naive, where keys and values are projected, as they do for prompts.

The device's ceilings, for copies and matrix products, are measured in the process that times the backend. They use
random numbers, because zeros can be faster. The best of a few repeats counts, since on a shared machine it is nearest
to the limit. Each repeat follows a cache flush, as samples do. Sizes are large on a GPU; on a CPU they are small enough
to take under 0.3 s.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from attncheck.backends.declarations import OTHER_PATHS
from attncheck.backends.dtypes import DTYPES
from attncheck.cases.model import Case
from attncheck.errors import SpecError
from attncheck.harness.checks.timing.clock import Clock, do_nothing, host_ns
from attncheck.harness.device import accelerator_of
from attncheck.harness.problem.pages import Request, visible_span
from attncheck.harness.problem.problem import request_of
from attncheck.harness.problem.sizes import ITEMSIZES, naive_layer, num_weights
from attncheck.reference import PrefixMask, layer_params
from attncheck.reference.spec import LayerSpec, MLASpec
from attncheck.reference.step_spec import REGISTERED, ROW_FORMATS, RequestSpec, TreeOptions
from attncheck.reports.run_file.timings import Ceilings


@dataclass(frozen=True)
class Work:
    """Bytes read and written, and floating-point operations."""

    moved_bytes: int
    flops: int


@dataclass(frozen=True)
class VisibleKeys:
    """The keys that the rows of one request see.

    ``pairs``: number of pairs of a row and a key it sees. ``first .. end - 1``: the contiguous range of keys that rows
    see.
    """

    request: Request
    pairs: int
    first: int
    end: int


def work_of(case: Case) -> Work:
    """Return the least work of a step of ``case``, including the cache write. Raise SpecError if it is no attention."""
    if case.batch.path.name in OTHER_PATHS:
        raise SpecError(
            "only the work of attention is counted",
            field="path",
            value=case.batch.path.name,
            allowed="give a path of attention",
        )
    seen = [(spec, visible_keys_of(case, request_of(case, spec))) for spec in case.batch.requests]
    layer, naive = case.layer, naive_layer(case.layer)
    given = ITEMSIZES[layer.dtype]
    row = layer.num_kv_heads * (layer.head_size + (0 if layer.mla else layer.value_head_size))
    of_query, of_output = (1 if quant else given for quant in (layer.query_quant, layer.output_quant))
    one_row = layer.num_heads * (naive.head_size * of_query + naive.value_head_size * of_output)
    stored = _stored_bytes(case, row)
    one_new_key = row * given + (stored if layer.has_cache else 0)

    moved, flops = num_weights(layer) * given, 0
    for spec, sight in seen:
        request = sight.request
        moved += spec.count * (request.rows * one_row + (request.num_keys - request.cached) * one_new_key)
        flops += spec.count * _flops(layer, sight)
    return Work(moved + _context_rows(seen) * stored, flops)


def _stored_bytes(case: Case, row: int) -> int:
    """Return the bytes that a cache holds for a token, at least. ``row``: numbers of its keys and values."""
    layer, name = case.layer, case.cache.kv_cache_dtype
    if name == REGISTERED:
        return row  # its dtype is the backend's, of one byte or more
    row_format = ROW_FORMATS.get(name)
    if row_format is None:
        return row * ITEMSIZES[layer.dtype if name == "auto" else name]
    sizes = layer.head_size, layer.value_head_size
    return layer.num_kv_heads * sum(map(row_format.row_bytes, sizes))


def visible_keys_of(case: Case, request: Request) -> VisibleKeys:
    """Return the keys that the rows of one request see."""
    options = case.batch.path.options
    position = torch.arange(request.first_position, request.num_keys)
    low, last = visible_span(layer_params(naive_layer(case.layer)), position, request.num_keys)
    high = last + 1
    pairs = int((high - low).clamp(min=0).sum())
    if request.prefix != PrefixMask():
        return _visible_keys_of_prefix(request, position, low, high)
    if isinstance(options, TreeOptions):
        pairs -= _hidden_pairs(options.parents, position, low, high)
    sees = high > low
    first, end = (int(low[sees].min()), int(high[sees].max())) if sees.any() else (0, 0)
    return VisibleKeys(request, pairs, first, end)


def _visible_keys_of_prefix(request: Request, position: Tensor, low: Tensor, high: Tensor) -> VisibleKeys:
    keys = torch.arange(request.num_keys)
    sees = (keys >= low[:, None]) & (keys < high[:, None]) | request.prefix.sees(position[:, None], keys)
    seen = sees.any(dim=0).nonzero()
    # First keys beyond the window count like as many keys right before it, since those between are not read.
    end = int(seen[-1]) + 1 if len(seen) else 0
    return VisibleKeys(request, int(sees.sum()), end - len(seen), end)


def _hidden_pairs(parents: tuple[int, ...], position: Tensor, low: Tensor, high: Tensor) -> int:
    """Return how many pairs within the spans are hidden because the key is on another branch of the tree."""
    root = int(position[0])
    hidden = 0
    above = list[set[int]]()
    for node, parent in enumerate(parents):
        above.append({node} | (above[parent] if parent >= 0 else set()))
        within = range(max(0, int(low[node]) - root), int(high[node]) - root)
        hidden += sum(key not in above[node] for key in within)
    return hidden


def _flops(layer: LayerSpec, sight: VisibleKeys) -> int:
    if layer.mla is not None:
        return 2 * layer.num_heads * min(_absorbed(layer.mla, sight), _naive(layer.mla, sight))
    return 2 * layer.num_heads * sight.pairs * (layer.head_size + layer.value_head_size)


def _absorbed(mla: MLASpec, sight: VisibleKeys) -> int:
    """Return the multiply-add operations of one head in the absorbed form."""
    projected = sight.request.rows * mla.kv_lora_rank * (mla.qk_nope_head_dim + mla.v_head_dim)
    return projected + sight.pairs * (2 * mla.kv_lora_rank + mla.qk_rope_head_dim)


def _naive(mla: MLASpec, sight: VisibleKeys) -> int:
    """Return those in the naive form, which projects each visible key to the heads."""
    projected = (sight.end - sight.first) * mla.kv_lora_rank * (mla.qk_nope_head_dim + mla.v_head_dim)
    return projected + sight.pairs * (mla.qk_nope_head_dim + mla.qk_rope_head_dim + mla.v_head_dim)


def _context_rows(seen: list[tuple[RequestSpec, VisibleKeys]]) -> int:
    """Return the number of cache rows from earlier steps that some row sees, counting those of a shared prefix once."""
    total, shared = 0, list[tuple[int, int]]()
    for spec, sight in seen:
        end, prefix = min(sight.end, sight.request.cached), spec.shared_prefix
        total += spec.count * max(0, end - max(sight.first, prefix))
        shared.append((sight.first, min(end, prefix)))
    reached = 0
    for first, end in sorted(shared):
        total += max(0, end - max(first, reached))
        reached = max(reached, end)
    return total


@dataclass(frozen=True)
class Sizes:
    """copied: bytes to copy. side: most rows of the square matrices. limit_ns: time limit for each of the two."""

    copied: int
    side: int
    repeats: int
    limit_ns: int


GPU = Sizes(copied=2**30, side=8192, repeats=10, limit_ns=500_000_000)
CPU = Sizes(copied=2**25, side=1024, repeats=5, limit_ns=80_000_000)

FIRST_SIDE = 128


def measure_ceilings(
    device: torch.device | str, dtype: str, clock: Clock, flush: Callable[[], object] = do_nothing
) -> Ceilings:
    """Measure the ceilings of ``device``. ``dtype``: a layer's. ``clock``: one that is used for nothing else.

    ``flush`` is called before each repeat, as before each sample. Copied bytes count twice, as read and as written.
    """
    device, element = torch.device(device), DTYPES[dtype]
    accelerator = accelerator_of(device)
    sizes, free = (CPU, CPU.copied * 64) if accelerator is None else (GPU, accelerator.free_bytes())
    generator = torch.Generator(device).manual_seed(0)
    copied = min(sizes.copied, free // 8) // element.itemsize
    source = torch.randn(copied, generator=generator, device=device, dtype=element)
    target = torch.empty_like(source)
    copy_ns = _best(lambda: target.copy_(source), clock, sizes, flush)
    copy_bytes, source, target = 2 * source.nbytes, torch.empty(0), torch.empty(0)  # frees the memory for the products

    side, rate = FIRST_SIDE, 0.0
    end = host_ns() + sizes.limit_ns
    while True:
        a, b = (torch.randn(side, side, generator=generator, device=device, dtype=element) for _ in range(2))
        best_ns = _best(lambda a=a, b=b: a @ b, clock, sizes, flush)  # type: ignore[misc]
        rate = max(rate, 2 * side**3 / best_ns * 1e9)
        # The next product has eight times as much work.
        if side == sizes.side or 12 * (side * side * element.itemsize) > free or host_ns() + 16 * best_ns > end:
            break
        side *= 2
    return Ceilings(copy_bytes_per_s=copy_bytes / copy_ns * 1e9, matmul_flops_per_s=rate, dtype=dtype)


def _best(call: Callable[[], object], clock: Clock, sizes: Sizes, flush: Callable[[], object]) -> int:
    """Return the shortest time of a few repeats, without the first if there are others, within the limit."""
    end = host_ns() + sizes.limit_ns
    times = [clock.time(call, before=flush)]
    for _ in range(sizes.repeats):
        if host_ns() + times[-1] > end:
            break
        times.append(clock.time(call, before=flush))
    return max(1, min(times[1:] or times))
