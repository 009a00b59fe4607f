"""Main module of the process that writes a stand-alone file: :class:`StandAloneRequest` on stdin, answer on stdout.

The file is run, and kept only if it shows the failure. Fills for foreign slots of the cache are tried in turn: zeros,
which are shortest to write, then the values of a containment check, then stale rows.
"""

import ast
import inspect
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from attncheck.backends.contract import AttentionBackend
from attncheck.backends.declarations import FUNCTION_PATHS
from attncheck.errors import QuestionError
from attncheck.harness.driver.foreign_code import StageError
from attncheck.harness.driver.turn import Fill
from attncheck.harness.fuzz.recording import BACKEND, NotExpressibleError, record_step
from attncheck.harness.fuzz.stand_alone import WRONG, StandAloneAnswer, StandAloneRequest
from attncheck.harness.fuzz.stand_alone_text import Target, stand_alone_text
from attncheck.harness.problem.problem import build_problem
from attncheck.harness.run.backend_loading import load_backend
from attncheck.harness.run.plan import UnavailableBackend
from attncheck.harness.truth.truth import truth_of
from attncheck.reports.run_file.graph_levels import CUDAGRAPH

_FILLS = (0.0, math.nan, math.inf, None)
_RUN_LIMIT_S = 60.0


def written(request: StandAloneRequest) -> StandAloneAnswer:
    """Write the file if one step of the backend shows the failure."""
    backend = load_backend(request.ref)
    if isinstance(backend, UnavailableBackend):
        return StandAloneAnswer(False, "; ".join(backend.reasons))
    if request.case.batch.path.name in FUNCTION_PATHS:
        return StandAloneAnswer(False, f"the path {request.case.batch.path.name} calls a function of the backend")
    if request.check == CUDAGRAPH:
        return StandAloneAnswer(False, "a captured graph takes several steps")
    device, path = torch.device(request.device), Path(request.path)
    problem = build_problem(request.case, request.seed)
    truth = truth_of(problem, device)
    reason = "one step does not show the fault"
    for poison in _FILLS:
        try:
            step = record_step(backend.backend, problem, truth, device, Fill(poison=poison))
            target = _target(request.ref, backend.backend, step.functions)
            text = stand_alone_text(request, step, target)
        except (NotExpressibleError, QuestionError) as error:
            return StandAloneAnswer(False, str(getattr(error, "reason", error)))
        except StageError as failure:
            return StandAloneAnswer(False, failure.raised.in_words)
        path.write_text(text, encoding="utf-8")
        if _shows(path, request):
            return StandAloneAnswer(True, needs=target.needs)
        path.unlink()
    return StandAloneAnswer(False, reason)


def _shows(path: Path, request: StandAloneRequest) -> bool:
    try:
        ended = subprocess.run(  # noqa: S603 (the file that was written)
            [sys.executable, path], capture_output=True, text=True, timeout=_RUN_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return request.ends
    if request.ends:
        return ended.returncode < 0 or (ended.returncode > 0 and WRONG not in ended.stdout and not ended.stderr)
    if request.raised:
        return ended.returncode == 1 and request.raised in ended.stderr
    error = next(iter(ended.stderr.strip().splitlines()[-1:]), "").partition(":")[0].rpartition(".")[2]
    return ended.returncode == 1 and (WRONG in ended.stdout or bool(error and error in request.summary))


def _target(ref: str, backend: type[AttentionBackend], functions: dict[str, Callable[..., object]]) -> Target:
    """Return how to import the functions, or the backend.

    Raises:
        NotExpressibleError: one of them is defined within a function.
    """
    found: dict[str, Any] = dict(functions) or {BACKEND: backend}
    names = {key: each.__qualname__ for key, each in found.items()}
    if not functions:
        names[BACKEND] = ref.rpartition(":")[2] if ":" in ref else backend.__qualname__
    first = next(iter(found.values()))
    module, file = first.__module__, inspect.getsourcefile(sys.modules[first.__module__])
    for name in names.values():
        if "<locals>" in name or file is None:
            raise NotExpressibleError(f"{name} is defined within a function, and cannot be imported")
    # A module of its own is loaded by its path, since its folder may not be on sys.path.
    is_file = "." not in module and Path(file or "").name != "__init__.py"
    ours = _imports_of_attncheck(Path(file or ""))
    needs = "attncheck" if module.startswith("attncheck.") or (ours and not (functions and is_file)) else ""
    if not is_file:
        return Target(f"import {module}", {key: f"{module}.{name}" for key, name in names.items()}, needs)
    lines = []
    if ours and not needs:
        lines = [
            "try:  # the functions need nothing of attncheck, which their file imports",
            "    import attncheck  # noqa: F401",
            "except ImportError:",
            "    from unittest.mock import MagicMock",
            "",
            f"    sys.modules |= {{name: MagicMock() for name in {ours}}}",
        ]
    lines += [
        f"path = Path(sys.argv[1] if len(sys.argv) > 1 else {str(Path(file or '').resolve())!r})",
        "sys.path.insert(0, str(path.parent))",
        'spec = importlib.util.spec_from_file_location("candidate", path)',
        "candidate = importlib.util.module_from_spec(spec)",
        'sys.modules["candidate"] = candidate',
        "spec.loader.exec_module(candidate)",
    ]
    return Target("\n".join(lines), {key: f"candidate.{name}" for key, name in names.items()}, needs)


def _imports_of_attncheck(file: Path) -> list[str]:
    found = set[str]()
    for node in ast.walk(ast.parse(file.read_bytes())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        found |= {name for name in names if name.partition(".")[0] == "attncheck"}
    return sorted(found)


def main() -> None:
    """Answer the request on stdin."""
    request = TypeAdapter(StandAloneRequest).validate_json(sys.stdin.read())
    answer_to = os.dup(1)
    os.dup2(2, 1)  # keep prints of the backend out of the answer
    answer = written(request)
    os.write(answer_to, TypeAdapter(StandAloneAnswer).dump_json(answer))


if __name__ == "__main__":
    main()
