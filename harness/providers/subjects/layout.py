"""Questions about the layout of the KV cache: an override, the environment variable, and a cached answer.

The functions have global state, which is restored afterwards.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from attncheck.harness.providers.questions import Subject, SubjectCall, SubjectSetting, subject_call

VARIABLE = "VLLM_KV_CACHE_LAYOUT"

Step = tuple[str, str | None]


@contextmanager
def _clean(get: Any, put: Any) -> Iterator[None]:
    """Remove override, environment variable and cached answer, before and afterwards; then restore the variable."""
    before = os.environ.pop(VARIABLE, None)
    try:
        put(None)
        get.cache_clear()
        yield
    finally:
        os.environ.pop(VARIABLE, None)
        put(None)
        get.cache_clear()
        if before is not None:
            os.environ[VARIABLE] = before


def _walk(get: Any, put: Any, *, steps: list[Step]) -> list[Any]:
    """Return the result of each ``get`` and ``set`` among the steps; an exception counts as ``refused``."""
    answers: list[Any] = []
    with _clean(get, put):
        for action, value in steps:
            if action == "environment":
                os.environ[VARIABLE] = str(value)
            elif action == "clear":
                get.cache_clear()
            else:
                try:
                    answers.append(get() if action == "get" else put(value))
                except Exception:  # noqa: BLE001 (foreign code)
                    answers.append("refused")
    return answers


def _put(put: Any, get: Any, *, steps: list[Step]) -> list[Any]:
    return _walk(get, put, steps=steps)


def _call(*steps: Step) -> SubjectCall:
    text = ", ".join(action if value is None and action != "set" else f"{action} {value!r}" for action, value in steps)
    return subject_call(text, steps=list(steps))


GET, CLEAR = ("get", None), ("clear", None)


def _resolutions(_: SubjectSetting) -> Iterator[SubjectCall]:
    yield _call(GET)
    yield _call(("environment", "HND"), GET, ("set", "NHD"), GET, CLEAR, GET)
    yield _call(("set", "NHD"), ("environment", "nhd"), GET)
    yield _call(("environment", "nhd"), GET, ("environment", "HND"), GET)
    yield _call(("environment", ""), GET)


def _overrides(_: SubjectSetting) -> Iterator[SubjectCall]:
    yield _call(("set", "HND"), GET)
    yield _call(("set", "HND"), ("set", None), GET)
    yield _call(("set", "LBNHC"), GET)


def _values(_: SubjectSetting) -> Iterator[SubjectCall]:
    for value in ("NHD", "HND", "nhd", "", "LBNHC", " NHD"):
        yield subject_call(repr(value), value=value)


SUBJECTS = (
    Subject("is_valid_kv_cache_layout", _values),
    Subject("get_kv_cache_layout", _resolutions, _walk, helpers=("set_kv_cache_layout",), is_function=False),
    Subject("set_kv_cache_layout", _overrides, _put, helpers=("get_kv_cache_layout",)),
)
