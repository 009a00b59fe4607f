"""The text of a stand-alone file: imports, tensors, the calls of one step, and the comparison with expected values."""

import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import attncheck
from attncheck.harness.fuzz.literals import SourceWriter
from attncheck.harness.fuzz.recording import (
    BACKEND,
    BUILD,
    BUILDER,
    CONSTRUCT,
    FORWARD,
    KERNEL,
    UPDATE,
    Call,
    RecordedStep,
)
from attncheck.harness.fuzz.stand_alone import WRONG, StandAloneRequest

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
