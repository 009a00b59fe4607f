"""Call a backend's ``forward`` as a model's layer does, and collect the result.

The sessions of a case, of a CUDA graph and of a timed step all bind their arguments here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attncheck.backends.contract import AttentionBackend
from attncheck.harness.driver.forward_calls import ForwardCall
from attncheck.harness.driver.kv_pool import KVPool
from attncheck.harness.driver.output_buffers import GuardedBuffer, read_result
from attncheck.harness.driver.results import CallResult
from attncheck.harness.driver.step import Step
from attncheck.harness.driver.vllm_config import LayerStub
from attncheck.harness.problem.output_quantisation import output_codes
from attncheck.harness.problem.problem import Problem


@dataclass(frozen=True)
class OutputBuffers:
    """The buffers that a call of ``forward`` writes its result to.

    ``lse`` is None if the backend does not declare ``lse``. ``scale``: float32, one element; None unless the layer's
    output is quantised.
    """

    out: GuardedBuffer
    lse: GuardedBuffer | None
    scale: Tensor | None

    def refill(self, num_rows: int) -> None:
        """Mark all buffers as unwritten, for a call of ``num_rows`` real rows."""
        self.out.refill(num_rows)
        if self.lse is not None:
            self.lse.refill(num_rows)

    def handed_out(self) -> dict[str, Tensor]:
        """Return the output keywords of ``forward``; the buffers are aliases of the same memory."""
        keywords = {"output": self.out.handed_out()}
        if self.lse is not None:
            keywords["output_lse"] = self.lse.handed_out()
        if self.scale is not None:
            keywords["output_scale"] = self.scale
        return keywords


@dataclass(frozen=True)
class BackendLayer:
    """A backend's impl and the layer object that holds it.

    ``writes``: whether the layer stores the keys it is given.
    """

    backend: type[AttentionBackend]
    impl: Any
    attn_layer: LayerStub
    writes: bool = True

    def output_buffers(self, problem: Problem, call: ForwardCall) -> OutputBuffers:
        """Return new buffers for the result of ``call``, on its device."""
        device, shape = call.query.device, (len(call.query), problem.layer.num_heads)
        codes, lse, scale = output_codes(problem.layer), None, None
        dtype = problem.dtype if codes is None else codes.dtype
        out = GuardedBuffer((*shape, problem.output_size), call.num_rows, dtype, device, call.output_form)
        if "lse" in self.backend.features:
            lse = GuardedBuffer(shape, call.num_rows, torch.float32, device, call.output_form)
        if codes is not None:
            scale = torch.tensor([codes.scale], dtype=torch.float32, device=device)
        return OutputBuffers(out, lse, scale)

    def store_new_rows(self, pool: KVPool, step: Step) -> None:
        """Write the new rows of ``step`` to the cache, if the layer stores keys and its impl has no writer."""
        if self.writes and not self.impl.brings_writer and step.key is not None and step.value is not None:
            slots = step.slot_mapping.clone()
            pool.write(slots, step.key[: len(slots)].clone(), step.value[: len(slots)].clone())

    def bind(
        self, call: ForwardCall, kv_cache: Tensor | None, metadata: Any, buffers: OutputBuffers
    ) -> Callable[[], object]:
        """Return ``forward`` with all arguments bound, to be called under ``torch.no_grad()``.

        ``kv_cache``: None if there is no cache. Calling the result runs the backend's code alone, and does not wait for
        the device.
        """
        impl, attn_layer, slots = self.impl, self.attn_layer, call.common.slot_mapping
        query, key, value = call.query, call.key, call.value
        if kv_cache is None:
            kv_cache = torch.empty(0, dtype=query.dtype, device=query.device)
        # An alias, so that a backend that changes the tensor object leaves ours alone.
        cache = kv_cache.detach()
        enter = partial(impl.forward, attn_layer, query, key, value, cache, metadata, **buffers.handed_out())
        if self.backend.forward_includes_kv_cache_update or not self.writes or metadata is None or key is None:
            return enter  # with no Python frame in between, which would add to a timing

        def forward() -> object:
            impl.do_kv_cache_update(attn_layer, key, value, cache, slots)
            return enter()

        return forward

    def enter(self, call: ForwardCall, kv_cache: Tensor | None, metadata: Any, buffers: OutputBuffers) -> object:
        """Return what ``forward`` returns under ``torch.no_grad()``, without waiting for the device."""
        forward = self.bind(call, kv_cache, metadata, buffers)
        with torch.no_grad():
            return forward()

    def result_of(self, call: ForwardCall, returned: object, buffers: OutputBuffers) -> CallResult:
        """Return the result of ``call``: the output buffer, or ``returned`` if the contract allows another tensor."""
        out, lse = buffers.out, buffers.lse
        rows, protocol = read_result(returned, out, must_be_buffer=self.backend.accept_output_buffer)
        if rows is out.rows:
            unwritten = out.unwritten_rows()
            if (ignored := getattr(self.impl, "ignored_result", "")) and bool(unwritten[: call.num_rows].any()):
                protocol = (*protocol, ignored)
        else:
            unwritten = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
        return CallResult(
            call=call,
            output=rows,
            lse=None if lse is None else lse.rows,
            unwritten=unwritten,
            lse_unwritten=None if lse is None else lse.unwritten_rows(),
            breaches=tuple(name for name, buffer in (("output", out), ("LSE", lse)) if buffer and buffer.breached()),
            protocol=protocol,
        )
