"""A folder to type commands in: a suite of two small questions, and backends that are wrong."""

import os
import shlex
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from attncheck.harness.cli import app as cli
from attncheck.reports.run_file.store import read_run

SUITE = """\
suite: small
description: two small questions
defaults:
  layer: {num_heads: 4, num_kv_heads: 2, head_size: 32, dtype: float32}
cases:
  - {id: decode, batch: q1s20_q1s7}
  - {id: prefill, batch: q17, checks: [numerics]}
"""
WRONG = """\
from attncheck.backends.candidates.reference import ReferenceBackend, ReferenceImpl

class Wrong(ReferenceBackend):
    class Impl(ReferenceImpl):
        def forward(self, *args, **kwargs):
            result = super().forward(*args, **kwargs)
            result.mul_(1.25)
            return result
    @classmethod
    def get_name(cls): return "WRONG"
    @classmethod
    def get_impl_cls(cls): return cls.Impl

class Raising(Wrong):
    class Impl(ReferenceImpl):
        def forward(self, *args, **kwargs):
            raise RuntimeError("no such kernel")

class Leaving(Wrong):
    class Impl(ReferenceImpl):
        def forward(self, *args, **kwargs):
            raise SystemExit(0)

class Nowhere(ReferenceBackend):
    @classmethod
    def unavailable_reasons(cls, device): return ["needs a moon"]

class Nothing(ReferenceBackend):
    @classmethod
    def unsupported_reasons(cls, layer, cache, batch): return ["cannot"]
"""
RUN = "run --suite small.yaml --device cpu"


class Done(NamedTuple):
    """What a command printed, and its exit code."""

    code: int
    out: str
    err: str


@pytest.fixture
def typed(capsys):
    """``typed("list cases", "--suite", path)``: what that command printed, and its exit code."""

    def typed(command, *more):
        capsys.readouterr()
        code = cli.main([*shlex.split(command), *map(str, more)])
        return Done(code, *capsys.readouterr())

    return typed


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "small.yaml").write_text(SUITE)
    (tmp_path / "wrong.py").write_text(WRONG)
    (tmp_path / "results").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def run(typed, folder, preloaded):
    """``run("reference --check lse")``: that run of the small suite."""
    return lambda words: typed(f"{RUN} {words}")


@pytest.fixture
def here(typed, folder):
    """The same without processes of the backends' own, where these are not what is tested: they cost seconds."""
    return lambda words: typed(f"{RUN} --in-process {words}")


@pytest.fixture
def the_run():
    """``the_run()``: the only run below ``results``."""

    def the_run():
        (path,) = Path("results").iterdir()
        return read_run(path)

    return the_run


@pytest.fixture
def workers_of():
    """``workers_of(pid)``: the processes of backends that a run has, each of which leads a session."""

    def workers_of(pid):
        paths = Path(f"/proc/{pid}/task").glob("*/children")
        found = [int(each) for path in paths for each in path.read_text().split()]
        return [each for each in found if os.getsid(each) == each]

    return workers_of


@pytest.fixture
def is_alive():
    """``is_alive(pid)``: whether there is such a process, and it has not ended."""

    def is_alive(pid):
        with suppress(OSError):
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
        return False

    return is_alive
