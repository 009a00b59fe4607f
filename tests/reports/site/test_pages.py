"""The files of a site: what is written, deleted, linked and left out."""

import re

from attncheck.backends.mutants.catalogue import PREFIX
from attncheck.reports.site.build import names_of


def test_every_link_leads_to_a_page_of_the_site(run_file, build):
    wrong = run_file(1, {"a": "failed"}, backend="o/ther", device="b gpu")
    site = build([run_file(1, {"a": "passed"}), run_file(2, {"a": "passed"}), wrong])
    for page in site.rglob("*.html"):
        for link in re.findall(r'(?:href|src)="([^"?#]+)', page.read_text(encoding="utf-8")):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_only_runs_that_a_current_result_is_from_have_a_page(run_file, build):
    site = build([run_file(1, {"a": "passed"}), run_file(2, {"a": "passed"})])
    (page,) = (site / "runs").iterdir()
    assert page.stem.startswith("001-")
    assert "000.jsonl" in (site / "runs.html").read_text(encoding="utf-8")


def test_files_of_an_earlier_site_are_deleted_and_unread_runs_are_named(run_file, build, tmp_path):
    build([run_file(1, {"a": "passed"}, backend="gone")])
    broken = tmp_path / "runs" / "broken.jsonl"
    broken.write_text("no run", encoding="utf-8")
    site = build([run_file(2, {"a": "passed"}), broken])
    assert [path.name for path in (site / "backends").iterdir()] == ["mine-4fc9bda4.html"] or not (
        site / "backends" / "gone.html"
    ).exists()
    assert "broken.jsonl" in (site / "runs.html").read_text(encoding="utf-8")


def test_a_case_that_breaks_a_backend_comes_first(run_file, build):
    site = build([run_file(1, {"a": "passed", "z": "failed"})])
    rows = re.findall(r"<tr><th[^>]*>(smoke/\w)", (site / "cases.html").read_text(encoding="utf-8"))
    assert rows == ["smoke/z", "smoke/a"]


def test_a_mutant_is_no_backend_of_a_site(run_file, build):
    mutant = f"{PREFIX}window-one-short"
    site = build([run_file(1, {"a": "failed"}, backend=mutant)])
    assert "No backend was examined" in (site / "index.html").read_text(encoding="utf-8")
    site = build([run_file(1, {"a": "failed"}, backend=mutant), run_file(1, {"a": "passed"})])
    assert mutant not in "".join(path.read_text(encoding="utf-8") for path in site.rglob("*.*") if path.is_file())


def test_run_files_from_a_generator_have_names_too(tmp_path):
    files = [tmp_path / "a" / "run.jsonl", tmp_path / "b" / "run.jsonl"]
    assert names_of(path for path in files) == names_of(files) == {files[0]: "a/run.jsonl", files[1]: "b/run.jsonl"}
    assert names_of(()) == {}
