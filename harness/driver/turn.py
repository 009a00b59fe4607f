"""Inputs of a step, and the state of one session's part in a running step."""

from dataclasses import dataclass, field

from torch import Tensor

from attncheck.harness.driver.forward_calls import ForwardCall
from attncheck.harness.driver.results import CallResult
from attncheck.harness.driver.step import Step
from attncheck.harness.problem.problem import Problem
from attncheck.reference.spec import StridesSpec


@dataclass(frozen=True)
class Fill:
    """Contents of the memory that a backend must not depend on, and other variations of a step's inputs.

    ``poison``: value in foreign slots, or only in ``regions`` if given; None leaves stale rows there. ``padding``:
    value of the padding rows of query, key and value. ``loose``: the maxima of the metadata that are loose upper
    bounds. ``strides``: memory layout of the operands; None for the case's own. ``rows``: keys and values that replace
    the problem's; the step takes its new rows from them.
    """

    poison: float | None = None
    regions: tuple[str, ...] | None = None
    padding: float = float("nan")
    loose: tuple[str, ...] = ()
    rows: tuple[Tensor, Tensor] | None = None
    strides: StridesSpec | None = None


@dataclass(frozen=True)
class OtherLayer:
    """A further layer of a step, which runs ``problem`` over the same requests.

    ``role``: its name in messages. ``shares_cache``: it reads the cache of the session's own layer and writes nothing,
    whatever keys it is given. ``has_own_group``: its cache has another shape, so it has pages and a builder of its own.
    Otherwise the same builder serves it over the same pages.
    """

    problem: Problem
    role: str
    shares_cache: bool = False
    has_own_group: bool = False


@dataclass(frozen=True)
class PreparedStep:
    """A step and its calls, of which the backend gets copies. ``facts``: the fields of the fill that they depend on."""

    step: Step
    calls: tuple[ForwardCall, ...]
    facts: tuple[str, tuple[str, ...], StridesSpec | None]


@dataclass(frozen=True)
class Turn:
    """A session's part of a step that has begun.

    ``pristine``: the original calls. ``calls``: the copies that the backend gets. ``before``: the cache's memory before
    the first call. ``has_images``: whether the cache's memory and the inputs are compared afterwards. ``results``:
    results of the calls made so far.
    """

    step: Step
    pristine: tuple[ForwardCall, ...]
    calls: tuple[ForwardCall, ...]
    kv_cache: Tensor | None
    before: Tensor | None
    has_images: bool
    results: list[CallResult] = field(default_factory=list)
