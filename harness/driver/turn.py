"""What a session keeps of a step: its inputs as they were made, and its part of a step that has begun."""

from dataclasses import dataclass, field

from torch import Tensor

from attncheck.harness.driver.forward_calls import ForwardCall
from attncheck.harness.driver.results import CallResult
from attncheck.harness.driver.step import Step
from attncheck.harness.problem.problem import Problem
from attncheck.reference.spec import StridesSpec


@dataclass(frozen=True)
class Fill:
    """What stands where nothing should be looked at.

    ``poison`` in foreign slots (None: plausible stale rows; only in ``regions``, where given), ``padding`` in the
    padding rows of query, key and value. ``loose``: the maxima of the metadata that are upper bounds. ``strides``: how
    the operands lie in memory; None: as the case has it. ``rows``: keys and values of which the step brings its part,
    in place of the problem's.
    """

    poison: float | None = None
    regions: tuple[str, ...] | None = None
    padding: float = float("nan")
    loose: tuple[str, ...] = ()
    rows: tuple[Tensor, Tensor] | None = None
    strides: StridesSpec | None = None


@dataclass(frozen=True)
class OtherLayer:
    """A further layer of a step, asked ``problem`` over the same requests.

    ``role``: how messages name it. ``shares_cache``: it reads the cache of the session's own layer, and writes nothing,
    whatever keys it is handed. ``has_own_group``: its cache has another shape, so it has pages and a builder of its
    own; any other is served by the same builder over the same pages.
    """

    problem: Problem
    role: str
    shares_cache: bool = False
    has_own_group: bool = False


@dataclass(frozen=True)
class PreparedStep:
    """A step and its calls, as the backend gets copies of them. ``facts``: what of the fill they depend on."""

    step: Step
    calls: tuple[ForwardCall, ...]
    facts: tuple[str, tuple[str, ...], StridesSpec | None]


@dataclass(frozen=True)
class Turn:
    """A session's part of a step that has begun.

    ``pristine``: the calls as they were made, ``calls``: the copies that the backend gets. ``before``: the cache's
    memory before the first call. ``has_images``: whether the cache's memory is compared, and the inputs.
    ``results``: those of the calls made so far.
    """

    step: Step
    pristine: tuple[ForwardCall, ...]
    calls: tuple[ForwardCall, ...]
    kv_cache: Tensor | None
    before: Tensor | None
    has_images: bool
    results: list[CallResult] = field(default_factory=list)
