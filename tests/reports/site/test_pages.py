"""The files of a site: what is written, deleted, linked and left out."""

import re

from attncheck.backends.mutants.catalogue import PREFIX


def test_every_link_leads_to_a_page_of_the_site_and_only_current_runs_have_one(run_file, build):
    wrong = run_file(1, {"a": "passed", "z": "failed"}, backend="o/ther", device="b gpu")
    site = build(path for path in [run_file(1, {"a": "passed"}), run_file(2, {"a": "passed"}), wrong])
    for page in site.rglob("*.html"):
        for link in re.findall(r'(?:href|src)="([^"?#]+)', page.read_text(encoding="utf-8")):
            assert (page.parent / link).exists(), f"{page.name}: {link}"
    assert sorted(page.stem[:4] for page in (site / "runs").iterdir()) == ["000-", "002-"]
    assert "001.jsonl" in (site / "runs.html").read_text(encoding="utf-8")
    rows = re.findall(r"<tr><th[^>]*>(smoke/\w)", (site / "cases.html").read_text(encoding="utf-8"))
    assert rows == ["smoke/z", "smoke/a"]  # what breaks a backend comes first


def test_files_of_an_earlier_site_are_deleted_and_unread_runs_are_named(run_file, build, tmp_path):
    build([run_file(1, {"a": "passed"}, backend="gone")])
    broken = tmp_path / "runs" / "broken.jsonl"
    broken.write_text("no run", encoding="utf-8")
    site = build([run_file(2, {"a": "passed"}), broken])
    assert [path.name for path in (site / "backends").iterdir()] == ["mine-4fc9bda4.html"] or not (
        site / "backends" / "gone.html"
    ).exists()
    assert "broken.jsonl" in (site / "runs.html").read_text(encoding="utf-8")


def test_a_mutant_is_no_backend_of_a_site(run_file, build):
    mutant = f"{PREFIX}window-one-short"
    site = build([run_file(1, {"a": "failed"}, backend=mutant)])
    assert "No backend was examined" in (site / "index.html").read_text(encoding="utf-8")
    site = build([run_file(1, {"a": "failed"}, backend=mutant), run_file(1, {"a": "passed"})])
    assert mutant not in "".join(path.read_text(encoding="utf-8") for path in site.rglob("*.*") if path.is_file())
