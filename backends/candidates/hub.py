"""Candidates for attention kernels of the Hugging Face Hub, such as ``hf:kernels-community/flash-attn2@1``.

A kernel with the functions of flash-attn 2.8 is the candidate ``flash_attn`` with another module. The package
``kernels`` downloads it and imports it (read in version 0.17.2, and run with a folder on a CPU).
"""

import importlib
import inspect
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from attncheck.backends.base import machine
from attncheck.backends.candidates.flash_attention import (
    FlashAttnBackend,
    FlashAttnBuilder,
    FlashAttnImpl,
    FlashBackend,
)
from attncheck.errors import BackendUnavailableError

INSTALL = "install it (pip install kernels)"

_SCORES = ("softmax_scale", "causal", "window_size", "softcap", "alibi_slopes")
_ARGUMENTS = {
    "flash_attn_varlen_func": (
        "cu_seqlens_q",
        "cu_seqlens_k",
        "max_seqlen_q",
        "max_seqlen_k",
        "return_attn_probs",
        "block_table",
        *_SCORES,
    ),
    "flash_attn_with_kvcache": ("cache_seqlens", "block_table", "return_softmax_lse", *_SCORES),
}
"""The keywords that the candidate passes, by function."""

_UNTRUSTED = (
    "there is no connection to the Hub, or its publisher is not trusted there; "
    "download the kernel and name its folder, such as hf:./folder"
)


@dataclass(frozen=True)
class HubKernel:
    """A kernel that is loaded into this process.

    device: the type of the devices that its build runs on, such as ``cpu``. version: of the kernel, with its commit if
    it was downloaded, and of the package ``kernels``.
    """

    module: ModuleType
    device: str
    version: str


class HubBackend(FlashAttnBackend):
    """A kernel of the Hub; :meth:`from_argument` creates the class that can be driven.

    It declares what ``flash_attn`` declares. Whether the build runs on this GPU is decided by ``kernels``.
    """

    @classmethod
    def from_argument(cls, argument: str) -> type[FlashAttnBackend]:
        """Return the candidate for ``OWNER/NAME@VERSION``, or for a folder (``./folder``, ``/folder``).

        VERSION is a number; another text is a revision: a branch, a tag or a commit.

        Raises:
            BackendUnavailableError: ``kernels`` is not installed, has no build of the kernel for this machine, has no
                connection to the Hub, or does not trust the publisher.
            ValueError: no version is given, or the functions of the kernel are not those of flash-attn 2.8.
        """
        kernel = load_kernel(argument)
        if problems := signature_problems(kernel.module):
            raise ValueError(f"is no kernel with the functions of flash-attn 2.8: {'; '.join(problems)}")
        own: dict[str, Any] = {"__module__": __name__, "__doc__": cls.__doc__}
        members = {
            "library": staticmethod(lambda: kernel.module),
            "version": staticmethod(lambda: kernel.version),
            "kernels_of": argument,
            "supported_devices": (kernel.device,),
            "get_name": staticmethod(f"hf:{argument}".upper),
            "get_impl_cls": staticmethod(lambda: impl),
            "get_builder_cls": staticmethod(lambda: builder),
        }
        backend = type("HubKernelBackend", (cls,), own | members)
        impl = type("HubKernelImpl", (FlashAttnImpl,), own | {"backend": backend})
        builder = type("HubKernelBuilder", (FlashAttnBuilder,), own | {"backend": backend})
        return backend

    @classmethod
    def unavailable_reasons(cls, device: str) -> list[str]:
        """See the contract; ``kernels`` has checked the rest."""
        return super(FlashBackend, cls).unavailable_reasons(device)


def load_kernel(argument: str) -> HubKernel:
    """Return the kernel that ``argument`` of :meth:`HubBackend.from_argument` names, which this may download."""
    repo, _, version = argument.partition("@")
    is_folder = argument.startswith((".", "/"))
    if not is_folder and not version:
        raise ValueError(f"names no version; write hf:{repo}@1, or a branch, tag or commit after the @")
    package = _package(f"hf:{argument}")
    try:
        if is_folder:
            module = package.get_local_kernel(Path(argument))
        elif version.isdecimal():
            module = package.get_kernel(repo, version=int(version))
        else:
            module = package.get_kernel(repo, revision=version)
    except (OSError, RuntimeError, ValueError) as error:  # no build for this machine, or no connection
        words = " ".join(str(error).split())
        reason = f"kernels cannot load it: {type(error).__name__}: {words}"
        if isinstance(error, ValueError):
            if "trust" in words:  # its advice is an argument of get_kernel, which attncheck does not pass
                reason = _UNTRUSTED
            elif "offline mode" not in words:  # such as a version that does not exist
                raise
        raise BackendUnavailableError(f"hf:{argument}", [reason]) from error
    (loaded,) = (each for each in package.get_loaded_kernels() if each.module is module)
    texts = [] if loaded.metadata.version is None else [f"version {loaded.metadata.version}"]
    if loaded.repo_info is not None:
        texts.append(f"revision {loaded.repo_info.revision}")
    texts.append(f"kernels {machine.installed_version('kernels')}")
    return HubKernel(module, str(loaded.metadata.backend.backend_type).lower(), ", ".join(texts))


def _package(name: str) -> Any:
    """Return the package ``kernels``. It is looked up by its distribution: projects have folders of this name."""
    if machine.installed_version("kernels") is None:
        raise BackendUnavailableError(name, [f"the package kernels is not installed; {INSTALL}"])
    return importlib.import_module("kernels")


def signature_problems(module: ModuleType) -> list[str]:
    """Return what a module lacks of the functions of flash-attn 2.8; empty if nothing.

    A function whose signature Python cannot read, such as a compiled one, counts as right.
    """
    problems = []
    for name, arguments in _ARGUMENTS.items():
        function = getattr(module, name, None)
        if function is None:
            problems.append(f"it has no {name}")
            continue
        try:
            known = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):
            continue
        if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in known):
            continue
        missing = set(arguments) - {each.name for each in known}
        if missing:
            problems.append(f"{name} takes no {', '.join(sorted(missing))}")
    return problems
