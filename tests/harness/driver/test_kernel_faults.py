"""What is wrong with a Triton kernel is told with the kernel's own line, beside the line that launches it."""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

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


@pytest.fixture
def kernels(tmp_path: Path) -> ModuleType:
    path = tmp_path / "kernels_at_fault.py"
    path.write_text(KERNELS)
    spec = importlib.util.spec_from_file_location("kernels_at_fault", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compile_kernel(kernel: Any) -> None:
    from triton import compile as compile_source
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(fn=kernel, signature={"x": "*fp32", "n": "constexpr"}, constexprs={(1,): 16})
    compile_source(source, target=GPUTarget("cuda", 90, 32))


@pytest.mark.parametrize(
    ("name", "place", "message"),
    [
        ("plain", "line 15, in plain", "NameError('nothing is not defined')"),
        ("calling", "line 9, in helper", "'constexpr' object has no attribute 'shape'"),
    ],
)
def test_a_kernel_that_cannot_be_compiled(kernels: ModuleType, name: str, place: str, message: str) -> None:
    with pytest.raises(Exception, match="at ") as caught:
        compile_kernel(getattr(kernels, name))
    raised = capture_exception("forward", caught.value)
    assert raised_at(raised.trace) == f'File "{kernels.__file__}", {place}'
    assert raised.message.startswith(f'{message} (launched by File "{__file__}", line ')
    assert raised.message.endswith(", in compile_kernel)")


def test_a_kernel_that_is_interpreted(tmp_path: Path) -> None:
    """The launch replaces the exception, as Triton's does, in a file of an installed library."""
    library = tmp_path / "site-packages" / "interpreter.py"
    kernel = tmp_path / "kernel.py"
    text = (
        "\ndef launch(kernel):\n    try: kernel()\n    except Exception as e: raise InterpreterError(repr(e)) from e\n"
    )
    names: dict[str, Any] = {}
    exec(compile("from triton.runtime.errors import InterpreterError" + text, library, "exec"), names)
    exec(compile("\n\ndef attend():\n    [][3]\n", kernel, "exec"), names)
    with pytest.raises(Exception, match="IndexError") as caught:
        names["launch"](names["attend"])
    raised = capture_exception("forward", caught.value)
    assert raised_at(raised.trace) == f'File "{kernel}", line 4, in attend'
    assert raised.message.startswith(f'IndexError: list index out of range (launched by File "{__file__}", line ')


def test_any_other_exception_is_told_as_it_is() -> None:
    with pytest.raises(ValueError, match="no") as caught:
        raise ValueError("no")
    raised = capture_exception("forward", caught.value)
    assert raised.message == "no"
    assert raised.trace.endswith('raise ValueError("no")\nValueError: no\n')
