"""What docs/ shows is what attncheck reads, and what docs/ and README.md name is there."""

import pkgutil
import re
import runpy
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from attncheck.backends.conventions import Conventions
from attncheck.backends.registry import load
from attncheck.cases.loader import load_suite
from attncheck.cases.model import question
from attncheck.harness.checks.cudagraph.probes import probes_of
from attncheck.harness.driver.vllm_config import ConfigNode, vllm_config
from attncheck.harness.run.expectation_file import load_expectations
from attncheck.reference.spec import (
    CHECKS,
    FEATURES,
    CacheSpec,
    LayerSpec,
    MLASpec,
    OutputQuantSpec,
    PathSpec,
    SpecDecodeOptions,
)

DOCS = Path(__file__).resolve().parent.parent / "docs"
TEXT = (DOCS / "case-files.md").read_text(encoding="utf-8")
CASE_FILE, *EXPECTED = re.findall(r"^```yaml\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
BACKENDS = (DOCS / "backends.md").read_text(encoding="utf-8")
FUNCTION, LEVEL_BY_CONFIG = re.findall(r"^```python\n(.*?)^```$", BACKENDS, re.MULTILINE | re.DOTALL)
LAYER, CACHE = LayerSpec(num_heads=2, num_kv_heads=1, head_size=16, dtype="float32"), CacheSpec(block_size=4)
PROBES = probes_of(LAYER, CACHE)


def test_the_case_file_is_one(tmp_path: Path) -> None:
    path = tmp_path / "name.yaml"
    path.write_text(CASE_FILE, encoding="utf-8")
    cases = load_suite(str(path)).cases
    assert [case.id for case in cases] == [f"decode.{d}-{b}" for d in ("float16", "bfloat16") for b in (16, 32)]
    assert question(cases[0])["layer"]["logits_soft_cap"] == 30.0


def test_the_expectation_files_are_some(tmp_path: Path) -> None:
    path = tmp_path / "known.yaml"
    path.write_text("".join(EXPECTED), encoding="utf-8")
    place, finding, bounded = load_expectations(path)
    assert place.expectation.fits_case("smoke", "window-decode")
    assert finding.expectation.needs == ("logits_soft_cap", "dtype=float16")
    assert bounded.expectation.within is not None
    assert bounded.expectation.within.values == ("nan",)


def test_the_backend_is_one_and_every_feature_and_convention_is_documented(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(FUNCTION, encoding="utf-8")
    assert load(f"{path}:Mine").backend.conventions.lse_base == "2"
    features = BACKENDS.partition("## Features")[2].partition("\n## ")[0]
    documented = re.findall(r"^\| `(\w+)` \|", features, re.MULTILINE)
    assert sorted(documented) == sorted(FEATURES)
    assert all(f"`{field.name}`" in BACKENDS for field in fields(Conventions))


def test_a_level_by_the_config_goes_with_the_backend_of_a_function(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(FUNCTION + LEVEL_BY_CONFIG, encoding="utf-8")
    builder = load(f"{path}:Configured").backend.get_builder_cls()
    assert builder.get_cudagraph_support(None, SimpleNamespace(sliding_window=None)).name == "UNIFORM_BATCH"
    assert builder.get_cudagraph_support(None, SimpleNamespace(sliding_window=8)).name == "NEVER"


def test_what_a_builder_is_offered_is_all_documented() -> None:
    drafts = PathSpec(name="spec_decode", options=SpecDecodeOptions(num_speculative_tokens=1))
    config = vllm_config(LAYER, CACHE, torch.float32, max_model_len=1, max_num_seqs=1, max_tokens=1, path=drafts)
    offered = {name for name in vars(config) if not name.startswith("_")}
    nodes = {name for name in offered if isinstance(getattr(config, name), ConfigNode)}
    inner = {f"{node}.{name}" for node in nodes for name in vars(getattr(config, node)) if not name.startswith("_")}
    rows = re.findall(r"^\| (`[a-z]+_config\b.*?) \|", BACKENDS, re.MULTILINE)
    documented = {name for row in rows for name in re.findall(r"`([\w.]+)", row)}
    assert documented == (offered - nodes) | inner | {"speculative_config"}


def test_the_probes_of_the_levels_are_those_that_are_played() -> None:
    text = (DOCS / "cuda-graphs.md").read_text(encoding="utf-8")
    documented = []
    for level, names in re.findall(r"^\| `([A-Z_]+)` \| (.*?) \|", text, re.MULTILINE):
        ranges = re.sub(r"`(\w+) (\d+)` to `\1 (\d+)`", _numbered, names)
        documented += [(level, name) for name in re.findall(r"`(.*?)`", ranges)]
    assert documented == [(probe.level.name, probe.name) for probe in PROBES]


def _numbered(match: re.Match[str]) -> str:
    return ", ".join(f"`{match[1]} {number}`" for number in range(int(match[2]), int(match[3]) + 1))


@pytest.mark.parametrize("path", [DOCS.parent / "README.md", *sorted(DOCS.glob("*.md"))], ids=lambda path: path.name)
def test_what_is_named_can_be_imported(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for name in re.findall(r"`(attncheck(?:\.\w+)+)`", text):
        pkgutil.resolve_name(name)
    for names, module in re.findall(r"((?:`\w+`(?:,|\s+and)\s+)*`\w+`)\s+of\s+`(attncheck(?:\.\w+)+)`", text):
        for name in re.findall(r"`(\w+)`", names):
            pkgutil.resolve_name(f"{module}:{name}")


def test_every_key_and_check_is_named() -> None:
    for kind in (LayerSpec, CacheSpec, MLASpec, OutputQuantSpec):
        for name in (field.name for field in fields(kind)):
            assert name in TEXT, f"docs/case-files.md does not name {name}"
    judged = (DOCS / "how-it-judges.md").read_text(encoding="utf-8")
    for check in CHECKS:
        assert f"| `{check}` |" in judged


ROOT = DOCS.parent
MADE = (
    "measured-support.md",
    "xformers-vllm.md",
    "vllm-audit.md",
    "vllm-cpu-attn.md",
    "vllm-mla.md",
    "vllm-triton-attn.md",
    "vllm-utilities.md",
)
"""Pages made from runs: they name the files of the version that ran."""
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(page for page in DOCS.glob("*.md") if page.name not in MADE)]


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_every_file_a_page_names_is_there(page: Path) -> None:
    """A name in capitals, such as `cases/suites/NAME.yaml`, is for the reader to choose."""
    named = re.findall(
        r"(?<![\w./-])(?:harness|reports|backends|reference|cases|tests|scripts|docs|benchmarks)/[\w./-]*\w/?",
        page.read_text(encoding="utf-8"),
    )
    own = [name for name in named if not re.search(r"[A-Z]{3}", name)]
    assert [name for name in own if not (ROOT / name).exists()] == []


SITE = (DOCS / "site" / "mkdocs.yml").read_text(encoding="utf-8")
GENERATED = {*MADE, "vllm-versions.md", "cost.md"}
LONGEST = 1500


def _pages(nav: object) -> list[str]:
    """Every page that a part of the navigation names, in order."""
    if isinstance(nav, str):
        return [nav]
    return [page for each in (nav if isinstance(nav, list) else nav.values()) for page in _pages(each)]


def test_the_navigation_names_every_page_once() -> None:
    named = _pages(yaml.safe_load(SITE)["nav"])
    written = {page.name for page in DOCS.glob("*.md")}
    assert len(named) == len(set(named))
    assert {page for page in named if "/" not in page} == written


@pytest.mark.parametrize("page", sorted({path.name for path in DOCS.glob("*.md")} - GENERATED))
def test_a_page_that_is_written_by_hand_is_short_and_states_its_purpose(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    assert len(text.split()) <= LONGEST
    title, purpose = [line for line in text.splitlines() if line][:2]
    assert title.startswith("# ")
    assert purpose.startswith("This page ")


def test_every_picture_is_there_and_has_words_in_its_place() -> None:
    pictures = [found for path in DOCS.glob("*.md") for found in PICTURE.findall(path.read_text(encoding="utf-8"))]
    assert all(len(words.split()) > 10 for words, _ in pictures)
    assert {name for _, name in pictures} == {path.name for path in (DOCS / "pictures").glob("*.svg")}


PICTURE = re.compile(r"!\[([^]]*)\]\(pictures/([\w.-]+)\)")


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
