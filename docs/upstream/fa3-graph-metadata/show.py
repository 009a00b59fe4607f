"""Show that a full CUDA graph of FA3 fails where a step's scheduler metadata have another layout than the capture's.

    python show.py

Exits 0 while the defect is there, 1 when it is gone, and 77 without a GPU of compute capability 9.x or without FA3.
"""

import itertools
import sys
from dataclasses import dataclass

import torch

try:
    from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata, is_fa_version_supported
except ImportError:
    print("this build of vLLM has no FlashAttention")
    sys.exit(77)

HEADS, KV_HEADS, PAGE, REQUESTS, MODEL_LEN, SPLITS = 8, 2, 32, 4, 2048, 32
WINDOW = 128
KEYS = {"short": (32, 1, 33, 7), "long": (300, 700, 1000, 450)}


@dataclass(frozen=True)
class Layer:
    """A layer, and what its graph is captured with: vLLM takes 1 for graphs of decodes, and else the tokens."""

    head_size: int
    has_window: bool
    has_sinks: bool
    captured_query_len: int


class Replay:
    """The layer's full graph for one token a request, as vLLM's builder and runner use it."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        table_size = (REQUESTS, MODEL_LEN // PAGE)
        shape = (1 + REQUESTS * table_size[1], PAGE, KV_HEADS, layer.head_size)
        self.keys = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
        self.values = torch.randn_like(self.keys)
        self.table = torch.arange(1, shape[0], dtype=torch.int32, device="cuda").view(table_size)
        self.query = torch.randn(REQUESTS, HEADS, layer.head_size, dtype=torch.bfloat16, device="cuda")
        self.output = torch.zeros_like(self.query)
        self.sinks = torch.randn(HEADS, dtype=torch.bfloat16, device="cuda") if layer.has_sinks else None
        self.window = (WINDOW - 1, 0) if layer.has_window else (-1, -1)
        self.starts = torch.arange(REQUESTS + 1, dtype=torch.int32, device="cuda")
        self.lengths = torch.full((REQUESTS,), layer.captured_query_len, dtype=torch.int32, device="cuda")
        self.buffer = torch.zeros(1 + 4 * REQUESTS, dtype=torch.int32, device="cuda")
        metadata = self.metadata(layer.captured_query_len, MODEL_LEN)
        self.captured_integers = len(metadata)
        self.graph = torch.cuda.CUDAGraph()
        self.attend(metadata, layer.captured_query_len, MODEL_LEN)
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph):
            self.attend(metadata, layer.captured_query_len, MODEL_LEN)

    def metadata(self, max_query_len: int, max_seq_len: int) -> torch.Tensor:
        """Return the scheduler metadata, in the persistent buffer, whose rest is 0."""
        made = get_scheduler_metadata(
            batch_size=REQUESTS,
            max_seqlen_q=max_query_len,
            max_seqlen_k=max_seq_len,
            num_heads_q=HEADS,
            num_heads_kv=KV_HEADS,
            headdim=self.layer.head_size,
            cache_seqlens=self.lengths,
            qkv_dtype=torch.bfloat16,
            cu_seqlens_q=self.starts,
            page_size=PAGE,
            causal=True,
            window_size=self.window,
            num_splits=SPLITS,
        )
        self.buffer.zero_()
        self.buffer[: len(made)] = made
        return self.buffer[: len(made)]

    def attend(self, metadata: torch.Tensor, max_query_len: int, max_seq_len: int) -> None:
        """Write the layer's output, as FlashAttentionImpl.forward does."""
        flash_attn_varlen_func(
            q=self.query,
            k=self.keys,
            v=self.values,
            out=self.output,
            cu_seqlens_q=self.starts,
            max_seqlen_q=max_query_len,
            seqused_k=self.lengths,
            max_seqlen_k=max_seq_len,
            softmax_scale=self.layer.head_size**-0.5,
            causal=True,
            window_size=list(self.window),
            block_table=self.table,
            scheduler_metadata=metadata,
            fa_version=3,
            num_splits=SPLITS,
            s_aux=self.sinks,
        )

    def truth(self) -> torch.Tensor:
        """Return the right output in float64: the newest token of each request over its keys."""
        rows = []
        for request, length in enumerate(self.lengths.tolist()):
            first = max(0, length - WINDOW) if self.layer.has_window else 0
            pages = self.table[request].long()
            keys, values = (
                cache[pages].flatten(0, 1)[first:length].double().repeat_interleave(HEADS // KV_HEADS, 1)
                for cache in (self.keys, self.values)
            )
            scores = torch.einsum("hd,khd->hk", self.query[request].double(), keys) * self.layer.head_size**-0.5
            if self.sinks is not None:
                scores = torch.cat([scores, self.sinks.double()[:, None]], 1)
            rows.append(torch.einsum("hk,khd->hd", scores.softmax(1)[:, : length - first], values))
        return torch.stack(rows)

    def decode(self, lengths: tuple[int, ...]) -> tuple[int, int, float, float]:
        """Return the step's integers, the rows not written, and the largest error with the graph and without it."""
        self.lengths.copy_(torch.tensor(lengths))
        wanted = self.truth()
        metadata = self.metadata(1, max(lengths))
        self.output.fill_(float("nan"))
        self.graph.replay()
        torch.cuda.synchronize()
        unwritten = int(self.output.isnan().flatten(1).any(1).sum())
        error = self.error(wanted)
        self.attend(self.metadata(1, max(lengths)), 1, max(lengths))
        return len(metadata), unwritten, error, self.error(wanted)

    def error(self, wanted: torch.Tensor) -> float:
        """Return the largest error of the output; rows not written have 9."""
        return float((self.output.double() - wanted).nan_to_num(9.0).abs().max())


def main() -> int:
    """Capture for each kind of layer, replay with decodes of few and of many keys, and print a line for each."""
    if not torch.cuda.is_available() or not is_fa_version_supported(3):
        print("this machine cannot run FA3, which needs a GPU of compute capability 9.x")
        return 77
    torch.manual_seed(0)
    print("capture: head size, window, sinks, max_query_len, integers of metadata; ", end="")
    print("step: keys, integers, rows not written, error with the graph and without")
    is_wrong = False
    for layer in itertools.starmap(Layer, itertools.product((64, 128, 256), (False, True), (False, True), (4, 1))):
        replay = Replay(layer)
        for keys, lengths in KEYS.items():
            integers, unwritten, error, error_without_graph = replay.decode(lengths)
            print(
                f"{layer.head_size:4} {WINDOW if layer.has_window else '-':>4} {'sinks' if layer.has_sinks else '-':>6}"
                f"{layer.captured_query_len:2} {replay.captured_integers:3}; {keys:>5} {integers:3} "
                f"{unwritten} of {REQUESTS} {error:.1e} {error_without_graph:.1e}"
            )
            is_wrong |= error > 0.05 > error_without_graph
    return 0 if is_wrong else 1


if __name__ == "__main__":
    sys.exit(main())
