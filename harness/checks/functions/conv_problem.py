"""A short convolution over packed sequences with a rolling state: its tensors, and the right result.

The sequences are the requests of the batch. Each has its own line of the state buffer, which has more lines and columns
than needed; only a request with context has a state. Padding requests have the index ``PAD_ID``. Each padding request
gets one padding token while there are any, and further padding tokens belong to no sequence.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu

from attncheck.backends.dtypes import DTYPES
from attncheck.cases.model import Case
from attncheck.harness.problem.random_stream import RandomStream
from attncheck.harness.problem.rows import planted_inputs
from attncheck.harness.truth.tolerance import Budget, allowed_errors, float32_bracket
from attncheck.reference import Precision, causal_conv1d
from attncheck.reference.spec import CausalConv1dOptions

PAD_ID = -1
"""The index of padding sequences, as in vLLM."""

_SPARE = 3
"""Columns of the state buffer that no state uses, and columns of the packed rows that a view omits."""

_RUBBISH = 512.0
_SILU_SLOPE = 1.1

SPARE, FOREIGN, ABSENT = "spare columns of the state", "lines of no sequence", "lines of sequences without a state"


@dataclass(frozen=True)
class ConvProblem:
    """The arguments on the CPU. The ``T`` real rows of ``R`` sequences come first, then those of padding."""

    case: Case
    positions: tuple[tuple[int, int], ...]
    """(request, position) of each real row."""
    x: Tensor
    """``[T + padding, C]``, in the layer's dtype, as are weight, bias and states."""
    weight: Tensor
    bias: Tensor | None
    states: Tensor
    """``[lines, C, K - 1 + spare]``"""
    query_start_loc: Tensor
    cache_indices: Tensor
    has_initial_state: Tensor

    @property
    def dtype(self) -> torch.dtype:
        """The layer's dtype."""
        return DTYPES[self.case.layer.dtype]

    @property
    def options(self) -> CausalConv1dOptions:
        """The options of the path."""
        return conv_options(self.case)

    @property
    def past(self) -> int:
        """``K - 1``: the number of inputs that a state holds."""
        return self.options.width - 1

    @property
    def lines(self) -> list[int]:
        """The state line of each request."""
        return [int(line) for line in self.cache_indices[: self.case.batch.num_requests]]

    def row_name(self, row: int) -> str:
        """Return a readable name for a row."""
        request, position = self.positions[row]
        return f"request {request}, position {position}"

    def line_name(self, line: int) -> str:
        """Return a readable name for a line of the state."""
        owner = f"request {self.lines.index(line)}" if line in self.lines else "no sequence"
        return f"line {line} of {len(self.states)} ({owner})"

    def regions(self) -> dict[str, Tensor]:
        """Return bool masks ``[lines, 1, columns]`` by name, of the regions that must not influence the result."""
        lines, _, width = self.states.shape
        spare = (torch.arange(width) >= self.past).expand(lines, 1, width)
        named, absent = torch.zeros(lines, 1, 1, dtype=torch.bool), torch.zeros(lines, 1, 1, dtype=torch.bool)
        named[self.lines] = True
        absent[self.lines] = ~self.has_initial_state[: len(self.lines), None, None]
        masks = {SPARE: spare, FOREIGN: ~named & ~spare, ABSENT: absent & ~spare}
        return {name: mask for name, mask in masks.items() if bool(mask.any())}

    def arguments(
        self, device: torch.device, poison: float | None = None, regions: tuple[str, ...] | None = None
    ) -> dict[str, Tensor | None]:
        """Return the positional arguments in order, as new tensors, with ``poison`` in ``regions`` of the states.

        ``regions``: names of :meth:`regions`, or None for all. With the input ``views``, rows are slices of wider rows,
        and states have channels last in memory.
        """
        x, states = self.x.to(device, copy=True), self.states.to(device, copy=True)
        if poison is not None:
            for name, mask in self.regions().items():
                if regions is None or name in regions:
                    states.masked_fill_(mask.to(device), poison)
        if "views" in planted_inputs(self.case):
            wide = x.new_full((len(x), x.shape[1] + _SPARE), _RUBBISH)
            wide[:, : x.shape[1]] = x
            x, states = wide[:, : x.shape[1]], states.transpose(1, 2).contiguous().transpose(1, 2)
        return {
            "x": x,
            "weight": self.weight.to(device, copy=True),
            "bias": None if self.bias is None else self.bias.to(device, copy=True),
            "conv_states": states,
            "query_start_loc": self.query_start_loc.to(device, copy=True),
            "cache_indices": self.cache_indices.to(device, copy=True),
            "has_initial_state": self.has_initial_state.to(device, copy=True),
        }


@dataclass(frozen=True)
class ConvTruth:
    """The right result: ``y`` float64 ``[T, 1, C]`` of the real rows, the states after the call, and the budget."""

    y: Tensor
    states: Tensor
    budget: Budget


def conv_options(case: Case) -> CausalConv1dOptions:
    """Return the options of the path, or the defaults."""
    options = case.batch.path.options
    return options if isinstance(options, CausalConv1dOptions) else CausalConv1dOptions()


def build_conv(case: Case, seed: int) -> ConvProblem:
    """Return the tensors of ``case`` under ``seed``, with the same bits on every machine."""
    stream = RandomStream(seed, case.hash, "causal_conv1d")
    options, dtype, specs = conv_options(case), DTYPES[case.layer.dtype], list(case.batch)
    padding = case.batch.padding
    positions = tuple((r, max(spec.context_len, 0) + i) for r, spec in enumerate(specs) for i in range(spec.query_len))
    one_each = [1 if i < padding.tokens else 0 for i in range(padding.requests)]
    lengths = [*(spec.query_len for spec in specs), *one_each]
    # Leave the first line unused, because some kernels take it for padding, and the last, which index -1 would select.
    num_lines = len(specs) + len(specs) // 2 + 4
    lines = stream.permutation(num_lines - 2)[: len(specs)] + 1
    remembers = torch.tensor([spec.context_len > 0 for spec in specs])
    size, past = options.channels, options.width - 1
    states = stream.uniform(num_lines, size, past + _SPARE) * _RUBBISH
    states[lines[remembers], :, :past] = stream.uniform(int(remembers.sum()), size, past)
    weight, bias = stream.uniform(size, options.width) / 2, stream.uniform(size)
    return ConvProblem(
        case=case,
        positions=positions,
        x=stream.uniform(len(positions) + padding.tokens, size).to(dtype),
        weight=weight.to(dtype),
        bias=bias.to(dtype) if options.bias else None,
        states=states.to(dtype),
        query_start_loc=torch.tensor([0, *lengths]).cumsum(0).int(),
        cache_indices=torch.cat([lines, torch.full((padding.requests,), PAD_ID)]).int(),
        has_initial_state=torch.cat([remembers, torch.arange(padding.requests) % 2 == 1]),
    )


def conv_truth(problem: ConvProblem, device: torch.device) -> ConvTruth:
    """Return the right result, and the error that a correct kernel may have.

    A correct kernel computes in float32 and rounds once. It may also round every product to the dtype, if it multiplies
    the loaded values, or round the sums, as two separate functions do. ``exp`` in the activation inherits the rounding
    of its argument.
    """
    activation, real = problem.options.activation, len(problem.positions)
    y, states = convolve(problem, device)
    low, _ = convolve(problem, device, precision=Precision(torch.float32, None, problem.dtype))
    sums, _ = convolve(problem, device, activation=None)
    weighted, squares = (_convolve_sizes(problem, device, power)[:real] for power in (1, 2))
    slope = 1.0 if activation is None else _SILU_SLOPE
    products = slope * torch.finfo(problem.dtype).eps / 2 * squares.sqrt()
    reach = torch.zeros_like(y[:, :1]) if activation is None else sums.abs().amax(dim=1, keepdim=True)
    rounded = sums.to(problem.dtype).double()
    twice = (rounded if activation is None else silu(rounded)).to(problem.dtype).double()
    losses = [(low - y)[:, None], products[:, None], (twice - y)[:, None]]
    bracket = float32_bracket(reach, problem.options.width)
    norm, peak = allowed_errors(losses, y[:, None], bracket, slope * weighted[:, None], problem.dtype)
    budget = Budget(norm, peak, torch.zeros_like(norm))
    if problem.case.tolerance is not None:
        budget = budget.scaled(problem.case.tolerance.factor)
    return ConvTruth(y[:, None], states, budget)


def convolve(problem: ConvProblem, device: torch.device, **changes: object) -> tuple[Tensor, Tensor]:
    """Return the reference's ``y``, float64 ``[T, C]`` of the real rows, and the states.

    ``changes``: arguments to replace.
    """
    options: dict[str, object] = {"activation": problem.options.activation, "pad_id": PAD_ID}
    arguments = {**problem.arguments(device), **options, **changes}
    y: Tensor = causal_conv1d(**arguments)  # type: ignore[arg-type]
    states = arguments["conv_states"]
    if not isinstance(states, Tensor):
        raise TypeError(f"conv_states is {states!r}")
    return y[: len(problem.positions)].double(), states


def _convolve_sizes(problem: ConvProblem, device: torch.device, power: int) -> Tensor:
    """Return the sums of the absolute terms, each raised to ``power``."""
    arguments = problem.arguments(device)
    sizes = {
        name: None if (tensor := arguments[name]) is None else tensor.double().abs() ** power
        for name in ("x", "weight", "bias", "conv_states")
    }
    return convolve(problem, device, activation=None, **sizes)[0]
