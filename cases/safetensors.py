"""Reads integer tensors of a safetensors file without the tensor libraries that the safetensors package needs.

The format: eight bytes with the length of the header, the header as JSON with dtype, shape and offsets of each tensor,
then the tensors, little-endian.
"""

import sys
from array import array
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from attncheck.errors import SpecError

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
                raise _unread(path, f"a header of {length} bytes")
            header = _HEADER.validate_json(file.read(length))
            if key not in header:
                raise _unread(path, f"no tensor {key!r} among {', '.join(list(header)[:8])}")
            place = _PLACE.validate_python(header[key])
            if place.dtype not in _CODES:
                raise _unread(path, f"{key} has dtype {place.dtype}, not int32 or int64")
            begin, end = place.data_offsets
            if not 0 <= end - begin <= _MOST_BYTES:
                raise _unread(path, f"{key} has {end - begin} bytes")
            file.seek(_LENGTH_BYTES + length + begin)
            content = file.read(end - begin)
    except OSError as error:
        raise _unread(path, error.strerror or str(error)) from error
    except ValidationError as error:
        raise _unread(path, "the header is no JSON of a safetensors file") from error
    numbers = array(_CODES[place.dtype])
    if len(content) != end - begin or len(content) % numbers.itemsize:
        raise _unread(path, f"{key} is cut off")
    numbers.frombytes(content)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()


def _unread(path: Path, reason: str) -> SpecError:
    return SpecError(f"{path.name}: {reason}", field="workload", value=str(path), allowed="a safetensors file")
