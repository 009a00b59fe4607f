"""Accelerators: a class for each kind of device with streams, with all that differs between kinds. The CPU has none.

Another kind is one more class, and its entry in :data:`KINDS`. What torch names alike for all accelerators, such as
streams and captures, is used through :meth:`Accelerator.module`. Loads neither torch nor pydantic when imported.
"""

import platform
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cache, cached_property
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import attncheck
from attncheck.errors import DeviceError
from attncheck.harness.host import cpu_name, first_line, git_commit, run_command, usable_cores

if TYPE_CHECKING:
    import torch

    from attncheck.reports.run_file.header import Environment
    from attncheck.reports.run_file.timings import DeviceState

CommandRunner = Callable[[Sequence[str]], str | None]
"""Returns what a command prints, or None if it is missing, fails or does not respond."""


@dataclass(frozen=True)
class Facts:
    """Properties of an accelerator; equal for all of one model.

    ``capability``: its compute capability, such as ``9.0``. ``memory``, ``cache``: bytes of its memory, and of the last
    cache before it. ``float64_rate``: its peak of float64 operations per second; None if unknown.
    """

    name: str
    capability: str | None
    memory: int
    cache: int
    float64_rate: float | None = None
    uuid: str = field(default="", compare=False)

    def __str__(self) -> str:
        capability = "" if self.capability is None else f"compute capability {self.capability}, "
        return f"{self.name}, {capability}{self.memory / 2**30:.1f} GiB"


@dataclass(frozen=True)
class GpuModes:
    """Modes of a GPU, as nvidia-smi prints them.

    ``compute``: such as ``Default`` or ``Exclusive_Process``. ``mig``: such as ``Enabled``. ``free``: bytes of its
    memory that no process uses; None if unknown.
    """

    compute: str
    mig: str
    free: int | None = None

    @property
    def is_shared(self) -> bool:
        """Whether several processes may use the GPU at once."""
        return self.compute == "Default"


_PROCESS_BYTES = 2**32
"""Memory that one process uses: its context, what torch keeps between cases, and captured graphs; estimated."""


class Accelerator(ABC):
    """A device that works through streams. Its module of torch has the names of ``torch.cuda``, as ``torch.xpu`` has.

    ``type``: as in ``torch.device``. ``index``: None for the current device of the kind.
    ``graph_class``: name of the module's class of captured graphs; empty if there are none.
    ``reports_waits``: whether :meth:`waits_raise` has an effect.
    ``variables``: patterns of the environment variables that its libraries read.
    ``remedy``: what to do to find the cause of a lost device.
    """

    type: ClassVar[str]
    graph_class: ClassVar[str] = ""
    reports_waits: ClassVar[bool] = False
    variables: ClassVar[tuple[str, ...]] = ()
    remedy: ClassVar[str]

    def __init__(self, index: int | None = None) -> None:
        self.index = index

    def __str__(self) -> str:
        return self.type if self.index is None else f"{self.type}:{self.index}"

    @classmethod
    def module(cls) -> Any:
        """Return torch's module of this kind, such as ``torch.cuda``."""
        import torch

        return getattr(torch, cls.type)

    @classmethod
    @abstractmethod
    def absence(cls) -> str:
        """Return why torch finds no such device, then ``;`` and what to do; empty if it finds one."""

    @classmethod
    @abstractmethod
    def visible_variables(cls) -> tuple[str, ...]:
        """Return the environment variables that select the visible devices, the one that decides first."""

    @abstractmethod
    def facts(self) -> Facts:
        """Return what does not change, without creating a context."""

    @abstractmethod
    def hold(self, ns: int) -> None:
        """Keep the current stream idle for at least ``ns`` nanoseconds; 0 launches a kernel that does nothing."""

    def driver(self) -> str | None:
        """Return the version of the driver; None if unknown."""
        return None

    def modes(self) -> GpuModes | None:
        """Return the modes of a GPU; None if unknown."""
        return None

    def can_serve_several(self) -> bool:
        """Return whether CUDA's Multi-Process Service (MPS) lets several processes use it at the same time."""
        return False

    def most_processes(self) -> int:
        """Return how many processes may use it at once, by its free memory and its mode; at least 1.

        If its free memory is unknown, it is that of the whole device.
        """
        modes = self.modes()
        if modes is not None and not modes.is_shared:
            return 1
        free = self.facts().memory if modes is None or modes.free is None else modes.free
        return max(1, free // 2 // _PROCESS_BYTES)

    def state(self, run: CommandRunner = run_command) -> "DeviceState | None":
        """Return frequency, temperature and throttling; None if unknown. ``run`` runs a command of the driver."""
        return None

    def waits_raise(self) -> AbstractContextManager[None]:
        """Return a context in which torch raises if an operator waits for the device, where it can."""
        return nullcontext()

    @abstractmethod
    def release_pool(self, pool: Any) -> None:
        """Stop allocations into the memory pool of a capture that could not be ended, and release it."""

    @cached_property
    def properties(self) -> Any:
        """What torch reports on the device."""
        return self.module().get_device_properties(self.index)

    def free_bytes(self) -> int:
        """Return how much of its memory torch may still allocate."""
        module = self.module()
        free, total = module.mem_get_info(self.index)
        reserved = module.memory_reserved(self.index)
        allocated = module.memory_allocated(self.index)
        allowed = int(module.get_per_process_memory_fraction(self.index) * total)
        # The driver counts memory that torch's allocator reserves as used, but torch can allocate from it again.
        return int(min(free + reserved, allowed) - allocated)

    def limit_memory(self, size: int) -> None:
        """Let torch allocate at most ``size`` bytes of its memory in this process."""
        share = min(size / self.properties.total_memory, 1.0)
        self.module().set_per_process_memory_fraction(share, self.index)

    # Streams and events are opaque to their users. These methods use :meth:`references`.

    @classmethod
    @cache
    def references(cls) -> Any:
        """Return the functions of torch that clocks need, as they are at the first call."""
        module = cls.module()
        names = ("synchronize", "current_stream", "set_stream", "device", "Event", "_sleep")
        taken = {name: getattr(module, name, None) for name in names}  # only CUDA has _sleep
        return SimpleNamespace(**taken, **{name: getattr(module.Event, name) for name in EVENT_FUNCTIONS})

    now_ns = staticmethod(time.perf_counter_ns)

    def synchronize(self) -> None:
        """Wait for all streams."""
        self.references().synchronize(self.index)

    def current(self) -> Any:
        """Return the current stream."""
        return self.references().current_stream(self.index)

    def make_current(self, stream: Any) -> None:
        """Make a stream the current one."""
        self.references().set_stream(stream)

    def record(self, stream: Any) -> Any:
        """Return a new event after all work issued to ``stream`` so far."""
        event = self.references().Event(enable_timing=True)
        self.references().record(event, stream)
        return event

    def is_done(self, event: Any) -> bool:
        """Return whether the device has reached ``event``."""
        return bool(self.references().query(event))

    def elapsed_ms(self, start: Any, end: Any) -> float:
        """Return the float32 milliseconds between two reached events."""
        return float(self.references().elapsed_time(start, end))


EVENT_FUNCTIONS = ("record", "query", "elapsed_time")
"""The methods of events that clocks call."""

_FLOAT64_A_CYCLE = {(6, 0): 32, (7, 0): 32, (8, 0): 32, (9, 0): 64, (10, 0): 64}
"""Float64 multiply-adds per cycle of an SM, by compute capability, of data-centre GPUs (CUDA programming guide)."""

_FLOAT64_OF_OTHERS = 2
"""The same for every other GPU; some with a capability below 7 have 4."""

_USUAL_CLOCK_KHZ = 1_500_000
"""Clock assumed for float64 if torch does not report it."""

REASONS = {
    0x2: "applications_clocks_setting",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}
"""Names from nvidia-smi by bit of the driver's mask (NVML's ``nvmlClocksEventReason...``).

Bit 0, an idle GPU, is not a throttling reason.
"""

MASKS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
"""The mask's name, and its name in drivers before 535."""


class Cuda(Accelerator):
    """A GPU of CUDA, or of HIP, which torch also calls ``cuda``.

    Driver, modes and state come from nvidia-smi, which is part of the driver and needs no Python library.
    """

    type = "cuda"
    graph_class = "CUDAGraph"
    reports_waits = True
    variables = ("CUDA*", "CUBLAS*", "CUDNN*", "NVIDIA*", "NV_*", "NSYS_*", "NCCL*", "HIP*", "HSA_*", "ROCM*", "ROCR*")
    remedy = "repeat with CUDA_LAUNCH_BLOCKING=1 or under compute-sanitizer"

    @classmethod
    def absence(cls) -> str:
        """See :class:`Accelerator`."""
        import torch

        if cls.module().is_available():
            return ""
        if torch.backends.cuda.is_built():
            return "finds no GPU; give --device cpu, or check the driver with nvidia-smi"
        return "is built without CUDA; give --device cpu, or install a torch that is built for CUDA"

    @classmethod
    def visible_variables(cls) -> tuple[str, ...]:
        """See :class:`Accelerator`. ROCm's ``ROCR_VISIBLE_DEVICES`` is applied before them, and does not change."""
        return ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES") if _is_hip() else ("CUDA_VISIBLE_DEVICES",)

    def facts(self) -> Facts:
        """See :class:`Accelerator`."""
        found = self.properties
        return Facts(
            found.name,
            f"{found.major}.{found.minor}",
            found.total_memory,
            found.L2_cache_size,
            float64_rate(found),
            str(getattr(found, "uuid", "")),
        )

    def hold(self, ns: int) -> None:
        """See :class:`Accelerator`."""
        taken = self.references()
        with taken.device(self.index):
            taken._sleep(round(ns * cycles_per_ns(self.properties)))

    def driver(self) -> str | None:
        """See :class:`Accelerator`."""
        return first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")

    def modes(self) -> GpuModes | None:
        """See :class:`Accelerator`."""
        query = "--query-gpu=compute_mode,mig.mode.current,memory.free"
        line = first_line("nvidia-smi", self._id_option(), query, "--format=csv,noheader,nounits")
        words = (line or "").split(", ")
        if len(words) != 3:
            return None
        compute, mig, mebibytes = words
        free = _number(mebibytes)
        return GpuModes(compute, mig, None if free is None else free * 2**20)

    def can_serve_several(self) -> bool:
        """See :class:`Accelerator`. Before capability 7.0, MPS does not separate the memory of processes."""
        return not _is_hip() and self.properties.major >= 7

    def state(self, run: CommandRunner = run_command) -> "DeviceState | None":
        """See :class:`Accelerator`. Figures that the driver does not report are None."""
        from attncheck.reports.run_file.timings import DeviceState

        for mask in MASKS:
            fields = ("clocks.sm", "clocks.max.sm", "temperature.gpu", mask)
            query = f"--query-gpu={','.join(fields)}"
            printed = run(("nvidia-smi", self._id_option(), query, "--format=csv,noheader,nounits"))
            words = [word.strip() for word in (printed or "").strip().split(",")]
            if len(words) == len(fields):
                clock, max_clock, temperature, active = map(_number, words)
                return DeviceState(
                    sm_clock_mhz=clock,
                    max_sm_clock_mhz=max_clock,
                    temperature_c=temperature,
                    throttle_reasons=tuple(name for bit, name in REASONS.items() if (active or 0) & bit),
                )
        return None

    @contextmanager
    def waits_raise(self) -> Iterator[None]:
        """See :class:`Accelerator`."""
        before = self.module().get_sync_debug_mode()
        self._set_sync_debug_mode("error")
        try:
            yield
        finally:
            self._set_sync_debug_mode(before)

    def release_pool(self, pool: Any) -> None:
        """See :class:`Accelerator`."""
        import torch

        index = self.module().current_device() if self.index is None else self.index
        with suppress(RuntimeError):  # the pool may not be recording
            torch._C._cuda_endAllocateToPool(index, pool)
            torch._C._cuda_releasePool(index, pool)  # torch calls this only after an ended capture

    def _id_option(self) -> str:
        """Return nvidia-smi's option for this GPU; its indices may differ from torch's."""
        uuid = str(self.properties.uuid)
        return f"--id={uuid}" if uuid.startswith(("GPU-", "MIG-")) else f"--id=GPU-{uuid}"

    def _set_sync_debug_mode(self, mode: int | str) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns once that the mode does not see every wait
            self.module().set_sync_debug_mode(mode)


def float64_rate(properties: Any) -> float | None:
    """Return the peak of float64 operations per second by ``torch.cuda.get_device_properties``; None for HIP."""
    if _is_hip():
        return None
    per_cycle = _FLOAT64_A_CYCLE.get((properties.major, properties.minor), _FLOAT64_OF_OTHERS)
    clock = 1000 * getattr(properties, "clock_rate", _USUAL_CLOCK_KHZ)
    return float(2 * per_cycle * properties.multi_processor_count * clock)


def cycles_per_ns(properties: Any) -> float:
    """Return an upper bound on the rate of the counter that ``torch.cuda._sleep`` reads, so that no hold is too short.

    The counter counts GPU cycles, whose clock may exceed its nominal rate by a quarter. On gfx11 it runs at 100 MHz.
    """
    if getattr(properties, "gcnArchName", "").startswith("gfx11"):
        return 0.1
    return float(1.25 * getattr(properties, "clock_rate", 2_400_000) / 1e6)  # kHz


def _is_hip() -> bool:
    import torch

    return torch.version.hip is not None


def _number(word: str) -> int | None:
    """Return the number in ``1980`` or ``0x0000000000000004``; None for ``[N/A]`` and all other text."""
    try:
        return int(word, 0)
    except ValueError:
        return None


KINDS: tuple[type[Accelerator], ...] = (Cuda,)
"""The kinds that ``--device`` accepts besides the CPU, the best first. Another kind is one more class, named here."""


def accelerator_of(device: "torch.device | str") -> Accelerator | None:
    """Return the accelerator ``device``, such as ``cuda:1``; None for a CPU. Raise DeviceError for other kinds."""
    name, _, number = str(device).partition(":")
    if name == "cpu":
        return None
    for kind in KINDS:
        if kind.type == name:
            return kind(int(number) if number else None)
    raise DeviceError(str(device), f"attncheck examines on {accepted_devices()}")


def accepted_devices() -> str:
    """Return what ``--device`` accepts, in words."""
    names = [kind.type for kind in KINDS]
    *first, last = ["cpu", *names, *(f"{name}:N" for name in names)]
    return f"{', '.join(first)} or {last}"


def accelerators_in_use(device: "torch.device | str" = "cpu") -> list[Accelerator]:
    """Return what this process uses: ``device``, and of other kinds the current one. Such a process cannot fork."""
    own = accelerator_of(device)
    used = [kind for kind in KINDS if kind.module().is_initialized()]
    return [own if own is not None and type(own) is kind else kind() for kind in used]


def collect_environment(device: str) -> "Environment":
    """Return the environment of a run on ``device`` (``cpu``, ``cuda``, ``cuda:1``, ...).

    The TF32 and determinism policies are read, not set. Set them before calling this.
    """
    import numpy as np
    import torch

    from attncheck.reports.run_file.header import Environment

    accelerator = accelerator_of(device)
    facts = None if accelerator is None else accelerator.facts()
    return Environment(
        attncheck=attncheck.__version__,
        python=platform.python_version(),
        torch=str(torch.__version__),
        numpy=np.__version__,
        platform=f"{platform.system()} {platform.machine()}",
        cpu=cpu_name(),
        cores=usable_cores(),
        device=device,
        device_name=cpu_name() if facts is None else facts.name,
        capability=None if facts is None else facts.capability,
        driver=None if accelerator is None else accelerator.driver(),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        tf32=torch.get_float32_matmul_precision() != "highest",
        git_commit=git_commit(),
    )
