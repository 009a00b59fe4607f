"""Compiles, for an H100 that is not here, the kernels of calls of the candidate flex_attention.

    python flex_calls.py '[{"num_heads": 16, "rows": 26}, ...]'     # see Call for the rest

Tensors are fake, with shapes and no values. Torch's compiler runs in full, dynamo to Triton's assembly, in one process
as a run's does; nothing is launched. Prints a JSON list: of each call that was compiled or raised, the call, how many
graphs were compiled for it, the names of their kernels, and the error.

Modules of torch's compiler look for a device when they are imported, so they are imported where it is pretended.
"""

import ctypes
import json
import os
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch

CUDA, META, NUM_DEVICE_TYPES = 1, 14, 22
"""Of c10's enumeration ``DeviceType``."""

H100 = SimpleNamespace(
    name="H100",
    type="cuda",
    index=0,
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=80 * 2**30,
    L2_cache_size=50 * 2**20,
    shared_memory_per_block=48 * 2**10,
    shared_memory_per_block_optin=227 * 2**10,
    shared_memory_per_multiprocessor=228 * 2**10,
    regs_per_multiprocessor=2**16,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    gcnArchName="",
)


ANSWERS = {
    torch.cuda: {
        "is_available": True,
        "is_initialized": True,
        "_is_compiled": True,
        "_lazy_init": None,
        "device_count": 1,
        "current_device": 0,
        "set_device": None,
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
        "synchronize": None,
        "get_device_properties": H100,
        "get_device_capability": (H100.major, H100.minor),
        "get_device_name": H100.name,
        "current_stream": SimpleNamespace(cuda_stream=0, stream_id=0, device_index=0, device_type=CUDA),
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": None,
        "is_bf16_supported": True,
    },
    torch._C: {
        "_cuda_getCurrentRawStream": 0,
        "_cuda_getDevice": 0,
        "_cuda_exchangeDevice": 0,
        "_cuda_maybeExchangeDevice": 0,
        "_cuda_setDevice": None,
    },
}
"""What a function of a module returns where there is an H100."""


@dataclass(frozen=True)
class Call:
    """What the compiled kernel of a call depends on: parameters of the layer, and sizes and dtypes of the tensors."""

    num_heads: int = 8
    num_kv_heads: int = 2
    head_size: int = 64
    head_size_v: int | None = None
    scale: float = 0.125
    cap: float | None = None
    has_slopes: bool = False
    rows: int = 30
    keys: int = 330
    dtype: str = "bfloat16"
    has_all_rows: bool = True
    """False: without the rows that the candidate adds."""

    def make(self):
        from torch._subclasses.fake_tensor import FakeTensorMode

        from attncheck.backends.candidates.flex_attention import backend

        impl = backend.FlexImpl(
            self.num_heads,
            self.head_size,
            self.scale,
            self.num_kv_heads,
            [0.5] * self.num_heads if self.has_slopes else None,
            logits_soft_cap=self.cap,
            head_size_v=self.head_size_v,
        )
        with FakeTensorMode(allow_non_fake_inputs=True):
            dtype = getattr(torch, self.dtype)
            own, low, high = (torch.empty(self.rows, dtype=torch.int64, device="cuda") for _ in range(3))
            query, key, value = (
                torch.empty(*shape, dtype=dtype, device="cuda")
                for shape in (
                    (self.rows, self.num_heads, self.head_size),
                    (self.keys, self.num_kv_heads, self.head_size),
                    (self.keys, self.num_kv_heads, self.head_size_v or self.head_size),
                )
            )
            call = backend.Call([slice(0, self.rows)], key, value, own, low, high)
            multiple = backend._COMPILED_ROWS if self.has_all_rows else 1
            with patch.object(backend, "_COMPILED_ROWS", multiple):
                impl._attend_rows(query, call)


def compile_calls(calls):
    """Compile the calls in their order; the device must be pretended."""
    from torch._dynamo.utils import counters
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    found, kernels = [], []

    def compiled(self):
        kernels.extend(result.kernel.metadata.name for result in self.compile_results)

    CachingAutotuner._make_launchers = compiled
    CachingAutotuner.run = lambda *args, **kwargs: None
    for call in calls:
        graphs, error = counters["stats"]["unique_graphs"], None
        kernels.clear()
        try:
            call.make()
        except Exception as raised:  # noqa: BLE001 (what a call raises is printed)
            error = f"{type(raised).__name__}: {raised}"
        graphs = counters["stats"]["unique_graphs"] - graphs
        if graphs or error:
            found.append({"call": asdict(call), "graphs": graphs, "kernels": list(kernels), "error": error})
    return found


def pretend_cuda():
    """Change in this process what torch's compiler reads of a CUDA device."""
    for owner, answers in ANSWERS.items():
        for name, answer in answers.items():
            # A function for each name: dynamo keeps a table of them.
            setattr(owner, name, lambda *args, answer=answer, **kwargs: answer)
    torch.version.cuda = "13.0"
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * NUM_DEVICE_TYPES).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    guards[CUDA] = guards[CUDA] or guards[META]  # a guard that does nothing; a torch built for CPU has none for CUDA

    from launches import Elsewhere
    from torch._inductor import config
    from torch._inductor.fx_passes import joint_graph, post_grad
    from torch._inductor.runtime import triton_helpers
    from torch._subclasses.fake_tensor import FakeTensorMode
    from triton.runtime.driver import driver

    driver.set_active(Elsewhere(H100.major * 10 + H100.minor))
    FakeTensorMode.avoid_device_init = True
    torch._C._dynamo.guards._empty_strided_cuda = lambda size, stride, dtype: torch.empty_strided(
        size, stride, dtype=dtype, device="cuda"
    )
    for module in (joint_graph, post_grad):
        module.lazy_init = lambda *args: None  # it traces patterns with tensors on the device
    triton_helpers.set_driver_to_gpu = lambda: None
    config.compile_threads, config.fx_graph_cache, config.use_static_cuda_launcher = 1, False, False


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
        pretend_cuda()
        printed = compile_calls([Call(**call) for call in json.loads(sys.argv[1])])
    sys.stdout.write(json.dumps(printed))
