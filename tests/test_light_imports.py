"""What an import or a command must not load, so that it starts at once, or starts where a library is missing."""

import subprocess
import sys

import pytest

ARRAYS = {"torch", "numpy"}
OPTIONAL = {"flashinfer", "triton", "vllm"}
FORMATS = {
    f"attncheck.reports.{name}" for name in ("data", "github", "html", "junit", "markdown", "sarif", "terminal.run")
}


def command(words: str) -> str:
    """The statement that runs a command of attncheck."""
    return f"from attncheck.__main__ import main; sys.argv[1:] = {words.split()}; assert main() == 0"


LIGHT = {
    "import attncheck": {*ARRAYS, "pydantic", "yaml", "typer"},
    "import attncheck.reference as r; dir(r); r.__all__; r.LayerSpec; r.CacheSpec; r.BatchSpec": ARRAYS,
    "from attncheck.reference import AttentionType, AttentionCGSupport": ARRAYS,
    "import attncheck.reports.formats": {*ARRAYS, *FORMATS},
    "import attncheck.harness.workers.process": {*ARRAYS, "pydantic"},
    "import attncheck.harness.cli.app": {*ARRAYS, "pydantic", "yaml", "rich"},
    # Those that read run files are tried where such files are made: tests/harness/cli.
    command("list schema --of run"): {*ARRAYS, "yaml"},
    "import attncheck.reports.terminal.run, attncheck.reports.markdown.run": ARRAYS,
    "import attncheck.reports.terminal.recommendation": ARRAYS,
    "import attncheck.reports.html": {*ARRAYS, "jinja2", "matplotlib"},
    "import attncheck.reports.site.build": {*ARRAYS, "jinja2", "matplotlib"},
    "from attncheck.cases import loader, schema; [loader.load_suite(n) for n in loader.suite_names()];"
    "schema.json_schema()": {*ARRAYS, "attncheck.backends"},
    "import attncheck.harness.workers.executor, attncheck.harness.run.preparation": ARRAYS,
    **{command(words): ARRAYS for words in ("--help", "run --help", "list", "list cases", "list schema")},
    "import attncheck.reference.v0 as v; v.AttentionType; dir(v)": {"torch"},
    "import attncheck.backends.registry as r; r.known_names()": {"torch"},
    "import attncheck.harness.run.preparation as c; c.first_refs([], [])": {"torch"},
    "import attncheck.backends.mutants.catalogue as c; c.catalogue()": {"torch"},
    command("new backend fast"): {"torch"},
    # Candidates: what they declare is known where their library is missing.
    "from attncheck.backends.registry import load; load('flashinfer')": OPTIONAL,
    "from attncheck.backends.candidates.triton_mla.backend import TritonMLABackend as B; B.version()": OPTIONAL,
    "from attncheck.backends.candidates.triton_unified.backend import UnifiedBackend as B;"
    "B.version(), B.unavailable_reasons('cpu'), B.features": OPTIONAL,
    "import importlib, pkgutil, attncheck.backends.candidates.vllm as room;"
    "[importlib.import_module(f'{room.__name__}.{it.name}') for it in pkgutil.iter_modules(room.__path__)]": OPTIONAL,
}
"""By statement, the modules that it must not load. All run in one process, and those that may load more come later."""


def test_nothing_heavy_is_loaded(tmp_path):
    """The first statement that loads what it must not ends the process."""
    code = "import sys\n"
    for statement, heavy in LIGHT.items():
        code += f"{statement}\nif loaded := {heavy} & set(sys.modules):\n"
        code += f"    sys.exit({statement!r} + ' loads ' + ' '.join(loaded))\n"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


def test_what_is_loaded_is_seen(monkeypatch, tmp_path):
    monkeypatch.setattr(sys.modules[__name__], "LIGHT", {"import json": {"json", "torch"}})
    with pytest.raises(AssertionError, match="import json loads json"):
        test_nothing_heavy_is_loaded(tmp_path)


def test_a_run_of_a_backend_in_a_process_of_its_own_loads_no_torch(tmp_path):
    words = "run reference --suite=smoke --case=decode.float32 --check=numerics --no-output"
    code = f"import sys; {command(words)}; sys.exit(' '.join({ARRAYS} & set(sys.modules)) or 0)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "reference: PASSED: 1 case right" in done.stdout
