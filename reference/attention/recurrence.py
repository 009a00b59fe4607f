"""Layers with a state, by the plain loop over tokens: Mamba, gated delta networks, and linear attention.

All rules are one recurrence. Each head has a state ``S [V, K]``, and each row a query ``q``, a key ``k``, a value
``v``, a decay ``a`` in ``[0, 1]``, and for delta rules a step size ``beta``::

    S = a * S                                 one a for the head, or one for each key channel (column of S)
    S = S + beta * (v - S k) k^T              with beta: the delta rule
    S = S + v k^T                             without
    o = S q

=====================  ================================================  =============================================
rule                   its q, k, v, a                                    source
=====================  ================================================  =============================================
:func:`mamba1_inputs`  a head is a channel, V = 1: C, B, dt x, exp(dt A)  Mamba, arXiv 2312.00752, equations 2 and 4
:func:`mamba2_inputs`  C, B, dt x, exp(dt A) with one A a head            Mamba-2, arXiv 2405.21060, equation 1 and §5
:func:`delta_inputs`   q scaled, k, v, exp(g), beta                       Gated DeltaNet, arXiv 2412.06464, equation 10;
                                                                          with a g for each key channel: Kimi Delta
                                                                          Attention, arXiv 2510.26692, equation 1
:func:`linear_inputs`  q, k, v, exp(-slope)                               Lightning Attention, arXiv 2401.04658
=====================  ================================================  =============================================

A row's output comes from the state after its own key and value have entered.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softplus

from attncheck.errors import ReferenceArgumentError
from attncheck.reference.arguments import require_float, require_shape
from attncheck.reference.step_spec import RecurrenceRule


@dataclass(frozen=True)
class RecurrentRows:
    """The rows of one sequence in the terms of the recurrence, in one float dtype.

    query, key: ``[T, H, K]``. value: ``[T, H, V]``. log_decay: ``[T, H, 1]`` or ``[T, H, K]``, not positive.
    beta: ``[T, H]``, or None for a rule without delta.

    Raises:
        ReferenceArgumentError: a shape or dtype differs from these, or a decay would grow the state.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    log_decay: Tensor
    beta: Tensor | None = None

    def __post_init__(self) -> None:
        rows, heads, size = self._three_axes()
        require_shape("key", self.key, rows, heads, size, legend="like query")
        require_shape("value", self.value, rows, heads, None, legend="rows, heads, value size")
        channels = 1 if self.log_decay.shape[-1] == 1 else size
        require_shape("log_decay", self.log_decay, rows, heads, channels, legend="rows, heads, 1 or key size")
        if self.beta is not None:
            require_shape("beta", self.beta, rows, heads, legend="rows, heads")
        if bool((self.log_decay > 0).any()):
            raise ReferenceArgumentError("log_decay", float(self.log_decay.max()), "at most 0: a state does not grow")

    def _three_axes(self) -> tuple[int, int, int]:
        require_float("query", self.query)
        require_shape("query", self.query, None, None, None, legend="rows, heads, key size")
        rows, heads, size = self.query.shape
        return rows, heads, size

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """``(H, V, K)``: the shape of the state."""
        return self.value.shape[1], self.value.shape[2], self.key.shape[2]

    def to(self, dtype: torch.dtype) -> "RecurrentRows":
        """Return the same rows, converted to ``dtype``."""
        beta = None if self.beta is None else self.beta.to(dtype)
        return RecurrentRows(
            self.query.to(dtype), self.key.to(dtype), self.value.to(dtype), self.log_decay.to(dtype), beta
        )


@torch.no_grad()
def recurrence(rows: RecurrentRows, state: Tensor | None, keep: Iterable[int] = ()) -> tuple[Tensor, dict[int, Tensor]]:
    """Return the outputs ``[T, H, V]``, and the states ``[H, V, K]`` after the rows in ``keep``, by row.

    All sums are in the dtype of ``rows``. ``state``: ``[H, V, K]``, the state before the first row; None for zeros. It
    does not change. For the row -1 in ``keep``, the state before the first row is returned.

    One head, keys and values of one channel, a decay of one half:

    >>> import math
    >>> one = torch.ones(3, 1, 1, dtype=torch.float64)
    >>> o, states = recurrence(RecurrentRows(one, one, one, one * math.log(0.5)), None, keep=[0, 2])
    >>> o.flatten().tolist(), float(states[0]), float(states[2])
    ([1.0, 1.5, 1.75], 1.0, 1.75)
    """
    dtype, device = rows.query.dtype, rows.query.device
    now = torch.zeros(rows.state_shape, dtype=dtype, device=device)
    if state is not None:
        require_shape("state", state, *rows.state_shape, legend="heads, value size, key size")
        now = now + state.to(dtype)
    wanted = set(keep)
    states = {-1: now.clone()} if -1 in wanted else {}
    outputs = torch.empty_like(rows.value)
    decay = rows.log_decay.exp()
    for t, (query, key, value) in enumerate(zip(rows.query, rows.key, rows.value, strict=True)):
        now = now * decay[t, :, None, :]
        new = value
        if rows.beta is not None:
            known = torch.einsum("hvk,hk->hv", now, key)
            new = rows.beta[t, :, None] * (value - known)
        now = now + torch.einsum("hv,hk->hvk", new, key)
        outputs[t] = torch.einsum("hvk,hk->hv", now, query)
        if t in wanted:
            states[t] = now.clone()
    return outputs, states


def step_sizes(
    dt: Tensor, dt_bias: Tensor | None, *, dt_softplus: bool, dt_limit: tuple[float, float] = (0.0, float("inf"))
) -> Tensor:
    """Return the step sizes of Mamba: ``dt + dt_bias``, through softplus if wanted, and clamped to ``dt_limit``.

    dt: ``[T, D]`` or ``[T, H]``. dt_bias: ``[D]`` or ``[H]``.
    """
    size = dt if dt_bias is None else dt + dt_bias
    if dt_softplus:
        size = softplus(size)
    return size.clamp(*dt_limit)


def mamba1_inputs(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> RecurrentRows:
    """Return the rows of Mamba's selective scan, where each channel is a head with values of size 1.

    x, dt: ``[T, D]``; ``dt`` as of :func:`step_sizes`. a: ``A [D, N]``, negative. b, c: ``B, C [T, N]``.
    The skip ``D x`` and the gate are not part of the recurrence.
    """
    channels = x.shape[1]
    key = b[:, None].expand(-1, channels, -1)
    query = c[:, None].expand(-1, channels, -1)
    return RecurrentRows(query, key, (dt * x)[..., None], dt[..., None] * a)


def mamba2_inputs(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> RecurrentRows:
    """Return the rows of Mamba-2, whose head ``h`` of ``H`` uses group ``h // (H / G)`` of ``B`` and ``C``.

    x: ``[T, H, P]``. dt: ``[T, H]``, as of :func:`step_sizes`. a: ``A [H]``, negative. b, c: ``B, C [T, G, N]``.
    """
    a_group = x.shape[1] // b.shape[1]
    key = b.repeat_interleave(a_group, dim=1)
    query = c.repeat_interleave(a_group, dim=1)
    return RecurrentRows(query, key, dt[..., None] * x, (dt * a)[..., None])


def delta_inputs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    qk_l2norm: bool = True,
    eps: float = 1e-6,
) -> RecurrentRows:
    """Return the rows of a gated delta rule: GDN with ``log_decay [T, HV]``, KDA with ``log_decay [T, HV, K]``.

    query, key: ``[T, H, K]``; head ``h`` of the ``HV`` value heads uses key head ``h // (HV / H)``.
    value: ``[T, HV, V]``. beta: ``[T, HV]``.
    scale: the factor of the query; None for ``K ** -0.5``.
    qk_l2norm: divide queries and keys by ``sqrt(sum of squares + eps)`` first.
    """
    if qk_l2norm:
        query, key = _unit(query, eps), _unit(key, eps)
    a_group = value.shape[1] // key.shape[1]
    factor = key.shape[-1] ** -0.5 if scale is None else scale
    query = query.repeat_interleave(a_group, dim=1) * factor
    decay = log_decay[..., None] if log_decay.dim() == 2 else log_decay
    return RecurrentRows(query, key.repeat_interleave(a_group, dim=1), value, decay, beta)


def linear_inputs(
    query: Tensor, key: Tensor, value: Tensor, slopes: Tensor, *, scale: float | None = None
) -> RecurrentRows:
    """Return the rows of linear attention with one decay ``exp(-slope)`` a head.

    query, key: ``[T, H, K]``. value: ``[T, H, V]``. slopes: ``[H]``, not negative.
    scale: the factor of the query; None for ``K ** -0.5``.
    """
    rows, heads, size = query.shape
    factor = size**-0.5 if scale is None else scale
    return RecurrentRows(query * factor, key, value, -slopes[None, :, None].expand(rows, heads, 1))


def recurrent_rows(
    rule: RecurrenceRule,
    inputs: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    *,
    scale: float | None = None,
    qk_l2norm: bool = True,
) -> RecurrentRows:
    """Return the rows of one sequence of a layer, from its tensors by name.

    inputs: ``[T, ...]`` each: ``x, dt, B, C`` for Mamba, ``query, key, value, g, beta`` for delta rules (``g`` is the
    log decay), and ``query, key, value`` for linear attention. ``dt`` gets its bias and softplus here.
    weights: ``A, dt_bias`` for Mamba, ``slopes`` for linear attention.
    scale, qk_l2norm: as of :func:`delta_inputs`.
    """
    if rule in ("mamba1", "mamba2"):
        dt = step_sizes(inputs["dt"], weights["dt_bias"], dt_softplus=True)
        to_rows = mamba1_inputs if rule == "mamba1" else mamba2_inputs
        return to_rows(inputs["x"], dt, weights["A"], inputs["B"], inputs["C"])
    attended = inputs["query"], inputs["key"], inputs["value"]
    if rule == "linear":
        return linear_inputs(*attended, weights["slopes"], scale=scale)
    return delta_inputs(*attended, inputs["g"], inputs["beta"], scale=scale, qk_l2norm=qk_l2norm)


def _unit(x: Tensor, eps: float) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + eps).rsqrt()
