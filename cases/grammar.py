"""The batch grammar: ``2q2ks4k_32q1s1k`` to requests and back.

The grammar of vLLM's ``attention_benchmarks``: segments joined by ``_``, each ``[count]q<len>[k][s<len>[k]]``. ``q`` is
the number of new tokens. ``s`` is the number of tokens in the cache after the step, new ones included; it defaults to
``q``. A lowercase ``k`` multiplies by 1024, and the count defaults to 1. Unlike vLLM's parser, this one rejects invalid
batches with a reason. It does not depend on layers, caches or files.
"""

import re
from collections.abc import Sequence
from dataclasses import fields

from attncheck.errors import BatchSpecError, SpecError
from attncheck.reference.step_spec import MAX_TOKENS, RequestSpec

_SEGMENT = re.compile(r"(?P<count>[0-9]+)?q(?P<q>[0-9]+)(?P<qk>k?)(?:s(?P<s>[0-9]+)(?P<sk>k?))?")
_OLD_SEGMENT = re.compile(r"([0-9]*q[0-9]+k?)kv([0-9]+k?)")
_DIGITS_LIMIT = len(str(MAX_TOKENS))

_IN_STRINGS = ("query_len", "seq_len", "count")
"""Fields of a request that a batch string has."""

_FORM = "a segment is [count]q<new tokens>[s<total tokens>], with lowercase k for x1024, as in 2q2ks4k_32q1s1k"


def parse_batch(text: str) -> tuple[RequestSpec, ...]:
    """Return the requests of a batch string, one :class:`RequestSpec` per segment, in order.

    Raise :class:`BatchSpecError` for a string that does not parse, and for a count of 0, a query without tokens, a
    total below the new tokens, or more than :data:`MAX_TOKENS` tokens in all.
    """
    if not text:
        raise BatchSpecError("the string is empty", text=text, allowed=_FORM)
    for mark in re.finditer(r"\s", text):
        raise BatchSpecError("blanks are not part of a batch", text=text, position=mark.start(), allowed=_FORM)
    requests: list[RequestSpec] = []
    tokens = position = 0
    for segment in text.split("_"):
        request = _parse_segment(segment, text, position)
        tokens += request.count * request.total_len
        if tokens > MAX_TOKENS:
            raise BatchSpecError(
                f"up to here the batch holds {tokens} tokens",
                text=text,
                position=position,
                allowed=f"at most {MAX_TOKENS} tokens are allowed",
            )
        requests.append(request)
        position += len(segment) + 1
    return tuple(requests)


def format_batch(requests: Sequence[RequestSpec]) -> str:
    """Return the string that :func:`parse_batch` reads back as exactly these requests.

    Raise :class:`SpecError` for what a string cannot express: encoder lengths, shared prefixes, a total below the new
    tokens, or a batch without requests.
    """
    if not requests:
        raise SpecError("a batch needs a request", field="requests", value=(), allowed="give one")
    return "_".join(_format_segment(request) for request in requests)


def _parse_segment(segment: str, text: str, start: int) -> RequestSpec:
    match = _SEGMENT.fullmatch(segment)
    if match is None:
        raise _explain(segment, text, start)

    def number(name: str, suffix: str | None = None) -> int:
        digits = match[name].lstrip("0") or "0"
        scale = 1024 if suffix is not None and match[suffix] else 1
        # The length is checked first, so that a number of a million digits is never converted.
        if len(digits) > _DIGITS_LIMIT or int(digits) * scale > MAX_TOKENS:
            raise BatchSpecError(
                f"{match[name][:24]}{match[suffix] if suffix else ''} is too large",
                text=text,
                position=start + match.start(name),
                allowed=f"at most {MAX_TOKENS} tokens are allowed",
            )
        return int(digits) * scale

    count = 1 if match["count"] is None else number("count")
    query_len = number("q", "qk")
    seq_len = query_len if match["s"] is None else number("s", "sk")
    if count == 0:
        raise BatchSpecError(
            "a count of 0 has no effect", text=text, position=start, allowed="leave the segment out, or give a count"
        )
    if query_len == 0:
        raise BatchSpecError(
            "a request without new tokens has no effect",
            text=text,
            position=start + match.start("q") - 1,
            allowed="padding requests are written {requests: ..., padding: {requests: n}}",
        )
    if seq_len < query_len:
        raise BatchSpecError(
            f"s counts all tokens, and {seq_len} are fewer than the {query_len} new ones",
            text=text,
            position=start + match.start("s") - 1,
            allowed=f"write {match['count'] or ''}q{query_len}s{query_len + seq_len} for {seq_len} tokens of context, "
            "or use the list form",
        )
    return RequestSpec(query_len=query_len, seq_len=seq_len, count=count)


def _explain(segment: str, text: str, start: int) -> BatchSpecError:
    """Return the error for a segment that does not match, with what to write instead."""
    old = _OLD_SEGMENT.fullmatch(segment)
    if not segment:
        return BatchSpecError("a segment is empty", text=text, position=start, allowed="write one _ between segments")
    if old is not None:
        return BatchSpecError(
            "kv is the old spelling of s",
            text=text,
            position=start + old.start(2) - 2,
            allowed=f"write {old[1]}s{old[2]}",
        )
    if _SEGMENT.fullmatch(segment.lower()):
        where = next(i for i, char in enumerate(segment) if char.isupper())
        return BatchSpecError(
            f"{segment[where]!r} must be lowercase",
            text=text,
            position=start + where,
            allowed=f"write {segment.lower()}",
        )
    if "q" not in segment:
        return BatchSpecError("a segment lacks its q", text=text, position=start, allowed=_FORM)
    return BatchSpecError(
        f"{segment[:24]!r} is no segment", text=text, position=start + _first_bad(segment), allowed=_FORM
    )


def _first_bad(segment: str) -> int:
    """Return the index of the first character that no segment could have in that position."""
    match = re.match(r"[0-9]*(?:q(?:[0-9]+k?(?:s(?:[0-9]+k?)?)?)?)?", segment)
    return min(match.end() if match else 0, len(segment) - 1)


def _format_segment(request: RequestSpec) -> str:
    for field in fields(request):
        value = getattr(request, field.name)
        if field.name not in _IN_STRINGS and value != field.default:
            raise SpecError(
                "a batch string cannot express this",
                field=field.name,
                value=value,
                allowed="use the list form",
            )
    if request.context_len < 0:
        raise SpecError(
            f"a batch string cannot express {request.query_len} new tokens that exceed the total",
            field="seq_len",
            value=request.total_len,
            allowed="use the list form",
        )
    count = "" if request.count == 1 else str(request.count)
    total = "" if request.context_len == 0 else f"s{_format_number(request.total_len)}"
    return f"{count}q{_format_number(request.query_len)}{total}"


def _format_number(n: int) -> str:
    return f"{n // 1024}k" if n % 1024 == 0 else str(n)
