"""Compiles, for a GPU that is not here, the Triton kernels of the launches that a statement makes on CPU tensors.

    python launches.py 90 'import torch; from ... import op; op(torch.zeros(3))'

An interpreter runs kernels that no compiler takes. Nothing is launched: what is shown is that each variant compiles,
and what it takes. Prints a JSON list: of each kernel its name, bytes of shared memory, and a thread's registers and
spilled bytes.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction


class Elsewhere(DriverBase):
    """The driver of a GPU of compute capability ``major * 10 + minor``, of which only that is known."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError

    def get_active_torch_device(self) -> Any:
        raise NotImplementedError

    def get_benchmarker(self) -> Any:
        raise NotImplementedError


def compile_launches(capability: int, statement: str) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        found.setdefault(
            kernel.hash, {"name": self.__name__, "shared": kernel.metadata.shared, **used(kernel, capability)}
        )
        return kernel

    driver.set_active(Elsewhere(capability))
    JITFunction.run = compile_only
    try:
        exec(statement, {"__name__": "launches"})
    finally:
        JITFunction.run = run
        driver._active = None
    return list(found.values())


def used(kernel: Any, capability: int) -> dict[str, int]:
    """What the assembler says of the kernel: Triton brings one along."""
    assembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    suffix = "a" if capability >= 90 else ""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(kernel.asm["ptx"])
        command = [str(assembler), "-v", f"-arch=sm_{capability}{suffix}", str(source), "-o", f"{folder}/kernel.cubin"]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = re.search(r"Used (\d+) registers", told)
    spilled = re.search(r"(\d+) bytes spill stores", told)
    return {"registers": int(registers[1]) if registers else -1, "spilled": int(spilled[1]) if spilled else -1}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(compile_launches(int(sys.argv[1]), sys.argv[2])))
