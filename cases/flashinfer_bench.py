"""Reads workloads of FlashInfer-Bench unchanged: one JSON object per line, each with a definition in its data set.

Supported definitions are of the kinds ``gqa_paged``, ``gqa_ragged`` and ``mla_paged``. Sizes and dtypes come from the
definition, lengths from the index tensors of a workload. An unreadable workload is skipped, with the reason in the
suite's notes.

Index tensors are in safetensors files, which are read here without the tensor libraries that the safetensors package
needs: eight bytes with the length of the header, the header as JSON with dtype, shape and offsets of each tensor, then
the tensors, little-endian.
"""

import re
import sys
from array import array
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from attncheck.cases.consistency import check_meaning, implied_path
from attncheck.cases.model import Case, Suite
from attncheck.cases.suite_file import MAX_CASES, MAX_CONTENT
from attncheck.errors import CaseFileError, SpecError
from attncheck.reference.spec import LayerSpec, MLASpec
from attncheck.reference.step_spec import BatchSpec, CacheSpec, PaddingSpec, RequestSpec

_LENGTH_BYTES = 8
_MOST_HEADER = 2**24
_MOST_BYTES = 2**26
"""Most bytes of one index tensor: 8 million requests."""

_CODES = {"I32": "i", "I64": "q"}


class _Place(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    dtype: str
    data_offsets: tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)]]


_PLACE: TypeAdapter[_Place] = TypeAdapter(_Place)
_HEADER: TypeAdapter[dict[str, Any]] = TypeAdapter(dict[str, Any])


def read_integers(path: Path, key: str) -> list[int]:
    """Return the numbers of the tensor ``key``, in storage order.

    Raises:
        SpecError: the file cannot be read, or has no such tensor of int32 or int64.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if not 0 < length <= _MOST_HEADER:
                raise _unread_file(path, f"a header of {length} bytes")
            header = _HEADER.validate_json(file.read(length))
            if key not in header:
                raise _unread_file(path, f"no tensor {key!r} among {', '.join(list(header)[:8])}")
            place = _PLACE.validate_python(header[key])
            if place.dtype not in _CODES:
                raise _unread_file(path, f"{key} has dtype {place.dtype}, not int32 or int64")
            begin, end = place.data_offsets
            if not 0 <= end - begin <= _MOST_BYTES:
                raise _unread_file(path, f"{key} has {end - begin} bytes")
            file.seek(_LENGTH_BYTES + length + begin)
            content = file.read(end - begin)
    except OSError as error:
        raise _unread_file(path, error.strerror or str(error)) from error
    except ValidationError as error:
        raise _unread_file(path, "the header is no JSON of a safetensors file") from error
    numbers = array(_CODES[place.dtype])
    if len(content) != end - begin or len(content) % numbers.itemsize:
        raise _unread_file(path, f"{key} is cut off")
    numbers.frombytes(content)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()


def _unread_file(path: Path, reason: str) -> SpecError:
    return SpecError(f"{path.name}: {reason}", field="workload", value=str(path), allowed="a safetensors file")


_DTYPES = {"float16": "float16", "bfloat16": "bfloat16", "float32": "float32"}
_CACHE_DTYPES = {"float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2"}
_KINDS = ("gqa_paged", "gqa_ragged", "mla_paged")
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]+")
_NOTES = {
    "gqa_paged": "kv_indices is not read: pages are assigned again, and none is shared",
    "gqa_ragged": "contiguous keys and values are examined in pages of 16",
    "mla_paged": "qk_nope_head_dim follows from sm_scale, and v_head_dim is taken to be the same",
}


class _Model(BaseModel):
    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="ignore")


class _Axis(_Model):
    type: Literal["const", "var"]
    value: int | None = None


class _Tensor(_Model):
    dtype: str


class _Definition(_Model):
    name: str
    op_type: str
    axes: Mapping[str, _Axis]
    inputs: Mapping[str, _Tensor]

    def size(self, name: str) -> int:
        axis = self.axes.get(name)
        if axis is None or axis.value is None or axis.value < 1:
            raise _unread(f"the definition {self.name} has no constant axis {name} above 0")
        return axis.value


class _Input(_Model):
    type: str
    value: float | None = Field(default=None, allow_inf_nan=False)
    path: str = ""
    tensor_key: str = ""


class _Workload(_Model):
    uuid: str
    axes: Mapping[str, int] = Field(default_factory=dict)
    inputs: Mapping[str, _Input]


class _Line(_Model):
    definition: str
    workload: _Workload


def is_flashinfer_definition(keys: Sequence[str]) -> bool:
    """Return whether the keys of a file are those of a definition, which has no batches."""
    return {"op_type", "axes", "inputs", "reference"} <= set(keys)


def read_flashinfer_bench(text: str, path: Path) -> Suite:
    """Return the suite of a file of workloads: one case for each workload of paged or ragged attention.

    Raises:
        CaseFileError: a line is not a workload, or no workload can be read.
    """
    root = next((each for each in path.absolute().parents if (each / "definitions").is_dir()), None)
    if root is None:
        raise _fault(path, None, "no folder above the file is called definitions/", "keep workloads in their data set")
    definition = cache(lambda name: _definition(root, name))
    cases: dict[str, Case] = {}
    notes: dict[str, None] = {}
    requests = 0
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            read = _Line.model_validate_json(line)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"])) or "the line"
            raise _fault(path, number, f"{where}: {first['msg']}", "a line is {definition, workload}") from error
        name = _UNSAFE.sub("-", f"{read.definition}.{read.workload.uuid}")
        try:
            case = _case(path.stem, name, f"{path}:{number}", definition(read.definition), read.workload, root)
        except SpecError as error:
            notes[f"not read: {read.definition}, workload {read.workload.uuid}: {error.reason}"] = None
            continue
        notes |= dict.fromkeys([f"{read.definition}: {_NOTES[definition(read.definition).op_type]}"])
        cases.setdefault(case.id, case)
        requests += len(case.batch.requests)
        if len(cases) > MAX_CASES or requests > MAX_CONTENT:
            limit = f"at most {MAX_CASES} cases and {MAX_CONTENT} requests a file: split it"
            raise _fault(path, number, "up to here the file holds too many requests", limit)
    if not cases:
        reason = next(iter(notes), "the file has no line")
        raise _fault(path, None, f"no workload of paged or ragged attention: {reason}", f"read are {', '.join(_KINDS)}")
    return Suite(
        name=_UNSAFE.sub("-", path.stem), description="", cases=tuple(cases.values()), path=path, notes=tuple(notes)
    )


def _definition(root: Path, name: str) -> _Definition:
    if _UNSAFE.search(name):
        raise _unread(f"{name!r} is no name of a definition")
    file = next((root / "definitions").rglob(f"{name}.json"), None)
    if file is None:
        raise _unread(f"there is no definitions/.../{name}.json")
    try:
        return _Definition.model_validate_json(file.read_bytes())
    except (OSError, ValidationError) as error:
        raise _unread(f"{file} is no definition: {str(error).splitlines()[0]}") from error


def _case(suite: str, name: str, origin: str, definition: _Definition, workload: _Workload, root: Path) -> Case:
    """Return the case of one workload.

    Raises:
        SpecError: the workload cannot be read, or a case cannot express it.
    """
    if definition.op_type not in _KINDS:
        raise _unread(f"op_type {definition.op_type} is no paged or ragged attention")
    layer = _layer(definition, workload)
    page = 16 if definition.op_type == "gqa_ragged" else definition.size("page_size")
    stored, query = _dtype(definition, "k", "k_cache", "ckv_cache"), _dtype(definition, "q", "q_nope")
    if stored != query and stored not in _CACHE_DTYPES:
        raise _unread(f"a cache of {stored} beside a query of {query}")
    cache_spec = CacheSpec(block_size=page, kv_cache_dtype=_CACHE_DTYPES.get(stored, "auto"))  # type: ignore[arg-type]
    lengths = _lengths(definition, workload, root, page)
    live = tuple(RequestSpec(query_len=q, seq_len=s) for q, s in lengths if q)
    batch = BatchSpec(requests=live, padding=PaddingSpec(requests=len(lengths) - len(live)), path=implied_path(layer))
    check_meaning(layer, cache_spec, batch)
    return Case(suite=_UNSAFE.sub("-", suite), id=name, layer=layer, cache=cache_spec, batch=batch, origin=origin)


def _dtype(definition: _Definition, *names: str) -> str:
    """Return the dtype of the first of these inputs that the definition has."""
    found = next((definition.inputs[name] for name in names if name in definition.inputs), None)
    if found is None:
        raise _unread(f"the definition {definition.name} has no input {' or '.join(names)}")
    return found.dtype


def _layer(definition: _Definition, workload: _Workload) -> LayerSpec:
    dtype = _dtype(definition, "q", "q_nope")
    if dtype not in _DTYPES:
        raise _unread(f"a query of {dtype}")
    given = workload.inputs.get("sm_scale")
    scale = None if given is None else given.value
    heads = definition.size("num_qo_heads")
    if definition.op_type == "mla_paged":
        rank, rope = definition.size("head_dim_ckv"), definition.size("head_dim_kpe")
        width = scale**-2 if scale is not None and scale > 1e-4 else 0.0
        if abs(width - round(width)) > 1e-3 * width or round(width) <= rope:
            raise _unread(f"sm_scale {scale} is that of no whole width above head_dim_kpe {rope}")
        nope = round(width) - rope
        mla = MLASpec(kv_lora_rank=rank, qk_nope_head_dim=nope, qk_rope_head_dim=rope, v_head_dim=nope)
        layer = LayerSpec(num_heads=heads, num_kv_heads=1, head_size=rank + rope, dtype=dtype, mla=mla)  # type: ignore[arg-type]
    else:
        layer = LayerSpec(
            num_heads=heads,
            num_kv_heads=definition.size("num_kv_heads"),
            head_size=definition.size("head_dim"),
            dtype=dtype,  # type: ignore[arg-type]
            causal=None if _is_causal(definition) else False,
        )
        if scale is not None and abs(scale / layer.softmax_scale - 1) > 1e-5:
            layer = LayerSpec(**{**vars(layer), "scale": scale})
    if definition.op_type == "mla_paged" and not _is_causal(definition):
        raise _unread("latent attention that is not causal")
    return layer


def _is_causal(definition: _Definition) -> bool:
    """Return whether a row sees no later key; for decodes, which have one row, it makes no difference."""
    words = definition.name.replace("non_causal", "noncausal").split("_")
    if "noncausal" in words:
        return False
    if "qo_indptr" in definition.inputs and "causal" not in words:
        raise _unread(f"the definition's name {definition.name} must contain causal or noncausal")
    return True


def _lengths(definition: _Definition, workload: _Workload, root: Path, page: int) -> list[tuple[int, int]]:
    """Return ``(query_len, seq_len)`` of each request."""
    kv = _indptr("kv_indptr", workload, root)
    if definition.op_type != "gqa_ragged" and page > 1:
        if "kv_last_page_len" not in workload.inputs:
            raise _unread(f"without kv_last_page_len, pages of {page} tokens do not determine lengths")
        last = _integers("kv_last_page_len", workload, root)
        if len(last) < len(kv):
            raise _unread(f"kv_last_page_len has {len(last)} entries for {len(kv)} requests")
        if any(not 0 < tokens <= page for pages, tokens in zip(kv, last, strict=False) if pages):
            raise _unread(f"kv_last_page_len is not within a page of {page} tokens")
        kv = [(pages - 1) * page + tokens if pages else 0 for pages, tokens in zip(kv, last, strict=False)]
    queries = _indptr("qo_indptr", workload, root) if "qo_indptr" in definition.inputs else [1] * len(kv)
    if len(queries) != len(kv):
        raise _unread(f"qo_indptr is of {len(queries)} requests, kv_indptr of {len(kv)}")
    return list(zip(queries, kv, strict=True))


def _indptr(name: str, workload: _Workload, root: Path) -> list[int]:
    """Return the differences between consecutive entries of an index tensor."""
    found = [high - low for low, high in pairwise(_integers(name, workload, root))]
    if any(each < 0 for each in found):
        raise _unread(f"{name} falls")
    return found


def _integers(name: str, workload: _Workload, root: Path) -> list[int]:
    given = workload.inputs.get(name)
    if given is None or given.type != "safetensors":
        raise _unread(f"{name} is {'missing' if given is None else given.type}, so that lengths are not known")
    return read_integers(root / given.path, given.tensor_key)


def _unread(reason: str) -> SpecError:
    return SpecError(reason, field="workload", value="", allowed="another workload")


def _fault(path: Path, line: int | None, reason: str, allowed: str) -> CaseFileError:
    return CaseFileError(reason, file=str(path), line=line, allowed=allowed)


def definition_fault(path: Path) -> CaseFileError:
    """Return the error for a definition given as a case file."""
    return _fault(path, None, "a definition of FlashInfer-Bench has no batches", "give its workloads, a .jsonl file")
