"""The one error tree: every exception class of the package is in it, and the drawing names it below its base."""

import ast
import re
from pathlib import Path

from attncheck import errors

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("reference", "cases", "backends", "reports", "harness")
INDENT = 4
ENTRY = re.compile(r"^( [ |`-]*)(\w+Error)\b", re.MULTILINE)


def test_a_message_is_one_line_of_bounded_length_whatever_a_file_holds():
    assert errors.readable("a.yaml:1:2: key: reason") == "a.yaml:1:2: key: reason"
    assert errors.readable("\x1b[2J\n\u202e\ud800é") == r"\x1b[2J\n\u202e\ud800é"
    long = str(errors.CaseFileError("r" * 10_000, file="a.yaml", line=1, allowed="write less"))
    assert long.startswith("a.yaml:1: rrr")
    assert long.endswith("rrr; write less")
    assert len(long) == errors.LONGEST_MESSAGE + len(" ... ")
    assert len(str(errors.RunFileError("a.jsonl", "r" * 10_000, line=3))) == len(long)


def defined() -> dict[str, str]:
    """By name, the first base of each exception class of the package."""
    files = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    files.append(ROOT / "src" / "attncheck" / "errors.py")
    found: dict[str, str] = {}
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            base = ast.unparse(node.bases[0]) if isinstance(node, ast.ClassDef) and node.bases else ""
            if base.endswith(("Error", "Exception", "Exit", "Interrupt", "Warning")):
                found[node.name] = base.rpartition(".")[2]
    return found


def drawn() -> dict[str, str | None]:
    """By name, the base of each class in the drawing."""
    assert errors.__doc__ is not None
    above: list[str] = []
    found: dict[str, str | None] = {}
    for match in ENTRY.finditer(errors.__doc__):
        depth = len(match[1]) // INDENT - 1
        del above[depth:]
        found[match[2]] = above[-1] if above else None
        above.append(match[2])
    return found


def test_every_exception_class_is_drawn_below_its_base():
    assert drawn() == {name: None if base == "Exception" else base for name, base in defined().items()}
    for name in ("SpecError", "ReferenceArgumentError"):
        assert issubclass(getattr(errors, name), ValueError)
        assert re.search(rf"{name} .*\(also a ValueError\)", errors.__doc__ or "")
