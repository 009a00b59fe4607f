"""Two candidates over FlashAttention-2's kernels: ``flash_attn``, the library, and ``torch_varlen``, torch's build.

The limits were read in ``csrc/flash_attn`` of flash-attn 2.8.3 and its copy in torch; ``flash_attn`` has not been run
on a GPU. A candidate derives from :class:`FlashBackend` and :class:`FlashImpl`, and implements
:meth:`FlashImpl.answer`. The libraries are imported only if nothing else prevents their use. FlashAttention-3
(``flash_attn_interface``) would be a separate backend.
"""

import importlib
import inspect
import itertools
from abc import abstractmethod
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from attncheck.backends.base import machine
from attncheck.backends.base.gathering import unpaged_requests
from attncheck.backends.contract import AttentionLayer, AttentionType, CommonAttentionMetadata, Conventions, MultipleOf
from attncheck.backends.paged import PagedBackend, PagedImpl
from attncheck.backends.paged_metadata import PagedBuilder, PagedMetadata
from attncheck.backends.uniform import uniform_query_len
from attncheck.reference.attention.params import AttentionParams
from attncheck.reference.spec import LayerSpec
from attncheck.reference.step_spec import BatchSpec, CacheSpec

PAGE_SIZES = MultipleOf(256)
"""Sizes of pages that the kernels read in place, through a block table."""

_LOWEST_CAPABILITY = (8, 0)
"""Minimum compute capability, that of Ampere."""


@dataclass
class PackedMetadata(PagedMetadata):
    """Metadata of one step. ``cu_seq_lens``: int32 ``[R + 1]``, device, 0 and the running sums of ``seq_lens``."""

    cu_seq_lens: Tensor = field(kw_only=True)


class PackedBuilder(PagedBuilder):
    """Builder of :class:`PackedMetadata`.

    The sums are in one buffer, which the next ``build`` overwrites, so that a graph reads them at each replay. No CUDA
    graph level is declared, since no graph has been captured yet.
    """

    metadata_cls = PackedMetadata

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        room = 0 if vllm_config is None else vllm_config.scheduler_config.max_num_seqs
        self._sums = self._zeros(room)

    def own_fields(self, common: CommonAttentionMetadata) -> dict[str, Any]:
        num_reqs = len(common.seq_lens)
        if len(self._sums) <= num_reqs:
            self._sums = self._zeros(num_reqs)
        torch.cumsum(common.seq_lens, 0, dtype=torch.int32, out=self._sums[1 : num_reqs + 1])
        return {"cu_seq_lens": self._sums[: num_reqs + 1]}

    def _zeros(self, num_reqs: int) -> Tensor:
        return torch.zeros(num_reqs + 1, dtype=torch.int32, device=self.device)


class FlashBackend(PagedBackend):
    """Backend for half precision on NVIDIA GPUs; pages of any strides whose head dimension is contiguous."""

    supported_dtypes = (torch.float16, torch.bfloat16)
    supported_devices = ("cuda",)
    supported_head_sizes = tuple(range(8, 257, 8))

    @classmethod
    def unavailable_reasons(cls, device: str) -> list[str]:
        return [*super().unavailable_reasons(device), *machine.gpu_reasons(device, _LOWEST_CAPABILITY)]

    @classmethod
    def unsupported_reasons(cls, layer: LayerSpec, cache: CacheSpec, batch: BatchSpec) -> list[str]:
        has_alibi, has_window = layer.alibi_slopes is not None, layer.sliding_window is not None
        own = cls.score_reasons(layer.softmax_scale, has_alibi=has_alibi, has_window=has_window)
        return [*super().unsupported_reasons(layer, cache, batch), *own]

    @classmethod
    def score_reasons(cls, scale: float, *, has_alibi: bool, has_window: bool) -> list[str]:
        """Return why the kernels cannot compute such scores, beyond the declarations; an empty list if they can.

        They find the maximum score before they scale, and subtract the scaled maximum. With a negative scale the
        exponentials overflow, and with 0 masked scores become NaN.
        """
        return [] if scale > 0 else [f"scale {scale:g}: FlashAttention-2 needs one above 0"]


class FlashImpl(PagedImpl):
    """One layer. The library has no writer for slots, so the harness writes new keys and values."""

    backend: ClassVar[type[FlashBackend]]
    metadata_cls = PackedMetadata
    brings_writer = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        reasons = self.backend.score_reasons(
            self.scale, has_alibi=self.alibi_slopes is not None, has_window=self._window_size is not None
        )
        if reasons:
            raise NotImplementedError(f"{self.backend.get_name()}: {'; '.join(reasons)}")

    def write(
        self,
        layer: AttentionLayer,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
    ) -> None:
        raise RuntimeError(f"{self.backend.get_name()} has no cache writer")

    def attend(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        caches: tuple[Tensor, Tensor] | None,
        metadata: PagedMetadata,
        output: Tensor,
        output_lse: Tensor | None,
    ) -> None:
        name = self.backend.get_name()
        if not isinstance(metadata, PackedMetadata):
            raise TypeError(f"{name}: attn_metadata is a {type(metadata).__qualname__}, not a PackedMetadata")
        if not metadata.num_rows:
            return
        if caches is not None:
            key, value = caches
        if key is None or value is None:
            raise ValueError(f"{name}: a layer without a cache needs key and value")
        out, lse = self.answer(layer, query[: metadata.num_rows], (key, value), metadata)
        store_results(metadata, out, lse, output, output_lse)

    @abstractmethod
    def answer(
        self, layer: AttentionLayer, query: Tensor, keys: tuple[Tensor, Tensor], metadata: PackedMetadata
    ) -> tuple[Tensor, Tensor]:
        """Return output and log-sum-exp of the step's rows: ``[rows, heads, size]`` and float32 ``[rows, heads]``.

        query: ``[rows, heads, size]``, at least one row. keys: key and value, in pages if the layer has a cache,
        otherwise ``[rows, num_kv_heads, size]`` each.
        """


def longest_query(metadata: PagedMetadata) -> int:
    """Return the bound of query lengths for a call on packed sequences; at least 2.

    At 1 the kernels may assume that every request, padding included, has exactly one row, and rearrange the rows.
    """
    return max(2, metadata.common.max_query_len)


def store_results(metadata: PagedMetadata, out: Tensor, lse: Tensor, output: Tensor, output_lse: Tensor | None) -> None:
    """Copy the results of a step's rows (``[rows, heads, size]``, ``[rows, heads]``) to ``output`` and ``output_lse``.

    In a captured graph some rows may be padding, which a call on packed sequences leaves unwritten; they become 0 and
    -inf. The log-sum-exp of rows that see nothing, which the kernels set to +inf, becomes -inf.
    """
    rows = len(out)
    is_row = torch.arange(rows, device=out.device) < metadata.common.query_start_loc[-1:]
    torch.where(is_row[:, None, None], out, out.new_zeros(()), out=output[:rows])
    if output_lse is not None:
        output_lse[:rows] = lse.masked_fill(~is_row[:, None] | torch.isposinf(lse), -torch.inf)


_KNOWN_SERIES = "2.8"
"""Version series whose signatures and kernels these modules are written against (2.8.3)."""


def library_version() -> str:
    """Return the installed version, or "". flash-attn 4 is another distribution with the same package name."""
    return machine.installed_version("flash-attn") or ""


def missing_library_reasons() -> list[str]:
    """Return why the library cannot be called here, without importing it; an empty list if it can."""
    found = library_version()
    if not found:
        return ["flash-attn is not installed"]
    if found.split(".")[:2] != _KNOWN_SERIES.split("."):
        return [f"flash-attn {found}: written against {_KNOWN_SERIES}"]
    return []


UNIFORM_ROWS = 16
"""Maximum rows per request of a step that counts as decoding, or as verifying drafts."""


class FlashAttnBackend(FlashBackend):
    """Backend for head sizes up to 256 that are multiples of 8; both layouts; window and soft cap in any combination.

    It calls two functions: ``flash_attn_with_kvcache``, which may split the keys of a request, for steps with few and
    equally many rows per request, and ``flash_attn_varlen_func`` for all other steps, including encoders.

    ALiBi's bias is ``slope * j`` under the causal mask, which shifts only the log-sum-exp, and ``-slope * |i - j|``
    under any other mask. Two combinations are not supported: with a causal window the output is right but the
    log-sum-exp is measured from another position, and where a row sees later keys the bias differs from the contract's.
    """

    features = frozenset(
        {"sliding_window", "logits_soft_cap", "alibi", "non_causal", "lse", "kv_sharing", "short_keys"}
    )
    conventions = Conventions(alibi_reference="zero", padded_rows="finite")
    supported_attn_types = tuple(AttentionType)
    supported_block_sizes = (PAGE_SIZES,)
    kernels_of: ClassVar[str] = "FA2"
    """The begin of the names in ``chosen_kernels``."""

    get_name = staticmethod(lambda: "FLASH_ATTN")
    get_impl_cls = staticmethod(lambda: FlashAttnImpl)
    get_builder_cls = staticmethod(lambda: FlashAttnBuilder)

    @classmethod
    def library(cls) -> Any:
        """Import and return the module with ``flash_attn_varlen_func`` and ``flash_attn_with_kvcache``."""
        return importlib.import_module("flash_attn")

    @classmethod
    def unavailable_reasons(cls, device: str) -> list[str]:
        reasons = [*super().unavailable_reasons(device), *missing_library_reasons()]
        return reasons or machine.import_reasons("flash_attn")

    @classmethod
    def score_reasons(cls, scale: float, *, has_alibi: bool, has_window: bool) -> list[str]:
        reasons = super().score_reasons(scale, has_alibi=has_alibi, has_window=has_window)
        if has_alibi and has_window:
            reasons.append("ALiBi beside a sliding window: the log-sum-exp is then measured from another place")
        return reasons

    @classmethod
    def version(cls) -> str:
        found = library_version()
        return ", ".join([super().version(), *([f"flash-attn {found}"] if found else [])])


class FlashAttnBuilder(PackedBuilder):
    """Builder of :class:`PackedMetadata`."""

    backend = FlashAttnBackend


class FlashAttnImpl(FlashImpl):
    """One layer."""

    backend: ClassVar[type[FlashAttnBackend]] = FlashAttnBackend

    def answer(
        self, layer: AttentionLayer, query: Tensor, keys: tuple[Tensor, Tensor], metadata: PackedMetadata
    ) -> tuple[Tensor, Tensor]:
        query_len = uniform_query_len(metadata, UNIFORM_ROWS)
        # A graph for mixed lengths may be captured with equal ones; its max_query_len is then not their length.
        if not self.has_cache or query_len is None or query_len != metadata.common.max_query_len:
            return self._packed(query, keys, metadata)
        return self._uniform(query.unflatten(0, (-1, query_len)), keys, metadata)

    def _uniform(self, query: Tensor, caches: tuple[Tensor, Tensor], metadata: PackedMetadata) -> tuple[Tensor, Tensor]:
        """Attend with ``query [requests, rows, heads, size]``; padding, which has no keys, gets 0."""
        common, num_reqs = metadata.common, len(query)
        out, lse = self.backend.library().flash_attn_with_kvcache(
            query,
            *caches,
            cache_seqlens=common.seq_lens[:num_reqs],
            block_table=common.block_table_tensor[:num_reqs],
            return_softmax_lse=True,
            **self._scores(metadata, query.device),
        )
        self.chosen_kernels.add(f"{self.backend.kernels_of} flash_attn_with_kvcache")
        return out.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)

    def _packed(self, query: Tensor, keys: tuple[Tensor, Tensor], metadata: PackedMetadata) -> tuple[Tensor, Tensor]:
        """Attend to requests of any lengths; without a cache, key and value have the rows of the same requests."""
        common, is_paged = metadata.common, self.has_cache
        out, lse, _ = self.backend.library().flash_attn_varlen_func(
            query,
            *keys,
            cu_seqlens_q=common.query_start_loc,
            cu_seqlens_k=metadata.cu_seq_lens if is_paged else common.query_start_loc,
            max_seqlen_q=longest_query(metadata),
            max_seqlen_k=common.max_seq_len if is_paged else longest_query(metadata),
            return_attn_probs=True,  # returns the log-sum-exp; without dropout no probabilities are stored
            block_table=common.block_table_tensor if is_paged else None,
            **self._scores(metadata, query.device),
        )
        self.chosen_kernels.add(f"{self.backend.kernels_of} flash_attn_varlen_func")
        return out, lse.t()

    def _scores(self, metadata: PackedMetadata, device: torch.device) -> dict[str, Any]:
        """Return the arguments on scores that both functions share."""
        params = self.params(metadata)
        return {
            "softmax_scale": self.scale,
            "causal": params.causal,
            "window_size": params.window,
            "softcap": self.logits_soft_cap or 0.0,
            "alibi_slopes": self.slopes_on(device),
        }


class TorchVarlenBackend(FlashBackend):
    """Backend for any block size and both layouts; ``varlen_attn`` supports neither soft cap nor ALiBi.

    If the installed function accepts a page table, pages of a multiple of 256 tokens are read in place. Other pages,
    and all pages with torch 2.11, are first gathered into packed rows; timings include that. The arguments of
    ``varlen_attn`` differ between releases, so its signature is inspected, not the version.
    """

    features = frozenset({"sliding_window", "non_causal", "lse", "kv_sharing", "short_keys"})
    conventions = Conventions(padded_rows="finite")
    supported_attn_types = tuple(AttentionType)

    get_name = staticmethod(lambda: "TORCH_VARLEN")
    get_impl_cls = staticmethod(lambda: TorchVarlenImpl)
    get_builder_cls = staticmethod(lambda: TorchVarlenBuilder)

    @classmethod
    def unavailable_reasons(cls, device: str) -> list[str]:
        return [*super().unavailable_reasons(device), *missing_varlen_reasons()]

    @classmethod
    def version(cls) -> str:
        return f"torch {torch.__version__}"


class TorchVarlenBuilder(PackedBuilder):
    """Builder of :class:`PackedMetadata`."""

    backend = TorchVarlenBackend


class TorchVarlenImpl(FlashImpl):
    """One layer."""

    backend = TorchVarlenBackend

    @cached_property
    def _known(self) -> frozenset[str]:
        return varlen_parameters()

    def answer(
        self, layer: AttentionLayer, query: Tensor, keys: tuple[Tensor, Tensor], metadata: PackedMetadata
    ) -> tuple[Tensor, Tensor]:
        """Call ``varlen_attn``; its log-sum-exp is ``[heads, rows]``, although its documentation states the reverse."""
        common, params = metadata.common, self.params(metadata)
        arguments: dict[str, Any] = {}
        if not self.has_cache:
            key_ends, longest = common.query_start_loc, longest_query(metadata)
        elif self._known.issuperset(_FOR_PAGES) and keys[0].shape[1] % PAGE_SIZES.base == 0:
            key_ends, longest = metadata.cu_seq_lens, common.max_seq_len
            arguments |= {"block_table": common.block_table_tensor, "seqused_k": common.seq_lens}
            if "num_splits" in self._known:
                arguments["num_splits"] = 1  # split keys are combined wrongly over pages (pytorch issue 194167)
        else:
            keys, key_ends, longest = packed_keys(params, metadata, layer, keys, query.dtype)
        key, value = keys
        if "enable_gqa" in self._known:
            arguments["enable_gqa"] = True
        elif self.num_heads != self.num_kv_heads:
            # The older function is documented for equal numbers of heads only.
            key, value = (rows.repeat_interleave(self.num_heads // self.num_kv_heads, dim=1) for rows in keys)
        left, right = params.window
        varlen = varlen_module()
        out, lse = varlen.varlen_attn(
            query,
            key,
            value,
            common.query_start_loc,
            key_ends,
            longest_query(metadata),
            longest,
            return_aux=varlen.AuxRequest(lse=True),
            scale=self.scale,
            window_size=(left, 0 if params.causal else right),  # must be a tuple: (-1, 0) is recognised by comparison
            **arguments,
        )
        self.chosen_kernels.add(flash_implementation())
        return out, lse.t()


_NEEDED = ("return_aux", "scale", "window_size")
_FOR_PAGES = ("block_table", "seqused_k")
"""Arguments of a ``varlen_attn`` for which keys may stay in pages."""


def varlen_module() -> Any:
    """Import and return ``torch.nn.attention.varlen``; on demand, since loading torch's compiler takes seconds."""
    return importlib.import_module("torch.nn.attention.varlen")


def varlen_parameters() -> frozenset[str]:
    """Return the names of the arguments of ``varlen_attn``."""
    return frozenset(inspect.signature(varlen_module().varlen_attn).parameters)


def flash_implementation() -> str:
    """Return the FlashAttention that ``varlen_attn`` calls: torch's own FA2, or the activated replacement."""
    current = getattr(torch.nn.attention, "current_flash_attention_impl", None)
    return (None if current is None else current()) or "FA2"


def missing_varlen_reasons() -> list[str]:
    """Return why this torch's function cannot be called on a GPU; an empty list if it can."""
    if not torch.backends.cuda.is_flash_attention_available():
        return [f"torch {torch.__version__} was built without FlashAttention"]
    missing = [name for name in _NEEDED if name not in varlen_parameters()]
    return [f"torch {torch.__version__}: varlen_attn takes no {', '.join(missing)}"] if missing else []


def packed_keys(
    params: AttentionParams,
    metadata: PagedMetadata,
    layer: AttentionLayer,
    caches: tuple[Tensor, Tensor],
    dtype: torch.dtype,
) -> tuple[tuple[Tensor, Tensor], Tensor, int]:
    """Return the step's keys and values, gathered from their pages request by request; the step must have rows.

    Each request has its keys from the first that some row sees to its last. The result is keys and values ``[keys,
    num_kv_heads, head size]``, 0 and the end of each request's keys (int32 ``[R + 1]``; a request without rows has no
    keys), and the maximum number of keys of one request. Lengths are read on the host, so such a step cannot be part of
    a CUDA graph.
    """
    found = list(unpaged_requests(params, metadata, layer, None, None, caches, dtype))
    lens = iter([len(piece.key) for piece in found])
    counts = [next(lens) if query_len else 0 for query_len in metadata.query_lens]
    ends = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device=found[0].key.device)
    keys = torch.cat([piece.key for piece in found]), torch.cat([piece.value for piece in found])
    return keys, ends, max(counts)
