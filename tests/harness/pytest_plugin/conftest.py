"""A folder for sessions of pytest with the plugin: a suite of small questions, and backends that are wrong."""

import shlex

import pytest

SUITE = """\
suite: small
defaults:
  layer: {num_heads: 2, num_kv_heads: 1, head_size: 16, dtype: float32}
cases:
  - {id: decode, batch: q1s20_q1s7}
  - {id: capped.x-1, batch: q17, layer: {logits_soft_cap: 5.0}, checks: [numerics, lse]}
  - {id: mixed, batch: q1s20_q5s9, checks: [numerics]}
"""
WRONG = """\
import os, pathlib
from attncheck.backends.candidates.reference import ReferenceBackend, ReferenceImpl

pathlib.Path("seen").write_text(" ".join(name for name in os.environ if name.endswith("_TOKEN")))

class Wrong(ReferenceBackend):
    class Impl(ReferenceImpl):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            with pathlib.Path("constructed.txt").open("a") as log:
                log.write(f"{os.getpid()} {self.logits_soft_cap}\\n")
        def forward(self, *args, **kwargs):
            result = super().forward(*args, **kwargs)
            result.zero_()
            return result
    @classmethod
    def get_name(cls): return "WRONG"
    @classmethod
    def get_impl_cls(cls): return cls.Impl

class Raising(Wrong):
    class Impl(ReferenceImpl):
        def forward(self, *args, **kwargs):
            raise RuntimeError("no such kernel")

class Dying(Wrong):
    class Impl(ReferenceImpl):
        def forward(self, *args, **kwargs):
            os.abort()

class Huge(Wrong):
    class Impl(ReferenceImpl):
        def forward(self, *args, **kwargs):
            bytearray(2**36)

class Keeping(Wrong):
    class Impl(ReferenceImpl):
        kept = None
        def forward(self, *args, **kwargs):
            result = super().forward(*args, **kwargs)
            if self.kept is None:
                self.kept = result.clone()
            result.copy_(self.kept)
            return result

class Nowhere(ReferenceBackend):
    @classmethod
    def unavailable_reasons(cls, device): return ["needs a moon"]
"""


@pytest.fixture
def folder(pytester, monkeypatch):
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT"):  # of the run around it
        monkeypatch.delenv(name, raising=False)
    (pytester.path / "small.yaml").write_text(SUITE)
    (pytester.path / "wrong.py").write_text(WRONG)
    return pytester


def split(words, backends):
    """The words of a session of the small suite on the CPU; ``--X`` of the plugin may be typed as ``@X``."""
    chosen = "".join(f" @backend {name}" for name in backends)
    suite = "@suite small.yaml" if backends else ""
    return shlex.split(f"-p no:cacheprovider @device cpu {suite}{chosen} {words}".replace("@", "--attncheck-"))


@pytest.fixture
def apart(folder, preloaded):
    """``apart("@check lse", "reference")``: a session of these backends in a process of its own."""
    return lambda words, *backends: folder.runpytest_subprocess(*split(words, backends), timeout=300)


@pytest.fixture
def inside(folder):
    """The same in this process."""
    return lambda words, *backends: folder.runpytest_inprocess(*split(words, backends))
