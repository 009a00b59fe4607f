"""A fault of a Triton kernel is reported with the kernel's own line, beside the line that launches it."""

import os
import subprocess
import sys

import pytest

from attncheck.harness.driver.observation import capture_exception
from attncheck.reports.run_file.causes import raised_at

pytest.importorskip("triton", reason="no Triton")

KERNELS = """\
from functools import partial

import triton.language as tl
from triton.runtime.jit import JITFunction  # `triton.jit` interprets where TRITON_INTERPRET says so


@JITFunction
def helper(x):
    return tl.dot(x, 3)


@partial(JITFunction, do_not_specialize=[])
def plain(x, n: tl.constexpr):
    i = tl.arange(0, n)
    tl.store(x + i, nothing)


@JITFunction
def calling(x, n: tl.constexpr):
    tl.store(x, helper(tl.load(x + tl.arange(0, n))))
"""


COMPILE = """
from triton import compile as compile_source
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from attncheck.harness.driver.observation import capture_exception
from attncheck.reports.run_file.causes import raised_at
import kernels_at_fault

for kernel in (kernels_at_fault.plain, kernels_at_fault.calling):
    source = ASTSource(fn=kernel, signature={"x": "*fp32", "n": "constexpr"}, constexprs={(1,): 16})
    try:
        compile_source(source, target=GPUTarget("cuda", 90, 32))
    except Exception as error:
        raised = capture_exception("forward", error)
        print(raised_at(raised.trace), raised.message, sep="\\n")
"""


def test_a_kernel_that_cannot_be_compiled(tmp_path, preloaded):
    """In a process of its own: an interpreted kernel changes ``triton.language`` for the rest of a process."""
    kernels, script = tmp_path / "kernels_at_fault.py", tmp_path / "compiling.py"
    kernels.write_text(KERNELS)
    script.write_text(COMPILE)
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
    launched = f' (launched by File "{script}", line '
    plain, its_message, calling, other_message = done.stdout.splitlines()
    assert plain == f'File "{kernels}", line 15, in plain'
    assert its_message.startswith(f"NameError('nothing is not defined'){launched}")
    assert calling == f'File "{kernels}", line 9, in helper'
    assert other_message.startswith(f"'constexpr' object has no attribute 'shape'{launched}")


def test_a_kernel_that_is_interpreted(tmp_path):
    """The launch replaces the exception, as Triton's does, in a file of an installed library."""
    library = tmp_path / "site-packages" / "interpreter.py"
    kernel = tmp_path / "kernel.py"
    text = (
        "\ndef launch(kernel):\n    try: kernel()\n    except Exception as e: raise InterpreterError(repr(e)) from e\n"
    )
    names = {}
    exec(compile("from triton.runtime.errors import InterpreterError" + text, library, "exec"), names)
    exec(compile("\n\ndef attend():\n    [][3]\n", kernel, "exec"), names)
    with pytest.raises(Exception, match="IndexError") as caught:
        names["launch"](names["attend"])
    raised = capture_exception("forward", caught.value)
    assert raised_at(raised.trace) == f'File "{kernel}", line 4, in attend'
    assert raised.message.startswith(f'IndexError: list index out of range (launched by File "{__file__}", line ')
