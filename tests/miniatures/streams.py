"""Backends that use further CUDA streams: some leave out a wait between two streams. All declare ``NEVER``."""

from contextlib import contextmanager

import torch

from attncheck.backends.contract import AttentionCGSupport
from attncheck.backends.mutants.graphs import Base, RowsImpl


@contextmanager
def side_stream(*, waits_before, waits_after):
    """Make a new stream current, which waits for the current one before, and the current one for it after, or not."""
    outer, side = torch.cuda.current_stream(), torch.cuda.Stream()
    if waits_before:
        side.wait_stream(outer)
    with torch.cuda.stream(side):
        yield
    if waits_after:
        outer.wait_stream(side)


class Miniature(Base):
    """The base, whose work needs no wait of the host."""

    level = AttentionCGSupport.NEVER


class WaitsForBoth(Miniature):
    """Right: another stream, which waits for the current one, which waits for it."""

    class Impl(RowsImpl):
        def forward(self, *arguments, **keywords):
            with side_stream(waits_before=True, waits_after=True):
                return super().forward(*arguments, **keywords)


class WaitsOnTheHost(Miniature):
    """Right: work on the default stream between two waits of the host."""

    class Impl(RowsImpl):
        def forward(self, *arguments, **keywords):
            torch.cuda.synchronize()
            with torch.cuda.stream(torch.cuda.default_stream()):
                result = super().forward(*arguments, **keywords)
            torch.cuda.synchronize()
            return result


class LeavesForward(Miniature):
    """The current stream does not wait for the stream of ``forward``."""

    class Impl(RowsImpl):
        def forward(self, *arguments, **keywords):
            with side_stream(waits_before=True, waits_after=False):
                torch.cuda._sleep(1_000_000)  # on a GPU, the work could be done in time by chance
                return super().forward(*arguments, **keywords)


class LeavesTheWriter(Miniature):
    """The current stream attends without waiting for the stream that writes the cache."""

    class Impl(RowsImpl):
        def write(self, *arguments):
            with side_stream(waits_before=True, waits_after=False):
                super().write(*arguments)


class StartsEarly(Miniature):
    """The stream of ``forward`` does not wait for the current stream, which writes the inputs."""

    class Impl(RowsImpl):
        def forward(self, *arguments, **keywords):
            with side_stream(waits_before=False, waits_after=True):
                return super().forward(*arguments, **keywords)


class OnTheDefaultStream(Miniature):
    """Works on the default stream, whatever stream is current."""

    class Impl(RowsImpl):
        def forward(self, *arguments, **keywords):
            with torch.cuda.stream(torch.cuda.default_stream()):
                return super().forward(*arguments, **keywords)
