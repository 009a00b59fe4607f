"""What README.md and docs/ state is what the code has, and what they name is there."""

import json
import os
import pkgutil
import re
import runpy
import shlex
import tomllib
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace

import pytest
import torch
import typer.main
import yaml

from attncheck.backends.conventions import Conventions
from attncheck.backends.mutants.catalogue import Mutant, catalogue
from attncheck.backends.registry import FAMILIES, builtin_names, known_names, load
from attncheck.cases.loader import TELLING, load_suite, suite_names, telling_ranks
from attncheck.harness.checks.cudagraph.probes import probes_of
from attncheck.harness.checks.findings import TimingSettings
from attncheck.harness.checks.timing import check
from attncheck.harness.cli.app import app
from attncheck.harness.cli.options import KEYS, read_config
from attncheck.harness.driver.construction import ConfigNode, vllm_config
from attncheck.harness.engine.traffic import TRAFFIC
from attncheck.harness.problem.sizes import needed_bytes
from attncheck.harness.pytest_plugin.plugin import name_in_pytest
from attncheck.harness.run.expectations import load_expectations
from attncheck.harness.run.options import KEEP, options_in
from attncheck.harness.run.selection import checks_of
from attncheck.harness.workers import pool as pool_module
from attncheck.harness.workers.limits import DEFAULT
from attncheck.reference.spec import CHECKS, FEATURES, LayerSpec, default_checks
from attncheck.reference.step_spec import CacheSpec, PathSpec, SpecDecodeOptions
from attncheck.reports.analysis.recommendation import STANDINGS
from attncheck.reports.comparison import significance
from attncheck.reports.comparison.significance import ProcessNoise, smallest_slowdown
from attncheck.reports.document.support import SIGNS
from attncheck.reports.run_file.header import FORMAT
from attncheck.reports.run_file.records import OUTCOMES, RecordKey
from attncheck.reports.speeds.tables import FASTEST_ROUNDS

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
WRITTEN = sorted(DOCS.glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *WRITTEN]
LONGEST = 2000
LAYER, CACHE = LayerSpec(num_heads=2, num_kv_heads=1, head_size=16, dtype="float32"), CacheSpec(block_size=4)


def text_of(page: str) -> str:
    folder = ROOT if page == "README.md" else DOCS
    return (folder / page).read_text(encoding="utf-8")


def prose_of(*pages: str) -> str:
    """The words of pages, without line ends."""
    return " ".join(" ".join(map(text_of, pages)).split())


def section(page: str, title: str) -> str:
    return text_of(page).partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def blocks(page: str, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", text_of(page), re.MULTILINE | re.DOTALL)


def first_cells(text: str) -> list[str]:
    return re.findall(r"^\| `(\w+)(?::NAME)?` \|", text, re.MULTILINE)


# Files


def test_the_expectation_file_is_one(tmp_path: Path) -> None:
    (tmp_path / "known.yaml").write_text(blocks("case-files.md", "yaml")[1], encoding="utf-8")
    place, finding = load_expectations(tmp_path / "known.yaml")
    assert place.expectation.fits_case("name", "window-decode")
    assert finding.expectation.needs == ("logits_soft_cap", "dtype=float16")
    assert finding.expectation.within is not None


def test_the_backend_is_one_and_a_level_by_the_config_goes_with_it(tmp_path: Path) -> None:
    function, level_by_config = blocks("backends.md", "python")
    (tmp_path / "mine.py").write_text(function + level_by_config, encoding="utf-8")
    assert load(f"{tmp_path / 'mine.py'}:Mine").backend.conventions.lse_base == "2"
    builder = load(f"{tmp_path / 'mine.py'}:Configured").backend.get_builder_cls()
    assert builder.get_cudagraph_support(None, SimpleNamespace(sliding_window=None)).name == "UNIFORM_BATCH"
    assert builder.get_cudagraph_support(None, SimpleNamespace(sliding_window=8)).name == "NEVER"


def test_the_table_of_pyproject_is_read_and_has_every_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (table,) = blocks("running.md", "toml")
    (tmp_path / "pyproject.toml").write_text(table, encoding="utf-8")
    assert read_config(tmp_path).given["backends"] == ["./mine.py", "torch_sdpa"]
    assert set(tomllib.loads(table)["tool"]["attncheck"]) == set(KEYS)
    assert f"newest {KEEP} stay" in prose_of("running.md")


# Tables


def test_tables_have_every_name() -> None:
    of_engines = [name for name, info in CHECKS.items() if info.applies_to == "engine"]
    others = [name for name in CHECKS if name not in of_engines]
    assert first_cells(text_of("README.md")) == others
    assert first_cells(section("how-it-judges.md", "The checks")) == others
    assert first_cells(section("engine.md", "What is judged")) == of_engines
    assert re.findall(r"^\| `([a-z-]+)` \|", section("engine.md", "Judge an engine"), re.MULTILINE) == list(TRAFFIC)
    assert first_cells(section("reading-a-report.md", "Outcomes")) == list(OUTCOMES)
    assert sorted(first_cells(section("backends.md", "Features"))) == sorted(FEATURES)
    assert all(f"`{field.name}`" in text_of("backends.md") for field in fields(Conventions))
    examined = {*builtin_names(), "xformers_vllm", *FAMILIES}
    assert sorted(first_cells(text_of("candidates.md"))) == sorted(name for name in known_names() if name in examined)


def test_every_sign_of_support_and_every_answer_of_a_site_is_explained() -> None:
    signs = re.findall(r"^\| (\S) \| (.+?) \|$", text_of("reading-a-report.md"), re.MULTILINE)
    assert signs == [(sign.sign, sign.meaning) for sign in SIGNS.values()]
    answers = text_of("comparing.md").partition("| answer | meaning |\n|---|---|\n")[2].partition("\n\n")[0]
    assert re.findall(r"^\| (.+?) \| .+? \|$", answers, re.MULTILINE) == list(STANDINGS.values())


def test_entries_of_mutants_are_some_of_the_catalogue_and_every_key_is_explained() -> None:
    text = section("fuzzing.md", "How many faults a suite detects")
    shown = [yaml.safe_load(dedent(entry)) for entry in re.findall(r"^    - .*\n(?:    .*\n)+", text, re.MULTILINE)]
    assert len(shown) == 2
    known = {mutant.name: mutant for mutant in catalogue()}
    for (entry,) in shown:
        found = known[entry["name"]]
        assert Mutant.model_validate({"fault": found.fault, "area": found.area} | entry) == found
    keys = {field.alias or name for name, field in Mutant.model_fields.items()} - {"area"}
    explained = "".join(re.findall(r"^\| (`.*?) \|", text.partition("| key | meaning |")[2], re.MULTILINE))
    assert set(re.findall(r"`(\w+)`", explained)) == keys


def test_a_record_is_known_by_what_the_page_lists() -> None:
    identity = text_of("run-files.md").partition("## Identity")[2].partition("A run holds")[0]
    assert re.findall(r"`(\w+)`", identity) == list(RecordKey._fields)
    assert f"`format` is {FORMAT}." in text_of("run-files.md")


def test_the_variables_that_a_backend_gets_are_listed() -> None:
    items = "".join(re.findall(r"^(?:- |  ).*\n", section("processes.md", "Environment"), re.MULTILINE))
    assert set(re.findall(r"`([^`]+?)`", items.partition("- in `attncheck.examine`")[0])) == set(DEFAULT)


def test_what_a_builder_is_offered_is_all_documented() -> None:
    drafts = PathSpec(name="spec_decode", options=SpecDecodeOptions(num_speculative_tokens=1))
    config = vllm_config(
        LAYER,
        CACHE,
        torch.float32,
        passed_cache_dtype="auto",
        max_model_len=1,
        max_num_seqs=1,
        max_tokens=1,
        path=drafts,
    )
    offered = {name for name in vars(config) if not name.startswith("_")}
    nodes = {name for name in offered if isinstance(getattr(config, name), ConfigNode)}
    inner = {f"{node}.{name}" for node in nodes for name in vars(getattr(config, node)) if not name.startswith("_")}
    rows = re.findall(r"^\| (`[a-z]+_config\b.*?) \|", text_of("backends.md"), re.MULTILINE)
    documented = {name for row in rows for name in re.findall(r"`([\w.]+)", row)}
    assert documented == (offered - nodes) | inner | {"speculative_config"}


def test_the_probes_of_the_levels_are_those_that_are_played() -> None:
    documented = []
    for level, names in re.findall(r"^\| `([A-Z_]+)` \| (.*?) \|", text_of("cuda-graphs.md"), re.MULTILINE):
        ranges = re.sub(r"`(\w+) (\d+)` to `\1 (\d+)`", _numbered, names)
        documented += [(level, name) for name in re.findall(r"`(.*?)`", ranges)]
    assert documented == [(probe.level.name, probe.name) for probe in probes_of(LAYER, CACHE)]


def _numbered(match: re.Match[str]) -> str:
    return ", ".join(f"`{match[1]} {number}`" for number in range(int(match[2]), int(match[3]) + 1))


def test_the_slowdowns_that_are_found_are_those_of_the_theory() -> None:
    (pairs,) = re.findall(r"where (\d+) pairs of two runs are compared", prose_of("comparing.md"))
    (heading,) = re.findall(r"^\| noise between processes \|(.*)\|$", text_of("comparing.md"), re.MULTILINE)
    rounds = [int(number) for number in re.findall(r"(\d+) rounds", heading)]
    rows = re.findall(r"^\| (\d+) % \|(.*)\|$", text_of("comparing.md"), re.MULTILINE)
    assert len(rounds) == len(rows) == 4
    for spread, cells in rows:
        level = significance.FAMILY_LEVEL / int(pairs)
        found = [smallest_slowdown(ProcessNoise(int(spread) / 100), number, level=level) for number in rounds]
        assert [cell.strip() for cell in cells.split("|")] == [f"{share:.1%}" for share in found]


def test_the_index_of_faults_for_upstream_lists_each_report_under_its_kind() -> None:
    kinds = {
        "Wrong answers": "wrong answer",
        "Hazards": "hazard",
        "Differences of documentation": "difference of documentation",
    }
    _, *sections = re.split(r"^## ", text_of("upstream/README.md"), flags=re.MULTILINE)
    listed = {
        folder: kinds[section.splitlines()[0]]
        for section in sections
        for folder in re.findall(r"^\| \[[\w-]+\]\(([\w-]+)/report\.md\)", section, re.MULTILINE)
    }
    reports = {path.parent.name: path.read_text(encoding="utf-8") for path in DOCS.glob("upstream/*/report.md")}
    assert listed == {name: re.search(r"^- Kind: (.*)$", text, re.MULTILINE)[1] for name, text in reports.items()}
    assert {path.parent.name for path in DOCS.glob("upstream/*/show.py")} == set(listed)


# Figures


def test_figures_of_times_are_those_of_the_code() -> None:
    own, timing, comparing = TimingSettings(), prose_of("timing.md"), prose_of("comparing.md")
    assert own.limit_s == 0.25
    assert f"no wider than {own.relative_width:.0%} of it".replace("%", " %") in timing
    assert f"at least {own.min_samples}, at most {own.max_samples}, and for a quarter of a second at most" in timing
    assert f"lies beyond {significance.EFFECT:.0%}".replace("%", " %") in comparing
    assert f"lies within {significance.MARGIN:.0%}".replace("%", " %") in comparing
    assert f"a {1 - significance.FAMILY_LEVEL:.0%} interval".replace("%", " %") in comparing
    assert f"fewer than {significance.MIN_ROUNDS} rounds a side" in comparing
    assert (FASTEST_ROUNDS, check.TOO_FAST, check.NOTABLE) == (5, 2.0, 1.25)  # stated in words


def test_figures_of_memory_are_those_of_the_suites() -> None:
    page = text_of("first-gpu-run.md")
    (most,) = re.findall(r"No case of the suites needs more than ([\d.]+) GiB", page)
    (pool,) = re.findall(r"those of `limits` up to ([\d.]+) GiB", page)
    cases = [case for name in suite_names() for case in load_suite(name)]
    for figure, reserves in ((float(most), True), (float(pool), False)):
        largest = max(needed_bytes(case, reserves=reserves) for case in cases) / 2**30
        assert figure - 0.1 < largest <= figure
    far = {case.id: needed_bytes(case) / 2**30 for case in load_suite("smoke")}
    assert round(far.pop("far-elements")) == 8
    assert max(far.values()) < 1
    assert "up to eight processes" in prose_of("first-gpu-run.md").lower()
    assert pool_module._MOST == 8
    assert set(builtin_names()) <= set(re.findall(r"`(\w+)`", section("first-gpu-run.md", "What it costs")))


def test_the_detection_figures_are_those_of_the_kept_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    detection = import_module("detection")
    measured = json.loads((DOCS / "detection.json").read_text(encoding="utf-8"))
    assert detection.table(measured) in text_of("README.md")
    assert measured["mutants"] == [mutant.name for mutant in detection.comparable_mutants()]


def test_the_order_of_within_is_made_from_the_suite_and_the_mutants_that_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If this fails, make the order and its table again: CONTRIBUTING.md has the command."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    telling, detection = import_module("telling"), import_module("detection")
    measured = json.loads(TELLING.read_text(encoding="utf-8"))
    suite = load_suite(measured["suite"])
    assert measured["digest"] == suite.hash
    assert measured["cases"] == [case.id for case in suite.cases]
    assert sorted(measured["checks"]) == sorted(default_checks("cpu"))
    assert sorted(measured["mutants"] + measured["left_out"]) == sorted(
        each.name for each in detection.comparable_mutants()
    )
    known = {(case.key, check) for case in suite.cases for check in checks_of(case, None, "cpu")}
    assert telling_ranks().keys() <= known
    assert telling.table(measured) in text_of("running.md")


# Names


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_what_a_page_names_is_there(path: Path) -> None:
    """A name in capitals, such as `cases/suites/NAME.yaml`, is for the reader to choose."""
    text = path.read_text(encoding="utf-8")
    for name in re.findall(r"`(attncheck(?:\.\w+)+)`", text):
        pkgutil.resolve_name(name)
    for names, module in re.findall(r"((?:`\w+`(?:,|\s+and)\s+)*`\w+`)\s+of\s+`(attncheck(?:\.\w+)+)`", text):
        for name in re.findall(r"`(\w+)`", names):
            pkgutil.resolve_name(f"{module}:{name}")
    files = re.findall(
        r"(?<![\w./-])(?:harness|reports|backends|reference|cases|tests|scripts|docs|benchmarks)/[\w./-]*\w/?", text
    )
    own = [name for name in files if not re.search(r"[A-Z]{3}", name)]
    assert [name for name in own if not (ROOT / name).exists()] == []


def test_every_option_that_a_page_names_is_there() -> None:
    def options(command: typer.core.TyperGroup) -> set[str]:
        own = {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
        return own.union(*(options(each) for each in getattr(command, "commands", {}).values()))

    plugin = ["--attncheck-timing", *map(name_in_pytest, options_in("pytest"))]
    elsewhere = {
        "--no-async-scheduling",
        "--dist",
        "--kill-after",
        "--signal",
        "--no-build-isolation",
        "--benchmark-compare",
        "--compute-mode",
    }
    known = options(typer.main.get_command(app)) | {*plugin} | elsewhere | {"--part", "--limit", "--help"}
    for path in WRITTEN:
        code = re.findall(r"`(?:attncheck [^`]*)?(--[^`*]*)`", path.read_text(encoding="utf-8"))
        named = {word.partition("=")[0] for text in code for word in shlex.split(text) if word.startswith("--")}
        assert named <= known, path.name


def test_the_navigation_names_every_page_once() -> None:
    def pages(nav: object) -> list[str]:
        if isinstance(nav, str):
            return [nav]
        return [page for each in (nav if isinstance(nav, list) else nav.values()) for page in pages(each)]

    named = pages(yaml.safe_load(text_of("site/mkdocs.yml"))["nav"])
    assert len(named) == len(set(named))
    assert {page for page in named if "/" not in page} == {page.name for page in WRITTEN}


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: path.name)
def test_a_page_is_short_and_begins_with_what_it_is_for(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.split()) <= LONGEST
    title, purpose = [line for line in text.splitlines() if line][:2]
    assert title.startswith("# ")
    assert purpose.startswith("This page ")


def test_every_picture_is_there_and_has_words_in_its_place() -> None:
    texts = [path.read_text(encoding="utf-8") for path in PAGES]
    pictures = [found for text in texts for found in re.findall(r"!\[([^]]*)\]\((?:docs/)?pictures/([\w.-]+)\)", text)]
    assert all(len(words.split()) > 10 for words, _ in pictures)
    assert {name for _, name in pictures} == {path.name for path in (DOCS / "pictures").glob("*.[sp][vn]g")}


def test_the_readme_is_short_and_its_links_and_scripts_and_extras_are_there() -> None:
    text = text_of("README.md")
    assert 110 <= len(text.splitlines()) <= 145
    links = re.findall(r"\[[^]]*\]\(([^)]+)\)", text)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
    assert all(os.access(ROOT / script, os.X_OK) for script in re.findall(r"^    (scripts/\w+)", text, re.MULTILINE))
    (extras,) = re.findall(r"^pip install '\.\[(.*)\]'$", text, re.MULTILINE)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(extras.split(",")) <= project["optional-dependencies"].keys()


def test_the_site_of_the_kept_runs_has_the_gpu_and_no_deliberately_wrong_backend(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("griffe", reason="the pages of the API are read by griffe, which the extra docs installs")
    monkeypatch.syspath_prepend(str(DOCS / "site"))
    pages = dict(runpy.run_path(str(DOCS / "site" / "reference_pages.py"))["kept_runs"]())
    assert '<a href="index.html" aria-current="page">NVIDIA H200</a>' in pages["index.html"]
    backends = {path.rpartition("/")[2].removesuffix(".html") for path in pages if path.startswith("backends/")}
    assert "torch_sdpa" in backends
    assert not [name for name in backends if name.startswith(("wildwrite", "rowbyrow"))]
