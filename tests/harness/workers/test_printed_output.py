"""What a process prints: the end of each case's, apart from the others', whole lines shown, and nothing waits."""

import os
import threading

import pytest

from attncheck.harness.workers import process
from attncheck.harness.workers.process import KEPT, KEPT_OF_EARLIER, PrintedOutput, mark_of


@pytest.fixture
def pipe():
    reading, writing = os.pipe()
    yield reading, writing
    os.close(writing)


def test_cases_that_were_begun_ahead_keep_what_is_theirs(pipe):
    printed = PrintedOutput(pipe[0], "mine")
    os.write(pipe[1], b"loading\n" + mark_of("smoke/a") + b"one\n" + mark_of("smoke/b") + b"two\n")
    assert [printed.of(case) for case in ("", "smoke/a", "smoke/b", "smoke/c")] == ["loading\n", "one\n", "two\n", ""]
    os.write(pipe[1], b"three")
    assert printed.of() == "two\nthree"
    printed.close()
    printed.close()


def test_a_mark_may_come_in_pieces_and_what_looks_like_one_is_text(pipe):
    printed = PrintedOutput(pipe[0], "mine")
    for byte in b"a\0attn\0b" + mark_of("s/c") + b"d\0":
        os.write(pipe[1], bytes([byte]))
        printed.of()
    os.write(pipe[1], b"\xffe")
    assert (printed.of(""), printed.of("s/c")) == ("a\0attn\0b", "d\0\ufffde")
    printed.close()


def test_little_is_kept_of_earlier_cases_and_the_rest_is_counted(pipe):
    printed = PrintedOutput(pipe[0], "mine")
    line = b"x" * 99 + b"\n"
    os.write(pipe[1], line * 1000 + mark_of("s/next"))
    whole = KEPT_OF_EARLIER // 100
    assert printed.of("") == f"[{100_000 - 100 * whole} bytes before this are not kept]\n" + line.decode() * whole
    os.write(pipe[1], line * 1000)
    assert len(printed.of().encode()) <= KEPT + 60
    assert printed.of("s/next", 250).endswith("kept]\n" + line.decode() * 2)
    printed.close()


def test_whole_lines_are_shown_as_they_come_and_the_last_at_the_end(pipe):
    shown = []
    came = threading.Event()

    def show(label, text):
        shown.append((label, text))
        came.set()

    printed = PrintedOutput(pipe[0], "mine", show)
    os.write(pipe[1], "a\nb\n\u00fc".encode()[:-1])
    assert came.wait(20)
    assert shown == [("mine", "a\nb")]
    os.write(pipe[1], "\u00fc".encode()[-1:] + mark_of("s/c") + b"!")
    printed.close()
    assert shown[1:] == [("mine", "\u00fc!")]


def test_of_more_than_a_case_may_show_the_rest_is_dropped_and_the_next_case_is_shown(pipe, monkeypatch):
    monkeypatch.setattr(process, "SHOWN", 1000)
    shown = []
    printed = PrintedOutput(pipe[0], "mine", lambda _label, text: shown.extend(text.split("\n")))
    os.write(pipe[1], mark_of("s/a") + b"x" * 99 + b"\n" + b"\xc3\xbc" * 600 + b"\nthe end\n")
    os.write(pipe[1], mark_of("s/b") + b"short\n")
    printed.close()
    assert shown[0] == "x" * 99
    assert set(shown[1]) == {"\u00fc"}
    assert shown[2:] == [process._DROPPED.strip(), "short"]
    assert printed.of("s/a").endswith("\nthe end\n")
    assert printed.of("s/b") == "short\n"


def test_a_line_without_end_is_shown_in_pieces_and_takes_no_memory(pipe):
    shown = []
    printed = PrintedOutput(pipe[0], "mine", lambda _label, text: shown.append(text))
    block = b"x" * 2**20
    for _ in range(8):
        rest = memoryview(block)
        while rest:
            rest = rest[os.write(pipe[1], rest) :]
    assert len(printed._line) <= process._LONGEST_LINE
    printed.close()
    assert "".join(shown) == "x" * 2**23
