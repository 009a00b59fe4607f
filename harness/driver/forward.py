"""One entry into a backend's ``forward``, as the model's layer makes it, and what came out of it.

The cache is written before, aliases are handed out. Must not know: sessions, what is judged.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attncheck.backends.contract import AttentionBackend
from attncheck.harness.driver.forward_calls import ForwardCall
from attncheck.harness.driver.output_buffers import GuardedBuffer, read_result
from attncheck.harness.driver.results import CallResult
from attncheck.harness.driver.vllm_config import LayerStub
from attncheck.harness.problem.output_quantisation import output_codes
from attncheck.harness.problem.problem import Problem


def output_buffers(
    backend: type[AttentionBackend], problem: Problem, num_tokens: int, num_rows: int, device: torch.device
) -> tuple[GuardedBuffer, GuardedBuffer | None]:
    """For the output of ``num_tokens`` rows, ``num_rows`` of them real, and for the LSE where it is declared."""
    shape = (num_tokens, problem.layer.num_heads)
    codes = output_codes(problem.layer)
    dtype = problem.dtype if codes is None else codes.dtype
    out = GuardedBuffer((*shape, problem.output_size), num_rows, dtype, device)
    if "lse" not in backend.features:
        return out, None
    return out, GuardedBuffer(shape, num_rows, torch.float32, device)


def output_scale_of(problem: Problem, device: torch.device) -> Tensor | None:
    """``output_scale`` of a layer whose output is quantised: float32, one element."""
    codes = output_codes(problem.layer)
    return None if codes is None else torch.tensor([codes.scale], dtype=torch.float32, device=device)


def bound_forward(
    backend: type[AttentionBackend],
    impl: Any,
    attn_layer: LayerStub,
    call: ForwardCall,
    kv_cache: Tensor,
    metadata: Any,
    out: GuardedBuffer,
    lse: GuardedBuffer | None,
    output_scale: Tensor | None,
) -> Callable[[], object]:
    """One entry with all of its arguments bound, to be made under ``torch.no_grad()``; returns what ``forward`` does.

    Nothing but the backend's own code is left to be run. The device is not waited for.
    """
    keywords = {} if lse is None else {"output_lse": lse.handed_out()}
    if output_scale is not None:
        keywords["output_scale"] = output_scale
    # An alias: what the backend does to the tensor object must not reach ours.
    cache, output = kv_cache.detach(), out.handed_out()
    query, key, value, slots = call.query, call.key, call.value, call.common.slot_mapping
    writes = not backend.forward_includes_kv_cache_update and metadata is not None and key is not None

    enter = partial(impl.forward, attn_layer, query, key, value, cache, metadata, output=output, **keywords)
    if not writes:
        return enter  # without a frame of Python's on the way, which a clock would count

    def forward() -> object:
        impl.do_kv_cache_update(attn_layer, key, value, cache, slots)
        return enter()

    return forward


def enter_forward(
    backend: type[AttentionBackend],
    impl: Any,
    attn_layer: LayerStub,
    call: ForwardCall,
    kv_cache: Tensor,
    metadata: Any,
    out: GuardedBuffer,
    lse: GuardedBuffer | None,
    output_scale: Tensor | None,
) -> object:
    """What ``forward`` returns, under ``torch.no_grad()``; the device is not waited for."""
    forward = bound_forward(backend, impl, attn_layer, call, kv_cache, metadata, out, lse, output_scale)
    with torch.no_grad():
        return forward()


def result_of(
    backend: type[AttentionBackend], call: ForwardCall, returned: object, out: GuardedBuffer, lse: GuardedBuffer | None
) -> CallResult:
    """What the call answered, which ``forward`` left in its buffers, or ``returned`` where it may."""
    rows, protocol = read_result(returned, out, must_be_buffer=backend.accept_output_buffer)
    is_buffer = rows is out.rows
    return CallResult(
        call=call,
        output=rows,
        lse=None if lse is None else lse.rows,
        unwritten=out.unwritten_rows() if is_buffer else torch.zeros(len(rows), dtype=torch.bool, device=rows.device),
        lse_unwritten=None if lse is None else lse.unwritten_rows(),
        breaches=tuple(name for name, buffer in (("output", out), ("LSE", lse)) if buffer and buffer.breached()),
        protocol=protocol,
    )
