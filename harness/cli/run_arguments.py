"""Arguments and options of ``attncheck run`` as parameter types, with names, help and completion."""

from pathlib import Path
from typing import Annotated

import typer

from attncheck.harness.cli import completion

# What is examined.
BackendArguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="BACKEND",
        help="Backends: a name, file.py, file.py:NAME of a class or function, module:NAME, or vllm:NAME. "
        "Default: all built-in backends.",
        autocompletion=completion.backends,
        show_default=False,
    ),
]
BackendOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--backend",
        metavar="REF",
        help="A backend, like the argument BACKEND. May be repeated.",
        autocompletion=completion.backends,
    ),
]
Providers = Annotated[
    list[str] | None,
    typer.Option(
        "--provider",
        metavar="REF",
        help="A provider of metadata utilities: vllm, vllm:file.py, a module, or file.py. May be repeated. Without "
        "BACKEND, only providers are examined.",
    ),
]
Functions = Annotated[
    list[str] | None,
    typer.Option(
        "--function",
        metavar="PATTERN",
        help="Examine only provider functions whose name matches this shell pattern. May be repeated.",
    ),
]
Suites = Annotated[
    list[str] | None,
    typer.Option(
        "--suite",
        metavar="NAME|FILE",
        help="Built-in suites or YAML files, separated by commas. May be repeated. Default: smoke, or interpreted for "
        "backends whose kernels are interpreted; for providers alone also named_batches and padding.",
        autocompletion=completion.suites,
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Replace a default of the suites, such as cache.block_size=32, cache.layout=HND, layer.head_size=96. "
        "A case that sets the key itself keeps its value. May be repeated.",
    ),
]
Cases = Annotated[
    list[str] | None,
    typer.Option(
        "--case",
        metavar="PATTERN",
        help="Select only cases whose id or suite/id matches one of these shell patterns (*, ?, [...]), separated by "
        "commas. An id without a variant selects all its variants: decode selects decode.float16. May be repeated.",
        autocompletion=completion.cases,
    ),
]
Keywords = Annotated[
    str | None,
    typer.Option(
        "-k",
        metavar="EXPR",
        help="Select only cases that match this expression of words in suite/id, description and needs, with and, or, "
        "not, such as 'sliding_window and not head_size=64'.",
    ),
]
LastFailed = Annotated[
    bool,
    typer.Option(
        "--last-failed",
        "--lf",
        help="Select only the cases and backends that did not pass in the newest kept run, and the checks that failed.",
    ),
]
Checks = Annotated[
    list[str] | None,
    typer.Option(
        "--check",
        metavar="NAME",
        help="Run only these checks: names or shell patterns, separated by commas. May be repeated. Default: all "
        "except timing.",
        autocompletion=completion.checks,
    ),
]
Skip = Annotated[
    list[str] | None,
    typer.Option(
        "--skip",
        metavar="NAME",
        help="Skip these checks: names or shell patterns, separated by commas. May be repeated.",
        autocompletion=completion.checks,
    ),
]
Watch = Annotated[
    bool,
    typer.Option(
        "--watch",
        help="Run again after each save of the backend's file, a Python file in its folder, or a case file. Cases that "
        "did not pass run first. Press q to end.",
    ),
]

# How.
ShardOption = Annotated[
    str | None,
    typer.Option(
        "--shard",
        metavar="I/N",
        help="Examine shard I of N of the cases; all shards take about equally long. `attncheck merge` merges their "
        "run files.",
    ),
]
Rounds = Annotated[
    int | None,
    typer.Option(
        "--rounds",
        metavar="N",
        help="Measure the check timing in N fresh processes of each backend; backends alternate. Default: 10.",
    ),
]
TimeLimit = Annotated[
    float | None,
    typer.Option(
        "--time-limit",
        metavar="S",
        help="Seconds for which the check timing samples each part of a step in each process. Default: 0.25.",
    ),
]
WarmCache = Annotated[
    bool, typer.Option("--warm-cache", help="Do not flush the GPU's L2 cache before each timing sample.")
]
Kernels = Annotated[
    bool, typer.Option("--kernels", help="Record the kernel names of each timed step with the profiler.")
]
Device = Annotated[
    str | None,
    typer.Option("--device", metavar="NAME", help="cpu, cuda or cuda:N. Default: cuda if there is a GPU, else cpu."),
]
Seed = Annotated[int | None, typer.Option("--seed", min=0, metavar="N", help="Seed of the inputs. Default: 0.")]
ExitFirst = Annotated[bool, typer.Option("--exitfirst", "-x", help="Stop at the first record that does not pass.")]
MaxFail = Annotated[
    int | None, typer.Option("--maxfail", min=1, metavar="N", help="Stop after N records that did not pass.")
]
Expect = Annotated[
    Path | None,
    typer.Option(
        "--expect", metavar="FILE", help="Expected failures: a YAML file, or the name of one that attncheck includes."
    ),
]
StrictExpect = Annotated[
    bool, typer.Option("--strict-expect", help="Fail if an entry of --expect with `says` matches no record.")
]
Dump = Annotated[
    Path | None,
    typer.Option("--dump", metavar="DIR", help="Write the tensors of each failing case into this folder."),
]
ShowOutput = Annotated[
    bool,
    typer.Option(
        "--show-output",
        "-s",
        help="Show the output of backends immediately, each line with the backend's name. Default: show its last lines "
        "with each failure.",
    ),
]


# What is written.
Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        metavar="FILE|DIR",
        help="The run file to write, which must not exist, or a folder for it. Default: the folder results/ if it "
        "exists, else a folder in the user's cache; both keep the newest 50 runs.",
    ),
]
Resume = Annotated[
    Path | None,
    typer.Option(
        "--resume",
        metavar="RUN",
        help="Continue an incomplete run, and append to its run file. Repeat the other arguments of the first command.",
    ),
]
NoOutput = Annotated[bool, typer.Option("--no-output", help="Write no run file.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only what did not pass, and the summary.")]
Verbose = Annotated[
    bool,
    typer.Option(
        "--verbose",
        "-v",
        help="Print each record to stderr immediately, and print the report in full.",
    ),
]
Durations = Annotated[
    int | None, typer.Option("--durations", min=0, metavar="N", help="Print the N slowest checks of cases; 0: all.")
]
