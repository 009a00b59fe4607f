"""``attncheck warm``, and a run that warms: kernels are compiled by other processes, and nothing else changes.

The backend is a miniature whose kernels are files in Triton's cache, one a number of rows. Its process waits at 32 rows
until there is the kernel of the last case.
"""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from attncheck.harness.cli import app as cli
from attncheck.harness.workers import executor, pool
from attncheck.harness.workers.pool import WarmingAhead
from attncheck.reports.run_file.store import read_run

pytestmark = [pytest.mark.xdist_group("warm"), pytest.mark.usefixtures("preloaded")]

COMPILING = """\
import os, pathlib, time
from attncheck.backends.candidates.reference import ReferenceBackend, ReferenceImpl

class Compiling(ReferenceBackend):
    class Impl(ReferenceImpl):
        def forward(self, layer, query, *args, **kwargs):
            cache = pathlib.Path(os.environ["TRITON_CACHE_DIR"])
            kernel = cache / f"rows-{len(query)}" / "attend.cubin"
            since = time.monotonic()
            while len(query) == 32 and not (cache / "rows-96").exists():  # until another process is at work
                assert time.monotonic() - since < 60, "none came"
                time.sleep(0.01)
            if not kernel.exists():
                time.sleep(0.1)
                kernel.parent.mkdir(parents=True, exist_ok=True)
                kernel.write_bytes(b"")
                with open("compiled.txt", "a") as log:
                    print(os.getpid(), len(query), file=log)
            return super().forward(layer, query, *args, **kwargs)
    @classmethod
    def get_name(cls): return "COMPILING"
    @classmethod
    def get_impl_cls(cls): return cls.Impl
"""
SUITE = """\
suite: rows
defaults:
  layer: {num_heads: 4, num_kv_heads: 2, head_size: 32, dtype: float32}
cases:
"""
ROWS = (16, 32, 48, 64, 80, 96)
OPTIONS = ("./compiling.py:Compiling", "--suite", "rows.yaml", "--check", "numerics", "--device", "cpu")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "compiling.py").write_text(COMPILING)
    (tmp_path / "rows.yaml").write_text(SUITE + "".join(f"  - {{id: rows-{n}, batch: q{n}}}\n" for n in ROWS))
    (tmp_path / "results").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    monkeypatch.setattr(pool, "usable_cores", lambda: 2)
    return tmp_path


def compiled(folder: Path) -> list[tuple[str, int]]:
    """The process and the rows of each kernel that was compiled."""
    lines = (folder / "compiled.txt").read_text().splitlines()
    return [(process, int(rows)) for process, rows in map(str.split, lines)]


@pytest.mark.slow
def test_what_it_warms_is_what_a_run_needs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["warm", *OPTIONS]) == 0
    warmed = compiled(folder)
    assert set(ROWS) <= {rows for _, rows in warmed}
    line = re.search(r"^Compiling: 6 cases, \S+ s, processes at once: 2; kernels added: (.*)$", capsys.readouterr().out)
    kernels = len({rows for _, rows in warmed})
    assert line is not None
    assert line[1] == f"triton {kernels}, inductor 0, flashinfer 0"
    assert not list((folder / "results").iterdir())
    assert cli.main(["run", *OPTIONS]) == 0
    assert compiled(folder) == warmed


def test_a_run_that_sees_kernels_compiled_has_others_compile_ahead(
    folder: Path, monkeypatch: pytest.MonkeyPatch, the_run: Callable[[Path], Path]
) -> None:
    monkeypatch.setattr(pool, "_SLOW_S", 0.05)
    monkeypatch.setattr(executor, "WarmingAhead", lambda *given, is_on: WarmingAhead(*given, is_on=True))
    assert cli.main(["run", *OPTIONS]) == 0
    found = read_run(the_run(folder))
    assert [(record.case_id, record.outcome) for record in found.records] == [(f"rows-{n}", "passed") for n in ROWS]
    (first, *_) = processes = list(dict.fromkeys(process for process, _ in compiled(folder)))
    assert len(processes) == 2
    assert (first, ROWS[0]) in compiled(folder)
    assert (processes[1], ROWS[-1]) in compiled(folder)
