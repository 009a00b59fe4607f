"""A kernel that does not end is reported as work of the backend's call that launched it, not at a line of attncheck."""

from pretend_cuda import Settings

from attncheck.reports.run_file.causes import cause_of_end

BACKENDS = """\
import torch
from attncheck.backends.mutants.graphs import Base, RowsImpl


def work_for_ever():
    torch.cuda._sleep(2**62)


class Endless(Base):
    @classmethod
    def kv_cache_codec(cls, layer, cache):
        return None


class InForward(Endless):
    class Impl(RowsImpl):
        def attend(self, *arguments):
            super().attend(*arguments)
            work_for_ever()


class InTheWriter(Endless):
    forward_includes_kv_cache_update = False

    class Impl(RowsImpl):
        brings_writer = True

        def write(self, *_):
            pass

        def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
            super().write(layer, key, value, *self._cache_views(kv_cache), slot_mapping)
            work_for_ever()
"""


def test_a_kernel_that_does_not_end_is_charged_to_the_call_that_launched_it(run_attncheck, tmp_path):
    (tmp_path / "endless.py").write_text(BACKENDS)
    words = ["--backend", "endless.py:InForward", "--backend", "endless.py:InTheWriter", "--suite", "small.yaml"]
    _, records = run_attncheck([*words, "--check", "numerics", "--case-timeout", "4", "--jobs", "2"], Settings())
    for found, call in zip(records, ("forward", "do_kv_cache_update"), strict=True):
        assert found.outcome == "timed_out"
        # The pretend device waits in files of its own, where torch has one frame.
        lines = [line for line in found.output.splitlines() if "threading.py" not in line and "clock.py" not in line]
        output = "\n".join(lines).replace("pretend/pretend_cuda/", "site-packages/torch/cuda/")
        assert cause_of_end(found.cause, found.stage, output).endswith(f": work of {call} on the GPU goes on")
