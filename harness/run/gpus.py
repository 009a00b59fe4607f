"""Finds the GPUs of one kind, for processes that each use one of them. Loads no torch when imported."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from attncheck.errors import QuestionError
from attncheck.reports.run_file.header import Environment


@dataclass(frozen=True)
class GpuKind:
    """Properties that GPUs of one kind share. ``memory``: in bytes."""

    name: str
    capability: str
    memory: int

    def __str__(self) -> str:
        return f"{self.name}, compute capability {self.capability}, {self.memory / 2**30:.1f} GiB"


@dataclass(frozen=True)
class Gpu:
    """A GPU for one process. ``variables``: environment variables that make it the only GPU visible to the process."""

    uuid: str
    variables: Mapping[str, str] = field(default_factory=dict)


def gpus_alike(device: str) -> tuple[tuple[Gpu, ...], tuple[str, ...]]:
    """Return the GPUs of the same kind as GPU 0, and a note on each other GPU; none unless ``device`` is ``cuda``."""
    if device != "cuda":
        return (), ()
    import torch

    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    kinds = [GpuKind(each.name, f"{each.major}.{each.minor}", each.total_memory) for each in found]
    variables = gpu_variables(len(found), os.environ, is_hip=torch.version.hip is not None)
    gpus = tuple(
        Gpu(str(getattr(each, "uuid", "")), alone)
        for each, kind, alone in zip(found, kinds, variables, strict=False)
        if kind == kinds[0]
    )
    notes = tuple(
        f"GPU {index} ({kind}) is not used: it is not of the kind of GPU 0 ({kinds[0]})"
        for index, kind in enumerate(kinds)
        if kind != kinds[0]
    )
    return gpus, notes


def gpu_variables(count: int, environment: Mapping[str, str], *, is_hip: bool) -> list[dict[str, str]]:
    """Return, for each of ``count`` GPUs visible under ``environment``, variables that make it the only visible one.

    ROCm reads both variables. Its ``ROCR_VISIBLE_DEVICES`` is applied before them, and does not change.
    """
    names = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES") if is_hip else ("CUDA_VISIBLE_DEVICES",)
    given = next((environment[name] for name in names if name in environment), None)
    entries = list(map(str, range(count))) if given is None else [each.strip() for each in given.split(",")]
    return [dict.fromkeys(names, entry) for entry in entries[:count]]


def refuse_other_gpu(device: str, uuid: str | None, environment: Environment) -> None:
    """Raise QuestionError unless GPU ``uuid`` is the only visible one and its environment equals ``environment``.

    ``uuid``: None accepts any GPU and any environment.
    """
    if uuid is None:
        return
    from attncheck.harness.run.evaluation import environment_of

    gpus, _ = gpus_alike(device)
    seen = [gpu.uuid for gpu in gpus]
    if seen != [uuid]:
        raise QuestionError(f"the process sees the GPUs {', '.join(seen)}, and has to use {uuid} alone")
    here, there = environment_of(device).model_dump(), environment.model_dump()
    for name, value in here.items():
        if value != there[name]:
            raise QuestionError(f"{name} on GPU {uuid} is {value!r}, and {there[name]!r} in the run")
