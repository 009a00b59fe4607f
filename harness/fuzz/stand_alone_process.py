"""A recorded step of a backend, written as a Python file that needs torch alone."""

import ast
import base64
import inspect
import io
import math
import os
import subprocess
import sys
import textwrap
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import TypeAdapter
from torch import Tensor

import attncheck
from attncheck.backends.contract import AttentionBackend
from attncheck.backends.declarations import OTHER_PATHS
from attncheck.cases.yaml_text import case_yaml
from attncheck.errors import QuestionError, SpecError
from attncheck.harness.driver.foreign_code import StageError
from attncheck.harness.driver.pool import KVPool, flat_bytes
from attncheck.harness.driver.session import Fill, Session
from attncheck.harness.driver.step import Step
from attncheck.harness.fuzz import stand_alone_template
from attncheck.harness.fuzz.stand_alone import StandAloneAnswer, StandAloneRequest
from attncheck.harness.problem.problem import Problem, build_problem
from attncheck.harness.run.backend_loading import load_backend
from attncheck.harness.run.outcomes import BackendDescription
from attncheck.harness.truth.truth import Truth, truth_of
from attncheck.reports.run_file.graph_levels import CUDAGRAPH

FUNCTIONS = ("kernel", "writing_kernel")
"""The functions that ``kernel_backend`` wraps: names of their calls, and of the attributes of the impl."""

FORWARDS = ("kernel", "forward")
"""Calls that compute the output."""

_MOST_MEMORY = 2**26
"""Bytes of tensors that a step may take."""

_MOST_TEXT = 2**19
"""Characters that they may take, compressed, in the file."""


class NotExpressibleError(SpecError):
    """A case that cannot be written as one step with plain arguments; ``reason`` has the cause."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason, field="case", value="", allowed="repeat it with attncheck")


class CallRecorder:
    """Records calls as (name, arguments, keywords) instead of making them, so that none can crash.

    A function that ``kernel_backend`` wraps is recorded always. The methods of any other backend's impl and builder
    are recorded while the recorder ``is_on``, and called otherwise; impl and builder are constructed in any case.
    """

    def __init__(self, backend: type[AttentionBackend]) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.is_on = False
        impl_cls: Any = backend.get_impl_cls()
        self.functions = {name: getattr(impl_cls, name) for name in FUNCTIONS if hasattr(impl_cls, name)}
        if self.functions:
            noting = {name: staticmethod(self._note(name)) for name in self.functions}
            recorded_impl = type(impl_cls.__name__, (impl_cls,), noting)
            makers: dict[str, Any] = {"get_impl_cls": lambda: recorded_impl}
        else:
            builder_cls = backend.get_builder_cls()
            makers = {
                "get_impl_cls": lambda: self._constructing("impl", impl_cls, ("do_kv_cache_update", "forward")),
                "get_builder_cls": lambda: self._constructing("builder", builder_cls, ("build",)),
            }
        methods = {name: staticmethod(maker) for name, maker in makers.items()}
        self.backend: type[AttentionBackend] = type(backend.__name__, (backend,), methods)

    def _note(self, name: str) -> Callable[..., Any]:
        def note(*args: Any, **keywords: Any) -> Any:
            self.calls.append((name, args, keywords))
            return keywords.get("output", name)  # of `build`, some metadata: without any, no rows are written

        return note

    def _constructing(self, name: str, cls: Callable[..., Any], methods: tuple[str, ...]) -> Callable[..., Any]:
        """Return a function that constructs ``cls``; the first call, and those of the object's methods, are noted."""

        def construct(*args: Any, **keywords: Any) -> Any:
            if any(known == name for known, _, _ in self.calls):
                return cls(*args, **keywords)
            self._note(name)(*args, **keywords)
            return _Noted(cls(*args, **keywords), self, {each: self._note(each) for each in methods})

        return construct


class _Noted:
    """An impl or a builder; while the recorder is on, its ``noted`` methods are recorded instead of called."""

    def __init__(self, made: Any, recorder: CallRecorder, noted: Mapping[str, Callable[..., Any]]) -> None:
        self.__dict__ |= {"_made": made, "_recorder": recorder, "_noted": noted}

    def __getattr__(self, name: str) -> Any:
        is_recorded = self._recorder.is_on and name in self._noted
        return self._noted[name] if is_recorded else getattr(self._made, name)


def record_step(recorder: CallRecorder, problem: Problem, truth: Truth, device: torch.device, fill: Fill) -> Any:
    """Return the first step of ``problem`` over a cache filled according to ``fill``, as the template restores it.

    It has the calls, and what they should leave in which tensors.

    Raises:
        NotExpressibleError: the step takes several calls, its output is quantised, or an argument has no plain form.
    """
    if truth.codes is not None:
        raise NotExpressibleError("its output is quantised")
    step, expected_cache = None, None
    try:
        session = Session(recorder.backend, problem, device)
        recorder.is_on = True
        with suppress(StageError):  # a call that raises is recorded as well
            session.run(fill)
        recorder.is_on = False
        step = session.prepared(fill).step
        if session.pool is not None and session.pool.codec is not None and session.impl.brings_writer:
            expected_cache = _cache_after(step, session.pool)
    except StageError:
        if not recorder.calls:
            raise
    forwards = sum(name in FORWARDS for name, _, _ in recorder.calls)
    if forwards > 1:
        raise NotExpressibleError(f"the path {problem.case.batch.path.name} takes {forwards} calls of forward")
    order = torch.arange(len(truth.out)) if step is None else step.row_order
    right: dict[str, Any] = {
        "output": None,
        "lse": None,
        "cache": None,
        "expected": truth.out.cpu()[order],
        "norm": truth.budget.norm.cpu()[order],
        "peak": truth.budget.peak.cpu()[order],
        "expected_lse": truth.lse.cpu()[order],
        "lse_error": truth.budget.lse.cpu()[order],
    }
    for name, args, keywords in recorder.calls:
        if name in FORWARDS:
            right["output"] = keywords["output"] if name == "forward" else args[5]
            right["lse"] = keywords.get("output_lse")
        elif expected_cache is not None and name in ("writing_kernel", "do_kv_cache_update"):
            cache = args[2 if name == "writing_kernel" else 3]
            memory = flat_bytes(cache)
            if len(memory) == len(expected_cache):  # of a very large cache, only some pages are known
                right |= {"cache": memory, "expected_cache": expected_cache, "itemsize": cache.itemsize}
    return plain({"calls": recorder.calls, "right": right}, {})


def _cache_after(step: Step, pool: KVPool) -> Tensor:
    """Return the memory of the cache that the recorded step should leave, which did not run."""
    image = pool.bytes().clone()
    if step.key is not None and step.value is not None:
        slots = step.slot_mapping  # shorter than the key rows if the last ones are unmapped
        mapped = (slots >= 0).nonzero().flatten()
        pool.write_image(image, slots[mapped], step.key[mapped], step.value[mapped])
    return image.cpu()


def plain(value: Any, taken: dict[int, tuple[Any, Any]]) -> Any:
    """Return a value taken apart into containers, numbers and memory, which `torch.load` reads without running code.

    ``taken``: the objects taken apart so far, with the result, by id; an object that occurs again gives the same one.

    Raises:
        NotExpressibleError: the value has no plain form.
    """
    match value:
        case Enum():
            return plain(value.value, taken)
        case None | bool() | int() | float() | str() | torch.dtype() | torch.device():
            return value
        case Tensor():
            place = (value.storage_offset(), tuple(value.shape), tuple(value.stride()))
            return {"memory": flat_bytes(value), "dtype": value.dtype, "place": place}
        case np.ndarray():
            return {"array": plain(torch.from_numpy(value), taken)}
        case tuple():
            return tuple(plain(each, taken) for each in value)
        case list():
            return [plain(each, taken) for each in value]
        case Mapping():
            return {key: plain(each, taken) for key, each in value.items()}
    if callable(value):
        return {"returns": plain(value(*[None] * len(inspect.signature(value).parameters)), taken)}
    if id(value) in taken:
        return taken[id(value)][1]
    if not hasattr(value, "__dict__") and not is_dataclass(value):
        raise NotExpressibleError(f"a {type(value).__name__} is among the arguments")
    names = [each.name for each in fields(value)] if is_dataclass(value) else list(vars(value))
    names += [name for name, _ in inspect.getmembers_static(type(value), lambda each: isinstance(each, property))]
    held = {name: plain(getattr(value, name), taken) for name in names if name not in ("_path", "impl")}
    result = {"object": type(value).__name__, "fields": held}
    taken[id(value)] = value, result  # the value is held so that its id is not used again
    return result


def _num_bytes(step: Any) -> int:
    """Return the bytes of all memory in a step that was taken apart; what tensors share counts once."""
    sizes = dict[int, int]()
    rest = [step]
    while rest:
        match rest.pop():
            case Tensor() as memory:
                sizes[memory.data_ptr()] = memory.nbytes
            case dict() as held:
                rest += held.values()
            case list() | tuple() as held:
                rest += held
    return sum(sizes.values())


@dataclass(frozen=True)
class Target:
    """How the file imports the backend: arguments of the template's ``main``.

    ``names``: of the functions in ``module`` by the names of their calls, or of the class. ``file``: its path if the
    module is loaded from there. ``mocked``: modules of attncheck that its file imports and does not need. ``needs``:
    what must be installed besides torch.
    """

    names: dict[str, str]
    module: str
    file: str = ""
    mocked: tuple[str, ...] = ()
    needs: str = ""


def target_of(ref: str, backend: type[AttentionBackend], functions: Mapping[str, Callable[..., object]]) -> Target:
    """Return how to import the functions, or the backend if there are none.

    Raises:
        NotExpressibleError: one of them is defined within a function.
    """
    found: dict[str, Any] = dict(functions) or {"backend": backend}
    names = {key: each.__qualname__ for key, each in found.items()}
    if not functions and ":" in ref:
        names["backend"] = ref.rpartition(":")[2]
    module = next(iter(found.values())).__module__
    source = inspect.getsourcefile(sys.modules[module])
    for name in names.values():
        if "<locals>" in name or source is None:
            raise NotExpressibleError(f"{name} is defined within a function, and cannot be imported")
    file = Path(source or "").resolve()
    # A module of its own is loaded by its path, since its folder may not be on sys.path.
    is_file = "." not in module and file.name != "__init__.py"
    ours = _imports_of_attncheck(file)
    is_ours = module.startswith("attncheck.") or (ours and not (functions and is_file))
    needs = "attncheck" if is_ours else ""
    return Target(names, module, str(file) if is_file else "", () if is_ours else ours, needs)


def _imports_of_attncheck(file: Path) -> tuple[str, ...]:
    found = set[str]()
    for node in ast.walk(ast.parse(file.read_bytes())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        found |= {name for name in names if name.partition(".")[0] == "attncheck"}
    return tuple(sorted(found))


def stand_alone_text(request: StandAloneRequest, step: Any, target: Target) -> str:
    """Return the text of the file.

    Raises:
        NotExpressibleError: it would be too long.
    """
    if _num_bytes(step) > _MOST_MEMORY:
        raise NotExpressibleError(f"its tensors take more than {_MOST_MEMORY >> 20} MiB")
    held = io.BytesIO()
    torch.save(step, held)
    data = base64.b64encode(zlib.compress(held.getvalue(), 9)).decode()
    if len(data) > _MOST_TEXT:
        raise NotExpressibleError(f"its tensors take more than {_MOST_TEXT >> 10} KiB of text")
    needs = f"torch and {target.needs}" if target.needs else "torch alone"
    where = f"{Path(request.path).name}{' [PATH]' if target.file else ''}"
    ends = "crashes or hangs" if request.ends else "has exit code 1"
    about = [
        f"{request.check} of {request.ref}: {request.summary}",
        f"Needs {needs}. While the fault is there, `python {where}` {ends}; when it is fixed, the exit code is 0.",
        f"Written by attncheck {attncheck.__version__}, from this case:",
    ]
    lines = [line for each in about for line in textwrap.wrap(each, 116)] + case_yaml(request.case).splitlines()
    comment = "\n".join(f"# {line}".rstrip() for line in lines)
    how = f"module={target.module!r}, file={target.file!r}, mocked={target.mocked}, may_refuse={request.may_refuse}"
    blob = "\n".join(textwrap.wrap(data, 116))
    return (
        f'{comment}\n\n{inspect.getsource(stand_alone_template)}\n\nSTEP = """\n{blob}\n"""\n\n'
        f"main(STEP, {target.names}, {how})\n"
    )


# Main module of the process that writes a stand-alone file: :class:`StandAloneRequest` on stdin, answer on stdout.
#
# The file is run, and kept only if it shows the failure. Fills for foreign slots of the cache are tried in turn: zeros,
# which are shortest to write, then the values of a containment check, then stale rows.

_FILLS = (0.0, math.nan, math.inf, None)
_RUN_LIMIT_S = 60.0


def written(request: StandAloneRequest) -> StandAloneAnswer:
    """Write the file if one step of the backend shows the failure."""
    loaded = load_backend(request.ref)
    if isinstance(loaded, BackendDescription):
        return StandAloneAnswer(False, loaded.reason)
    if request.case.batch.path.name in OTHER_PATHS:
        return StandAloneAnswer(False, f"the path {request.case.batch.path.name} does not call attention")
    if request.case.batch.path.name == "ranks":
        return StandAloneAnswer(False, "the path ranks has a process for each rank")
    if request.check == CUDAGRAPH:
        return StandAloneAnswer(False, "a captured graph takes several steps")
    device, path = torch.device(request.device), Path(request.path)
    problem = build_problem(request.case, request.seed)
    truth = truth_of(problem, device)
    for poison in _FILLS:
        try:
            recorder = CallRecorder(loaded.backend)
            step = record_step(recorder, problem, truth, device, Fill(poison=poison))
            target = target_of(request.ref, loaded.backend, recorder.functions)
            text = stand_alone_text(request, step, target)
        except (NotExpressibleError, QuestionError) as error:
            return StandAloneAnswer(False, str(getattr(error, "reason", error)))
        except StageError as failure:
            return StandAloneAnswer(False, failure.raised.in_words)
        path.write_text(text, encoding="utf-8")
        if _shows(path, request):
            return StandAloneAnswer(True, needs=target.needs)
        path.unlink()
    return StandAloneAnswer(False, "one step does not show the fault")


def _shows(path: Path, request: StandAloneRequest) -> bool:
    try:
        ended = subprocess.run(  # noqa: S603 (the file that was written)
            [sys.executable, path], capture_output=True, text=True, timeout=_RUN_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return request.ends
    is_wrong = stand_alone_template.WRONG in ended.stdout
    if request.ends:
        return ended.returncode < 0 or (ended.returncode > 0 and not is_wrong and not ended.stderr)
    if request.raised:
        return ended.returncode == 1 and request.raised in ended.stderr
    error = next(iter(ended.stderr.strip().splitlines()[-1:]), "").partition(":")[0].rpartition(".")[2]
    return ended.returncode == 1 and (is_wrong or bool(error and error in request.summary))


def main() -> None:
    """Answer the request on stdin."""
    request = TypeAdapter(StandAloneRequest).validate_json(sys.stdin.read())
    answer_to = os.dup(1)
    os.dup2(2, 1)  # keep prints of the backend out of the answer
    answer = written(request)
    os.write(answer_to, TypeAdapter(StandAloneAnswer).dump_json(answer))


if __name__ == "__main__":
    main()
