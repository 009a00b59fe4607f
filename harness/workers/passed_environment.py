"""Select the environment variables that a backend's process gets: those it may need, and no secrets.

Imports no torch.
"""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

DEFAULT = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "PWD", "TMPDIR", "TMP", "TEMP", "XDG_*"),
    *("LANG", "LANGUAGE", "LC_*", "TZ"),
    *("PYTHON*", "VIRTUAL_ENV", "CONDA_*", "COVERAGE_*", "ATTNCHECK_*"),
    *("LD_*", "MALLOC_*", "*SAN_OPTIONS"),
    *("CUDA*", "CUBLAS*", "CUDNN*", "NVIDIA*", "NCCL*", "HIP*", "HSA_*", "ROCM*", "ROCR*"),
    *("TORCH*", "PYTORCH*", "ATEN_*", "TRITON*", "VLLM_*", "FLASH*", "XFORMERS*"),
    *("OMP_*", "GOMP_*", "KMP_*", "MKL_*", "DNNL_*", "ONEDNN_*", "OPENBLAS*", "NUMBA*"),
    *("CC", "CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS", "CPATH", "LIBRARY_PATH", "NVCC_*", "MAX_JOBS", "CCACHE_*"),
)
"""Shell patterns of the variables that every backend gets."""

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


def read_patterns(words: Iterable[str]) -> tuple[str, ...]:
    """Return the patterns of ``--pass-env``, each of whose ``words`` may contain several, separated by commas."""
    return tuple(part.strip() for word in words for part in word.split(",") if part.strip())


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
