"""The config of the model that is being made, for constructors that are not handed it; as in vLLM.

An impl's constructor takes ten arguments and no config; in vLLM those that need more (the dtype, the page size) ask for
the current one. It stands while impls and builders are made, and at no other time. Must not know: what a config holds.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_CURRENT: ContextVar[Any] = ContextVar("current_vllm_config")


def get_current_vllm_config() -> Any:
    """The config of the layer being made: the object its builder is given, but that it holds no layers yet.

    Raises:
        RuntimeError: no layer is being made; keep what the constructor asked for.
    """
    try:
        return _CURRENT.get()
    except LookupError as error:
        raise RuntimeError(
            "no vllm_config is current: it can be asked for while impls and builders are made"
        ) from error


@contextmanager
def set_current_vllm_config(vllm_config: Any) -> Iterator[None]:
    """``vllm_config`` is the current one inside."""
    token = _CURRENT.set(vllm_config)
    try:
        yield
    finally:
        _CURRENT.reset(token)
