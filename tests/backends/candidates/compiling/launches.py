"""Records Triton launches made with CPU tensors, and compiles their kernels for GPUs that are not here.

    python launches.py 90 'import torch; from ... import op; op(torch.zeros(3))'

An interpreter runs kernels that no compiler takes. Nothing is launched: what is shown is that each variant compiles,
and what it takes. Prints a JSON list: of each kernel its name, bytes of shared memory, and those that a thread spills.
"""

import json
import re
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.compiler import ASTSource
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction, compute_cache_key

SHARED = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
"""Bytes of shared memory that a block can have, of NVIDIA's tables of compute capabilities."""

_PROCESSORS = 132


class Elsewhere(DriverBase):
    """The driver of a GPU of compute capability ``major * 10 + minor``, of which only that is known."""

    def __init__(self, capability):
        self._target = GPUTarget("cuda", capability, 32)

    @classmethod
    def is_active(cls):
        return True

    def get_current_target(self):
        return self._target

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def map_python_to_cpp_type(self, ty):
        raise NotImplementedError

    def get_active_torch_device(self):
        raise NotImplementedError

    def get_benchmarker(self):
        raise NotImplementedError


@dataclass(frozen=True)
class Kernel:
    """What Triton would compile for a launch: once for each ``key``."""

    name: str
    key: str
    source: Any
    options: dict[str, Any]

    def compile(self, capability):
        """Return its name, and what running it takes."""
        kernel = triton.compile(self.source, target=GPUTarget("cuda", capability, 32), options=self.options)
        return {"name": self.name, "shared": kernel.metadata.shared, "spilled": spilled_bytes(kernel.asm["cubin"])}


@contextmanager
def recorded(capability):
    """Record launches in place of making them: their kernels in order, each once. The GPU has 132 multiprocessors."""
    from attncheck.backends.candidates.triton_mla import attention
    from attncheck.backends.candidates.triton_unified import launch

    found = {}

    def record(self, *args, grid, warmup, **kwargs):
        kwargs |= {"debug": False, "instrumentation_mode": ""}
        _, known, _, backend, bind = self.device_caches[0]
        bound, specialization, options = bind(*args, **kwargs)
        key = compute_cache_key(known, specialization, options)
        if (self.__name__, key) not in found:
            options, *source = self._pack_args(backend, kwargs, bound, specialization, options)
            found[self.__name__, key] = Kernel(self.__name__, key, ASTSource(self, *source), dict(vars(options)))

    properties = SimpleNamespace(multi_processor_count=_PROCESSORS, shared_memory_per_block_optin=SHARED[capability])
    driver.set_active(Elsewhere(capability))
    kernels = []
    try:
        with (
            patch.object(JITFunction, "run", record),
            patch.object(torch.cuda, "get_device_properties", lambda device=None: properties),
            patch.object(launch, "shared_memory_of", lambda device: SHARED[capability]),
            patch.object(attention, "shared_memory_of", lambda device: SHARED[capability]),
        ):
            yield kernels
    finally:
        driver._active = None
        kernels += found.values()


def spilled_bytes(binary):
    """Return the bytes of a thread's stack: what did not fit its registers."""
    dump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [str(dump), "--dump-resource-usage", file.name]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.findall(r"\bREG:\d+ STACK:(\d+)", printed)[0])


if __name__ == "__main__":
    with recorded(int(sys.argv[1])) as kernels:
        exec(sys.argv[2], {"__name__": "launches"})
    sys.stdout.write(json.dumps([kernel.compile(int(sys.argv[1])) for kernel in kernels]))
