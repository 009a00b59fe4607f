"""A recorded step as a Python file that needs torch alone."""

import ast
import dataclasses
import inspect
import math
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import TypeAdapter
from torch import Tensor

import attncheck
from attncheck.backends.contract import AttentionBackend
from attncheck.backends.declarations import FUNCTION_PATHS
from attncheck.errors import QuestionError, SpecError
from attncheck.harness.driver.foreign_code import StageError
from attncheck.harness.driver.pool import KVPool, flat_bytes
from attncheck.harness.driver.session import Fill, Session
from attncheck.harness.driver.step import Step
from attncheck.harness.fuzz.stand_alone import WRONG, StandAloneAnswer, StandAloneRequest
from attncheck.harness.problem.problem import Problem, build_problem
from attncheck.harness.run.backend_loading import load_backend
from attncheck.harness.run.outcomes import BackendDescription
from attncheck.harness.truth.truth import Truth, truth_of
from attncheck.reports.run_file.graph_levels import CUDAGRAPH

# Records one step of a backend as the calls that the harness would make, without making them, so none can crash.
#
# For a function that `kernel_backend` wraps, its own arguments are recorded. For any other backend, those of its impl
# and builder are. Needs a process of its own, since the backend is imported and constructed.

BACKEND, KERNEL, WRITER = "backend", "kernel", "writing_kernel"
CONSTRUCT, BUILDER, BUILD, UPDATE, FORWARD = "construct", "builder", "build", "do_kv_cache_update", "forward"


class NotExpressibleError(SpecError):
    """A case that cannot be written as one step with plain arguments; ``reason`` has the cause."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason, field="case", value="", allowed="repeat it with attncheck")


@dataclass(frozen=True)
class Call:
    """One call: ``name`` of the function, and its arguments."""

    name: str
    args: tuple[Any, ...]
    keywords: dict[str, Any]


@dataclass
class CallRecorder:
    """The calls so far. ``is_on``: record calls instead of making them."""

    calls: list[Call] = field(default_factory=list)
    is_on: bool = False

    def note(self, name: str, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Append a call."""
        self.calls.append(Call(name, args, keywords))


@dataclass(frozen=True)
class RecordedStep:
    """The calls of one step, and the expected results.

    ``functions``: the functions that ``kernel_backend`` wraps, by call name; empty if the backend is a class.
    ``expected``: float64 ``[rows, H, Dv]``, in the row order of the step. ``expected_lse``: log-sum-exp in the same
    order.
    ``norm``, ``peak``, ``lse_error``: the errors allowed.
    ``cache_after``: the expected memory of the cache after the step; None if unknown, or if the backend does not write
    it.
    """

    calls: tuple[Call, ...]
    functions: dict[str, Callable[..., object]]
    expected: Tensor
    norm: Tensor
    peak: Tensor
    expected_lse: Tensor
    lse_error: Tensor
    cache_after: Tensor | None


def record_step(
    backend: type[AttentionBackend], problem: Problem, truth: Truth, device: torch.device, fill: Fill
) -> RecordedStep:
    """Record the first step of ``problem`` over a cache filled according to ``fill``.

    Raises:
        NotExpressibleError: the step takes several calls, or its output is quantised.
    """
    if truth.codes is not None:
        raise NotExpressibleError("its output is quantised")
    recorder = CallRecorder()
    recorded, functions = _recorded(backend, recorder)
    step = None
    cache_after = None
    try:
        session = Session(recorded, problem, device)
        recorder.is_on = True
        with suppress(StageError):  # a call that raises is recorded as well
            session.run(fill)
        recorder.is_on = False
        step = session.prepared(fill).step
        if session.pool is not None and session.pool.codec is not None and session.impl.brings_writer:
            cache_after = _cache_after(step, session.pool)
    except StageError:
        if not recorder.calls:
            raise
    forwards = sum(call.name in (FORWARD, KERNEL) for call in recorder.calls)
    if forwards > 1:
        raise NotExpressibleError(f"the path {problem.case.batch.path.name} takes {forwards} calls of forward")
    order = torch.arange(len(truth.out)) if step is None else step.row_order
    return RecordedStep(
        tuple(recorder.calls),
        functions,
        truth.out.cpu()[order],
        truth.budget.norm.cpu()[order],
        truth.budget.peak.cpu()[order],
        truth.lse.cpu()[order],
        truth.budget.lse.cpu()[order],
        cache_after,
    )


def _cache_after(step: Step, pool: KVPool) -> Tensor:
    """Return the memory of the cache that the recorded step should leave, which did not run."""
    image = pool.bytes().clone()
    if step.key is not None and step.value is not None:
        slots = step.slot_mapping  # shorter than the key rows if the last ones are unmapped
        mapped = (slots >= 0).nonzero().flatten()
        pool.write_image(image, slots[mapped], step.key[mapped], step.value[mapped])
    return image


def _recorded(
    backend: type[AttentionBackend], recorder: CallRecorder
) -> tuple[type[AttentionBackend], dict[str, Callable[..., object]]]:
    impl_cls: Any = backend.get_impl_cls()
    functions = {name: getattr(impl_cls, name) for name in (KERNEL, WRITER) if hasattr(impl_cls, name)}
    methods: dict[str, Any] = {}
    if functions:
        recorded_impl = type(impl_cls.__name__, (impl_cls,), {name: _noting(recorder, name) for name in functions})
        methods["get_impl_cls"] = staticmethod(lambda: recorded_impl)
    else:
        builder_cls: Any = backend.get_builder_cls()

        def make(name: str, cls: Any, noted: tuple[str, ...], args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
            is_first = all(call.name != name for call in recorder.calls)
            if is_first:
                recorder.note(name, args, keywords)
            made = cls(*args, **keywords)
            return _Noted(made, recorder, noted) if is_first else made

        methods["get_impl_cls"] = staticmethod(
            lambda: lambda *args, **keywords: make(CONSTRUCT, impl_cls, (UPDATE, FORWARD), args, keywords)
        )
        methods["get_builder_cls"] = staticmethod(
            lambda: lambda *args, **keywords: make(BUILDER, builder_cls, (BUILD,), args, keywords)
        )
    return type(backend.__name__, (backend,), methods), functions


def _noting(recorder: CallRecorder, name: str) -> Any:
    return staticmethod(lambda *args, **keywords: recorder.note(name, args, keywords))


class _Noted:
    """An impl or a builder; while the recorder is on, the methods in ``noted`` are recorded instead of called."""

    def __init__(self, made: Any, recorder: CallRecorder, noted: tuple[str, ...]) -> None:
        self.__dict__ |= {"_made": made, "_recorder": recorder, "_noted": noted}

    def __getattr__(self, name: str) -> Any:
        if name not in self._noted or not self._recorder.is_on:
            return getattr(self._made, name)

        def note(*args: Any, **keywords: Any) -> Any:
            self._recorder.note(name, args, keywords)
            return keywords.get("output")

        return note


# Writes values as Python source that needs only torch: tensors with their strides, and stand-ins for our classes.

MOST_NUMBERS = 50_000
"""Maximum numbers that a file may contain."""

_FEW = 64
"""Maximum integers of a tensor that is written inline."""

_WIDTH = 118
_GAP = 6
"""Maximum distance, in elements, between neighbours in a run of numbers that differ from the fill."""


class SourceWriter:
    """Turns values into source: expressions, and the definitions they need, in order."""

    def __init__(self) -> None:
        self.definitions: list[str] = []
        self.classes: dict[str, str] = {}
        self._memories: dict[int, tuple[str, torch.dtype]] = {}
        self._named: dict[int, str] = {}
        self._numbers = 0

    def name(self, value: object, name: str) -> None:
        """Write ``name`` for this object (by identity) from now on."""
        self._named[id(value)] = name

    def source(self, value: Any) -> str:
        """Return the expression of a value.

        Raises:
            NotExpressibleError: the value has no plain form, or too many numbers.
        """
        if id(value) in self._named:
            return self._named[id(value)]
        match value:
            case None | bool() | int() | str() if not isinstance(value, Enum):
                return repr(value)
            case Enum():
                return repr(value.value)
            case float():
                return repr(value) if math.isfinite(value) else f"float({str(value)!r})"
            case tuple():
                return f"({', '.join(map(self.source, value))}{',' * (len(value) == 1)})"
            case list():
                return f"[{', '.join(map(self.source, value))}]"
            case torch.dtype():
                return str(value)
            case torch.device():
                return f"torch.device({str(value)!r})"
            case Tensor():
                return self._tensor(value)
            case np.ndarray():
                return f"{self._tensor(torch.from_numpy(value))}.numpy()"
            case Mapping():
                return "{" + ", ".join(f"{key!r}: {self.source(each)}" for key, each in value.items()) + "}"
        if dataclasses.is_dataclass(value) and not hasattr(value, "softmax_scale"):
            return self._dataclass(value)
        if callable(value):
            return f"lambda *_: {self.source(value(*[None] * len(inspect.signature(value).parameters)))}"
        if hasattr(value, "__dict__") or dataclasses.is_dataclass(value):
            return self._namespace(value)
        raise NotExpressibleError(f"a {type(value).__name__} is among the arguments")

    def memory(self, tensor: Tensor) -> str:
        """Return the name of the flat tensor for a tensor's storage; define it at the first call."""
        key = tensor.untyped_storage().data_ptr()
        if key not in self._memories or not key:
            flat = flat_bytes(tensor.cpu() if tensor.device.type == "cpu" else tensor).cpu()
            usable = flat[: len(flat) // tensor.element_size() * tensor.element_size()]
            name = f"memory_{len(self._memories) + 1}"
            self._memories[key or id(tensor)] = name, tensor.dtype
            self.definitions.append(self.flat_literal(name, usable.view(tensor.dtype)))
            return name
        return self._memories[key][0]

    def flat_literal(self, name: str, flat: Tensor) -> str:
        """Return statements that define ``name`` as this flat tensor: a fill with the most frequent number, then runs.

        Raises:
            NotExpressibleError: the file would have more than :data:`MOST_NUMBERS` numbers.
        """
        bits = flat.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.itemsize])
        is_fill = bits == bits.mode().values
        other = (~is_fill).nonzero().flatten()
        self._numbers += len(other)
        if self._numbers > MOST_NUMBERS:
            raise NotExpressibleError(f"it takes more than {MOST_NUMBERS} numbers")
        if len(flat) < 2 * len(other) + 8:
            return f"{name} = {_listed(flat)}"
        first = int(is_fill.nonzero()[0])
        lines = [f"{name} = torch.full(({len(flat)},), {_number(flat[first])}, dtype={flat.dtype})"]
        ends = (other.diff() > _GAP).nonzero().flatten().tolist() if len(other) else []
        for run in other.tensor_split([end + 1 for end in ends]) if len(other) else ():
            low, high = int(run[0]), int(run[-1]) + 1
            lines.append(f"{name}[{low}:{high}] = {_listed(flat[low:high])}")
        return "\n".join(lines)

    def _tensor(self, tensor: Tensor) -> str:
        if not tensor.numel():
            return f"torch.empty({tuple(tensor.shape)}, dtype={tensor.dtype})"
        whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size() and tensor.is_contiguous()
        if whole and not tensor.is_floating_point() and tensor.numel() <= _FEW:
            return f"torch.tensor({tensor.tolist()}, dtype={tensor.dtype})"
        name = self.memory(tensor)
        held = next((dtype for known, dtype in self._memories.values() if known == name), tensor.dtype)
        if held.itemsize != tensor.dtype.itemsize:
            raise NotExpressibleError(f"memory of {held} is read as {tensor.dtype} as well")
        seen = name if held == tensor.dtype else f"{name}.view({tensor.dtype})"
        if whole:
            return seen if tensor.dim() == 1 else f"{seen}.view({tuple(tensor.shape)})"
        return f"{seen}.as_strided({tuple(tensor.shape)}, {tensor.stride()}, {tensor.storage_offset()})"

    def _dataclass(self, value: Any) -> str:
        """Return a call of a stand-in dataclass with the same name and fields; omit fields with default values."""
        name, own = type(value).__name__, dataclasses.fields(value)
        if name not in self.classes:
            lines = [
                f"    {each.name}: object" + ("" if each.default is dataclasses.MISSING else f" = {each.default!r}")
                for each in own
            ]
            self.classes[name] = "\n".join(["@dataclass", f"class {name}:", *lines])
        given = [
            f"{each.name}={self.source(getattr(value, each.name))}"
            for each in own
            if getattr(value, each.name) is not each.default
        ]
        return _wrapped_call(name, given)

    def _namespace(self, value: Any) -> str:
        if dataclasses.is_dataclass(value):
            held = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
        else:
            held = {name: each for name, each in vars(value).items() if name not in ("_path", "impl")}
        computed = inspect.getmembers_static(type(value), lambda member: isinstance(member, property))
        held |= {name: getattr(value, name) for name, _ in computed}
        return _wrapped_call("SimpleNamespace", [f"{name}={self.source(each)}" for name, each in held.items()])


def _wrapped_call(name: str, arguments: list[str]) -> str:
    line = f"{name}({', '.join(arguments)})"
    if len(line) <= _WIDTH - 20:
        return line
    return f"{name}(\n" + "".join(f"{textwrap.indent(each, '    ')},\n" for each in arguments) + ")"


def _listed(flat: Tensor) -> str:
    numbers = "[" + ", ".join(_number(each) for each in flat) + "]"
    dtype = f", dtype={flat.dtype})"
    if len(numbers) + len(dtype) < _WIDTH - 40:
        return f"torch.tensor({numbers}{dtype}"
    body = textwrap.fill(numbers, _WIDTH, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)
    return f"torch.tensor(\n{body}{dtype}"


def _number(element: Tensor) -> str:
    """Return the shortest decimal that rounds to the same number in the tensor's dtype."""
    value = element.item()
    if isinstance(value, int):
        return str(value)
    if not math.isfinite(value):
        return str(value)
    return next(
        text
        for digits in range(1, 18)
        if float(torch.tensor(float(text := f"{value:.{digits}g}"), dtype=element.dtype)) == value
    )


# The text of a stand-alone file: imports, tensors, the calls of one step, and the comparison with expected values.

_KERNEL_ARGUMENTS = ("query", "key_cache", "value_cache", "metadata", "params", "out")
_WRITER_ARGUMENTS = ("key", "value", "key_cache", "value_cache", "slot_mapping")

_PLAIN = str.maketrans({"\\": "/", '"': "'"})
"""Replacements for characters that would break a docstring."""

_IMPORTS = """import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch"""


@dataclass(frozen=True)
class Target:
    """How the file imports the backend: statements, and the expressions that refer to it afterwards.

    ``expressions``: the expression of each function by the name of its recorded call; for a class, by ``BACKEND``.
    """

    imports: str
    expressions: dict[str, str]
    needs: str


def stand_alone_text(request: StandAloneRequest, step: RecordedStep, target: Target) -> str:
    """Return the text of the file.

    Raises:
        NotExpressibleError: a value of the step has no plain form.
    """
    writer = SourceWriter()
    calls, judged = _function_calls(step, target, writer) if step.functions else _class_calls(step, target, writer)
    if any(call.name in (FORWARD, KERNEL) for call in step.calls):
        judged += _judgement(step, writer)
    if request.may_refuse:
        body = textwrap.indent("\n".join(calls), "    ")
        calls = ["try:", body, "except (ValueError, NotImplementedError) as error:"]
        calls += ['    print(f"refused: {error}")', "    sys.exit(0)"]
    needs = f"torch and {target.needs}" if target.needs else "torch alone"
    where = f" {Path(request.path).name} [{'PATH' if 'sys.argv' in target.imports else ''}]".removesuffix(" []")
    ends = "crashes or hangs" if request.ends else "has exit code 1"
    about = textwrap.fill(
        f"Needs {needs}. While the fault is there, `python{where}` {ends}; when it is fixed, the exit code is 0. "
        f"Written by attncheck {attncheck.__version__}.",
        118,
    )
    summary = textwrap.fill(f"{request.check} of {request.ref}: {request.summary}".translate(_PLAIN), 116)
    parts = [
        f'"""{summary}\n\n{about}\n"""',
        _IMPORTS,
        target.imports,
        'nan, inf = float("nan"), float("inf")',
        *writer.classes.values(),
        "\n".join(writer.definitions),
        "\n".join(["torch.set_grad_enabled(False)", *calls]),
        "\n".join(["faults = []", *judged]),
        f'print("\\n".join("{WRONG}" + fault for fault in faults) or "right")\nsys.exit(1 if faults else 0)',
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _function_calls(step: RecordedStep, target: Target, writer: SourceWriter) -> tuple[list[str], list[str]]:
    """Return the statements that call the functions, and those that check the cache they wrote."""
    lines: list[str] = []
    judged: list[str] = []
    for call in step.calls:
        is_kernel = call.name == KERNEL
        names = _KERNEL_ARGUMENTS if is_kernel else _WRITER_ARGUMENTS
        arguments = dict(zip(names, call.args, strict=True)) | call.keywords
        answers = ("out", "output_lse")
        lines += [f"{name} = {writer.source(value)}" for name, value in arguments.items() if name not in answers]
        lines += _buffers(arguments["out"], arguments) if is_kernel else []
        given = [
            *("output" if name == "out" else name for name in names),
            *(f"{name}={name}" for name in call.keywords),
        ]
        lines.append(f"{target.expressions[call.name]}({', '.join(given)})")
        if not is_kernel:
            judged = _cache_judgement(step, arguments["key_cache"], writer)
    return lines, judged


def _class_calls(step: RecordedStep, target: Target, writer: SourceWriter) -> tuple[list[str], list[str]]:
    """Return the statements that construct impl and builder and run one step, and those that check the cache."""
    lines: list[str] = []
    by_name = {call.name: call for call in step.calls}
    layer = next((call.args[0] for call in step.calls if call.name in (UPDATE, FORWARD)), None)
    if layer is not None:
        lines.append(f"layer = {writer.source(layer)}")
        writer.name(layer, "layer")
    for name in (CONSTRUCT, BUILDER, BUILD, UPDATE, FORWARD):
        if name in by_name:
            lines += _CALLS[name](by_name[name], target, writer)
    if UPDATE not in by_name:
        return lines, []
    return lines, _cache_judgement(step, by_name[UPDATE].args[3], writer)


def _cache_judgement(step: RecordedStep, cache: torch.Tensor, writer: SourceWriter) -> list[str]:
    """Return statements that compare the cache's memory with its expected content; none if that is unknown."""
    if step.cache_after is None:
        return []
    memory = writer.memory(cache)
    writer.definitions.append(writer.flat_literal("cache_after", step.cache_after.view(cache.dtype)))
    integers = {1: "uint8", 2: "int16", 4: "int32"}[cache.itemsize]
    return [
        f"changed = ({memory}.view(torch.{integers}) != cache_after.view(torch.{integers})).nonzero().flatten()",
        "if len(changed):",
        '    faults.append(f"{len(changed)} elements of the cache are wrong, the first is element {int(changed[0])}")',
    ]


def _construct(call: Call, target: Target, writer: SourceWriter) -> list[str]:
    arguments = [writer.source(each) for each in call.args]
    arguments += [f"{name}={writer.source(value)}" for name, value in call.keywords.items()]
    lines = [f"impl = {target.expressions[BACKEND]}.get_impl_cls()({', '.join(arguments)})"]
    return [*lines, "layer.impl = impl"]


def _builder(call: Call, target: Target, writer: SourceWriter) -> list[str]:
    spec, names, config, device = call.args
    return [
        f"kv_cache_spec = {writer.source(spec)}",
        f"vllm_config = {writer.source(config)}",
        f"builder_cls = {target.expressions[BACKEND]}.get_builder_cls()",
        f"builder = builder_cls(kv_cache_spec, {writer.source(names)}, vllm_config, {writer.source(device)})",
    ]


def _build(call: Call, _target: Target, writer: SourceWriter) -> list[str]:
    common = call.keywords["common_attn_metadata"]
    prefix = call.keywords["common_prefix_len"]
    return [
        f"common = {writer.source(common)}",
        f"metadata = builder.build(common_prefix_len={prefix}, common_attn_metadata=common)",
    ]


def _update(call: Call, _target: Target, writer: SourceWriter) -> list[str]:
    _, key, value, kv_cache, slots = call.args
    return [
        f"key = {writer.source(key)}",
        f"value = {writer.source(value)}",
        f"kv_cache = {writer.source(kv_cache)}",
        f"impl.do_kv_cache_update(layer, key, value, kv_cache, {writer.source(slots)})",
    ]


def _forward(call: Call, _target: Target, writer: SourceWriter) -> list[str]:
    _, query, key, value, kv_cache, _ = call.args
    extra = {name: value for name, value in call.keywords.items() if name != "output"}
    given = "".join(f", {name}={name}" for name in extra)
    return [
        f"query = {writer.source(query)}",
        f"key = {writer.source(key)}",
        f"value = {writer.source(value)}",
        f"kv_cache = {writer.source(kv_cache)}",
        *_buffers(call.keywords["output"], extra),
        f"answer = impl.forward(layer, query, key, value, kv_cache, metadata, output=output{given})",
        "output = output if answer is None else answer.view(output.shape)",
    ]


_CALLS = {CONSTRUCT: _construct, BUILDER: _builder, BUILD: _build, UPDATE: _update, FORWARD: _forward}


def _buffers(output: torch.Tensor, keywords: dict[str, Any]) -> list[str]:
    lines = [f"output = torch.full({tuple(output.shape)}, nan, dtype={output.dtype})"]
    if (lse := keywords.get("output_lse")) is not None:
        lines.append(f"output_lse = torch.full({tuple(lse.shape)}, nan, dtype={lse.dtype})")
    return lines


def _judgement(step: RecordedStep, writer: SourceWriter) -> list[str]:
    rows, heads, size = step.expected.shape
    tensors = {"expected": step.expected, "norm": step.norm, "peak": step.peak}
    has_lse = any("output_lse" in call.keywords for call in step.calls)
    if has_lse:
        tensors |= {"expected_lse": step.expected_lse, "lse_error": step.lse_error}
    shapes = {"expected": (rows, heads, size)}
    for name, tensor in tensors.items():
        digits = 9 if name.startswith("expected") else 4
        rounded = torch.tensor([float(f"{each:.{digits}g}") for each in tensor.flatten().tolist()], dtype=torch.float64)
        literal = writer.flat_literal(name, rounded)
        writer.definitions.append(f"{literal}\n{name} = {name}.view({shapes.get(name, (rows, heads))})")
    lines = [
        f"error = output[:{rows}].view({rows}, {heads}, {size}).double() - expected",
        "size = torch.maximum(error.norm(dim=-1) / norm, error.abs().amax(-1) / peak).nan_to_num(inf)",
        "size[(error == 0).all(-1)] = 0",
        "wrong = size > 1.001",
        "if wrong.any():",
        "    row, head = divmod(int(size.argmax()), size.shape[1])",
        '    faults.append(f"{int(wrong.any(-1).sum())} of {len(wrong)} rows; worst: row {row}, head {head}, "',
        '                  f"{size[row, head]:.3g} times the error allowed")',
    ]
    if has_lse:
        lines += [
            f"lse = output_lse[:{rows}].double()",
            "wrong = ~((lse == expected_lse) | ((lse - expected_lse).abs() <= 1.001 * lse_error))",
            "if wrong.any():",
            '    faults.append(f"the log-sum-exp of {int(wrong.sum())} rows and heads")',
        ]
    return lines


# Main module of the process that writes a stand-alone file: :class:`StandAloneRequest` on stdin, answer on stdout.
#
# The file is run, and kept only if it shows the failure. Fills for foreign slots of the cache are tried in turn: zeros,
# which are shortest to write, then the values of a containment check, then stale rows.

_FILLS = (0.0, math.nan, math.inf, None)
_RUN_LIMIT_S = 60.0


def written(request: StandAloneRequest) -> StandAloneAnswer:
    """Write the file if one step of the backend shows the failure."""
    backend = load_backend(request.ref)
    if isinstance(backend, BackendDescription):
        return StandAloneAnswer(False, backend.reason)
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
