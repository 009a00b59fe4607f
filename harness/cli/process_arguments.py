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
        help="Kill the process of a backend that finishes no check of a case for so long; the check is timed_out. It "
        "covers the compiling of kernels, and of the check timing all samples. 0: no limit. Default: 300, and 10 times "
        "what the reference takes.",
    ),
]
BackendTimeout = Annotated[
    float | None,
    typer.Option(
        "--backend-timeout",
        metavar="SECONDS",
        help="Stop the processes of a backend when they have been at work for so long together; what is left of its "
        "cases is timed_out. Default: no limit.",
    ),
]
MemoryLimit = Annotated[
    str | None,
    typer.Option(
        "--memory-limit",
        metavar="SIZE",
        help="Kill the process of a backend that holds more, such as 4GiB, with all it started. Default: what the host "
        "has, but for a reserve.",
    ),
]
DeviceMemoryLimit = Annotated[
    str | None,
    typer.Option(
        "--device-memory-limit",
        metavar="SIZE",
        help="Bytes of GPU memory that torch may take in the process of a backend, such as 40GiB. Default: all.",
    ),
]
PassEnv = Annotated[
    list[str] | None,
    typer.Option(
        "--pass-env",
        metavar="PATTERN",
        help="Further environment variables for the processes of backends (docs/processes.md): "
        "names or shell patterns, separated by commas. May be repeated.",
    ),
]
InProcess = Annotated[
    bool,
    typer.Option(
        "--in-process",
        help="Examine backends in this process, not each in one of its own, and without a progress display: for "
        "debuggers, profilers, sanitizers.",
    ),
]
Jobs = Annotated[
    str | None,
    typer.Option(
        "--jobs",
        "-j",
        metavar="N|auto",
        help="Processes of backends at work side by side; while times are taken there is one. Default: auto, on a "
        "CPU as many as there are cores and memory for, one on each GPU.",
    ),
]
Executor = Annotated[
    ExecutorChoice,
    typer.Option("--executor", help="Where backends are examined: on this machine, or on the nodes of a Ray cluster."),
]
RayAddress = Annotated[
    str | None,
    typer.Option(
        "--ray-address",
        metavar="ADDRESS",
        help="The Ray cluster; local starts one on this machine. Default: $RAY_ADDRESS, else the cluster that this "
        "machine is part of.",
    ),
]
RayResources = Annotated[
    list[str] | None,
    typer.Option(
        "--ray-resources",
        metavar="NAME=AMOUNT",
        help="What each actor takes of its node, such as CPU=4, memory=8e9, accelerator_type:H100=0.001, separated by "
        "commas. May be repeated. Default: one CPU, and one GPU unless the device is cpu.",
    ),
]
RayRuntimeEnv = Annotated[
    Path | None,
    typer.Option(
        "--ray-runtime-env",
        metavar="FILE",
        help="The runtime environment of the actors, as YAML or JSON: working_dir, pip, env_vars, and so on.",
    ),
]
NoCache = Annotated[
    bool,
    typer.Option(
        "--no-cache",
        help="Compute every truth here: read and store none in the user's cache (see `attncheck doctor`).",
    ),
]
NoWarm = Annotated[
    bool,
    typer.Option(
        "--no-warm",
        help="On a GPU, start no other processes that compile kernels ahead of the run (see `attncheck warm`).",
    ),
]
