"""Which kernels a call runs, by torch's profiler. Must not know: backends, clocks.

Profiling slows the host, not the kernels: it is done apart from the samples.
"""

from collections import Counter
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from attncheck.reports.run_file.timings import Kernel


def kernels_of(call: Callable[[], object], device: torch.device | str) -> tuple[Kernel, ...]:
    """What ``call`` runs once, longest first, launches of one name taken together.

    On CUDA: its kernels, copies and fills, with the time each takes on the device. Elsewhere, where no kernel has a
    name, ATen's operators, with the time each takes without the operators it calls; what runs outside of torch is not
    seen.
    """
    is_cuda = torch.device(device).type == "cuda"
    kind = "CUDA" if is_cuda else "CPU"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
    if is_cuda:
        torch.cuda.synchronize(device)
    with profile(activities=activities) as profiler:
        call()
        if is_cuda:
            torch.cuda.synchronize(device)
    counts, durations = Counter[str](), Counter[str]()
    for event in profiler.events() or ():
        if event.device_type.name != kind or getattr(event, "is_user_annotation", False):
            continue
        if not is_cuda and not event.name.startswith("aten::"):
            continue
        counts[event.name] += 1
        duration_us = event.time_range.elapsed_us() if is_cuda else event.self_cpu_time_total
        durations[event.name] += round(duration_us * 1000)
    return tuple(
        Kernel(name=name, count=counts[name], duration_ns=duration) for name, duration in durations.most_common()
    )
