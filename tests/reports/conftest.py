"""Hand-made records: reports know nothing else."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from attncheck.reports.markdown import run as markdown
from attncheck.reports.run_file.header import RunHeader
from attncheck.reports.run_file.records import Record
from attncheck.reports.run_file.store import read_run


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium. A selected test fails without it, and names what is missing."""
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        pytest.fail("playwright is not installed: pip install 'attncheck[browser]', or `tox run -e browser`")
    program = os.environ.get("CHROMIUM") or shutil.which("chromium")
    if program is None:
        pytest.fail("no chromium on PATH: install it (apt-get install chromium), or name one: CHROMIUM=/path/to/it")
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def make(make_record: Callable[..., Record]) -> Callable[..., Record]:
    """``make("failed", case_id="b", ...)``: short for ``make_record``."""
    return make_record


@pytest.fixture
def write(tmp_path: Path, header: RunHeader, write_run: Callable[..., Path]) -> Callable[..., Path]:
    """``write(records)``: a complete run file of these records."""

    def write(*records: Record, errors: tuple[str, ...] = (), name: str = "run.jsonl") -> Path:
        return write_run(tmp_path / name, header, *records, errors=errors)

    return write


@pytest.fixture
def graph(make: Callable[..., Record]) -> Callable[..., Record]:
    """``graph("failed", levels, case_id=...)``: a record of the check ``cudagraph`` with these levels."""

    def record(outcome: str, found: dict[str, Any] | None, **fields: Any) -> Record:
        extra = {} if found is None else {"graph": found}
        return make(outcome, check="cudagraph", **extra, **fields)

    return record


@pytest.fixture
def graph_header(header: RunHeader) -> RunHeader:
    return header.model_copy(update={"checks": ("numerics", "cudagraph")})


@pytest.fixture
def as_markdown(tmp_path: Path, graph_header: RunHeader, write_run: Callable[..., Path]) -> Callable[..., str]:
    def render(*records: Record) -> str:
        path = tmp_path / f"graphs-{len(list(tmp_path.iterdir()))}.jsonl"
        return markdown.render_run(read_run(write_run(path, graph_header, *records)))

    return render
