"""What the installed ``torch.nn.attention.varlen.varlen_attn`` takes: its arguments differ from release to release.

As published with torch 2.11 it takes packed keys only; with 2.13 also a table of pages, how many keys are in use, and
fewer heads of keys than of queries. Told by the signature, not by the version. Must not know: layers, steps.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import varlen

_NEEDED = ("return_aux", "scale", "window_size")
_FOR_PAGES = ("block_table", "seqused_k")


def function() -> Callable[..., Any]:
    """``varlen_attn``."""
    return varlen.varlen_attn


def parameters() -> frozenset[str]:
    """The names of its arguments."""
    return frozenset(inspect.signature(function()).parameters)


def takes_pages(known: frozenset[str]) -> bool:
    """Whether keys may stay in pages, for a function of the arguments ``known``."""
    return known.issuperset(_FOR_PAGES)


def missing_reasons() -> list[str]:
    """Why this torch's function cannot be called here; empty: it can."""
    missing = [name for name in _NEEDED if name not in parameters()]
    reasons = [f"torch {torch.__version__}: varlen_attn takes no {', '.join(missing)}"] if missing else []
    if not torch.backends.cuda.is_flash_attention_available():
        reasons.append(f"torch {torch.__version__} was built without FlashAttention")
    return reasons
