"""The files of a site: links that lead somewhere, texts that stay texts, and data that its scripts read."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from attncheck.errors import QuestionError
from attncheck.reports.site.build import MARK, names_of, read_runs, refuse_foreign, run_files, write_site
from attncheck.reports.site.chunks import device_chunk, index_chunk
from attncheck.reports.site.current import subjects
from attncheck.reports.site.model import SiteRun, slug

HOSTILE = "</script><img src=x onerror=alert(1)>/../../\u202e{{ 7 * 7 }}"


class Page(HTMLParser):
    """The elements and links of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    @property
    def links(self) -> set[str]:
        found = {attributes.get(name) for _, attributes in self.tags for name in ("href", "src")}
        return {link.partition("#")[0].partition("?")[0] for link in found if link} - {""}


@pytest.fixture
def build(tmp_path: Path) -> Callable[..., Path]:
    def built(*paths: Path, output: Path = tmp_path / "site") -> Path:
        runs, unread = read_runs(names_of(paths), 1)
        write_site(runs, unread, output)
        return output

    return built


def read_chunk(site: Path, name: str) -> Any:
    text = (site / "data" / f"{name}.js").read_text(encoding="utf-8")
    match = re.fullmatch(r"chunk\((\"[^\"]*\"),(.*)\);\n", text)
    assert match is not None
    assert json.loads(match[1]) == name
    return json.loads(match[2])


def test_every_link_leads_to_a_file_of_the_site(build: Callable[..., Path], run_file: Callable[..., Path]) -> None:
    site = build(
        run_file(1, {"a": "failed", "b": "unsupported"}),
        run_file(2, {"a": "passed"}, version="2"),
        run_file(2, {"a": "passed"}, backend="other", device="b gpu", times={"a": 1e5}),
        run_file(3, {"a": "failed"}, backend=HOSTILE, device=HOSTILE, version=HOSTILE, finding=HOSTILE),
    )
    pages = list(site.rglob("*.html"))
    assert {path.parent.name for path in pages} == {"site", "backends", "devices", "cases"}
    for path in pages:
        page = Page(path.read_text(encoding="utf-8"))
        for link in page.links:
            target = (path.parent / link).resolve()
            assert target.is_relative_to(site.resolve()), (path, link)
            assert target.is_file(), (path, link)
        assert not [tag for tag, attributes in page.tags if any(name.startswith("on") for name in attributes)]
        assert {attributes["src"] for tag, attributes in page.tags if tag == "img"} <= {
            f"../badges/{badge.name}" for badge in (site / "badges").iterdir()
        }


def test_hostile_texts_stay_texts(build: Callable[..., Path], run_file: Callable[..., Path]) -> None:
    site = build(run_file(1, {"a": "failed"}, backend=HOSTILE, device=HOSTILE, finding=HOSTILE))
    assert "{{ 7 * 7 }}" in (site / "backends.html").read_text(encoding="utf-8")
    (device,) = read_chunk(site, "index")["devices"]
    assert device[0] == HOSTILE.replace("\u202e", "?")
    (backend,) = read_chunk(site, f"device-{device[2]}")["backends"]
    assert backend["name"] == HOSTILE.replace("\u202e", "?")


def test_names_with_slashes_stay_within_the_folder(build: Callable[..., Path], run_file: Callable[..., Path]) -> None:
    site = build(run_file(1, {"a": "passed"}, backend="../../out", device="/etc/x"))
    assert {path.name for path in site.parent.iterdir()} == {"site", "runs"}
    assert (site / "backends" / f"{slug('../../out')}.html").is_file()


def test_pages_of_earlier_runs_are_deleted(build: Callable[..., Path], run_file: Callable[..., Path]) -> None:
    old, new = run_file(1, {"a": "passed"}, backend="old"), run_file(2, {"a": "passed"}, backend="new")
    build(old)
    site = build(new)
    assert [path.name for path in (site / "backends").iterdir()] == ["new.html"]


def test_a_file_that_is_no_run_is_named_with_its_reason(
    build: Callable[..., Path], run_file: Callable[..., Path], tmp_path: Path
) -> None:
    run = run_file(1, {"a": "passed"})
    (run.parent / "bad.jsonl").write_text("no JSON\n")
    site = build(*run_files(run.parent))
    text = (site / "runs.html").read_text(encoding="utf-8")
    assert "bad.jsonl" in text
    assert "is not a run file" in text


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(QuestionError, match="other files"):
        refuse_foreign(tmp_path)
    with pytest.raises(QuestionError, match="is a file"):
        refuse_foreign(tmp_path / "notes")
    (tmp_path / "data").mkdir()
    (tmp_path / MARK).write_text("1")
    refuse_foreign(tmp_path)
    refuse_foreign(tmp_path / "new")


def test_a_device_chunk_has_the_current_results(run_of: Callable[..., SiteRun]) -> None:
    run = run_of(1, {"a": "passed", "b": "failed"}, times={"a": 123456.0})
    chunk = device_chunk(subjects([run]))
    (backend,) = chunk["backends"]
    rows = {
        chunk["cases"][case]: (set(chunk["needs"][needs]), chunk["texts"][count], time)
        for case, needs, count, _, _, _, _, time in backend["cases"]
    }
    needs = {"sliding_window", "block_size=16"}
    assert rows == {
        "smoke/a": (needs, "right", [123460.0, 122220.0, 124690.0, 1]),
        "smoke/b": (needs, "short", 0),
    }
    assert [cases for _, cases in backend["findings"]] == [[chunk["cases"].index("smoke/b")]]
    assert chunk["runs"] == [[run.key, run.started, run.digest]]


def test_a_backend_without_a_right_case_is_not_called_right(
    build: Callable[..., Path], run_file: Callable[..., Path]
) -> None:
    site = build(run_file(1, {"a": "passed"}, check="refusals", notes=("refused at forward: no",)))
    for page in (site / "backends.html", *(site / "devices").iterdir()):
        text = page.read_text(encoding="utf-8")
        assert '<span class="chip t-none">no declared case</span>' in text
        assert '<span class="chip t-good">' not in text


def test_gpus_come_before_cpus(run_of: Callable[..., SiteRun]) -> None:
    gpu = run_of(1, {"a": "passed"}, device="z gpu")
    cpu = replace(gpu, device="a", capability="")
    index = index_chunk([cpu, gpu], subjects([cpu, gpu]))
    assert [device[:2] for device in index["devices"]] == [["z gpu", "Hopper"], ["a", "CPU"]]
    assert index["needs"] == ["block_size=16", "sliding_window"]


def test_run_files_from_a_generator_have_names_too(tmp_path: Path) -> None:
    files = [tmp_path / "a" / "run.jsonl", tmp_path / "b" / "run.jsonl"]
    assert names_of(path for path in files) == names_of(files) == {files[0]: "a/run.jsonl", files[1]: "b/run.jsonl"}
    assert names_of(()) == {}
