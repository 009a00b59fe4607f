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
        "Default: all built-in ones.",
        autocompletion=completion.backends,
        show_default=False,
    ),
]
BackendOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--backend",
        metavar="REF",
        help="A backend, as an argument. May be repeated.",
        autocompletion=completion.backends,
    ),
]
Providers = Annotated[
    list[str] | None,
    typer.Option(
        "--provider",
        metavar="REF",
        help="A provider of metadata utilities: vllm, vllm:file.py, a module, or file.py. May be repeated. Without a "
        "backend, no backend is examined.",
    ),
]
Functions = Annotated[
    list[str] | None,
    typer.Option(
        "--function",
        metavar="PATTERN",
        help="Only functions of providers whose name matches this shell pattern. May be repeated.",
    ),
]
Suites = Annotated[
    list[str] | None,
    typer.Option(
        "--suite",
        metavar="NAME|FILE",
        help="Built-in suites, or YAML files, separated by commas. May be repeated. Default: smoke, or interpreted for "
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
        "Cases that say otherwise for themselves keep what they say. May be repeated.",
    ),
]
Cases = Annotated[
    list[str] | None,
    typer.Option(
        "--case",
        metavar="PATTERN",
        help="Only cases whose id, or suite/id, matches one of these shell patterns (*, ?, [...]), separated by "
        "commas. An id without its variants means all of them. May be repeated.",
        autocompletion=completion.cases,
    ),
]
Keywords = Annotated[
    str | None,
    typer.Option(
        "-k",
        metavar="EXPR",
        help="Only cases for which this is true: words of suite/id, description and needs, with and, or, not, such as "
        "'sliding_window and not head_size=64'.",
    ),
]
LastFailed = Annotated[
    bool,
    typer.Option("--last-failed", "--lf", help="Only the cases and backends that did not pass in the newest kept run."),
]
Checks = Annotated[
    list[str] | None,
    typer.Option(
        "--check",
        metavar="NAME",
        help="Only these checks: names or shell patterns, separated by commas. May be repeated. Default: all, but for "
        "timing.",
        autocompletion=completion.checks,
    ),
]
Skip = Annotated[
    list[str] | None,
    typer.Option(
        "--skip",
        metavar="NAME",
        help="Leave these checks out, named as after --check. May be repeated.",
        autocompletion=completion.checks,
    ),
]
Watch = Annotated[
    bool,
    typer.Option(
        "--watch",
        help="Examine again after each save of the backend's file, of Python files beside it, or of a case file; first "
        "what did not pass before. q ends it.",
    ),
]

# How.
ShardOption = Annotated[
    str | None,
    typer.Option(
        "--shard",
        metavar="I/N",
        help="Examine the I-th of N parts of the cases, which take about as long; `attncheck merge` joins their run "
        "files.",
    ),
]
Rounds = Annotated[
    int | None,
    typer.Option(
        "--rounds",
        metavar="N",
        help="Take the times of the check timing in N fresh processes of each backend, in turn. Default: 10.",
    ),
]
TimeLimit = Annotated[
    float | None,
    typer.Option(
        "--time-limit",
        metavar="S",
        help="Seconds that the check timing may sample a part of a step in a process. Default: 0.25.",
    ),
]
WarmCache = Annotated[
    bool, typer.Option("--warm-cache", help="Time without flushing the GPU's L2 cache before each sample.")
]
Kernels = Annotated[
    bool, typer.Option("--kernels", help="Name the kernels of each timed step, as the profiler sees them.")
]
Device = Annotated[
    str | None, typer.Option("--device", metavar="NAME", help="cpu, cuda or cuda:N. Default: cuda where a GPU is.")
]
Seed = Annotated[int | None, typer.Option("--seed", min=0, metavar="N", help="Seed of the inputs. Default: 0.")]
ExitFirst = Annotated[bool, typer.Option("--exitfirst", "-x", help="Stop at the first record that does not pass.")]
MaxFail = Annotated[
    int | None, typer.Option("--maxfail", min=1, metavar="N", help="Stop when N records have fallen short.")
]
Expect = Annotated[
    Path | None,
    typer.Option(
        "--expect", metavar="FILE", help="Expected failures: a YAML file, or the name of one of attncheck's own."
    ),
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
        help="Show what backends print as it comes, each line with the backend's name. Without it, the end of it is "
        "shown with each failure.",
    ),
]


# What is written.
Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        metavar="FILE|DIR",
        help="The run file, which must not exist, or a folder for it. Default: results/ if there is such a folder, "
        "else the user's cache; the newest 50 runs are kept there.",
    ),
]
Resume = Annotated[
    Path | None,
    typer.Option(
        "--resume",
        metavar="RUN",
        help="Examine the rest of a run that was cut off, and add it to its run file. The other words are those of the "
        "first command.",
    ),
]
NoOutput = Annotated[bool, typer.Option("--no-output", help="Write no run file.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only what did not pass, and the last lines.")]
Verbose = Annotated[
    bool,
    typer.Option(
        "--verbose",
        "-v",
        help="Print a line for each record as it comes, to stderr, and leave nothing out of the report.",
    ),
]
Durations = Annotated[
    int | None, typer.Option("--durations", min=0, metavar="N", help="Print the N slowest checks of cases; 0: all.")
]
