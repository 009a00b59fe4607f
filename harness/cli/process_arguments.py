"""Options of ``attncheck run`` that select and limit the processes of backends. Loads no torch."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class ExecutorChoice(StrEnum):
    """Where backends are examined."""

    LOCAL = "local"
    RAY = "ray"


CaseTimeout = Annotated[
    float | None,
    typer.Option(
        "--case-timeout",
        metavar="SECONDS",
        help="Time limit for one check of one case, with kernel compilation. After it, the process of the backend is "
        "killed, and the check is timed_out. The check timing gets extra time for its samples. 0: no limit. "
        "Default: 300, plus 10 times the reference's time.",
    ),
]
BackendTimeout = Annotated[
    float | None,
    typer.Option(
        "--backend-timeout",
        metavar="SECONDS",
        help="Time limit for all processes of a backend together. After it, its remaining cases are timed_out. "
        "Default: no limit.",
    ),
]
MemoryLimit = Annotated[
    str | None,
    typer.Option(
        "--memory-limit",
        metavar="SIZE",
        help="Memory limit for the process of a backend and its children, such as 4GiB. A process that exceeds it is "
        "killed. Default: the memory of the host, minus a reserve.",
    ),
]
DeviceMemoryLimit = Annotated[
    str | None,
    typer.Option(
        "--device-memory-limit",
        metavar="SIZE",
        help="GPU memory that torch may allocate in the process of a backend, such as 40GiB. Default: all.",
    ),
]
PassEnv = Annotated[
    list[str] | None,
    typer.Option(
        "--pass-env",
        metavar="PATTERN",
        help="Additional environment variables for the processes of backends (docs/processes.md): "
        "names or shell patterns, separated by commas. May be repeated.",
    ),
]
InProcess = Annotated[
    bool,
    typer.Option(
        "--in-process",
        help="Examine backends in this process, without a progress display: for debuggers, profilers, sanitizers.",
    ),
]
Jobs = Annotated[
    str | None,
    typer.Option(
        "--jobs",
        "-j",
        metavar="N|auto",
        help="Number of backend processes at once; the check timing always uses one. Default: auto, which is one per "
        "GPU, and on a CPU as many as cores and memory allow.",
    ),
]
Executor = Annotated[
    ExecutorChoice,
    typer.Option("--executor", help="local: examine backends on this machine; ray: on the nodes of a Ray cluster."),
]
RayAddress = Annotated[
    str | None,
    typer.Option(
        "--ray-address",
        metavar="ADDRESS",
        help="Address of the Ray cluster; local starts one on this machine. Default: $RAY_ADDRESS, else the cluster of "
        "this machine.",
    ),
]
RayResources = Annotated[
    list[str] | None,
    typer.Option(
        "--ray-resources",
        metavar="NAME=AMOUNT",
        help="Resources of each actor, such as CPU=4, memory=8e9, accelerator_type:H100=0.001, separated by "
        "commas. May be repeated. Default: one CPU, and one GPU unless the device is cpu.",
    ),
]
RayRuntimeEnv = Annotated[
    Path | None,
    typer.Option(
        "--ray-runtime-env",
        metavar="FILE",
        help="The runtime environment of the actors, as YAML or JSON, such as working_dir, pip, env_vars.",
    ),
]
NoCache = Annotated[
    bool,
    typer.Option(
        "--no-cache",
        help="Compute the float64 truth of every case, without the user's cache (see `attncheck doctor`).",
    ),
]
NoWarm = Annotated[
    bool,
    typer.Option(
        "--no-warm",
        help="On a GPU, do not compile kernels in advance in other processes (see `attncheck warm`).",
    ),
]
