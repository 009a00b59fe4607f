"""The memory order of a KV cache's axes, by vLLM's rule: an override, then the environment, then NHD.

The result is cached for the process, as in vLLM, whose callers rely on it.
"""

import logging
import os
from functools import lru_cache
from typing import get_args

from attncheck.errors import ReferenceArgumentError
from attncheck.reference.spec import Layout

logger = logging.getLogger(__name__)

KVCacheLayoutType = Layout
"""``"NHD"`` or ``"HND"``."""

_KV_CACHE_LAYOUT_OVERRIDE: KVCacheLayoutType | None = None

_VARIABLE = "VLLM_KV_CACHE_LAYOUT"


def is_valid_kv_cache_layout(value: str) -> bool:
    """Return whether the value is exactly ``"NHD"`` or ``"HND"``."""
    return value in get_args(KVCacheLayoutType)


def set_kv_cache_layout(cache_layout: KVCacheLayoutType | None) -> None:
    """Store an override of the layout; ``None`` removes it.

    A value already returned by :func:`get_kv_cache_layout` stays cached until its ``cache_clear()``. Raise
    :class:`~attncheck.errors.ReferenceArgumentError` for another layout.
    """
    global _KV_CACHE_LAYOUT_OVERRIDE  # noqa: PLW0603  # vLLM's callers set the layout of the process
    if cache_layout is not None:
        _require_layout("cache_layout", cache_layout)
    _KV_CACHE_LAYOUT_OVERRIDE = cache_layout
    logger.info("KV cache layout override: %s", cache_layout)


@lru_cache
def get_kv_cache_layout() -> str:
    """Return the override, else the environment's ``VLLM_KV_CACHE_LAYOUT``, else ``"NHD"``.

    The first result is cached until ``get_kv_cache_layout.cache_clear()``. Raise
    :class:`~attncheck.errors.ReferenceArgumentError` for another value of the environment variable, also an empty one.
    An error is not cached, and an override makes the variable unused.
    """
    if _KV_CACHE_LAYOUT_OVERRIDE is not None:
        return _KV_CACHE_LAYOUT_OVERRIDE
    layout = os.environ.get(_VARIABLE)
    if layout is None:
        return "NHD"
    _require_layout(_VARIABLE, layout)
    return layout


def _require_layout(name: str, value: str) -> None:
    if not is_valid_kv_cache_layout(value):
        raise ReferenceArgumentError(name, value, " or ".join(get_args(KVCacheLayoutType)))
