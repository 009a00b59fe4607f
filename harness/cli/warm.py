"""``attncheck warm``: compiles the kernels that a run will need, in several processes, into the caches on disk."""

import time
from typing import TYPE_CHECKING

import typer

from attncheck.harness.cli import process_arguments as processes
from attncheck.harness.cli import run_arguments as arguments

if TYPE_CHECKING:
    from attncheck.harness.run.backend_description import BackendDescription
    from attncheck.harness.run.plan import RunPlan
    from attncheck.harness.workers.worker_pool import WorkerPool


def warm(
    backends: arguments.BackendArguments = None,
    backend: arguments.BackendOptions = None,
    suite: arguments.Suites = None,
    settings: arguments.Settings = None,
    case: arguments.Cases = None,
    check: arguments.Checks = None,
    device: arguments.Device = None,
    pass_env: processes.PassEnv = None,
    no_cache: processes.NoCache = False,
) -> int:
    """Compile the kernels of a run in advance.

    The cases run in several processes, and the records are discarded. The kernels go to the caches of Triton, Inductor
    and FlashInfer, where a run finds them; `attncheck doctor` lists their folders. A run on a GPU does the same for
    each backend that compiles kernels. Exit code 0, even if cases fail.
    """
    from attncheck.harness.run.backend_choice import first_refs
    from attncheck.harness.run.selection import select_cases
    from attncheck.harness.truth.shared_folder import truths_folder
    from attncheck.harness.workers.passed_environment import read_patterns
    from attncheck.harness.workers.worker_pool import WorkerPool
    from attncheck.harness.workers.worker_settings import WorkerSettings

    refs = (*(backends or ()), *(backend or ()))
    selection = select_cases(suite or (), case or (), check or (), settings or ())
    with WorkerPool(settings=WorkerSettings(pass_env=read_patterns(pass_env or ()))) as pool:
        pool.start(first_refs(refs, selection.suites))

        from attncheck.harness.run.preparation import RunSettings, prepare_run

        truths = None if no_cache else truths_folder()
        prepared = prepare_run(selection, refs, RunSettings(device=device, truths=truths), pool=pool)
        pool.keep_only(())  # the backends are described; free the memory of these processes
        for each in prepared.backends:
            if each.is_loaded and not each.unavailable_reasons:
                _warm(each, prepared.plan, pool)
            else:
                typer.echo(f"{each.name}: not here: {each.reason}")
    return 0


def _warm(backend: "BackendDescription", plan: "RunPlan", pool: "WorkerPool") -> None:
    from attncheck.harness.run.kernel_caches import kernel_caches
    from attncheck.harness.workers.warming import Warmers, most_processes, questions_to_warm
    from attncheck.reports.analysis.phrases import plural

    caches = kernel_caches()
    before = [cache.contents().kernels for cache in caches]
    began = time.monotonic()
    processes = most_processes(plan.device)
    warmers = Warmers(lambda: pool.start_extra(backend.ref), questions_to_warm(plan, backend.ref), processes)
    try:
        warmers.wait()
    finally:
        warmers.close()
    added = (f"{cache.library} {cache.contents().kernels - held}" for cache, held in zip(caches, before, strict=True))
    lost = f", {plural(len(warmers.lost), 'case')} lost with their process" if warmers.lost else ""
    typer.echo(
        f"{backend.name}: {plural(len(warmers.examined), 'case')}{lost}, {time.monotonic() - began:.1f} s, "
        f"processes at once: {processes}; kernels added: {', '.join(added)}"
    )
