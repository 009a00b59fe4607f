"""The bridge where vLLM is a stand-in of a few modules. tests/vllm has the real one."""

import os
import runpy
import sys
from enum import Enum
from types import ModuleType, SimpleNamespace

import pytest
import torch

from attncheck.backends.candidates.vllm import bridge, package, trial
from attncheck.backends.candidates.vllm.cache import cache_shape, kernel_block_sizes, layouts, stride_order
from attncheck.backends.candidates.vllm.selection import registered, select
from attncheck.backends.candidates.vllm.trial import absent_part, missing_parts, names_missing_parts, refusals
from attncheck.backends.contract import MultipleOf
from attncheck.errors import BackendUnavailableError
from attncheck.reference.spec import LayerSpec
from attncheck.reference.step_spec import BatchSpec, CacheSpec, RequestSpec


class Base:
    """Stands for vLLM's AttentionBackend."""

    get_name = staticmethod(lambda: "SOME")


class Sparse(Base):
    is_mla = staticmethod(lambda: True)
    is_sparse = staticmethod(lambda: True)


class Nameless(Base):
    get_name = staticmethod(lambda: "NAMELESS")


class Backends(Enum):
    """Stands for vLLM's registry: a class, one whose library is missing, one that breaks, one that is only a tag."""

    SOME = "Base"
    SPARSE = "Sparse"
    FLASH = "missing"
    BROKEN = "broken"
    TAG = ""

    def get_class(self):
        if self is Backends.FLASH:
            raise ModuleNotFoundError("No module named 'flash'", name="flash")
        if self is Backends.BROKEN:
            raise AssertionError("Torch not compiled with CUDA enabled")
        return {"Base": Base, "Sparse": Sparse}[self.value]


@pytest.fixture
def vllm(monkeypatch):
    """A vLLM of the modules that selection looks at; nothing of it is interpreted."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    held = {
        "vllm": {"__version__": "9.9"},
        "vllm.logger": {},
        "vllm.v1": {},
        "vllm.v1.attention": {},
        "vllm.v1.attention.backend": {"AttentionBackend": Base},
        "vllm.v1.attention.backends": {},
        "vllm.v1.attention.backends.registry": {"AttentionBackendEnum": Backends},
        "theirs": {"Base": Base, "Nameless": Nameless, "number": 3},
    }
    for name, values in held.items():
        stand_in = ModuleType(name)
        stand_in.__path__ = []
        vars(stand_in).update(values)
        monkeypatch.setitem(sys.modules, name, stand_in)
    package._import_quietly.cache_clear()
    yield
    package._import_quietly.cache_clear()


def test_the_environment_is_the_user_s_before_and_after(vllm, monkeypatch):
    for level in (None, "DEBUG"):
        monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)
        if level is not None:
            monkeypatch.setenv("VLLM_LOGGING_LEVEL", level)
        package._import_quietly.cache_clear()
        package.module("vllm")
        assert os.environ.get("VLLM_LOGGING_LEVEL") == level
    monkeypatch.setenv("KEPT", "before")
    monkeypatch.setenv("GONE", "before")
    monkeypatch.delenv("NEW", raising=False)
    with package.kept_environment():
        os.environ["KEPT"] = "after"
        os.environ["NEW"] = "after"
        del os.environ["GONE"]
    assert (os.environ["KEPT"], os.environ["GONE"]) == ("before", "before")
    assert "NEW" not in os.environ


def test_names_modules_and_files_name_a_class(vllm, tmp_path):
    (tmp_path / "mine.py").write_text("from theirs import Base\n\n\nclass Mine(Base):\n    pass\n", encoding="utf-8")
    assert select("SOME") is select("theirs:Base") is Base
    assert issubclass(select(f"{tmp_path / 'mine.py'}:Mine"), Base)
    assert package.find("Base", "vllm.gone", "vllm.v1", "theirs") is Base
    with pytest.raises(ImportError, match=r"vLLM 9.9 has no Gone in vllm.gone or theirs"):
        package.find("Gone", "vllm.gone", "theirs")


def test_what_cannot_be_driven_is_refused_by_name(refusals, vllm):
    reasons = {
        "OTHER": "unknown backend of vLLM 9.9 'OTHER' (known: ...)",
        "FLASK": "unknown backend of vLLM 9.9 'FLASK'; did you mean 'FLASH'? (known: ...)",
        "TAG": "TAG names no class of vLLM 9.9: a plugin may register one",
        "theirs:Gone": "theirs has no 'Gone'",
        "theirs:number": "theirs:number is 3: give a class derived from vLLM's AttentionBackend",
        "absent.module:This": "absent.module:This: there is no module absent",
        "SPARSE": "SPARSE is for layers whose keys an indexer chooses, and the bridge makes no indexer",
        "theirs:Nameless": "theirs:Nameless calls itself 'NAMELESS': vLLM's layers take names of AttentionBackendEnum "
        "only, of which CUSTOM is free",
    }
    assert refusals(select, list(reasons)) == list(reasons.values())


def test_a_backend_whose_library_is_missing_or_breaks_is_no_wrong_question(refusals, vllm):
    flash, broken = refusals(select, ["FLASH", "BROKEN"], ImportError)
    assert flash == "No module named 'flash'"
    assert broken.startswith("importing it raised AssertionError: Torch not compiled with CUDA enabled (ROOT/tests/")


def test_batch_invariance_is_claimed_in_its_mode_only(vllm, monkeypatch):
    class Invariant(Base):
        supports_batch_invariance = staticmethod(lambda: True)

    def claims(mode):
        envs = ModuleType("vllm.envs")
        if mode is not None:
            envs.VLLM_BATCH_INVARIANT = mode
        monkeypatch.setitem(sys.modules, "vllm.envs", envs)
        return bridge._claims_batch_invariance(Invariant), bridge._claims_batch_invariance(Base)

    assert claims(None) == claims(False) == (False, False)  # None: a version without the variable
    assert claims(True) == (True, False)


class Registry(SimpleNamespace):
    """The registry of vLLM with these classes by name. None: the name has no class."""

    def __init__(self, **classes):
        super().__init__(__members__={})
        for name, cls in classes.items():
            self.register(name, cls)

    def register(self, name, cls):
        def path():
            if cls is None:
                raise ValueError(f"{name} must be registered before use")
            return f"theirs.{cls.__name__}"

        self.__members__[name] = SimpleNamespace(name=name, value=None, get_path=path, get_class=lambda: cls)


class State(Base):
    get_name = staticmethod(lambda: "STATE_ATTN")
    is_ssm = staticmethod(lambda: True)


def test_classes_of_plugins_and_of_layers_with_a_state_are_found_by_name(vllm, monkeypatch):
    held = vars(sys.modules["vllm.v1.attention.backends.registry"])
    held["AttentionBackendEnum"] = Registry(SOME=Base, TAG=None, CUSTOM=None)
    held["MambaAttentionBackendEnum"] = Registry(STATE=State, CUSTOM=None)
    plugins = ModuleType("vllm.plugins")
    plugins.load_general_plugins = lambda: held["AttentionBackendEnum"].register("CUSTOM", Base)
    monkeypatch.setitem(sys.modules, "vllm.plugins", plugins)
    assert set(registered()) == {"SOME", "TAG", "CUSTOM", "STATE"}
    assert select("CUSTOM") is Base
    assert select("STATE") is State

    def fail():
        raise RuntimeError("no licence")

    plugins.load_general_plugins = fail
    with pytest.raises(
        ImportError, match=r"a plugin of the group vllm.general_plugins raised RuntimeError: no licence"
    ):
        select("SOME")


class Older:
    """The generation that returns its cache's shape by a method."""

    get_name = staticmethod(lambda: "OLDER")
    get_kv_cache_stride_order = staticmethod(lambda: (1, 0, 2, 3, 4))

    @staticmethod
    def get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size):
        return (2, num_blocks, block_size, num_kv_heads, head_size)


def test_the_older_generation_s_methods_are_called():
    assert cache_shape(Older, 9, 16, 2, 64, 64) == (2, 9, 16, 2, 64)
    assert layouts(Older) == ("NHD",)
    assert stride_order(Older, "NHD") == (1, 0, 2, 3, 4)
    assert kernel_block_sizes(Older) == [MultipleOf(1)]


def newer(*, names=None, sizes=(16,)):
    """A class of today's generation; ``names`` of the layouts it reads."""
    found = None if names is None else [SimpleNamespace(name=name) for name in names]
    return SimpleNamespace(
        get_name=lambda: "NEWER",
        supported_kv_cache_layouts=lambda: found,
        get_supported_kernel_block_sizes=lambda: list(sizes),
    )


def test_layouts_of_one_layer_after_the_other_are_the_contract_s():
    """Tokens before heads, or heads before tokens, of [blocks, heads, tokens, content]."""
    assert layouts(newer()) == layouts(newer(names=["LHBNC", "LBNHC", "BLNHC", "LBHNC"])) == ("NHD", "HND")
    assert layouts(newer(names=["LBHNC"])) == ("HND",)
    assert stride_order(newer(), "HND") == (0, 1, 2, 3)
    assert stride_order(newer(), "NHD") == (0, 2, 1, 3)
    with pytest.raises(ValueError, match="layout NHD: kernels of NEWER read HND"):
        stride_order(newer(names=["LBHNC"]), "NHD")
    declared = {"supported_attn_types": ("decoder",), "supported_layouts": layouts(newer(names=["LHBNC"]))}
    none = type("Backend", (), {**declared, "get_supported_dtypes": staticmethod(lambda: [torch.float16])})
    assert missing_parts(none) == []  # no call for a row


def test_page_sizes_are_the_kernels_own():
    theirs = newer(sizes=(64, SimpleNamespace(base=48)))
    assert kernel_block_sizes(theirs) == [64, MultipleOf(48)]
    with pytest.raises(ValueError, match="block_size 32: kernels of NEWER take 64, multiples of 48"):
        cache_shape(theirs, 9, 32, 2, 64, 64)


def raised(call):
    """What ``call`` raises, with its traceback."""
    with pytest.raises(Exception) as caught:
        call()
    return caught.value


def test_what_a_row_raises_is_a_reason_where_a_part_is_not_there(tmp_path, monkeypatch):
    (tmp_path / "of_another_platform.py").write_text("assert False, 'no such GPU'\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    lacking = {
        "this build of vLLM lacks an operator of its writer": lambda: torch.ops.not_of_this_build.write(1),
        "its writer imports what cannot be imported here: ModuleNotFoundError": lambda: __import__("not_there"),
        "its writer imports what cannot be imported here: AssertionError": lambda: __import__("of_another_platform"),
    }
    for reason, call in lacking.items():
        (found,) = absent_part("writer", raised(call))
        assert found.startswith(reason)
    for message in ("FlashAttention version not detected.", "FLASHINFER: [required dependencies not available]"):
        assert absent_part("forward", AssertionError(message)) == [f"its forward lacks a library: {message}"]
    assert absent_part("writer", raised(lambda: {}["key"])) == []
    assert absent_part("forward", raised(lambda: torch.ones(2) @ torch.ones(3))) == []


def of_folder(folder, source):
    """The function ``call`` of a module in ``folder``."""
    folder.mkdir()
    path = folder / "layers.py"
    path.write_text(source, encoding="utf-8")
    return runpy.run_path(str(path))["call"]


OF_CONFIG = """
class ValidationError(ValueError):
    def errors(self):
        return [{"msg": "Value error, no such cache"}]

def call(*_):
    raise ValidationError()
"""
RAISES = "def call(*_):\n    raise {}\n"


@pytest.mark.parametrize(
    ("folder", "source", "expected"),
    [
        ("vllm", RAISES.format("ValueError('No valid backend.')"), "refused by vLLM's constructor: No valid backend"),
        ("vllm", RAISES.format("NotImplementedError('no sinks')"), "refused by vLLM's constructor: no sinks"),
        ("vllm", RAISES.format("AssertionError('a fault')"), None),
        ("vllm", RAISES.format("AttributeError('no such attribute')"), None),
        ("vllm", RAISES.format("ValueError('F: [required dependencies not available]')"), None),
        ("vllm", "def call(*_):\n    first, second = 1, 2, 3\n", None),
        ("plugin", RAISES.format("ValueError('of another author')"), None),
        ("pydantic", OF_CONFIG, "refused by vLLM's constructor: Value error, no such cache"),
    ],
)
def test_what_vllm_refuses_to_construct_is_no_fault(folder, source, expected, monkeypatch, tmp_path):
    class Impl:
        their_backend = type("Theirs", (Base,), {"__module__": "vllm.v1.attention.backends.some"})
        __init__ = names_missing_parts("constructor")(of_folder(tmp_path / folder, source))

    monkeypatch.setattr(trial, "_Row", lambda *_: Impl())
    layer = LayerSpec(num_heads=1, num_kv_heads=1, head_size=64)
    backend = type("Backend", (), {})  # a new key of the cache
    assert refusals(backend, layer, CacheSpec()) == (() if expected is None else (expected,))


def test_the_author_of_a_class_outside_vllm_sees_its_exceptions(tmp_path):
    class Impl:
        their_backend = type("Theirs", (Base,), {"__module__": "plugin"})
        forward = names_missing_parts("forward")(of_folder(tmp_path / "plugin", "def call(*_): import not_there"))

    with pytest.raises(ModuleNotFoundError):
        Impl().forward()
    Impl.their_backend.__module__ = "vllm.some"
    with pytest.raises(BackendUnavailableError, match="its forward imports what cannot be imported here"):
        Impl().forward()


def test_a_cache_without_a_kernel_for_this_cpu_is_unavailable(monkeypatch):
    def choose(dtype, block_size, head_size, kv_cache_dtype="auto"):
        if kv_cache_dtype != "auto":
            raise NotImplementedError("needs AVX-512")
        return "vec"

    older = lambda dtype, block_size, head_size: "vec"  # noqa: E731 (its signature is the point)
    theirs = SimpleNamespace(get_builder_cls=lambda: type("Builder", (), {"__module__": __name__}))
    monkeypatch.setattr(bridge, "_is_interpreted", lambda their_backend: False)
    candidate = type("Candidate", (bridge.VLLMBackend,), {"their_backend": theirs})
    batch = BatchSpec(requests=(RequestSpec(query_len=1),))
    layer = LayerSpec(num_heads=1, num_kv_heads=1, head_size=64, dtype="bfloat16")
    for function, dtype, expected in (
        (choose, "fp8", ["kv_cache_dtype fp8: needs AVX-512"]),
        (choose, "auto", []),
        (older, "fp8", []),
    ):
        monkeypatch.setattr(sys.modules[__name__], "_get_attn_isa", function, raising=False)
        found = candidate.unavailable_case_reasons("cpu", layer, CacheSpec(kv_cache_dtype=dtype), batch)
        assert found == expected
