"""``attncheck record``: the command runs with the recording switched on, and its exit code is the command's."""

import json
import os
import sys

import pytest
from inline_snapshot import snapshot

NOTES_ITS_ENVIRONMENT = (
    "import json, os, pathlib, sys;"
    "given = {k: v for k, v in os.environ.items() if k.startswith('ATTNCHECK_RECORD') or k == 'VLLM_PLUGINS'};"
    "pathlib.Path(os.environ['ATTNCHECK_RECORD']).write_text(json.dumps(given)); sys.exit(5)"
)


@pytest.mark.parametrize("plugins", [None, "theirs"])
def test_the_command_gets_the_settings_in_its_environment(typed, folder, monkeypatch, plugins):
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if plugins is not None:
        monkeypatch.setenv("VLLM_PLUGINS", plugins)
    words = "record --output a.yaml --every 3 --cases 7 --"
    done = typed(words, sys.executable, "-c", NOTES_ITS_ENVIRONMENT)
    assert done.code == 5
    assert done.err == snapshot("written: a.yaml; examine it: attncheck run --suite a.yaml\n")
    named = {} if plugins is None else {"VLLM_PLUGINS": "theirs,attncheck_record"}
    assert json.loads((folder / "a.yaml").read_text()) == named | {
        "ATTNCHECK_RECORD": str(folder / "a.yaml"),
        "ATTNCHECK_RECORD_EVERY": "3",
        "ATTNCHECK_RECORD_CASES": "7",
    }
    assert "ATTNCHECK_RECORD" not in os.environ


@pytest.mark.parametrize(("leaves_with", "expected"), [(0, 1), (4, 4)])
def test_a_command_that_serves_nothing(typed, folder, leaves_with, expected):
    done = typed("record --", sys.executable, "-c", f"raise SystemExit({leaves_with})")
    assert done.code == expected
    assert "recorded.yaml was not written: vLLM ran no batch in" in done.err
