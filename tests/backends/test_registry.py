"""Every way to name a backend, and every way in which that goes wrong."""

import importlib.metadata
import sys
from textwrap import dedent

import pytest
from inline_snapshot import snapshot

from attncheck.backends import registry
from attncheck.backends.candidates.torch_sdpa import SDPABackend
from attncheck.backends.registry import builtin_names, known_names, load, load_object
from attncheck.errors import BackendLoadError, BackendUnavailableError, UnknownNameError

GOOD = """
    from attncheck.backends.candidates.torch_sdpa import SDPABackend

    class Good(SDPABackend):
        pass

    class Other(SDPABackend):
        pass

    def kernel(query, key_cache, value_cache, metadata, params, out):
        out.zero_()

    def useless(query):
        pass

    number = 7
"""


@pytest.fixture
def file(tmp_path):
    def write(text, name="candidate.py"):
        path = tmp_path / name
        path.write_text(dedent(text))
        return path

    return write


@pytest.fixture
def entry_point(monkeypatch):
    """Installs entry points of our group for one test."""

    def install(**targets):
        points = [
            importlib.metadata.EntryPoint(name, target, registry.ENTRY_POINT_GROUP) for name, target in targets.items()
        ]
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points if group else ())

    return install


def test_built_in_backends_load_by_name():
    assert builtin_names() == (
        "reference",
        "torch_sdpa",
        "flex_attention",
        "triton_unified",
        "xformers",
        "torch_varlen",
        "flash_attn",
        "flashinfer",
        "reference_mla",
        "torch_mla",
        "triton_mla",
    )
    names = set()
    for name in builtin_names():
        try:
            loaded = load(name)
        except BackendUnavailableError:  # its library is not installed
            continue
        assert (loaded.name, loaded.ref, loaded.origin) == (name, name, "built in")
        assert loaded.backend.get_name().isupper()
        assert loaded.version
        names.add(loaded.backend.get_name())
    assert names >= {"REFERENCE", "TORCH_SDPA", "FLEX_ATTENTION", "REFERENCE_MLA", "TORCH_MLA"}


def test_an_unknown_name_is_answered_with_the_known_ones():
    with pytest.raises(UnknownNameError) as caught:
        load("torch_spda")
    assert str(caught.value) == (
        "unknown backend 'torch_spda'; did you mean 'torch_sdpa'? "
        f"(known: {', '.join(builtin_names())}, xformers_vllm, vllm)"
    )


@pytest.mark.parametrize("ref", ["vllm", "vllm:", "vllm:*"])
def test_a_name_that_stands_for_many_runs_only_when_one_is_named(ref):
    assert "vllm" not in builtin_names()
    assert "vllm" in known_names()
    with pytest.raises(BackendLoadError, match="vllm names many backends; name one, such as vllm:CPU_ATTN"):
        load(ref)


def test_a_class_of_vllms_is_answered_with_the_name_that_takes_it(file, monkeypatch):
    text = """
        AttentionBackend = type("AttentionBackend", (), {"__module__": "vllm.v1.attention.backend"})

        class Mine(AttentionBackend):
            pass

        class Other(type("AttentionBackend", (), {"__module__": "elsewhere"})):
            pass
    """
    monkeypatch.syspath_prepend(str(file(text, name="of_vllms.py").parent))
    with pytest.raises(BackendLoadError) as refused:
        load("of_vllms:Mine")
    assert str(refused.value) == snapshot("backend 'of_vllms:Mine': is a backend of vLLM's; write vllm:of_vllms:Mine")
    assert "of_vllms" in str(refused.value)
    with pytest.raises(BackendLoadError) as refused:
        load("of_vllms:Other")
    assert str(refused.value) == snapshot(
        "backend 'of_vllms:Other': is <class 'of_vllms.Other'>, neither a backend nor a function; derive the class from attncheck.backends.contract.AttentionBackend"
    )


def test_a_name_that_takes_no_argument():
    with pytest.raises(BackendLoadError) as refused:
        load("flex_attention:fast")
    assert str(refused.value) == snapshot(
        "backend 'flex_attention:fast': flex_attention takes no argument; write 'flex_attention'"
    )
    assert "flex_attention" in str(refused.value)
    assert "'flex_attention'" in str(refused.value)


def test_a_class_in_a_file(file):
    path = file(GOOD)
    before = list(sys.path)
    loaded = load(f"{path}:Good")
    assert loaded.name == "Good"
    assert loaded.ref == f"{path}:Good"
    assert loaded.origin == f"file {path}"
    assert issubclass(loaded.backend, SDPABackend)
    assert sys.path == before
    assert load(f"{path}:Other").backend.__module__ == loaded.backend.__module__


def test_an_edited_file_is_read_again(file):
    path = file(GOOD)
    first = load(f"{path}:Good").backend
    file(GOOD + "\n    Good.features = frozenset()\n")
    again = load(f"{path}:Good").backend
    assert again is not first
    assert again.features == frozenset()


def test_a_function_in_a_file_becomes_a_backend(file):
    loaded = load(f"{file(GOOD)}:kernel")
    assert loaded.name == "kernel"
    assert loaded.backend.get_name() == "KERNEL"
    assert loaded.backend.get_impl_cls().brings_writer is False


def test_a_file_with_one_class_or_one_function_needs_no_name(plain, file):
    one, other, _ = GOOD.partition("    class Other")
    assert other
    path = file(f"{one}    Alias = Good\n")
    assert (load(str(path)).name, load(str(path)).ref) == ("Good", str(path))
    function = "def kernel(query, key_cache, value_cache, metadata, params, out): pass\n"
    assert load(str(file(function))).name == "kernel"
    with pytest.raises(BackendLoadError) as refused:
        load(str(file(function + function.replace("kernel", "other"))))
    assert plain(str(refused.value)) == snapshot(
        "backend 'TMP/candidate.py': has 2 backends; write TMP/candidate.py:kernel or TMP/candidate.py:other"
    )
    with pytest.raises(BackendLoadError) as refused:
        load(str(file("x = 1")))
    assert plain(str(refused.value)) == snapshot(
        "backend 'TMP/candidate.py': has no backend; TMP/candidate.py defines no AttentionBackend"
    )


def test_a_file_shadows_no_module(file):
    path = file(GOOD, name="torch.py")
    load(f"{path}:Good")
    assert sys.modules["torch"].__file__ != str(path)


def test_a_class_in_a_module():
    loaded = load("attncheck.backends.candidates.torch_sdpa:SDPABackend")
    assert loaded.backend is SDPABackend
    assert (loaded.name, loaded.origin) == ("SDPABackend", "module attncheck.backends.candidates.torch_sdpa")


@pytest.mark.parametrize(
    ("suffix", "message"),
    [
        (
            ":Missing",
            snapshot(
                "backend 'TMP/candidate.py:Missing': TMP/candidate.py has no 'Missing'; write TMP/candidate.py:Good or TMP/candidate.py:Other"
            ),
        ),
        (
            "",
            snapshot(
                "backend 'TMP/candidate.py': has 2 backends; write TMP/candidate.py:Good or TMP/candidate.py:Other"
            ),
        ),
        (
            ":number",
            snapshot(
                "backend 'TMP/candidate.py:number': is 7, neither a backend nor a function; derive the class from attncheck.backends.contract.AttentionBackend"
            ),
        ),
        (
            ":useless",
            snapshot(
                "backend 'TMP/candidate.py:useless': useless(query) cannot be called with (query, key_cache, value_cache, metadata, params, out) by position: too many positional arguments"
            ),
        ),
    ],
)
def test_a_file_that_has_something_else(plain, file, suffix, message):
    with pytest.raises(BackendLoadError) as refused:
        load(f"{file(GOOD)}{suffix}")
    assert plain(str(refused.value)) == message


def test_a_file_without_any_backend(plain, file):
    with pytest.raises(BackendLoadError) as refused:
        load(f"{file('x = 1')}:Wrong")
    assert plain(str(refused.value)) == snapshot(
        "backend 'TMP/candidate.py:Wrong': TMP/candidate.py has no 'Wrong'; TMP/candidate.py defines no AttentionBackend"
    )


def test_a_file_that_is_not_there(plain, tmp_path):
    with pytest.raises(BackendLoadError) as refused:
        load(f"{tmp_path / 'nothing.py'}:Wrong")
    assert plain(str(refused.value)) == snapshot(
        "backend 'TMP/nothing.py:Wrong': cannot read TMP/nothing.py: No such file or directory"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import attncheck\n\nboom = {}['key']\n", r"KeyError: 'key' \(.*candidate.py:3: boom = \{\}\['key'\]\)"),
        ("x = 1\ndef broken(:\n", r"SyntaxError: .* \(.*candidate.py:2\)"),
        ("import no_such_library\n", r"ModuleNotFoundError: .*no_such_library.* \(.*candidate.py:1"),
        ("import sys\nsys.exit(4)\n", r"SystemExit: 4 \(.*candidate.py:2"),
        ("raise ValueError('x' * 10**6)\n", r"ValueError: x{1900,2000} \(.*candidate.py:1"),
    ],
)
def test_a_file_that_does_not_import_says_where(file, text, message):
    path = file(text)
    loaded = set(sys.modules)
    with pytest.raises(BackendLoadError, match=message):
        load(f"{path}:Wrong")
    assert not [name for name in set(sys.modules) - loaded if name.startswith("attncheck_file")]


def test_a_wrong_declaration_is_an_error_of_its_line(plain, file):
    path = file(
        "from attncheck import kernel_backend\n"
        "def attend(query, key_cache, value_cache, metadata, params, out): ...\n"
        "Mine = kernel_backend(attend, name='mine', features=('slidingwindow',))\n"
    )
    with pytest.raises(BackendLoadError) as caught:
        load(f"{path}:Mine")
    message = str(caught.value)
    assert "'slidingwindow'" in message
    assert "'sliding_window'" in message
    assert plain(message) == snapshot(
        "backend 'TMP/candidate.py:Mine': importing it raised ValueError: kernel_backend 'mine': unknown feature 'slidingwindow'; did you mean 'sliding_window'? (known: ...) (TMP/candidate.py:N: Mine = kernel_backend(attend, name='mine', features=('slidingwindow',)))"
    )
    assert f"({path}:3: Mine = kernel_backend(" in str(caught.value)


def test_a_module_that_exits_does_not_import(plain, tmp_path, monkeypatch):
    (tmp_path / "leaving.py").write_text("raise SystemExit(4)\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BackendLoadError) as refused:
        load("leaving:Wrong")
    assert plain(str(refused.value)) == snapshot(
        "backend 'leaving:Wrong': importing it raised SystemExit: 4 (TMP/leaving.py:N: raise SystemExit(4))"
    )


def test_a_module_that_is_not_there_is_answered_with_the_registered_names(plain):
    with pytest.raises(BackendLoadError) as refused:
        load("vlm:CPU_ATTN")
    assert plain(str(refused.value)) == snapshot(
        "backend 'vlm:CPU_ATTN': importing it raised ModuleNotFoundError: No module named 'vlm'; registered names are ..."
    )
    assert "'vlm'" in str(refused.value)
    assert "torch_sdpa" in str(refused.value)


def test_what_is_no_name_at_all():
    with pytest.raises(UnknownNameError):
        load("a backend: mine")


def test_a_class_that_breaks_the_contract(plain, file):
    text = """
        from attncheck.backends.contract import AttentionBackend

        class Half(AttentionBackend):
            features = frozenset({"sliding_windows"})

            @staticmethod
            def get_name():
                return "HALF"
    """
    with pytest.raises(BackendLoadError) as caught:
        load(f"{file(text)}:Half")
    message = str(caught.value)
    assert plain(message) == snapshot(
        "backend 'TMP/candidate.py:Half': breaks the contract: backend Half does not implement get_builder_cls, get_impl_cls, get_kv_cache_shape; features: unknown name 'sliding_windows'; did you mean 'sliding_window'? (known: ...)"
    )
    assert "get_builder_cls" in message
    assert "get_impl_cls" in message
    assert "get_kv_cache_shape" in message
    assert "'sliding_windows'" in message


def test_features_that_are_no_set_break_the_contract(plain, file):
    text = """
        from attncheck.backends.candidates.reference import ReferenceBackend

        class Bare(ReferenceBackend):
            features = None
    """
    with pytest.raises(BackendLoadError) as refused:
        load(f"{file(text)}:Bare")
    assert plain(str(refused.value)) == snapshot(
        "backend 'TMP/candidate.py:Bare': breaks the contract: features is a NoneType, not a frozenset of names"
    )


def test_an_entry_point_is_a_name(entry_point, file):
    entry_point(theirs="attncheck.backends.candidates.torch_sdpa:SDPABackend", reference="no.such:Thing")
    assert known_names() == (*builtin_names(), "xformers_vllm", "vllm", "theirs")
    loaded = load("theirs")
    assert (loaded.name, loaded.origin) == ("theirs", "entry point of an unknown distribution")
    assert loaded.backend is SDPABackend
    assert load("reference").origin == "built in"


def test_a_registered_name_whose_library_is_missing_is_unavailable(entry_point, file, monkeypatch):
    path = file("import no_such_library\n", name="needs_a_library.py")
    monkeypatch.syspath_prepend(str(path.parent))
    entry_point(theirs="needs_a_library:Backend")
    with pytest.raises(BackendUnavailableError) as caught:
        load("theirs")
    assert str(caught.value) == (
        snapshot(
            "backend 'theirs' is unavailable here: needs_a_library:Backend cannot be imported: "
            "No module named 'no_such_library'"
        )
    )


def test_a_registered_name_that_breaks_is_a_load_error(plain, entry_point, file, monkeypatch):
    path = file("raise RuntimeError('driver too old')\n", name="breaks_at_import.py")
    monkeypatch.syspath_prepend(str(path.parent))
    entry_point(theirs="breaks_at_import:Backend")
    with pytest.raises(BackendLoadError) as refused:
        load("theirs")
    assert plain(str(refused.value)) == snapshot(
        "backend 'theirs': importing it raised RuntimeError: driver too old (TMP/breaks_at_import.py:N: raise RuntimeError('driver too old'))"
    )


def test_a_library_missing_behind_a_factory_is_unavailable(entry_point, file, monkeypatch):
    text = """
        from attncheck.backends.candidates.torch_sdpa import SDPABackend

        class Lazy(SDPABackend):
            @staticmethod
            def get_impl_cls():
                import no_such_library
    """
    monkeypatch.syspath_prepend(str(file(text, name="lazy_backend.py").parent))
    entry_point(theirs="lazy_backend:Lazy")
    with pytest.raises(BackendUnavailableError, match="no_such_library"):
        load("theirs")
    with pytest.raises(BackendUnavailableError) as refused:
        load(f"{file(text, name='lazy_file.py')}:Lazy")
    assert str(refused.value) == snapshot(
        "backend 'Lazy' is unavailable here: its library cannot be imported: No module named 'no_such_library'"
    )


def test_a_registered_name_may_take_an_argument(plain, entry_point, file, monkeypatch):
    text = """
        from attncheck.backends.candidates.torch_sdpa import SDPABackend

        class Family:
            @classmethod
            def from_argument(cls, argument):
                if argument == "cudnn":
                    import no_such_library
                if argument == "broken":
                    raise RuntimeError("driver too old")
                if argument != "math":
                    raise ValueError(f"no kernel {argument!r}; there is 'math'")
                return SDPABackend
    """
    monkeypatch.syspath_prepend(str(file(text, name="family_of_backends.py").parent))
    entry_point(family="family_of_backends:Family")
    loaded = load("family:math")
    assert (loaded.name, loaded.ref, loaded.backend) == ("family:math", "family:math", SDPABackend)
    with pytest.raises(BackendLoadError) as refused:
        load("family:flash")
    assert plain(str(refused.value)) == snapshot("backend 'family:flash': no kernel 'flash'; there is 'math'")
    assert "'flash'" in str(refused.value)
    assert "'math'" in str(refused.value)
    with pytest.raises(BackendUnavailableError) as refused:
        load("family:cudnn")
    assert plain(str(refused.value)) == snapshot(
        "backend 'family:cudnn' is unavailable here: its library cannot be imported: No module named 'no_such_library'"
    )
    with pytest.raises(BackendLoadError) as refused:
        load("family:broken")
    assert plain(str(refused.value)) == snapshot(
        "backend 'family:broken': importing it raised RuntimeError: driver too old (TMP/family_of_backends.py:N: raise RuntimeError(\"driver too old\"))"
    )
    with pytest.raises(BackendLoadError) as refused:
        load("family")
    assert plain(str(refused.value)) == snapshot(
        "backend 'family': is <class 'family_of_backends.Family'>, neither a backend nor a function; derive the class from attncheck.backends.contract.AttentionBackend"
    )


def test_an_object_from_a_file_is_named_by_the_file(file):
    path = file(GOOD)
    assert load_object(load(f"{path}:Good").backend).ref == f"{path}:Good"


def test_objects_from_python():
    loaded = load_object(SDPABackend)
    assert (loaded.name, loaded.ref) == ("SDPABackend", "attncheck.backends.candidates.torch_sdpa:SDPABackend")
    assert load(loaded.ref).backend is SDPABackend

    def mine(query, key_cache, value_cache, metadata, params, out):
        pass

    assert load_object(mine).backend.get_name() == "MINE"
    with pytest.raises(BackendLoadError) as refused:
        load_object(7)
    assert str(refused.value) == snapshot(
        "backend ':int': is 7, neither a backend nor a function; derive the class from attncheck.backends.contract.AttentionBackend"
    )
