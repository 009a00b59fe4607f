"""Backends that hide time from a clock: work that is deferred, degraded or left out, and outputs that are kept or found.

All are correct in their first calls, and cheat once they assume that outputs are no longer checked.
``test_timing.py`` names the result for each.
"""

import hashlib
import threading
import time
from dataclasses import replace

import torch

from attncheck.backends.mutants.plain import Base as Miniature
from attncheck.backends.mutants.plain import PlainBackend, PlainBuilder, PlainImpl

HONEST_CALLS = 3

deferred = []
"""Work for a side stream where there is no device; done when the device is synchronised."""

ready = []
"""Work that a builder may do instead of ``forward``."""


class CheatingImpl(PlainImpl):
    """Correct for :data:`HONEST_CALLS` calls; later ``cheat`` runs instead of ``answer``."""

    calls = 0

    def attend(self, *arguments):
        self.calls += 1
        if self.calls <= HONEST_CALLS:
            self.answer(*arguments)
        else:
            self.cheat(*arguments)

    def answer(self, *arguments):
        super().attend(*arguments)

    def cheat(self, layer, query, key, value, caches, metadata, output, output_lse):
        raise NotImplementedError


class OwnMemory(Miniature):
    """A backend that may return its own memory."""

    accept_output_buffer = False
    features = PlainBackend.features - {"lse"}


class LeavesWorkToAThread(Miniature):
    """Returns at once and leaves the work to a thread."""

    class Impl(CheatingImpl):
        def cheat(self, *arguments):
            def work():
                threading.Event().wait(0.02)
                self.answer(*arguments)

            threading.Thread(target=work, daemon=True).start()


class LeavesWorkToAStream(Miniature):
    """Writes the output on a stream that the current one never waits for."""

    class Impl(CheatingImpl):
        def cheat(self, layer, query, key, value, caches, metadata, output, output_lse):
            right = torch.empty_like(output)
            lse = None if output_lse is None else torch.empty_like(output_lse)
            self.answer(layer, query, key, value, caches, metadata, right, lse)

            def hand_over():
                output.copy_(right)
                if lse is not None:
                    output_lse.copy_(lse)

            if not output.is_cuda:
                deferred.append(hand_over)
                return
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            for kept in (right, lse):
                if kept is not None:
                    kept.record_stream(side)
            with torch.cuda.stream(side):
                torch.cuda._sleep(10_000_000)
                hand_over()


class Lazy(torch.Tensor):
    """An output that is computed when a torch function first takes it."""

    work = None

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        for argument in args:
            if isinstance(argument, Lazy) and argument.__dict__.get("work"):
                argument.__dict__.pop("work")()
        return super().__torch_function__(function, types, args, kwargs or {})


class EvaluatesLazily(Miniature):
    """Returns a subclass of Tensor that does the work when a method is first called."""

    class Impl(CheatingImpl):
        def forward(self, *arguments, output, **keywords):
            super().forward(*arguments, output=output, **keywords)
            if self.calls <= HONEST_CALLS:
                return output
            lazy = output.as_subclass(Lazy)
            lazy.__dict__["work"] = self.work
            return lazy

        def cheat(self, *arguments):
            self.work = lambda: self.answer(*arguments)


class ReplacesTheClock(Miniature):
    """Replaces the functions that measure time."""

    class Impl(CheatingImpl):
        def cheat(self, *arguments):
            self.answer(*arguments)
            time.perf_counter_ns = lambda: 0
            torch.cuda.Event.elapsed_time = lambda *_: 0.0
            torch.cuda.synchronize = lambda *_: None


class LowersThePrecision(Miniature):
    """Rounds queries to eight bits."""

    class Impl(CheatingImpl):
        def cheat(self, layer, query, *rest):
            self.answer(layer, query.to(torch.float8_e4m3fn).to(query.dtype), *rest)


class LeavesOutTheWrite(Miniature):
    """Attends to the new rows from the arguments, and no longer leaves them in the cache."""

    class Impl(CheatingImpl):
        def answer(self, layer, query, key, value, caches, metadata, output, output_lse):
            super().answer(layer, query, key, value, caches, metadata, output, output_lse)
            if caches is not None and self.calls > HONEST_CALLS:
                common = metadata.common
                for cache in caches:
                    cache.flatten(0, 1)[common.slot_mapping[common.slot_mapping >= 0]] = 0

        cheat = answer


class ComputesWhileItBuilds(Miniature):
    """The builder computes the output from the previous call's tensors, and ``forward`` copies it."""

    class Builder(PlainBuilder):
        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
            if ready:
                ready.pop()(metadata)
            return metadata

    class Impl(PlainImpl):
        calls, made = 0, None

        def forward(self, layer, query, key, value, kv_cache, metadata, output, output_lse=None, **keywords):
            made, self.made = self.made, None
            attend = super().forward

            def ahead(coming):
                self.made = torch.empty_like(output), torch.empty_like(output_lse)
                attend(layer, query, key, value, kv_cache, coming, output=self.made[0], output_lse=self.made[1])

            self.calls += 1
            if self.calls >= HONEST_CALLS:
                ready[:] = [ahead]
            if made is None:
                return attend(layer, query, key, value, kv_cache, metadata, output=output, output_lse=output_lse)
            output_lse.copy_(made[1])
            return output.copy_(made[0])


class KeepsThePlan(Miniature):
    """The builder caches block tables by address."""

    class Builder(PlainBuilder):
        plans = None

        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            common = common_attn_metadata
            self.plans = self.plans or {}
            table = common.block_table_tensor
            # The old table is kept alive, since the allocator could otherwise give its address to another one.
            _, own = self.plans.setdefault((table.data_ptr(), table.shape), (table, table.clone()))
            return super().build(common_prefix_len, replace(common, block_table_tensor=own), fast_build)


# Outputs that are kept from earlier calls, or found in memory.


class Caching(CheatingImpl):
    """Caches outputs under a ``mark`` of the inputs."""

    hits = 0

    def __init__(self, *arguments, **keywords):
        super().__init__(*arguments, **keywords)
        self.kept = {}

    def mark(self, query, caches, metadata):
        raise NotImplementedError

    def attend(self, layer, query, key, value, caches, metadata, output, output_lse):
        self.calls += 1
        mark = self.calls if self.calls <= HONEST_CALLS else self.mark(query, caches, metadata)
        if mark in self.kept:
            type(self).hits += 1
            output.copy_(self.kept[mark][0])
            output_lse.copy_(self.kept[mark][1])
            return
        self.answer(layer, query, key, value, caches, metadata, output, output_lse)
        self.kept[mark] = (output.clone(), output_lse.clone())


class LeavesTheEarlierAnswer(Miniature):
    """Does nothing: the buffer still has the output of the previous call."""

    class Impl(CheatingImpl):
        def cheat(self, *arguments):
            pass


class HandsOutTheEarlierAnswer(OwnMemory):
    """Returns a copy of the output of its last correct call."""

    class Impl(CheatingImpl):
        def forward(self, *arguments, output, **keywords):
            returned = super().forward(*arguments, output=output, **keywords)
            if self.calls <= HONEST_CALLS:
                self.earlier = returned.clone()
            return self.earlier

        def cheat(self, *arguments):
            pass


class CachesByPointer(Miniature):
    """Caches outputs by the query's address and shape."""

    class Impl(Caching):
        def mark(self, query, caches, metadata):
            return query.data_ptr(), query.shape


class CachesByFingerprint(Miniature):
    """Caches outputs by the sums of magnitudes of the query's rows."""

    class Impl(Caching):
        def mark(self, query, caches, metadata):
            rows = query[: metadata.num_rows].double()
            return tuple(rows.abs().sum(dim=(1, 2)).mul(16).round().tolist())


class CachesByContent(Miniature):
    """Caches outputs by the bytes of query, cache and block table."""

    class Impl(Caching):
        def mark(self, query, caches, metadata):
            given = (query[: metadata.num_rows], *(caches or ()), metadata.common.block_table_tensor)
            whole = b"".join(each.contiguous().view(torch.uint8).numpy().tobytes() for each in given)
            return hashlib.sha256(whole).digest()


class HandsBackItsInput(OwnMemory):
    """Computes in place in the query, and returns it."""

    class Impl(CheatingImpl):
        def forward(self, layer, query, *arguments, output, **keywords):
            returned = super().forward(layer, query, *arguments, output=output, **keywords)
            return query if self.calls > HONEST_CALLS else returned

        def cheat(self, layer, query, key, value, caches, metadata, output, output_lse):
            self.answer(layer, query, key, value, caches, metadata, query, None)


class FindsItsAnswerInMemory(OwnMemory):
    """Returns memory that it never writes, in which an earlier owner may have left the right output."""

    class Impl(CheatingImpl):
        def forward(self, *arguments, output, **keywords):
            returned = super().forward(*arguments, output=output, **keywords)
            return torch.empty_like(output) if self.calls > HONEST_CALLS else returned

        def cheat(self, *arguments):
            pass
