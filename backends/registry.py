"""Maps a name or a path to a backend, and imports the backend only on request.

A reference has one of four forms, tried in this order:

- ``torch_sdpa``: a registered name, built in or from an entry point of the group ``attncheck.backends``;
- ``name:argument``: a registered name that takes an argument, such as the backend to choose within a library, or a
  kernel of the Hugging Face Hub;
- ``path/to/file.py:Class``: a file outside any package; ``:Class`` may be left out if there is one class or function;
- ``package.module:Class``: anything importable.

It names a backend class, or a function, which ``kernel_backend`` wraps. Importing this module loads no torch.
"""

import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any

from attncheck.errors import AttncheckError, BackendLoadError, BackendUnavailableError, UnknownNameError

if TYPE_CHECKING:
    from attncheck.backends.contract import AttentionBackend

BUILTIN: Mapping[str, str] = MappingProxyType(
    {
        "reference": "attncheck.backends.candidates.reference:ReferenceBackend",
        "torch_sdpa": "attncheck.backends.candidates.torch_sdpa:SDPABackend",
        "flex_attention": "attncheck.backends.candidates.flex_attention.backend:FlexBackend",
        "triton_unified": "attncheck.backends.candidates.triton_unified.backend:UnifiedBackend",
        "xformers": "attncheck.backends.candidates.xformers.backend:XFormersBackend",
        "torch_varlen": "attncheck.backends.candidates.flash_attention:TorchVarlenBackend",
        "flash_attn": "attncheck.backends.candidates.flash_attention:FlashAttnBackend",
        "flashinfer": "attncheck.backends.candidates.flashinfer:FlashInferBackend",
        "reference_mla": "attncheck.backends.candidates.reference_mla:ReferenceMLABackend",
        "torch_mla": "attncheck.backends.candidates.torch_mla:TorchMLABackend",
        "triton_mla": "attncheck.backends.candidates.triton_mla.backend:TritonMLABackend",
        "reference_state": "attncheck.backends.candidates.reference_state:ReferenceStateBackend",
        "torch_state": "attncheck.backends.candidates.torch_state:TorchStateBackend",
        "xformers_vllm": "attncheck.backends.candidates.xformers_vllm.backend:XFormersAttentionBackend",
        "vllm": "attncheck.backends.candidates.vllm.bridge:VLLMBackend",
        "hf": "attncheck.backends.candidates.hub:HubBackend",
    }
)
"""The built-in backends, in the order in which they are listed and run."""

FAMILIES: Mapping[str, str] = MappingProxyType({"vllm": "vllm:CPU_ATTN", "hf": "hf:kernels-community/flash-attn2@1"})
"""Built-in names that cover several backends. The user must choose one; the value is an example."""

SURVEYS: Mapping[str, str] = MappingProxyType({"vllm": "attncheck.backends.candidates.vllm.survey"})
"""Families for which ``NAME:*`` means every backend, with the module that has their names and declarations."""

ONLY_NAMED = frozenset({*FAMILIES, "xformers_vllm"})
"""Built-in names that run only if named: families, and candidates that are known to be wrong."""

ENTRY_POINT_GROUP = "attncheck.backends"

INSTALL_VLLM = "install vLLM (pip install vllm)"

_FILE_MODULE = "attncheck_file_"
_LONGEST_MESSAGE = 2_000
"""Maximum characters kept of an exception's message, which may be very long."""


@dataclass(frozen=True)
class LoadedBackend:
    """A backend that can be driven.

    name: its name in reports. ref: the reference it was loaded by; loading that again gives the same backend. origin:
    where it comes from, for users.
    """

    name: str
    ref: str
    backend: "type[AttentionBackend]"
    version: str
    origin: str

    @property
    def features(self) -> frozenset[str]:
        """The declared features beyond plain causal attention."""
        return self.backend.features


def builtin_names() -> tuple[str, ...]:
    """Return the names of the built-in backends that run if the user names none."""
    return tuple(name for name in BUILTIN if name not in ONLY_NAMED)


def entry_points() -> dict[str, metadata.EntryPoint]:
    """Return installed entry points by name, without those whose name is built in."""
    return {point.name: point for point in metadata.entry_points(group=ENTRY_POINT_GROUP) if point.name not in BUILTIN}


def known_names() -> tuple[str, ...]:
    """Return every registered name: built-in ones (including :data:`ONLY_NAMED`), then those of entry points."""
    return (*BUILTIN, *sorted(entry_points()))


def load(ref: str) -> LoadedBackend:
    """Return the backend that ``ref`` names.

    Raises:
        UnknownNameError: no such name is registered.
        BackendUnavailableError: its library cannot be imported here, or its factories raise ``ImportError``.
        BackendLoadError: the file does not import, the class is missing, or it breaks the contract.
    """
    name, colon, argument = ref.partition(":")
    if name in BUILTIN:
        return _load_registered(ref, name, argument if colon else None, BUILTIN[name], "built in")
    if name == "mutants" and argument:
        return _load_registered(ref, name, argument, "attncheck.backends.mutants.loading:MutantBackend", "mutant")
    if (point := entry_points().get(name)) is not None:
        distribution = point.dist.name if point.dist is not None else "an unknown distribution"
        return _load_registered(ref, name, argument if colon else None, point.value, f"entry point of {distribution}")
    place, colon, attribute = ref.rpartition(":")
    if place.endswith(".py"):
        return _checked(ref, attribute, _attribute(ref, import_file(ref, Path(place)), attribute), f"file {place}")
    if ref.endswith(".py"):
        module = import_file(ref, Path(ref))
        names = _candidates_in(module)
        if len(names) == 1:
            return _checked(ref, names[0], getattr(module, names[0]), f"file {ref}")
        found = f"{len(names)} backends" if names else "no backend"
        raise BackendLoadError(ref, f"has {found}", allowed=_choice(ref, names))
    if colon and all(part.isidentifier() for part in place.split(".")):
        return _checked(ref, attribute, _attribute(ref, _import_module(ref, place), attribute), f"module {place}")
    if Path(f"{ref}.py").is_file():
        raise BackendLoadError(ref, "no backend has this name", allowed=f"for the file, write ./{ref}.py")
    raise UnknownNameError("backend", ref, known_names())


def load_object(obj: object) -> LoadedBackend:
    """Return the loaded form of a backend class or a plain attention function.

    Raise :class:`BackendLoadError` if it is neither, and :class:`BackendUnavailableError` if its library is missing.
    """
    name = getattr(obj, "__qualname__", type(obj).__name__)
    module = getattr(obj, "__module__", "") or ""  # None for code run by exec
    # Names that another process cannot import.
    by_file = module == "__main__" or module.rpartition(".")[2].startswith(_FILE_MODULE)
    place = getattr(sys.modules.get(module), "__file__", None) if by_file else None
    ref = f"{place or module}:{name}"
    return _checked(ref, getattr(obj, "__name__", name), obj, f"object of {place or module}")


def _load_registered(ref: str, name: str, argument: str | None, target: str, origin: str) -> LoadedBackend:
    """Load a registered name; an ImportError here means that a library is missing, not that the name is wrong."""
    if name in FAMILIES and argument in (None, "", "*"):
        raise BackendLoadError(ref, f"{name} names many backends", allowed=f"name one, such as {FAMILIES[name]}")
    full_name = name if argument is None else ref
    module, _, attribute = target.partition(":")
    try:
        found = _attribute(ref, _import_module(ref, module, missing_is_unavailable=True), attribute)
        if argument is not None:
            if not hasattr(found, "from_argument"):
                raise BackendLoadError(ref, f"{name} takes no argument", allowed=f"write {name!r}")
            try:
                found = found.from_argument(argument)
            except AttncheckError:
                raise
            except ImportError as error:
                remedy = f"; {INSTALL_VLLM}" if _lacks_vllm(error) else ""
                raise BackendUnavailableError(
                    full_name, [f"its library cannot be imported: {error}{remedy}"]
                ) from error
            except ValueError as error:
                raise BackendLoadError(ref, str(error)) from error
            except Exception as error:
                raise BackendLoadError(ref, import_failure(error), raised=type(error).__name__) from error
        return _checked(ref, full_name, found, origin)
    except ImportError as error:
        raise BackendUnavailableError(full_name, [f"{target} cannot be imported: {error}"]) from error


def _checked(ref: str, name: str, found: Any, origin: str) -> LoadedBackend:
    """Return ``found`` as a loaded backend, or raise if it breaks the contract."""
    from attncheck.backends.contract import AttentionBackend
    from attncheck.backends.kernel import kernel_backend
    from attncheck.backends.verification import contract_problems

    if not isinstance(found, type) and callable(found):
        try:
            found = kernel_backend(found, name=getattr(found, "__name__", name))
        except ValueError as error:
            raise BackendLoadError(ref, str(error)) from error
    if not (isinstance(found, type) and issubclass(found, AttentionBackend)):
        if _is_of_vllm(found):
            raise BackendLoadError(ref, "is a backend of vLLM's", allowed=f"write vllm:{ref}")
        what = f"the class {found.__name__}" if isinstance(found, type) else repr(found)
        raise BackendLoadError(
            ref,
            f"is {what}, neither a backend nor a function",
            allowed="derive the class from attncheck.backends.contract.AttentionBackend",
        )
    try:
        problems = contract_problems(found)
    except ImportError as error:  # factories import their library when called, as they should
        raise BackendUnavailableError(name, [f"its library cannot be imported: {error}"]) from error
    if problems:
        raise BackendLoadError(ref, f"breaks the contract: {'; '.join(problems)}", raised=BackendLoadError.__name__)
    return LoadedBackend(name=name, ref=ref, backend=found, version=found.version(), origin=origin)


def _is_of_vllm(found: object) -> bool:
    """Compare names only, so that vLLM is not imported."""
    return isinstance(found, type) and any(
        base.__name__ == "AttentionBackend" and base.__module__.startswith("vllm.") for base in found.__mro__
    )


def _import_module(ref: str, name: str, *, missing_is_unavailable: bool = False) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if missing_is_unavailable:
            raise
        file, known = Path(f"{name.replace('.', '/')}.py"), f"registered names are {', '.join(known_names())}"
        allowed = f"for the file, write ./{file}{ref[len(name) :]}" if file.is_file() else known
        raise BackendLoadError(ref, import_failure(error), allowed=allowed) from error
    except (Exception, SystemExit) as error:
        raise BackendLoadError(ref, import_failure(error), raised=type(error).__name__) from error


def import_file(ref: str, path: Path) -> ModuleType:
    """Return the module of a file, imported under a unique name, so that it shadows no package.

    It can import the modules beside it: its folder is the last of ``sys.path`` from then on. A file of a package can
    import relatively, since the folder of the package is there, too. The name covers the file's state: importing the
    same file twice gives one module, an edited file a new one.
    """
    try:
        state = path.stat()
    except OSError as error:
        raise BackendLoadError(ref, f"cannot read {path}: {error.strerror}") from error
    identity = f"{path.resolve()}:{state.st_mtime_ns}:{state.st_size}"
    folder, package = path.resolve().parent, ""
    folders = [folder]
    while (folder / "__init__.py").is_file() and folder.name.isidentifier():
        folder, package = folder.parent, f"{folder.name}.{package}"
        folders = [path.resolve().parent, folder]
    name = f"{package}{_FILE_MODULE}{path.stem}_{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise BackendLoadError(ref, f"{path} is no Python file")
    sys.path += [each for each in map(str, folders) if each not in sys.path]
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickling look their module up
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if _lacks_vllm(error):
            allowed = f"{INSTALL_VLLM}, and write vllm:{path}:CLASS"
        else:
            allowed = f"{missing} is neither installed nor beside {path.name}" if missing else ""
        raise BackendLoadError(ref, import_failure(error), allowed=allowed, raised=type(error).__name__) from error
    return module


def _lacks_vllm(error: BaseException) -> bool:
    return isinstance(error, ModuleNotFoundError) and error.name == "vllm"


def _attribute(ref: str, module: ModuleType, path: str) -> Any:
    found: Any = module
    for name in path.split("."):
        if not hasattr(found, name):
            classes = _backends_in(module)
            raise BackendLoadError(ref, f"{_place(module)} has no {path!r}", allowed=_choice(_place(module), classes))
        found = getattr(found, name)
    return found


def _candidates_in(module: ModuleType) -> list[str]:
    """Return the names of the module's own backend classes or, if it has none, of its public functions.

    A class with two names counts once.
    """
    if classes := _backends_in(module):
        return list({getattr(module, name): name for name in reversed(classes)}.values())[::-1]
    return [
        name
        for name, found in vars(module).items()
        if inspect.isfunction(found) and found.__module__ == module.__name__ and not name.startswith("_")
    ]


def _backends_in(module: ModuleType) -> list[str]:
    from attncheck.backends.contract import AttentionBackend

    return [
        name
        for name, found in vars(module).items()
        if isinstance(found, type) and issubclass(found, AttentionBackend) and found.__module__ == module.__name__
    ]


def _choice(place: str, classes: list[str]) -> str:
    if not classes:
        return f"{place} defines no AttentionBackend"
    return "write " + " or ".join(f"{place}:{name}" for name in classes)


def _place(module: ModuleType) -> str:
    return str(getattr(module, "__file__", None) or module.__name__)


def import_failure(error: BaseException) -> str:
    """Return what an import raised, and where: the innermost line outside of the import system and attncheck."""
    message = f"importing it raised {traceback.format_exception_only(error)[-1].strip()[:_LONGEST_MESSAGE]}"
    if isinstance(error, SyntaxError):
        return f"{message} ({error.filename}:{error.lineno})"
    frames = [each for each in traceback.extract_tb(error.__traceback__) if "importlib" not in each.filename]
    frames = [frame for frame in frames if frame.filename != __file__]
    frames = [frame for frame in frames if not frame.filename.startswith(f"{Path(__file__).parents[1]}/")] or frames
    return f"{message} ({frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line})" if frames else message
