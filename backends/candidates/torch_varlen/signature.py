"""What the installed ``torch.nn.attention.varlen.varlen_attn`` takes: its arguments differ from release to release.

As published with torch 2.11 it takes packed keys only; with 2.13 also a table of pages, how many keys are in use, and
fewer heads of keys than of queries. Told by the signature, not by the version. Its module is imported where it is asked
for, since torch's compiler comes along, which takes seconds. Must not know: layers, steps.
"""

import importlib
import inspect
from typing import Any

import torch

_NEEDED = ("return_aux", "scale", "window_size")
_FOR_PAGES = ("block_table", "seqused_k")


def module() -> Any:
    """``torch.nn.attention.varlen``."""
    return importlib.import_module("torch.nn.attention.varlen")


def parameters() -> frozenset[str]:
    """The names of the arguments of ``varlen_attn``."""
    return frozenset(inspect.signature(module().varlen_attn).parameters)


def takes_pages(known: frozenset[str]) -> bool:
    """Whether keys may stay in pages, for a function of the arguments ``known``."""
    return known.issuperset(_FOR_PAGES)


def missing_reasons() -> list[str]:
    """Why this torch's function cannot be called on a GPU; empty: it can."""
    if not torch.backends.cuda.is_flash_attention_available():
        return [f"torch {torch.__version__} was built without FlashAttention"]
    missing = [name for name in _NEEDED if name not in parameters()]
    return [f"torch {torch.__version__}: varlen_attn takes no {', '.join(missing)}"] if missing else []
