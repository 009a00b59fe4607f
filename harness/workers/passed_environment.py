"""Select the environment variables that a backend gets: those it may need, and no secrets.

Imports no torch.
"""

import ast
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path

DEFAULT = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "PWD", "TMPDIR", "TMP", "TEMP", "XDG_*"),
    *("LANG", "LANGUAGE", "LC_*", "TZ", "COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"),
    *("PYTHON*", "VIRTUAL_ENV", "CONDA_*", "COVERAGE_*", "ATTNCHECK_*"),
    *("LD_*", "MALLOC_*", "*SAN_OPTIONS"),
    *("CUDA*", "CUBLAS*", "CUDNN*", "NVIDIA*", "NV_*", "NSYS_*", "NCCL*", "HIP*", "HSA_*", "ROCM*", "ROCR*"),
    *("TORCH*", "PYTORCH*", "ATEN_*", "TRITON*", "VLLM_*", "FLASH*", "XFORMERS*"),
    *("OMP_*", "GOMP_*", "KMP_*", "MKL_*", "DNNL_*", "ONEDNN_*", "OPENBLAS*", "NUMBA*"),
    *("CC", "CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS", "CPATH", "LIBRARY_PATH", "NVCC_*", "MAX_JOBS", "CCACHE_*"),
)
"""Shell patterns of the variables that every backend gets."""

_LOOKUPS = ("os.environ", "environ", "os.getenv", "getenv")
_SECRET = ("*TOKEN", "*SECRET", "*PASSWORD", "*KEY", "*CREDENTIALS")


def passed_environment(environment: Mapping[str, str], patterns: Iterable[str] = ()) -> dict[str, str]:
    """Return the part of ``environment`` that a backend's process gets.

    These are the variables that match ``patterns``, and those that match :data:`DEFAULT` and are not named like
    secrets.
    """
    given = tuple(patterns)
    return {
        name: value
        for name, value in environment.items()
        if _matches(name, given) or (_matches(name, DEFAULT) and not _matches(name.upper(), _SECRET))
    }


@contextmanager
def only_passed(patterns: Iterable[str]) -> Iterator[None]:
    """Keep only the variables that a backend's process gets in this process, until the context ends."""
    every = dict(os.environ)
    passed = passed_environment(every, patterns)
    for name in every.keys() - passed.keys():
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update({name: value for name, value in every.items() if name not in passed})


def variables_read(file: Path) -> set[str]:
    """Return the variables that a Python file, or a module beside it that it imports, looks up by a literal name."""
    found: set[str] = set()
    files = [file]
    for path in files:  # it grows by the modules that are imported
        try:
            nodes = ast.walk(ast.parse(path.read_bytes()))
        except (OSError, SyntaxError, ValueError):  # no such file, or its import reports the error
            continue
        modules: list[str] = []
        for node in nodes:
            match node:
                case (
                    ast.Subscript(value=owner, slice=ast.Constant(str(name)), ctx=ast.Load())
                    | ast.Call(func=ast.Attribute(value=owner, attr="get" | "pop"), args=[ast.Constant(str(name)), *_])
                    | ast.Call(func=owner, args=[ast.Constant(str(name)), *_])
                    | ast.Compare(left=ast.Constant(str(name)), comparators=[owner])
                ) if ast.unparse(owner) in _LOOKUPS:
                    found.add(name)
                case ast.Import(names=names):
                    modules += [alias.name for alias in names]
                case ast.ImportFrom(module=str(name)):
                    modules.append(name)
        beside = {path.with_name(f"{module.partition('.')[0]}.py") for module in modules}
        files += sorted(beside - {*files})
    return found


def read_patterns(words: Iterable[str]) -> tuple[str, ...]:
    """Return the patterns of ``--pass-env``, each of whose ``words`` may contain several, separated by commas."""
    return tuple(part.strip() for word in words for part in word.split(",") if part.strip())


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
