"""Work that is done, or contents that are learned of, in what the harness calls between two calls of a backend.

As in ``timing.py``, all are right in their first calls. The last one finds kept answers by what stays as it was.
"""

import sys

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attncheck.backends.candidates.reference import ReferenceBackend, ReferenceBuilder, ReferenceImpl

HONEST_CALLS = 3

put_off = []
"""Work for later."""

libraries = []


class Miniature(ReferenceBackend):
    """The reference under the name of the subclass, whose nested ``Impl`` or ``Builder`` brings the fault."""

    Impl = ReferenceImpl
    Builder = ReferenceBuilder

    @classmethod
    def get_name(cls):
        return cls.__name__.upper()

    @classmethod
    def get_impl_cls(cls):
        return cls.Impl

    @classmethod
    def get_builder_cls(cls):
        return cls.Builder


class CheatingImpl(ReferenceImpl):
    """Honest for some calls, then ``cheat`` answers in place of ``attend``."""

    calls = 0

    def attend(self, *arguments):
        self.calls += 1
        if self.calls <= HONEST_CALLS:
            self.answer(*arguments)
        else:
            self.cheat(*arguments)

    def answer(self, *arguments):
        super().attend(*arguments)

    def cheat(self, *arguments):
        raise NotImplementedError


class WorksInAProfileFunction(Miniature):
    """Once Python has called a clock, it calls whoever profiles."""

    class Impl(CheatingImpl):
        def cheat(self, *arguments):
            def profile(_frame, event, function):
                if event == "c_return" and "perf_counter" in function.__name__:
                    sys.setprofile(None)
                    self.answer(*arguments)

            sys.setprofile(profile)


class Asked(type):
    """Does what was put off when a backend is asked for its flag."""

    @property
    def accept_output_buffer(cls):
        while put_off:
            put_off.pop()()
        return True


class WorksInAProperty(Miniature, metaclass=type("AskedBackend", (Asked, type(ReferenceBackend)), {})):
    """A flag of the backend is no value, but does the work."""

    class Impl(CheatingImpl):
        def cheat(self, *arguments):
            put_off.append(lambda: self.answer(*arguments))


class WorksInAMethodOfTensor(Miniature):
    """Whoever asks where a tensor lies has the work done; the method is torch's own again after that."""

    class Impl(CheatingImpl):
        def cheat(self, *arguments):
            def data_ptr(tensor):
                del torch.Tensor.data_ptr
                self.answer(*arguments)
                return tensor.data_ptr()

            torch.Tensor.data_ptr = data_ptr


class WorksInAKernelOfATen(Miniature):
    """Whoever copies a tensor has the work done; the kernel is ATen's own again after that."""

    class Impl(CheatingImpl):
        def cheat(self, *arguments):
            def clone(tensor, *, memory_format=None):
                while libraries:
                    libraries.pop()._destroy()
                self.answer(*arguments)
                return torch.empty_like(tensor).copy_(tensor)

            libraries.append(torch.library.Library("aten", "IMPL"))
            libraries[0].impl("clone", clone, "CPU")


class LooksOnByAMode(Miniature):
    """A mode that the builder leaves sees rows as they are laid out."""

    class Builder(ReferenceBuilder):
        def build(self, *arguments, **keywords):
            Watching().__enter__()
            return super().build(*arguments, **keywords)


class Watching(TorchDispatchMode):
    """Sees every operator."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class LooksOnByAMethod(Miniature):
    """From ``build`` to ``forward`` rows are laid out by a method of its own."""

    class Builder(ReferenceBuilder):
        def build(self, *arguments, **keywords):
            made = super().build(*arguments, **keywords)
            torch.Tensor.copy_ = torch._C.TensorBase.copy_
            return made

    class Impl(ReferenceImpl):
        def attend(self, *arguments):
            if "copy_" in vars(torch.Tensor):
                del torch.Tensor.copy_
            super().attend(*arguments)


class ChoosesTheOrder(Miniature):
    """Nothing is permuted any more."""

    class Impl(CheatingImpl):
        def cheat(self, *arguments):
            torch.randperm = lambda count, **_: torch.arange(count)
            self.answer(*arguments)


class KeepsAnswersByInvariants(Miniature):
    """Knows a problem by its queries' magnitudes, and by its new values how channels were permuted and turned."""

    class Impl(ReferenceImpl):
        def attend(self, layer, query, key, value, caches, metadata, output, output_lse):
            rows = metadata.num_rows
            new = value[:rows].double()
            mark = tuple(query[:rows].double().abs().sum(dim=(1, 2)).mul(64).round().tolist())
            kept = self.__dict__.setdefault("kept", {})
            if mark in kept:
                out, lse, old = kept[mark]
                index = (new.abs()[..., None] == old.abs()[:, :, None]).all(0).double().argmax(-1)
                sign = (old.gather(2, index.expand(new.shape)) * new).sum(0).sign()
                grouped = out.unflatten(1, (len(index), -1))
                moved = grouped.gather(3, index[:, None].expand(grouped.shape)) * sign[:, None]
                output[:rows], output_lse[:rows] = moved.flatten(1, 2).to(output.dtype), lse
                return
            super().attend(layer, query, key, value, caches, metadata, output, output_lse)
            kept[mark] = output[:rows].double(), output_lse[:rows].clone(), new
