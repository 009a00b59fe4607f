"""``attncheck warm``: several processes compile the kernels of a run, which then compiles none.

The backend is a miniature whose kernels are files in Triton's cache, one a number of rows. Its process waits at 32 rows
until there is the kernel of the last case.
"""

import re

import pytest

from attncheck.harness.workers import pool

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
OPTIONS = "./compiling.py:Compiling --suite rows.yaml --check numerics --device cpu"


@pytest.fixture
def kernels(folder, monkeypatch):
    """``kernels()``: the process and the rows of each kernel that was compiled in this folder."""
    (folder / "compiling.py").write_text(COMPILING)
    (folder / "rows.yaml").write_text(SUITE + "".join(f"  - {{id: rows-{n}, batch: q{n}}}\n" for n in ROWS))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder / "triton"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(folder))
    monkeypatch.setattr(pool, "usable_cores", lambda: 2)

    def kernels():
        lines = (folder / "compiled.txt").read_text().splitlines()
        return [(process, int(rows)) for process, rows in map(str.split, lines)]

    return kernels


@pytest.mark.slow
def test_what_it_warms_is_what_a_run_needs(folder, typed, kernels):
    done = typed(f"warm {OPTIONS}")
    warmed = kernels()
    assert set(ROWS) <= {rows for _, rows in warmed}
    line = re.search(r"^Compiling: 6 cases, \S+ s, processes at once: 2; kernels added: (.*)$", done.out)
    assert line[1] == f"triton {len({rows for _, rows in warmed})}, inductor 0, flashinfer 0"
    assert not list((folder / "results").iterdir())
    assert typed(f"run {OPTIONS}").code == 0
    assert kernels() == warmed
