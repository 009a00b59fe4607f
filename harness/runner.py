"""Drives one backend through one problem, exactly as a model runner does, and never reaches around the contract.

A :class:`Session` constructs impl, builder and cache once; every :meth:`Session.run` refills the cache, hands over
fresh tensors and reports what was seen. Whatever the backend raises is caught here, with the stage it happened in.
Must not know: truths, checks, outcomes.
"""

from copy import copy
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attncheck.backends.contract import AttentionBackend, CommonAttentionMetadata, KVCacheSpec
from attncheck.backends.packings import cache_dtype
from attncheck.harness.buffers import GuardedBuffer, read_result
from attncheck.harness.config import Layer, vllm_config
from attncheck.harness.observation import Observation, Raised
from attncheck.harness.pool import Pool
from attncheck.harness.problem import Problem
from attncheck.harness.stages import StageError, stage
from attncheck.harness.step import Step, make_step


@dataclass(frozen=True)
class Fill:
    """What stands where nothing should be looked at.

    ``poison`` in foreign slots (None: plausible stale rows; only in ``regions``, where given), ``padding`` in the
    padding rows of query, key and value. ``loose_bounds``: the metadata's maxima are upper bounds, not exact. ``rows``:
    keys and values of which the step brings its part, in place of the problem's.
    """

    poison: float | None = None
    regions: tuple[str, ...] | None = None
    padding: float = float("nan")
    loose_bounds: bool = False
    rows: tuple[Tensor, Tensor] | None = None


class Session:
    """One backend on one problem on one device. Raises StageError where the backend refuses or breaks at set-up."""

    def __init__(self, backend: type[AttentionBackend], problem: Problem, device: torch.device) -> None:
        self.backend, self.problem, self.device = backend, problem, device
        self.attn_layer = Layer(problem.cache, device)
        self.impl = stage("construct", self._construct_impl)
        self.builder = stage("builder", self._construct_builder)
        self.pool: Pool | None = None
        self._prepare()

    def beside(self, problem: Problem) -> "Session":
        """A session for another problem of the same layer and cache, over the same impl and builder."""
        other = copy(self)
        other.problem = problem
        other._prepare()
        return other

    def run(self, fill: Fill = Fill(), *, images: bool = True) -> Observation | Raised:
        """One step over a freshly filled cache, of whose memory ``images`` before and after are kept."""
        try:
            step = self._step(fill)
            common = step.common_metadata()
            kv_cache = self._empty_cache()
            if self.pool is not None:
                kv_cache = self.pool.filled(fill.poison, fill.regions)
                if not self.impl.brings_writer and step.key is not None and step.value is not None:
                    self.pool.write(step.slot_mapping, step.key, step.value)
            before = self._image() if images else None
            metadata = stage("build", lambda: self.builder.build(common_prefix_len=0, common_attn_metadata=common))
        except StageError as failure:
            return failure.raised
        out, lse = self._buffers(step)
        try:
            returned = stage("forward", lambda: self._forward(step, kv_cache, metadata, out, lse))
        except StageError as failure:
            return replace(failure.raised, touched=self._touched(out, before))
        rows, protocol = read_result(returned, out, must_be_buffer=self.backend.accept_output_buffer)
        unwritten = out.unwritten_rows() if rows is out.rows else torch.zeros(len(rows), dtype=torch.bool)
        return Observation(
            output=self._in_problem_order(rows, step),
            lse=None if lse is None else self._in_problem_order(lse.rows, step),
            unwritten=self._in_problem_order(unwritten, step)[: step.num_rows],
            pool_before=before,
            pool_after=self._image() if images else None,
            changed=tuple(_changes(self._step(fill), step, common)),
            breaches=tuple(name for name, buffer in (("output", out), ("LSE", lse)) if buffer and buffer.breached()),
            protocol=protocol,
        )

    def run_without_metadata(self) -> Tensor | Raised:
        """The profiling call: no metadata, an empty cache. The output, in the step's order."""
        step = self._step(Fill(padding=0.0))
        out, lse = self._buffers(step)
        try:
            returned = stage(
                "forward without metadata", lambda: self._forward(step, self._empty_cache(), None, out, lse)
            )
        except StageError as failure:
            return failure.raised
        return read_result(returned, out, must_be_buffer=self.backend.accept_output_buffer)[0]

    def _prepare(self) -> None:
        """Everything that depends on the problem."""
        self.order = stage("builder", self._request_order)
        self.pool = None
        if self.problem.has_pool:
            self.pool = stage("cache", self._make_pool)

    def _make_pool(self) -> Pool:
        pool = Pool(self.backend, self.problem, self.device, self._write_through_backend)
        if pool.codec is None and not self.impl.brings_writer:
            raise TypeError(
                f"{self.backend.get_name()} brings neither a writer nor a cache codec: who fills its cache?"
            )
        return pool

    def _buffers(self, step: Step) -> tuple[GuardedBuffer, GuardedBuffer | None]:
        """For the output, and for the LSE where it is declared."""
        shape = (len(step.query), self.problem.layer.num_heads)
        out = GuardedBuffer((*shape, self._head_size_v), step.num_rows, self.problem.dtype, self.device)
        if "lse" not in self.backend.features:
            return out, None
        return out, GuardedBuffer(shape, step.num_rows, torch.float32, self.device)

    def _image(self) -> Tensor | None:
        """A copy of the cache's memory."""
        return None if self.pool is None else self.pool.bytes().clone()

    def _touched(self, out: GuardedBuffer, before: Tensor | None) -> tuple[str, ...]:
        """What a call changed before it raised; unknown where the device no longer answers after a fault on it."""
        try:
            touched = ["the output"] if out.touched() else []
            if before is not None and self.pool is not None and not torch.equal(before, self.pool.bytes()):
                touched.append("the cache")
        except RuntimeError:
            touched = ["the device"]
        return tuple(touched)

    def _empty_cache(self) -> Tensor:
        return torch.empty(0, dtype=self.problem.dtype, device=self.device)

    @property
    def _head_size_v(self) -> int:
        return self.problem.layer.value_head_size

    def _construct_impl(self) -> Any:
        layer = self.problem.layer
        keywords: dict[str, Any] = {}
        if layer.sink_logits is not None:
            keywords["sinks"] = torch.tensor(layer.sink_logits, dtype=torch.float32, device=self.device)
        if layer.value_head_size != layer.head_size:
            keywords["head_size_v"] = layer.value_head_size
        return self.backend.get_impl_cls()(
            layer.num_heads,
            layer.head_size,
            layer.softmax_scale,
            layer.num_kv_heads,
            None if layer.alibi_slopes is None else list(layer.alibi_slopes),
            layer.sliding_window,
            self.problem.cache.kv_cache_dtype,
            layer.logits_soft_cap,
            str(layer.attn_type),
            None,
            **keywords,
        )

    def _construct_builder(self) -> Any:
        problem, layer, cache = self.problem, self.problem.layer, self.problem.cache
        batch = problem.case.batch
        width = problem.block_table.shape[1] * cache.block_size
        spec = KVCacheSpec(
            block_size=cache.block_size,
            num_kv_heads=layer.num_kv_heads,
            head_size=layer.head_size,
            dtype=cache_dtype(layer, cache),
            head_size_v=layer.value_head_size if layer.value_head_size != layer.head_size else None,
            sliding_window=layer.sliding_window,
            attention_chunk_size=layer.attn_chunk_size,
        )
        config = vllm_config(
            layer,
            cache,
            problem.dtype,
            max_model_len=max(width, batch.max_seq_len),
            max_num_seqs=batch.num_requests + batch.padding.requests,
            max_tokens=batch.num_tokens + batch.padding.tokens,
        )
        return self.backend.get_builder_cls()(spec, ["layer.0"], config, self.device)

    def _request_order(self) -> list[int]:
        """Requests with at most ``reorder_batch_threshold`` new tokens first, as the runner sorts a batch."""
        threshold = getattr(self.builder, "reorder_batch_threshold", None)
        requests = range(len(self.problem.requests))
        if threshold is None:
            return list(requests)
        return sorted(requests, key=lambda i: self.problem.requests[i].rows > threshold)

    def _step(self, fill: Fill) -> Step:
        return make_step(
            self.problem,
            self.device,
            self.order,
            padding_fill=fill.padding,
            pad_seq_len=self.backend.conventions.pad_seq_len,
            loose_bounds=fill.loose_bounds,
            new_rows=fill.rows,
        )

    def _forward(
        self, step: Step, kv_cache: Tensor, metadata: Any, out: GuardedBuffer, lse: GuardedBuffer | None
    ) -> object:
        keywords = {} if lse is None else {"output_lse": lse.handed_out()}
        # An alias: what the backend does to the tensor object must not reach ours.
        cache = kv_cache.detach()
        with torch.no_grad():
            if not self.backend.forward_includes_kv_cache_update and metadata is not None and step.key is not None:
                self.impl.do_kv_cache_update(self.attn_layer, step.key, step.value, cache, step.slot_mapping)
            result: object = self.impl.forward(
                self.attn_layer, step.query, step.key, step.value, cache, metadata, output=out.handed_out(), **keywords
            )
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return result

    def _in_problem_order(self, rows: Tensor, step: Step) -> Tensor:
        """Real rows back where the problem has them; padding rows stay behind."""
        ordered = rows.clone()
        ordered[step.row_order.to(rows.device)] = rows[: step.num_rows]
        return ordered

    def _write_through_backend(self, kv_cache: Tensor, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Fill the cache by the backend's own writer, where it brings no codec: a prefill whose result is dropped."""
        if not self.backend.forward_includes_kv_cache_update:
            self.impl.do_kv_cache_update(self.attn_layer, key, value, kv_cache, slots)
            return
        capacity = self.problem.num_blocks * self.problem.cache.block_size
        for first in range(0, len(slots), capacity):
            piece = slice(first, first + capacity)
            common = _prefill_metadata(slots[piece], self.problem, self.device)
            metadata = self.builder.build(common_prefix_len=0, common_attn_metadata=common)
            query = key.new_zeros(len(slots[piece]), self.problem.layer.num_heads, self.problem.layer.head_size)
            output = key.new_zeros(len(query), self.problem.layer.num_heads, self._head_size_v)
            keywords = {}
            if "lse" in self.backend.features:
                keywords["output_lse"] = torch.zeros(output.shape[:2], device=self.device)
            with torch.no_grad():
                self.impl.forward(
                    self.attn_layer, query, key[piece], value[piece], kv_cache, metadata, output=output, **keywords
                )


def _changes(pristine: Step, step: Step, common: CommonAttentionMetadata) -> list[str]:
    """Names of inputs and metadata fields that no longer hold what was handed over."""
    names = []
    real = {"query": pristine.num_rows, "key": pristine.num_key_rows, "value": pristine.num_key_rows}
    for name in ("query", "key", "value", "slot_mapping"):
        was, now = getattr(pristine, name), getattr(step, name)
        count = real.get(name)
        if was is not None and not torch.equal(was[:count], now[:count]):
            names.append(name)
    untouched = pristine.common_metadata()
    metadata = [field.name for field in fields(CommonAttentionMetadata)]
    changed = [name for name in metadata if not _same(getattr(untouched, name), getattr(common, name))]
    return [*names, *(f"metadata.{name}" for name in changed)]


def _same(was: object, now: object) -> bool:
    """Whether a field still holds what it held: of the same type, and tensors on the same device."""
    if type(was) is not type(now):
        return False
    if isinstance(was, Tensor) and isinstance(now, Tensor):
        alike = (was.device, was.dtype, was.shape) == (now.device, now.dtype, now.shape)
        return alike and torch.equal(was, now)
    if isinstance(was, np.ndarray) and isinstance(now, np.ndarray):
        return was.dtype == now.dtype and np.array_equal(was, now)
    return was == now


def _prefill_metadata(slots: Tensor, problem: Problem, device: torch.device) -> CommonAttentionMetadata:
    """Metadata of one prompt whose K/V go to ``slots``."""
    count, size = len(slots), problem.cache.block_size
    starts, lens = torch.tensor([0, count], dtype=torch.int32), torch.tensor([count], dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts.to(device, copy=True),
        query_start_loc_cpu=starts,
        seq_lens=lens.to(device, copy=True),
        seq_lens_cpu=lens,
        num_computed_tokens_cpu=torch.zeros(1, dtype=torch.int32),
        num_reqs=1,
        num_actual_tokens=count,
        max_query_len=count,
        max_seq_len=count,
        block_table_tensor=torch.arange(-(-count // size), dtype=torch.int32, device=device)[None],
        slot_mapping=slots,
        causal=problem.layer.is_causal,
    )
