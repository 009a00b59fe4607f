"""Ten questions of a person who chooses a backend, each answered in a browser with few clicks.

The site shows made-up runs of five GPUs and four versions, by ``benchmarks/site.py``. ``xformers`` ignores the window on
one GPU before version 0.3.
"""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("browser")]

ROOT = Path(__file__).resolve().parents[3]
L40S, H200 = "NVIDIA L40S", "NVIDIA H200"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("questions")
    subprocess.run([sys.executable, ROOT / "benchmarks/site.py", folder, "--runs", "20"], check=True)
    return folder / "site"


class Reader:
    """A person at the first page, who clicks and selects. Counts both."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.actions = 0
        self.began = time.monotonic()

    def select(self, name: str, value: str) -> None:
        self.actions += 1
        self.page.select_option(f"[name={name}]", value)

    def tick(self, feature: str) -> None:
        self.actions += 1
        self.page.check(f"[name=feature][value={feature}]")

    def click(self, name: str, **options: Any) -> None:
        self.actions += 1
        self.page.get_by_role("link", name=name, exact=True).first.click(**options)
        self.page.wait_for_load_state()

    def names(self, standing: str) -> list[str]:
        """The backends of a standing; the answer has been drawn when this returns."""
        self.page.wait_for_timeout(50)
        found = self.page.locator(f"#found [aria-label^='{standing}'] tbody th")
        return [text.strip() for text in found.all_inner_texts()]

    def text(self) -> str:
        return " ".join(self.page.locator("main").inner_text().split())


@pytest.fixture
def reader(browser: Any, site: Path) -> Iterator[Reader]:
    context = browser.new_context(viewport={"width": 1440, "height": 900}, offline=True)
    page = context.new_page()
    page.goto((site / "index.html").as_uri())
    page.locator("#found h2").wait_for()
    found = Reader(page)
    yield found
    assert 0 < found.actions <= 5
    assert time.monotonic() - found.began < 10
    context.close()


def test_which_backends_are_right_for_a_window_on_my_gpu(reader: Reader) -> None:
    reader.select("device", H200)
    reader.tick("sliding_window")
    right = reader.names("right in")
    assert {"torch_sdpa", "xformers"} <= set(right)


def test_which_backends_are_right_for_sinks_in_bfloat16(reader: Reader) -> None:
    reader.select("device", H200)
    reader.select("dtype", "bfloat16")
    reader.tick("sinks")
    assert "flex_attention" in reader.names("right in")
    assert "xformers" not in reader.names("right in")


def test_which_backend_is_fastest_in_decode_batches(reader: Reader) -> None:
    reader.select("device", H200)
    reader.select("batch", "decode")
    first = reader.page.locator("#found [aria-label^='right in'] tbody tr").first
    assert "fastest" in first.inner_text()


def test_which_backends_can_be_captured_for_every_batch(reader: Reader) -> None:
    reader.select("device", H200)
    reader.select("level", "ALWAYS")
    right = reader.names("right in")
    assert right
    assert "torch_sdpa" not in right
    assert "torch_sdpa" in reader.names("right, but below the CUDA-graph level")


def test_which_backends_run_latent_attention(reader: Reader) -> None:
    reader.select("device", H200)
    reader.tick("mla")
    assert "torch_mla" in reader.names("right in")


def test_does_a_page_of_16_with_head_size_128_work_everywhere(reader: Reader) -> None:
    reader.select("device", "*")
    reader.select("block_size", "16")
    reader.select("head_size", "128")
    reader.page.locator("#found h2").nth(4).wait_for()
    assert reader.names("right in").count("torch_sdpa") == 5


def test_what_was_wrong_with_a_backend_and_when_was_it_repaired(reader: Reader) -> None:
    reader.click("Backends")
    reader.click("xformers")
    history = reader.page.get_by_role("region", name=f"History on {L40S}")
    repaired = history.locator("tr", has_text="0.3, torch").first
    assert "the sliding window is one key too long" in repaired.locator("td").nth(3).inner_text()


def test_what_changed_between_two_versions(reader: Reader) -> None:
    reader.click("Backends")
    reader.click("xformers")
    history = reader.page.get_by_role("region", name=f"History on {L40S}")
    reader.actions += 1
    history.locator("tr", has_text="0.3, torch").first.get_by_role("link").click()
    reader.page.locator("#found h2").first.wait_for()
    assert "better" in reader.text()
    assert "the sliding window is one key too long" in reader.text()


def test_who_is_right_in_this_case(reader: Reader) -> None:
    reader.click("Cases")
    reader.actions += 2
    suite = reader.page.locator("details", has_text="smoke").first
    suite.locator("summary").click()
    suite.locator("tbody a").first.click()
    rows = reader.page.get_by_role("region", name="Results of smoke").locator("tbody tr")
    assert rows.count() >= 5 * 5


def test_with_which_versions_was_this_gpu_measured(reader: Reader) -> None:
    reader.click("Devices")
    reader.click(L40S)
    assert "580.65" in reader.text()
    assert "2.13.0" in reader.text()
