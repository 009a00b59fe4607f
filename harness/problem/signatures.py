"""Signatures: the request, position and head of a K or V row, encoded in the signs of its first channels.

So a wrong read or write can be identified, not only detected. Magnitudes are kept: a row must use the whole mantissa of
its dtype, or a cache that rounds would go undetected. An invertible hash scrambles the bits, so that they look random
(constant channels in V would hide errors) and can still be decoded.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

CHANNELS = 32
"""Channels of a signature; smaller head sizes have none."""

SMALLEST = 2.0**-10
"""Magnitude to which smaller signed channels are raised, so that the sign survives the narrowest dtype."""

_MASK = 0xFFFFFFFF
_FACTOR = 0x9E3779B1
_INVERSE = pow(_FACTOR, -1, 1 << 32)
_SALT = {"key": 0x243F6A88, "value": 0x85A308D3}


@dataclass(frozen=True)
class Coordinate:
    """The origin of a row, ``kind`` "key" or "value": request modulo 1024, position modulo 131072, head modulo 32."""

    kind: str
    request: int
    position: int
    head: int

    def __str__(self) -> str:
        kind = "K" if self.kind == "key" else "V"
        return f"{kind} of request {self.request}, position {self.position}, KV head {self.head}"


def sign(rows: Tensor, kind: str, requests: Tensor, positions: Tensor, smallest: float | Tensor = SMALLEST) -> None:
    """Set the signs of ``rows`` (``[n, Hkv, D]``) in place; ``requests`` and ``positions`` are int64 ``[n]``.

    ``smallest``: the magnitude to which signed channels are raised, a number or one per head (``[Hkv, 1]``).
    """
    heads = torch.arange(rows.shape[1])
    word = ((requests % 1024) << 22 | (positions % 131072) << 5)[:, None] | (heads % 32)
    code = _scramble(word ^ _SALT[kind])
    is_set = np.unpackbits(code.numpy().astype("<u4")[..., None].view(np.uint8), axis=-1, bitorder="little")
    size = torch.maximum(rows[..., :CHANNELS].abs(), torch.as_tensor(smallest, dtype=rows.dtype))
    # Many times as fast as torch.where, whose branches are unpredictable.
    rows[..., :CHANNELS] = torch.copysign(size, torch.from_numpy(is_set).to(rows.dtype) - 0.5)


def decode(row: Tensor) -> tuple[Coordinate, ...]:
    """Return the origins that the signs of one row (``[D]``) encode, as a key and as a value; empty for shorter rows.

    Any pattern decodes to some origin: trust it only if the row of that origin equals the row that was read.
    """
    if len(row) < CHANNELS:
        return ()
    word = sum(1 << i for i, s in enumerate(row[:CHANNELS].tolist()) if s > 0)
    for _ in range(2):
        word = (word ^ word >> 16) * _INVERSE & _MASK
    plain = {kind: word ^ salt for kind, salt in _SALT.items()}
    return tuple(Coordinate(kind, w >> 22, w >> 5 & 131071, w & 31) for kind, w in plain.items())


def _scramble(word: Tensor) -> Tensor:
    """Return 32-bit words, held in int64, mixed invertibly."""
    for _ in range(2):
        word = word * _FACTOR & _MASK
        word = word ^ (word >> 16)
    return word
