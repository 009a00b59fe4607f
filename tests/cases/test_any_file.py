"""Whatever a file holds, it is loaded or refused: nothing else ever comes out."""

import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from attncheck.cases.loader import load_file
from attncheck.errors import CaseFileError

PIECES = [
    *("suite: s\n", "cases:\n", "  - id: a\n", "    batch: q5s9\n", "    layer: {num_heads: 4, ", "num_kv_heads: 2, "),
    *(
        "head_size: 8}\n",
        "matrix: {layer.scale: [",
        "0.5",
        ", ",
        "]",
        "}",
        "{",
        "[",
        "- ",
        ": ",
        "\n",
        "    ",
        "&a ",
        "*a",
    ),
    *(
        "null",
        "true",
        "-1",
        "1e3",
        "99999999999999999999",
        ".inf",
        "q1",
        "_",
        '"',
        "'",
        "<<: ",
        "? ",
        "|\n",
        "!!int ",
        "#",
    ),
    *("\t", "\x00", "\u2028", "é", "\U0001f600", "---\n", "batch_specs: ", "model: ", "defaults: "),
]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=40).map("".join))
def test_text(text: str) -> None:
    _load(text.encode())


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=60))
def test_bytes(data: bytes) -> None:
    _load(data)


def _load(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "any.yaml"
        path.write_bytes(data)
        try:
            suite = load_file(path)
        except CaseFileError as error:
            assert str(error).startswith(str(path))
        else:
            assert len(suite) >= 1
