"""The recorder for machines without a GPU: it freezes what ``torch.cuda.CUDAGraph`` freezes, and names what it forbids.

On the CPU every tensor lies in one memory, so which of them a GPU would hold follows from how they were made; see
:mod:`attncheck.harness.checks.cudagraph.emulation.host_memory`. Not recorded is work that torch does not see: a C
extension called directly, a Triton kernel launched outside of a custom operator, other threads. The Python code of a
custom operator runs at every replay; memory that it gets at by itself, rather than as an argument, is not known to be
used, and the same holds for FlexAttention's modifiers.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from textwrap import shorten

from torch import Tensor

from attncheck.harness.checks.cudagraph.emulation.tape import Tape
from attncheck.harness.checks.cudagraph.emulation.watch import Watch
from attncheck.harness.checks.cudagraph.recorder import CaptureError, Forward, RecorderName, Released, UnseenError


class EmulatedRecording:
    """The operators of one ``forward``, and the memory they use."""

    def __init__(self, tape: Tape, host_reads: tuple[str, ...], *, hands_out_memory: bool) -> None:
        self._tape, self._host_reads, self._hands_out_memory = tape, host_reads, hands_out_memory

    def replay(self) -> None:
        """Every operator once more, with the arguments it had, in the memory it had."""
        self._tape.replay()

    def launch(self) -> None:
        """As :meth:`replay`: a host waits for itself."""
        self._tape.replay()

    def reads(self, tensor: Tensor) -> bool:
        """Whether the memory of ``tensor`` existed before the recording, and an operator was given it."""
        return self._tape.uses_outside(tensor)

    def host_reads(self) -> tuple[str, ...]:
        """Calls and lines, in order, each once."""
        return self._host_reads

    def hands_out_memory(self) -> bool:
        """Outside of custom operators, which are computed again as a whole."""
        return self._hands_out_memory

    def released(self) -> tuple[Released, ...]:
        """Memory from before the recording that nobody but it holds any more, and what a resize moved away."""
        return tuple(self._tape.released())


class EmulatedRecorder:
    """Records on the CPU. One recorder accompanies one backend: what it knows of host memory, it saw being made."""

    name: RecorderName = "emulated"

    def __init__(self) -> None:
        self._watch = Watch()

    def watching(self) -> AbstractContextManager[None]:
        """Keeps account of what lies on the host."""
        return self._watch.active()

    def mark_host(self, *tensors: Tensor) -> None:
        """These tensors, and whatever shares their memory, lie on the host."""
        for tensor in tensors:
            self._watch.host.mark(tensor)

    def record(self, prepare: Callable[[], Forward]) -> EmulatedRecording:
        """A warm-up run, then ``forward`` once more, recorded.

        :class:`CaptureError` tells everything that was seen in one run. :class:`UnseenError`: ``forward`` runs alone,
        but not while torch's modes watch it, or it raised only in the run that was recorded.
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
            # Whose fault it is shows without the modes: what raises there as well is the backend's own.
            prepare()()
            raise UnseenError(f"it does not run while torch's modes watch it: {_in_words(error)}") from error


def _run(forward: Forward) -> None:
    """The outermost frame of what is recorded."""
    forward()


def _in_words(error: Exception) -> str:
    return shorten(f"{type(error).__name__}: {error}", 200, placeholder=" ...")
