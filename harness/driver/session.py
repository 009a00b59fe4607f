"""A backend that is driven through the steps of a model runner."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attncheck.backends.contract import AttentionBackend
from attncheck.backends.declarations import is_merged
from attncheck.harness.driver.construction import LAYER, LayerStub, construct_builder, construct_impl
from attncheck.harness.driver.foreign_code import StageError, call_backend, has_its_memory, require_memory, stage_named
from attncheck.harness.driver.lending import LentCalls, PersistentInputs, copied_calls, lend_copies, lend_in_place, same
from attncheck.harness.driver.observation import Observation, printable
from attncheck.harness.driver.outputs import CallResult, GuardedBuffer, in_problem_order, merged, placed, read_result
from attncheck.harness.driver.pool import KVPool, new_pool
from attncheck.harness.driver.step import ForwardCall, Step, forward_calls_of, make_step, num_builders, request_order
from attncheck.harness.problem.problem import Problem
from attncheck.harness.problem.sizes import judging_device
from attncheck.harness.problem.storage import output_codes
from attncheck.reference.step_spec import PCPOptions, StridesSpec


@dataclass(frozen=True)
class Fill:
    """Contents of the memory that a backend must not depend on, and other variations of a step's inputs.

    ``poison``: value in foreign slots, or only in ``regions`` if given; None leaves stale rows there. ``padding``:
    value of the padding rows of query, key and value. ``loose``: the maxima of the metadata that are loose upper
    bounds, and ``host_lens`` for lengths on the host. ``strides``: memory layout of the operands; None for the case's
    own. ``rows``: keys and values that replace the problem's; the step takes its new rows from them.
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
    """A step and its calls, which the backend gets as copies. ``facts``: the fields of the fill that they depend on."""

    step: Step
    calls: tuple[ForwardCall, ...]
    facts: tuple[str, tuple[str, ...], StridesSpec | None]


@dataclass(frozen=True)
class BegunStep:
    """A session's part of a step that has begun.

    ``lent``: the calls as the backend gets them. ``before``: the cache's memory before the first call. ``has_images``:
    whether the cache's memory and the inputs are compared afterwards. ``results``: each reads that of a call made.
    """

    step: Step
    lent: LentCalls
    kv_cache: Tensor | None
    before: Tensor | None
    has_images: bool
    results: list[Callable[[], CallResult]] = field(default_factory=list)

    @property
    def calls(self) -> tuple[ForwardCall, ...]:
        """The calls as the backend gets them."""
        return self.lent.calls


@dataclass(frozen=True)
class OutputBuffers:
    """The buffers that a call of ``forward`` writes its result to.

    ``lse`` is None if the backend does not declare ``lse``. ``scale``: float32, one element; None unless the layer's
    output is quantised.
    """

    out: GuardedBuffer
    lse: GuardedBuffer | None
    scale: Tensor | None

    @property
    def guarded(self) -> dict[str, GuardedBuffer]:
        """The buffers that are guarded, by their keyword."""
        return {"output": self.out} | ({} if self.lse is None else {"output_lse": self.lse})

    def refill(self, num_rows: int) -> None:
        """Mark all buffers as unwritten, for a call of ``num_rows`` real rows."""
        for buffer in self.guarded.values():
            buffer.refill(num_rows)

    def require_memory(self) -> None:
        """Raise StageError if a call of ``forward`` resized the memory of a buffer."""
        for name, buffer in self.guarded.items():
            require_memory(buffer.memory, name, "forward")

    def handed_out(self) -> dict[str, Tensor]:
        """Return the output keywords of ``forward``; the buffers are aliases of the same memory."""
        keywords = {name: buffer.handed_out() for name, buffer in self.guarded.items()}
        if self.scale is not None:
            keywords["output_scale"] = self.scale
        return keywords


@dataclass(frozen=True)
class BackendLayer:
    """A backend's impl and the layer object that holds it.

    ``judged_on``: where results are judged. ``writes``: whether the layer stores the keys it is given.
    """

    backend: type[AttentionBackend]
    impl: Any
    attn_layer: LayerStub
    judged_on: torch.device
    writes: bool = True

    def output_buffers(self, problem: Problem, call: ForwardCall) -> OutputBuffers:
        """Return new buffers for the result of ``call``, on its device."""
        device = call.query.device
        shape = (len(call.query), problem.layer.num_heads)
        codes, lse, scale = output_codes(problem.layer), None, None
        dtype = problem.dtype if codes is None else codes.dtype
        out = GuardedBuffer((*shape, problem.output_size), call.num_rows, dtype, device, call.output_form)
        if "lse" in self.backend.features:
            lse = GuardedBuffer(shape, call.num_rows, torch.float32, device, call.output_form)
        if codes is not None:
            scale = torch.tensor([codes.scale], dtype=torch.float32, device=device)
        return OutputBuffers(out, lse, scale)

    def store_new_rows(self, pool: KVPool, step: Step, calls: Sequence[ForwardCall]) -> None:
        """Write the new rows of ``step`` that none of ``calls`` writes before another one reads them.

        These are all rows if the impl has no writer, and none if the layer stores no keys. On the path ``pcp``, they
        are the rows of all ranks but the first: a rank reads the keys of all, as each rank gathers those of others.
        """
        is_spread = isinstance(step.problem.case.batch.path.options, PCPOptions)
        if not self.writes or step.key is None or step.value is None:
            return
        if is_spread or not self.impl.brings_writer:
            slots = step.slot_mapping.clone()
            if is_spread and self.impl.brings_writer:
                slots[calls[0].rows] = -1
            pool.write((slots, step.key[: len(slots)].clone(), step.value[: len(slots)].clone()))

    def bind(
        self, call: ForwardCall, kv_cache: Tensor | None, metadata: Any, buffers: OutputBuffers
    ) -> Callable[[], object]:
        """Return ``forward`` with all arguments bound, to be called under ``torch.no_grad()``.

        ``kv_cache``: None if there is no cache. Calling the result runs the backend's code alone, and does not wait for
        the device.
        """
        impl, attn_layer, slots = self.impl, self.attn_layer, call.common.slot_mapping
        query, key, value = call.query, call.key, call.value
        if kv_cache is None:
            kv_cache = torch.empty(0, dtype=query.dtype, device=query.device)
        # An alias, so that a backend that changes the tensor object leaves ours alone.
        cache = kv_cache.detach()
        enter = partial(impl.forward, attn_layer, query, key, value, cache, metadata, **buffers.handed_out())
        if self.backend.forward_includes_kv_cache_update or not self.writes or metadata is None or key is None:
            return enter  # with no Python frame in between, which would add to a timing

        def forward() -> object:
            impl.do_kv_cache_update(attn_layer, key, value, cache, slots)
            return enter()

        return forward

    def enter(self, call: ForwardCall, kv_cache: Tensor | None, metadata: Any, buffers: OutputBuffers) -> object:
        """Return what ``forward`` returns under ``torch.no_grad()``, without waiting for the device.

        Raises StageError if it resized the memory of an argument.
        """
        forward = self.bind(call, kv_cache, metadata, buffers)
        with torch.no_grad():
            returned = forward()
        buffers.require_memory()
        lent = {"query": call.query, "key": call.key, "value": call.value, "kv_cache": kv_cache}
        for name, tensor in lent.items():
            if tensor is not None:
                require_memory(tensor, name, "forward")
        return returned

    def result_of(self, call: ForwardCall, returned: object, buffers: OutputBuffers) -> Callable[[], CallResult]:
        """Return a function that reads the result of ``call`` once its step has ended: later calls may change it."""
        for buffer in buffers.guarded.values():
            buffer.find_unwritten()
        given, protocol = read_result(returned, buffers.out, must_be_buffer=self.backend.accept_output_buffer)
        ignored = getattr(self.impl, "ignored_result", "")

        def result() -> CallResult:
            buffers.require_memory()
            out = buffers.out.on(self.judged_on)
            lse = None if buffers.lse is None else buffers.lse.on(self.judged_on)
            is_buffer = given is buffers.out.rows
            unwritten = out.unwritten if is_buffer else torch.zeros_like(out.unwritten)
            is_ignored = ignored and bool(unwritten[: call.num_rows].any())
            guarded = {"output": out, "LSE": lse}
            return CallResult(
                call=call,
                output=out.rows if is_buffer else given.to(self.judged_on),
                lse=None if lse is None else lse.rows,
                unwritten=unwritten,
                lse_unwritten=None if lse is None else lse.unwritten,
                breaches=tuple(name for name, buffer in guarded.items() if buffer and buffer.breached()),
                protocol=(*protocol, ignored) if is_ignored else protocol,
            )

        return result


class Session:
    """One backend on one problem on one device, driven as a model runner does.

    Impl, builder and cache are constructed once. Every :meth:`run` refills the cache and passes fresh tensors. Raises
    StageError if the backend refuses or fails during set-up.
    """

    def __init__(
        self,
        backend: type[AttentionBackend],
        problem: Problem,
        device: torch.device,
        later: tuple[Problem, ...] = (),
        *,
        capture_sizes: tuple[int, ...] = (),
        pool: KVPool | None = None,
        layers: Sequence[OtherLayer] = (),
        role: str = "",
        least_builders: int = 1,
        watching: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """Construct impl, builder and cache.

        ``later``: problems for :meth:`beside`. The builder's maxima cover them all, and every pool has the size of the
        largest, as an engine's pool has one size.

        ``capture_sizes``: token counts of the graphs that will be captured, ascending. ``pool``: the pool of another
        session of this backend. It is reused for its own problem, and its codec for other problems of the same layer
        and cache. ``layers``: further layers that the builder serves, each a session in ``self.layers``. ``role``: the
        name in messages. ``least_builders``: builders to construct, even if a step needs fewer. ``watching``: returns a
        context for each call of impl and builder.
        """
        self.backend, self.problem, self.device = backend, problem, device
        self._problems, self._capture_sizes = (problem, *later), capture_sizes
        self._num_blocks = max(each.num_blocks for each in self._problems)
        self.builders: list[Any] = []
        self.pool = self._known_pool = pool
        self._latest: PreparedStep | None = None
        self._order: list[int] | None = None
        self.role, self._is_refilled = role, True
        self._least_builders, self._watching = least_builders, watching
        self._reads: str | None = None
        self.layers: tuple[Session, ...] = ()
        self._lend: Callable[[tuple[ForwardCall, ...]], LentCalls] = lend_copies
        self._construct()
        self.layers = tuple(self._of_layer(other) for other in layers)
        self._prepare()
        for session in self.layers:
            session._known_pool = self.pool
            session._prepare()

    def beside(self, problem: Problem, *, is_judged: bool = False) -> "Session":
        """Return a session for another problem of the same layer and cache, over the same impl and builder.

        ``is_judged``: foreign slots of a pool of its own hold stale rows, as those of the first session do.
        """
        return copy(self)._taking_up(problem, is_judged=is_judged)

    def with_second_builder(self, problem: Problem, role: str = "", first: "Session | None" = None) -> "Session":
        """Return a session with a builder of its own, for a micro-batch that is built before this one has run.

        ``first``: the session of that micro-batch on another layer, whose builder serves this layer, too.
        """
        other = copy(self)
        other.role, other._lend = role, lend_copies  # both are in use at once
        other.builders = [] if first is None else first.builders
        return other._taking_up(problem)

    def with_persistent_inputs(self) -> "Session":
        """Return this session with persistent inputs, as a model runner has them.

        Every step of this session, and of those :meth:`beside` it, is in the same memory as far as it fits.
        """
        inputs = [PersistentInputs(call) for call in copied_calls(self.prepared().calls)]

        def lend(calls: tuple[ForwardCall, ...]) -> LentCalls:
            return lend_in_place(inputs, calls) if len(calls) == len(inputs) else lend_copies(calls)

        other = copy(self)
        other._lend = lend
        return other

    def in_order(self, order: Sequence[int]) -> "Session":
        """Return a session over the same cache and builder whose steps have the requests in ``order``."""
        other = copy(self)
        other._order, other._latest = list(order), None
        return other

    def in_place(self, problem: Problem) -> "Session":
        """Return a session for another problem of the same layer and cache, over the same impl, builder and memory."""
        other = copy(self)
        other._known_pool = None if self.pool is None else self.pool.beside(problem)
        return other._taking_up(problem)

    def following(self, problem: Problem) -> "Session":
        """Return a session for a step over the cache as the previous step leaves it."""
        other = copy(self)
        other._known_pool, other._is_refilled = self.pool, False
        return other._taking_up(problem)

    def _taking_up(self, problem: Problem, *, is_judged: bool = False) -> "Session":
        """Return this session, a new copy of another, prepared for ``problem``."""
        self.problem = problem
        self._prepare(is_judged=is_judged)
        return self

    def _of_layer(self, other: OtherLayer) -> "Session":
        """Return a session of another layer over the same builders, without a pool yet."""
        made = copy(self)
        made.problem, made.role = other.problem, other.role
        made._is_refilled = not other.shares_cache
        made._reads = LAYER if other.shares_cache else None
        made._construct()
        return made

    def _construct(self) -> None:
        self.attn_layer = LayerStub(self.problem.cache, self.device)
        self.impl = self.attn_layer.impl = self._impl()
        self.layer = BackendLayer(self.backend, self.impl, self.attn_layer, self.device, writes=self._reads is None)

    def _impl(self, *, with_sinks: bool = True) -> Any:
        construct = partial(
            construct_impl, self.backend, self.problem, self.device, with_sinks=with_sinks, reads=self._reads
        )
        return call_backend("construct", construct, self.device, self._watching())

    @property
    def builder(self) -> Any:
        """The builder of every call, except those of micro-batches after the first."""
        return self.builders[0]

    @property
    def threshold(self) -> int | None:
        """The builder's ``reorder_batch_threshold``, which orders the requests of a step; None if it has none."""
        threshold: int | None = getattr(self.builder, "reorder_batch_threshold", None)
        return threshold

    @property
    def order(self) -> list[int]:
        """The problem's requests in the order of a step. Raises StageError if the builder's threshold is no number."""
        if self._order is None:
            self._order = call_backend("builder", lambda: request_order(self.problem, self.threshold))
        return self._order

    @property
    def chosen_kernels(self) -> tuple[str, ...]:
        """Names of the kernels chosen so far, sorted; empty if not known. Raises StageError if they are not names."""
        return call_backend("chosen_kernels", self._kernel_names)

    @property
    def _is_merged(self) -> bool:
        return is_merged(self.problem.case.batch, self.backend.features)

    def run(self, fill: Fill = Fill(), *, images: bool = True) -> Observation:
        """Run one step over a freshly filled cache. Raises StageError.

        ``images``: keep the cache's memory before and after, and look for changed inputs.
        """
        begun = self.begin(fill, images=images)
        try:
            for call, metadata in self.built(begun.calls):
                self.take(begun, call, metadata)
        except StageError as failure:
            if not begun.results or failure.raised.touched:
                raise
            raise StageError(replace(failure.raised, touched=("the output of an earlier call",))) from failure
        return self.finish(begun)

    def begin(self, fill: Fill = Fill(), *, images: bool = True, lent: LentCalls | None = None) -> BegunStep:
        """Make the inputs of a step, and fill the cache according to ``fill``. Raises StageError.

        ``lent``: the calls of the step if they are not to be in new memory.
        """
        if lent is None and not images and self._latest is None and self._lend is lend_copies:
            # Most such sessions run once: nothing needs the calls afterwards, so they are neither copied nor kept.
            step, calls = self.step_of(self.problem, fill)
            lent = LentCalls((), calls)
        else:
            prepared = self.prepared(fill)
            step, lent = prepared.step, lent or self._lend(prepared.calls)
        kv_cache = self._filled_cache(step, lent.calls, fill)
        before = self._image() if images else None
        return BegunStep(step, lent, kv_cache, before, images)

    def built(self, calls: Sequence[ForwardCall]) -> Iterable[tuple[ForwardCall, Any]]:
        """Return each call with its metadata; micro-batches are all built before the first runs, others one by one."""
        built = ((call, self._build(call)) for call in calls)
        return list(built) if num_builders(self.problem) > 1 else built

    def take(self, begun: BegunStep, call: ForwardCall, metadata: Any) -> None:
        """Make one call of a step that has begun. Raises StageError."""
        buffers = self.layer.output_buffers(self.problem, call)
        forward = partial(self.layer_of(call).enter, call, begun.kv_cache, metadata, buffers)
        try:
            returned = call_backend("forward", forward, self.device, self._watching())
        except StageError as failure:
            touched = self._touched(buffers, begun.before)
            raise StageError(replace(failure.raised, touched=touched)) from failure
        begun.results.append(self.layer.result_of(call, returned, buffers))

    def finish(self, begun: BegunStep) -> Observation:
        """Return the observation of a step whose calls have all been made. Raises StageError."""
        results = [result() for result in begun.results]
        seen = merged(results, self.backend.conventions) if self._is_merged else placed(results)
        seen = in_problem_order(seen, begun.step)
        if not begun.has_images:
            return seen
        changed = tuple(dict.fromkeys(begun.lent.changed()))
        return replace(seen, pool_before=begun.before, pool_after=self._image(), changed=changed)

    def layer_of(self, call: ForwardCall) -> BackendLayer:
        """Return the layer that makes ``call``: only one of the calls that are merged carries the sinks."""
        return self.layer if call.carries_sinks else self._bare_layer

    def run_without_metadata(self) -> Tensor:
        """Return the output of vLLM's profiling call (no metadata, empty cache) in step order. Raises StageError."""
        call, *_ = copied_calls(self.prepared(Fill(padding=0.0)).calls)
        buffers = self.layer.output_buffers(self.problem, call)
        forward = partial(self.layer_of(call).enter, call, None, None, buffers)
        returned = call_backend("forward without metadata", forward, self.device)
        return read_result(returned, buffers.out, must_be_buffer=self.backend.accept_output_buffer)[0]

    def _kernel_names(self) -> tuple[str, ...]:
        given: object = self.impl.chosen_kernels
        names = list(given) if isinstance(given, Collection) and not isinstance(given, str) else [None]
        if not all(isinstance(name, str) and name for name in names):
            raise TypeError(f"{type(self.impl).__name__}.chosen_kernels is {given!r}; a collection of names is right")
        return tuple(sorted({printable(str(name)) for name in names}))

    def _prepare(self, *, is_judged: bool = False) -> None:
        self.problem = self.problem.in_pool_of(self._num_blocks)
        for _ in range(len(self.builders), max(self._least_builders, num_builders(self.problem))):
            self._add_builder()
        self._order = None
        self._latest = None
        self.layer = replace(self.layer, judged_on=judging_device(self.problem.case, self.device))
        self._bare_layer = self.layer
        if self.problem.layer.sink_logits is not None and self._is_merged:
            self._bare_layer = replace(self.layer, impl=self._impl(with_sinks=False))
        self.pool = call_backend("cache", lambda: self._pool(is_judged=is_judged)) if self.problem.has_pool else None
        self._known_pool = self._known_pool or self.pool

    def _pool(self, *, is_judged: bool) -> KVPool:
        known, problem = self._known_pool, self.problem
        if known is not None and (known.problem is problem or not self._is_refilled):
            return known
        if known is not None and known.has_codec_for(problem):
            return known.with_own_memory(problem, is_judged=is_judged)
        return new_pool(self.backend, problem, self.device, self.impl)

    def _add_builder(self) -> None:
        construct = partial(
            construct_builder,
            self.backend,
            self._problems,
            self.device,
            self.attn_layer,
            beside=[session.attn_layer for session in self.layers],
            capture_sizes=self._capture_sizes,
        )
        self.builders.append(call_backend("builder", construct, self.device, self._watching()))

    def prepared(self, fill: Fill = Fill()) -> PreparedStep:
        """Return the step for ``fill``. The latest one is reused, unless ``fill`` brings rows of its own."""
        padding = self.problem.case.batch.padding
        is_padded = padding.query_rows or padding.key_rows
        facts = str(fill.padding) if is_padded else "", fill.loose, fill.strides
        if self._latest is not None and fill.rows is None and self._latest.facts == facts:
            return self._latest
        made = PreparedStep(*self.step_of(self.problem, fill), facts)
        if fill.rows is None:
            self._latest = made
        return made

    def step_of(self, problem: Problem, fill: Fill = Fill()) -> tuple[Step, tuple[ForwardCall, ...]]:
        """Return a new step of ``problem``, which has the batch of the session's own problem, and its calls."""
        step = make_step(
            problem,
            self.device,
            self.order,
            padding_fill=fill.padding,
            pad_seq_len=self.backend.conventions.pad_seq_len,
            loose=fill.loose,
            strides=fill.strides,
            conventions=self.backend.conventions,
            new_rows=fill.rows,
        )
        return step, forward_calls_of(step, self.backend.features, self.threshold)

    def _filled_cache(self, step: Step, calls: Sequence[ForwardCall], fill: Fill) -> Tensor | None:
        """Return the cache for ``fill``, with the step's new rows if the backend has no writer; None without a pool."""
        if self.pool is None:
            return None
        if self._is_refilled:
            self.pool.filled(fill.poison, fill.regions)
        self.layer.store_new_rows(self.pool, step, calls)
        return self.pool.kv_cache

    def _build(self, call: ForwardCall) -> Any:
        build = self.builders[call.builder].build
        make = partial(build, common_prefix_len=call.common_prefix_len, common_attn_metadata=call.common)
        # Without a wait, which a model runner does not have and which would hide a missing one.
        return call_backend("build", make, within=self._watching())

    def _image(self) -> Tensor | None:
        return None if self.pool is None else self.pool.bytes().clone()

    def _touched(self, buffers: OutputBuffers, before: Tensor | None) -> tuple[str, ...]:
        """Return what a call changed before it raised; "the device" if a fault on it prevents the check."""
        try:
            touched = ["the output"] if buffers.out.touched() else []
            if before is not None and self.pool is not None and self.pool.differs_from(before):
                touched.append("the cache")
        except RuntimeError:
            touched = ["the device"]
        return tuple(touched)


# Run one step over several layers or micro-batches, in the order in which a model builds and calls them.
#
# Sessions over the same builder and batch share one metadata object. Every builder builds before the first layer runs;
# that of the sessions without a role builds first. A builder that builds its calls one by one builds the next call
# after every layer has run the current one.

_DEPTH = 3
"""Levels of nested objects within the metadata that are compared: the common metadata, and plans."""


def run_step(sessions: Sequence[Session], changes: list[str] | None = None) -> list[Observation]:
    """Run one step in which each of ``sessions`` makes its calls, in order; return their observations.

    ``changes``: a list that receives each metadata field that a call of ``forward`` changed, with the layer that
    changed it. Raises StageError, whose stage includes the session's role.
    """
    begun_steps: list[tuple[Session, BegunStep]] = []
    for session in sessions:
        with _named(session):
            begun_steps.append((session, session.begin(images=False)))
    built: dict[object, Iterator[tuple[ForwardCall, Any]]] = {}
    for session, begun in sorted(begun_steps, key=lambda pair: pair[0].role != ""):
        if _batch_of(session) not in built:
            with _named(session):
                built[_batch_of(session)] = iter(session.built(begun.calls))
    for number in range(max(len(begun.calls) for _, begun in begun_steps)):
        made = {batch: next(calls, None) for batch, calls in built.items()}
        for session, begun in begun_steps:
            if (pair := made[_batch_of(session)]) is None:
                continue
            call = replace(begun.calls[number], common=pair[0].common)
            metadata = pair[1]
            with _named(session):
                before = {} if changes is None else call_backend("metadata", partial(_contents, metadata))
                session.take(begun, call, metadata)
                if changes is not None:
                    who = session.role or "the layer"
                    changed = call_backend("metadata", partial(_changes, before, metadata))
                    changes += [f"forward of {who} changes {name}" for name in changed]
    return [session.finish(begun) for session, begun in begun_steps]


def _batch_of(session: Session) -> object:
    """Return a key that is equal for two sessions if they share one metadata object."""
    return id(session.builder), id(session.problem.block_table)


def _named(session: Session) -> AbstractContextManager[None]:
    return stage_named(f"of {session.role}") if session.role else nullcontext()


def _contents(metadata: object, name: str = "metadata", depth: int = _DEPTH) -> dict[str, object]:
    """Return the values of an object's fields and of nested objects, by dotted name; tensors are copied."""
    if type(metadata) is Tensor and has_its_memory(metadata):
        return {name: metadata.detach().clone()}
    members = getattr(metadata, "__dict__", None)
    if not isinstance(members, Mapping) or isinstance(metadata, type) or not depth:
        return {name: metadata}
    held: dict[str, object] = {name: type(metadata)}
    for key, value in members.items():
        held |= _contents(value, f"{name}.{key}", depth - 1)
    return held


def _changes(before: Mapping[str, object], metadata: object) -> list[str]:
    """Return the names of the values that differ; if a whole object was replaced, only its own name."""
    after = _contents(metadata)
    names = dict.fromkeys((*before, *after))
    differ = [n for n in names if n not in before or n not in after or not same(before[n], after[n])]
    return [name for name in differ if name.rpartition(".")[0] not in differ]
