"""One recorded step of a backend: make its calls, and compare what they leave with the right result.

``STEP`` at the end holds the arguments, the right result and the errors allowed, in plain values and tensors.
"""

import base64
import importlib
import importlib.util
import io
import math
import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import make_dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch

WRONG = "wrong: "
"""Prefix of the lines that report what is wrong."""


def restored(value: Any, made: dict[int, Any]) -> Any:
    """Return the value that was taken apart: objects have the fields of the recorded ones, tensors share memory.

    ``made``: the objects restored so far, by the id of what they were taken apart into.
    """
    match value:
        case {"memory": memory, "dtype": dtype, "place": place}:
            return torch.empty(0, dtype=dtype, device=memory.device).set_(memory.untyped_storage(), *place)
        case {"array": tensor}:
            return restored(tensor, made).numpy()
        case {"returns": answer}:
            return lambda *_: restored(answer, made)
        case {"object": name, "fields": fields}:
            if id(value) not in made:
                made[id(value)] = make_dataclass(name, fields)(**restored(fields, made))
            return made[id(value)]
        case dict():
            return {key: restored(each, made) for key, each in value.items()}
        case list() | tuple():
            return type(value)(restored(each, made) for each in value)
    return value


def load(module: str, file: str, mocked: Sequence[str]) -> Any:
    """Import a module. One with a ``file`` is loaded from there, or from the path that is the argument."""
    if not file:
        return importlib.import_module(module)
    try:
        importlib.import_module("attncheck")
    except ImportError:  # the functions need none of these, which their file imports
        sys.modules |= {name: MagicMock() for name in mocked}
    path = Path(sys.argv[1] if len(sys.argv) > 1 else file)
    sys.path.insert(0, str(path.parent))
    spec: Any = importlib.util.spec_from_file_location("candidate", path)
    sys.modules["candidate"] = candidate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(candidate)
    return candidate


def make_calls(calls: Sequence[Any], targets: Mapping[str, Any]) -> Any:
    """Make the calls, of functions or of one layer; return what ``forward`` returns.

    ``targets``: each function by the name of its call, or the class of the backend as ``backend``.
    """
    impl: Any = None
    builder: Any = None
    metadata = returned = None
    for name, args, keywords in calls:
        if name in targets:
            targets[name](*args, **keywords)
        elif name == "impl":
            impl = targets["backend"].get_impl_cls()(*args, **keywords)
        elif name == "builder":
            for layer in args[2].compilation_config.static_forward_context.values():
                layer.impl = impl
            builder = targets["backend"].get_builder_cls()(*args, **keywords)
        elif name == "build":
            metadata = builder.build(*args, **keywords)
        elif name == "do_kv_cache_update":
            impl.do_kv_cache_update(*args, **keywords)
        else:
            layer, query, key, value, kv_cache, _ = args
            returned = impl.forward(layer, query, key, value, kv_cache, metadata, **keywords)
    return returned


def wrong_results(right: Any, returned: Any) -> list[str]:
    """Return what is wrong with output, log-sum-exp and cache, in words."""
    found = []
    if right["output"] is not None:
        output = right["output"] if returned is None else returned.view(right["output"].shape)
        expected = right["expected"]
        error = output[: len(expected)].cpu().view(expected.shape).double() - expected
        shares = torch.maximum(error.norm(dim=-1) / right["norm"], error.abs().amax(-1) / right["peak"])
        shares = shares.nan_to_num(nan=math.inf, posinf=math.inf).masked_fill((error == 0).all(-1), 0)
        wrong = shares > 1
        if bool(wrong.any()):
            row, head = divmod(int(shares.argmax()), shares.shape[1])
            share = float(shares[row, head])
            if share < math.inf:
                amount = f"{share:.3g} times the error allowed"
            elif bool(error[row, head].isfinite().all()):
                amount = "no error is allowed"
            else:
                amount = "NaN or infinite"
            worst = f"worst: row {row}, head {head}, {amount}"
            found.append(f"{int(wrong.any(-1).sum())} of {len(wrong)} rows; {worst}")
    if right["lse"] is not None:
        expected = right["expected_lse"]
        lse = right["lse"][: len(expected)].cpu().double()
        wrong = ~((lse == expected) | ((lse - expected).abs() <= right["lse_error"]))
        if bool(wrong.any()):
            found.append(f"the log-sum-exp of {int(wrong.sum())} rows and heads")
    if right["cache"] is not None:
        changed = right["cache"].cpu() != right["expected_cache"]
        elements = changed.unflatten(0, (-1, right["itemsize"])).any(1).nonzero()
        if len(elements):
            found.append(f"{len(elements)} elements of the cache are wrong, the first is element {int(elements[0])}")
    return found


def main(
    step: str, names: Mapping[str, str], *, module: str, file: str, mocked: Sequence[str], may_refuse: bool
) -> None:
    """Exit with code 0 if the step is right, or the backend refuses a step that it ``may_refuse``; else with 1."""
    torch.set_grad_enabled(False)
    held = restored(torch.load(io.BytesIO(zlib.decompress(base64.b64decode(step))), weights_only=True), {})
    found = load(module, file, mocked)
    targets = {call: attrgetter(name)(found) for call, name in names.items()}
    try:
        returned = make_calls(held["calls"], targets)
    except (ValueError, NotImplementedError) as error:
        if not may_refuse:
            raise
        print(f"refused: {error}")  # noqa: T201
        sys.exit(0)
    wrong = wrong_results(held["right"], returned)
    print("\n".join(f"{WRONG}{each}" for each in wrong) or "right")  # noqa: T201
    sys.exit(1 if wrong else 0)
