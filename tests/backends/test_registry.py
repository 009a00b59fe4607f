"""Every way to name a backend, and every way in which that goes wrong."""

import importlib.metadata
import importlib.util
import sys
from textwrap import dedent

import pytest
import torch
from inline_snapshot import snapshot

import attncheck
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
HALF = """
    from attncheck.backends.contract import AttentionBackend

    class Half(AttentionBackend):
        features = frozenset({"sliding_windows"})
        get_name = staticmethod(lambda: "HALF")
"""
KERNEL = "def kernel(query, key_cache, value_cache, metadata, params, out): pass\n"


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
        points = [importlib.metadata.EntryPoint(*each, registry.ENTRY_POINT_GROUP) for each in targets.items()]
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points if group else ())

    return install


@pytest.fixture
def on_path(file, monkeypatch):
    """``on_path(text, "name.py")`` writes a module that can be imported by its name."""
    return lambda text, name: monkeypatch.syspath_prepend(str(file(text, name=name).parent))


@pytest.fixture
def refusal(plain):
    """``refusal(ref)`` is the message of the BackendLoadError, or of ``error``, that loading ``ref`` raises."""

    def message(ref, error=BackendLoadError):
        with pytest.raises(error) as refused:
            load(ref)
        return plain(str(refused.value))

    return message


def test_built_in_backends_load_by_name():
    names = set()
    for name in builtin_names():
        try:
            loaded = load(name)
        except BackendUnavailableError:  # its library is not installed
            continue
        assert (loaded.name, loaded.ref, loaded.origin) == (name, name, "built in")
        assert loaded.backend.get_name() == name.upper()
        assert loaded.backend.accept_output_buffer
        assert loaded.version
        names.add(name)
    assert names >= {
        "reference",
        "torch_sdpa",
        "flex_attention",
        "reference_mla",
        "torch_mla",
        "reference_state",
        "torch_state",
    }
    assert load("reference").version == attncheck.__version__
    assert load("torch_sdpa").version == f"torch {torch.__version__}"


def test_names_that_are_refused_state_the_known_ones(refusal):
    assert refusal("a backend: mine", UnknownNameError) == snapshot("unknown backend 'a backend: mine' (known: ...)")
    for ref in ("vllm", "vllm:", "vllm:*"):
        assert "vllm names many backends; name one, such as vllm:CPU_ATTN" in refusal(ref)
    assert refusal("flex_attention:fast") == snapshot(
        "backend 'flex_attention:fast': flex_attention takes no argument; write 'flex_attention'"
    )
    assert "No module named 'vlm'; registered names are" in refusal("vlm:CPU_ATTN")


def test_a_class_in_a_file_that_is_edited(file):
    path = file(GOOD)
    loaded = load(f"{path}:Good")
    assert (loaded.name, loaded.ref, loaded.origin) == ("Good", f"{path}:Good", f"file {path}")
    assert issubclass(loaded.backend, SDPABackend)
    assert load(f"{path}:Good").backend is loaded.backend
    file(GOOD + "\n    Good.features = frozenset()\n")
    again = load(f"{path}:Good").backend
    assert again is not loaded.backend
    assert again.features == frozenset()


def test_a_file_imports_the_modules_beside_it_and_shadows_none(file, refusal):
    path = file(GOOD, name="torch.py")
    path.write_text(f"import a_neighbour_of_the_file\n{path.read_text()}")
    assert refusal(f"{path}:Good").endswith("a_neighbour_of_the_file is neither installed nor beside torch.py")
    (path.parent / "a_neighbour_of_the_file.py").touch()
    importlib.invalidate_caches()
    assert load(f"{path}:Good").name == "Good"
    assert sys.path[-1] == str(path.parent)
    assert sys.modules["torch"].__file__ != str(path)


def test_a_file_with_one_class_or_one_function_needs_no_name(file):
    one, other, _ = GOOD.partition("    class Other")
    assert other
    path = file(f"{one}    Alias = Good\n")
    assert (load(str(path)).name, load(str(path)).ref) == ("Good", str(path))
    loaded = load(str(file(KERNEL)))
    assert (loaded.name, loaded.backend.get_name()) == ("kernel", "KERNEL")
    assert loaded.backend.get_impl_cls().brings_writer is False


def test_a_file_that_has_something_else(file, refusal):
    refused = [
        (HALF, ":Half"),
        (GOOD, ":Missing"),
        (KERNEL + KERNEL.replace("kernel", "other"), ""),
        (GOOD, ":number"),
        (GOOD, ":useless"),
        ("x = 1", ""),
        ("x = 1", ":Wrong"),
    ]
    found = [refusal(f"{file(text)}{suffix}") for text, suffix in refused]
    assert found == snapshot(
        [
            "backend 'TMP/candidate.py:Half': breaks the contract: backend Half does not implement get_builder_cls, get_impl_cls; features: unknown name 'sliding_windows'; did you mean 'sliding_window'? (known: ...)",
            "backend 'TMP/candidate.py:Missing': TMP/candidate.py has no 'Missing'; write TMP/candidate.py:Good or TMP/candidate.py:Other",
            "backend 'TMP/candidate.py': has 2 backends; write TMP/candidate.py:kernel or TMP/candidate.py:other",
            "backend 'TMP/candidate.py:number': is 7, neither a backend nor a function; derive the class from attncheck.backends.contract.AttentionBackend",
            "backend 'TMP/candidate.py:useless': useless(query) cannot be called with (query, key_cache, value_cache, metadata, params, out) by position: too many positional arguments",
            "backend 'TMP/candidate.py': has no backend; TMP/candidate.py defines no AttentionBackend",
            "backend 'TMP/candidate.py:Wrong': TMP/candidate.py has no 'Wrong'; TMP/candidate.py defines no AttentionBackend",
        ]
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import attncheck\n\nboom = {}['key']\n", r"KeyError: 'key' \(.*candidate.py:3: boom = \{\}\['key'\]\)"),
        ("x = 1\ndef broken(:\n", r"SyntaxError: .* \(.*candidate.py:2\)"),
        ("raise ValueError('x' * 10**6)\n", r"ValueError: x{1900,2000} \(.*candidate.py:1"),
        (  # raised by attncheck itself
            "from attncheck import kernel_backend\n\nMine = kernel_backend(print, name='mine', features=('lze',))\n",
            r"ValueError: kernel_backend 'mine': unknown feature 'lze'.* \(.*candidate.py:3: Mine = kernel_backend\(",
        ),
    ],
)
def test_the_error_of_a_file_that_does_not_import_states_the_line(file, text, message):
    path = file(text)
    loaded = set(sys.modules)
    with pytest.raises(BackendLoadError, match=message):
        load(f"{path}:Wrong")
    assert not [name for name in set(sys.modules) - loaded if name.startswith("attncheck_file")]


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")
def test_without_vllm_the_error_states_what_to_install_and_how_to_name_the_class(file, refusal):
    path = str(file("import vllm.v1\n"))
    assert refusal(path) == snapshot(
        "backend 'TMP/candidate.py': importing it raised ModuleNotFoundError: No module named 'vllm' (TMP/candidate.py:N: import vllm.v1); install vLLM (pip install vllm), and write vllm:TMP/candidate.py:CLASS"
    )
    assert refusal(f"vllm:{path}:Mine", BackendUnavailableError) == snapshot(
        "backend 'vllm:TMP/candidate.py:Mine' is unavailable here: its library cannot be imported: No module named 'vllm'; install vLLM (pip install vllm)"
    )


def test_an_entry_point_is_a_name(entry_point):
    entry_point(theirs="attncheck.backends.candidates.torch_sdpa:SDPABackend", reference="no.such:Thing")
    assert known_names() == (*builtin_names(), "xformers_vllm", "vllm", "hf", "theirs")
    loaded = load("theirs")
    assert (loaded.name, loaded.origin) == ("theirs", "entry point of an unknown distribution")
    assert loaded.backend is SDPABackend
    assert load("reference").origin == "built in"


def test_a_library_that_is_missing_makes_a_backend_unavailable(entry_point, on_path, file, refusal):
    on_path("import no_such_library\n", "needs_a_library.py")
    on_path("raise SystemExit(4)\n", "leaving.py")
    entry_point(theirs="needs_a_library:Backend", gone="leaving:Backend")
    assert refusal("theirs", BackendUnavailableError) == snapshot(
        "backend 'theirs' is unavailable here: needs_a_library:Backend cannot be imported: No module named 'no_such_library'"
    )
    assert refusal("gone") == snapshot(
        "backend 'gone': importing it raised SystemExit: 4 (TMP/leaving.py:N: raise SystemExit(4))"
    )
    behind_a_factory = """
        from attncheck.backends.candidates.torch_sdpa import SDPABackend

        class Lazy(SDPABackend):
            @staticmethod
            def get_impl_cls():
                import no_such_library
    """
    assert refusal(f"{file(behind_a_factory)}:Lazy", BackendUnavailableError) == snapshot(
        "backend 'Lazy' is unavailable here: its library cannot be imported: No module named 'no_such_library'"
    )


def test_a_registered_name_may_take_an_argument(entry_point, on_path, refusal):
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
    on_path(text, "family_of_backends.py")
    entry_point(family="family_of_backends:Family")
    loaded = load("family:math")
    assert (loaded.name, loaded.ref, loaded.backend) == ("family:math", "family:math", SDPABackend)
    assert refusal("family:flash") == snapshot("backend 'family:flash': no kernel 'flash'; there is 'math'")
    assert refusal("family:cudnn", BackendUnavailableError) == snapshot(
        "backend 'family:cudnn' is unavailable here: its library cannot be imported: No module named 'no_such_library'"
    )
    assert refusal("family:broken") == snapshot(
        "backend 'family:broken': importing it raised RuntimeError: driver too old (TMP/family_of_backends.py:N: raise RuntimeError(\"driver too old\"))"
    )
    assert "is the class Family, neither a backend nor a function" in refusal("family")


def test_a_class_of_vllm_s_is_refused_with_the_way_to_name_it(on_path, refusal):
    text = """
        class Mine(type("AttentionBackend", (), {"__module__": "vllm.v1.attention.backend"})):
            pass

        class Other(type("AttentionBackend", (), {"__module__": "elsewhere"})):
            pass
    """
    on_path(text, "of_vllms.py")
    assert refusal("of_vllms:Mine") == snapshot(
        "backend 'of_vllms:Mine': is a backend of vLLM's; write vllm:of_vllms:Mine"
    )
    assert "neither a backend nor a function" in refusal("of_vllms:Other")


def test_objects_from_python_and_classes_of_a_module(file):
    loaded = load_object(SDPABackend)
    assert (loaded.name, loaded.ref) == ("SDPABackend", "attncheck.backends.candidates.torch_sdpa:SDPABackend")
    assert load(loaded.ref).backend is SDPABackend
    assert load(loaded.ref).origin == "module attncheck.backends.candidates.torch_sdpa"

    path = file(GOOD)
    assert load_object(load(f"{path}:Good").backend).ref == f"{path}:Good"

    def mine(query, key_cache, value_cache, metadata, params, out):
        pass

    assert load_object(mine).backend.get_name() == "MINE"
    with pytest.raises(BackendLoadError, match="backend ':int': is 7, neither a backend nor a function"):
        load_object(7)
