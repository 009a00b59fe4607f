"""The frame that is shown is the author's, wherever libraries and attncheck are installed."""

import pytest

from attncheck.reports.analysis.tracebacks import raised_at

MINE = "/home/me/mine.py"
HARNESS = "/src/attncheck/harness/graphs/watch.py"
TORCH = "/venv/lib/python3.12/site-packages/torch/_ops.py"
STANDARD = "/usr/lib64/python3.12/contextlib.py"


def traceback(*paths: str) -> str:
    frames = [
        f'  File "{path}", line {number}, in call\n    work()\n    ~~~~^^' for number, path in enumerate(paths, start=1)
    ]
    return "\n".join(["Traceback (most recent call last):", *frames, "RuntimeError: no"])


@pytest.mark.parametrize(
    ("paths", "line"),
    [
        ((HARNESS, MINE), 2),
        ((HARNESS, MINE, TORCH), 2),
        ((HARNESS, MINE, HARNESS, TORCH), 2),
        ((HARNESS, MINE, "/home/me/helper.py", STANDARD, TORCH), 3),
        ((HARNESS, MINE, "/usr/lib/python3/dist-packages/triton/runtime.py"), 2),
        ((HARNESS, MINE, "<string>", "<frozen importlib._bootstrap>"), 2),
        ((HARNESS, "/venv/lib/python3.12/site-packages/attncheck/backends/torch_sdpa.py", TORCH), 2),
        ((HARNESS, "/venv/lib/python3.12/site-packages/attncheck/harness/stages.py", MINE, TORCH), 3),
        (("/home/me/attncheck/.venv/lib/python3.12/site-packages/torch/_ops.py", "/home/me/attncheck/mine.py"), 2),
        ((MINE, "/home/me/attncheck/.venv/lib/python3.12/site-packages/torch/_ops.py"), 1),
    ],
)
def test_the_innermost_frame_of_the_author_is_shown(paths: tuple[str, ...], line: int) -> None:
    assert raised_at(traceback(*paths)) == f'File "{paths[line - 1]}", line {line}, in call'


@pytest.mark.parametrize("paths", [(HARNESS,), (HARNESS, TORCH), (HARNESS, TORCH, STANDARD)])
def test_the_last_frame_is_shown_where_none_is_the_authors(paths: tuple[str, ...]) -> None:
    assert raised_at(traceback(*paths)) == f'File "{paths[-1]}", line {len(paths)}, in call'


def test_a_message_without_frames_has_no_place() -> None:
    assert raised_at("") == ""
    assert raised_at("RuntimeError: killed by signal 9") == ""


def test_the_last_of_chained_errors_counts() -> None:
    chained = (
        f"{traceback(MINE, TORCH)}\n\nDuring handling of this another came:\n\n{traceback(HARNESS, HARNESS, MINE)}"
    )
    assert raised_at(chained) == f'File "{MINE}", line 3, in call'
