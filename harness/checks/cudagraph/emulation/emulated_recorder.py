"""A recorder for machines without a GPU: it freezes what ``torch.cuda.CUDAGraph`` freezes and reports what it forbids.

On the CPU all tensors share one memory, so how a tensor was created determines whether a GPU would hold it; see
:mod:`attncheck.harness.checks.cudagraph.emulation.host_memory`. Not recorded: work that torch does not see, such as a
C extension called directly, a Triton kernel launched outside a custom operator, or other threads. The Python code of a
custom operator runs at every replay. Memory that such an operator, or a FlexAttention modifier, accesses by itself and
not through an argument is not tracked.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from textwrap import shorten

from torch import Tensor

from attncheck.harness.checks.cudagraph.emulation.tape import Tape
from attncheck.harness.checks.cudagraph.emulation.watch import Watch
from attncheck.harness.checks.cudagraph.recorder import CaptureError, Forward, RecorderName, Released, UnseenError


class EmulatedRecording:
    """The recorded operators of one ``forward``, and the memory they use."""

    def __init__(self, tape: Tape, host_reads: tuple[str, ...], *, hands_out_memory: bool) -> None:
        self._tape, self._host_reads, self._hands_out_memory = tape, host_reads, hands_out_memory

    def replay(self) -> None:
        """Repeat each operator with its recorded arguments in its recorded memory."""
        self._tape.replay()

    def launch(self) -> None:
        """Do the same as :meth:`replay`, because a CPU has no separate device to wait for."""
        self._tape.replay()

    def reads(self, tensor: Tensor) -> bool:
        """Return whether the memory of ``tensor`` existed before the recording and is an argument of an operator."""
        return self._tape.uses_outside(tensor)

    def host_reads(self) -> tuple[str, ...]:
        """Return the reads of host memory with their lines, in order, without duplicates."""
        return self._host_reads

    def hands_out_memory(self) -> bool:
        """Return whether addresses were given away outside custom operators, which are recomputed as a whole."""
        return self._hands_out_memory

    def released(self) -> tuple[Released, ...]:
        """Return memory from before the recording that only recordings keep alive, or that a resize has moved."""
        return tuple(self._tape.released())


class EmulatedRecorder:
    """Records on the CPU. Use one recorder per backend, since it tracks host memory from its creation."""

    name: RecorderName = "emulated"

    def __init__(self) -> None:
        self._watch = Watch()

    def watching(self) -> AbstractContextManager[None]:
        """Return a context that tracks which memory is on the host."""
        return self._watch.active()

    def mark_host(self, *tensors: Tensor) -> None:
        """Mark these tensors, and all that share their memory, as being on the host."""
        for tensor in tensors:
            self._watch.host.mark(tensor)

    def record(self, prepare: Callable[[], Forward]) -> EmulatedRecording:
        """Run once to warm up, then run ``forward`` again and record it.

        Raise :class:`CaptureError` with all violations of the run. Raise :class:`UnseenError` if ``forward`` runs alone
        but fails under torch's modes, or if it raises only in the recorded run.
        """
        self._warm_up(prepare)
        with self._watch.active():
            forward = prepare()
        with self._watch.recording(_run.__code__) as (tape, report):
            try:
                _run(forward)
            except Exception as error:
                if report.violations:
                    raise CaptureError(tuple(report.violations)) from error
                raise UnseenError(f"forward raised while its operators were recorded: {_in_words(error)}") from error
        if report.violations:
            raise CaptureError(tuple(report.violations))
        tape.close()
        return EmulatedRecording(tape, tuple(report.host_reads), hands_out_memory=self._watch.hands_out_memory)

    def _warm_up(self, prepare: Callable[[], Forward]) -> None:
        try:
            with self._watch.active():
                prepare()()
        except Exception as error:
            # Run without the modes; if this raises as well, the exception is the backend's own.
            prepare()()
            raise UnseenError(f"it does not run while torch's modes watch it: {_in_words(error)}") from error


def _run(forward: Forward) -> None:
    """Call ``forward``. Its frame marks the boundary between the backend's code and ours."""
    forward()


def _in_words(error: Exception) -> str:
    return shorten(f"{type(error).__name__}: {error}", 200, placeholder=" ...")
