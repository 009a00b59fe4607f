"""Damaged copies of valid files, by chance, and what a reader may do with one.

``damaged`` changes bytes. ``reshaped`` changes values: their types, their places, their keys.
"""

import copy
import json
import resource
import sys
import time
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from hypothesis import given, settings
from hypothesis import strategies as st

from attncheck.errors import LONGEST_MESSAGE, SHOWN_ERRORS, QuestionError

INPUTS = 300
"""Inputs of a usual run; the hypothesis profile ``fuzz`` has 100,000."""

MOST_SECONDS = 2.0
MOST_BYTES = 512 * 2**20

TEXTS = (
    *("", " ", "~", "null", "yes", "010", "1e400", "2026-13-45", "a" * 20_000, "é", "\U0001f600", "\u2028"),
    *("\x00", "\x07", "\x1b[2J", "\x85", "\u202egnp.exe", "\ufeff", "\ud800", "%s{0}{x.y}", "$(id)", "`id`", "../../a"),
    *("</script><script>hacked()</script>", '"><img src=x onerror=hacked()>', "]]>", "<!--", "javascript:hacked()"),
    *("::error::text", "\n::set-output name=a::b", "##[error]text"),
    *("=1+1", "@SUM(A1)", "| a |\n|---|", "# a", "[a](b)"),
    *("*", "[", "[!", "[z-a]", "*a" * 50, "q1", "q5s9_q1", "9q99999s99999", "q" * 5000, "smoke", "a.b.c", "1/0", "0/0"),
    *("9999999/9999999", "1/99999999999999999999", "-1/3", "NaN", "Infinity", "x/y"),
)
"""Texts that a reader, or whatever shows them, could take for something else."""

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31, 2**63, -(2**63) - 1, 10**30, 10**400, 10**4000),
    *(0.5, -0.0, 5e-324, 1e308, -1e308, 1.7976931348623157e308, float("inf"), float("-inf"), float("nan")),
    *([], {}, [[]], [None] * 300, {"": {}}, {"a": [1, {"b": 2}]}),
)

TOKENS = (
    *(b"", b"\n", b"\r", b"\t", b" ", b"    ", b"-", b": ", b"? ", b", ", b"[", b"]", b"{", b"}", b'"', b"'", b"\\"),
    *(b"#", b"|\n", b">-\n", b"---\n", b"...\n", b"%YAML 9.9\n", b"&a ", b"*a", b"<<: *a", b"<<: [*a, *a]", b"!!int "),
    *(b"!!python/object/apply:os.system ", b"!" + b"t" * 3000 + b" ", b"*" + b"n" * 3000, b"\\u0000", b"\\ud800"),
    *(b"\x00", b"\x1b", b"\x7f", b"\x80", b"\xc0\xaf", b"\xed\xa0\x80"),
    *(b"\xef\xbb\xbf", b"\xff\xfe", b"\xf4\x90\x80\x80"),
    *(b"[" * 3000, b"{" * 300, b'{"a":' * 3000, b"- " * 300, b"9" * 30, b"9" * 5000, b"1e999999999", b"0x" + b"f" * 90),
    *(b"NaN", b"-Infinity", b"null", b"true", b"a" * 70_000, b"k: v\n" * 50, b'"kind":"header",', b'"kind":"footer",'),
)

T = TypeVar("T")

ENCODINGS = ("utf-16", "utf-16-le", "utf-32", "utf-8-sig", "utf-7", "cp1252")


def damaged(chance: Random, contents: Sequence[bytes]) -> bytes:
    """Return one of ``contents`` with up to four edits of its bytes."""
    data = chance.choice(contents)
    for _ in range(chance.randint(1, 4)):
        start = chance.randint(0, len(data))
        end = min(len(data), start + chance.choice((1, 2, 7, 40, 300, 5000)))
        match chance.choice(("delete", "repeat", "insert", "insert", "replace", "move", "flip", "cut", "encode")):
            case "delete":
                data = data[:start] + data[end:]
            case "repeat":
                data = data[:end] + data[start:end] * chance.choice((1, 2, 30)) + data[end:]
            case "insert":
                data = data[:start] + chance.choice(TOKENS) + data[start:]
            case "replace":
                data = data[:start] + chance.choice(TOKENS) + data[end:]
            case "move":
                to = chance.randint(end, len(data))
                data = data[:start] + data[end:to] + data[start:end] + data[to:]
            case "flip" if start < len(data):
                data = data[:start] + bytes([data[start] ^ 1 << chance.randrange(8)]) + data[start + 1 :]
            case "cut":
                data = data[:start]
            case "encode":
                data = data.decode("utf-8", "replace").encode(chance.choice(ENCODINGS), "replace")
    return data


def reshaped(chance: Random, tree: Any) -> Any:
    """Return a copy of ``tree``, of dicts, lists and scalars, with up to four edits of its values."""
    root = [copy.deepcopy(tree)]
    for _ in range(chance.randint(1, 4)):
        places = list(_places(root))
        owner, key = chance.choice(places)
        match chance.choice(("value", "value", "value", "everywhere", "delete", "rename", "repeat", "copy", "nest")):
            case "value":
                owner[key] = copy.deepcopy(chance.choice((*TEXTS, *VALUES)))
            case "everywhere":
                old, new = owner[key], chance.choice(TEXTS)
                for other, name in places if isinstance(old, str) else ():
                    if other[name] == old:
                        other[name] = new
            case "delete" if owner is not root:
                del owner[key]
            case "rename" if isinstance(owner, dict):
                owner[chance.choice(TEXTS)] = owner.pop(key)
            case "repeat" if isinstance(owner, list) and owner is not root:
                owner[key:key] = copy.deepcopy([owner[key]] * chance.choice((1, 3, 60)))
            case "copy":
                source, name = chance.choice(places)
                owner[key] = copy.deepcopy(source[name])
            case "nest":
                for _ in range(chance.choice((1, 3, 45, 200))):
                    owner[key] = [owner[key]] if isinstance(owner, list) else {"a": owner[key]}
    return root[0]


def written(chance: Random, tree: Any, indent: int | None = None) -> bytes:
    """Return ``tree`` as JSON, which is YAML too, with or without escapes."""
    text = json.dumps(tree, ensure_ascii=chance.random() < 0.5, indent=indent)
    return text.encode(errors="surrogatepass")


def changed(chance: Random, trees: Sequence[Any], files: Sequence[bytes], small: Sequence[bytes]) -> bytes:
    """Return a reshaped tree of ``trees``, or damaged contents: seldom one of ``files``, else one of ``small``."""
    kind = chance.randrange(8)
    if kind < 4:
        return written(chance, reshaped(chance, chance.choice(trees)), chance.choice((None, 1)))
    return damaged(chance, files if kind == 4 else small)


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yield owner and key of each value below ``tree``."""
    waiting = [tree]
    while waiting:
        owner = waiting.pop()
        for key in list(owner) if isinstance(owner, dict) else range(len(owner)):
            yield owner, key
            if isinstance(owner[key], dict | list):
                waiting.append(owner[key])


def try_inputs(check: Callable[[Random], None], count: int = INPUTS) -> None:
    """Call ``check`` with another source of chance for each input; ``Random(SEED)`` in a report repeats that input.

    All inputs together may take :data:`MOST_BYTES`: a MemoryError fails the test.
    """
    inputs = settings(max_examples=max(count, settings.default.max_examples))
    with _little_memory():
        inputs(given(st.randoms(use_true_random=True))(check))()


def answered(read: Callable[[Path], T], path: Path, data: bytes) -> T | None:
    """Return what ``read`` makes of a file of ``data``; None: it refuses the file, by name.

    Any other exception, a message that is long or has control characters, and more than two seconds fail the test.
    """
    path.write_bytes(data)
    start = time.process_time()
    try:
        return read(path)
    except QuestionError as error:
        lines = str(error).split("\n")
        assert len(lines) <= SHOWN_ERRORS + 1
        for line in lines:
            assert line.startswith(str(path)), line[:LONGEST_MESSAGE]
            assert line.isprintable(), line[:LONGEST_MESSAGE]
            assert len(line) <= LONGEST_MESSAGE + 10, line[:LONGEST_MESSAGE]
        return None
    finally:
        assert time.process_time() - start < MOST_SECONDS


def obeyed(text: str) -> set[str]:
    """Return the characters of ``text`` that a terminal or a reader of bidirectional text obeys."""
    return {character for character in set(text) - {"\n", "\t"} if unicodedata.category(character) in ("Cc", "Cf")}


@contextmanager
def _little_memory() -> Iterator[None]:
    """Let the process take :data:`MOST_BYTES` more than it has; on Linux, where that works."""
    if sys.platform != "linux":
        yield
        return
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[5])
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (pages * resource.getpagesize() + MOST_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
