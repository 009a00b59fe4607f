"""Files and lines for CI services lie below the root of the checkout, and the line that failed comes first."""

import pytest

from attncheck.reports.analysis.places import backend_file, place_to_show
from attncheck.reports.run_file.header import SuiteInfo

TRACEBACK = """Traceback (most recent call last):
  File "/work/mine.py", line 9, in attend
  File "/usr/lib/python3.12/site-packages/torch/functional.py", line 4, in einsum
"""
DIED = """Fatal Python error: Segmentation fault

Current thread 0x00007f (most recent call first):
  File "/work/src/kernel.py", line 31 in launch
  File "/work/mine.py", line 9 in attend
"""


@pytest.fixture
def header_of_file(header):
    suite = SuiteInfo(name="smoke", ref="./cases/edge.yaml{seed: 1}", cases=1)
    return header.model_copy(update={"suites": (suite,)})


@pytest.mark.parametrize(
    ("outcome", "fields", "expected"),
    [
        ("errored", {"traceback": TRACEBACK}, ("mine.py", 9)),
        ("errored", {"traceback": TRACEBACK.replace("/work", "/elsewhere")}, ("other.py", None)),
        ("crashed", {"output": DIED}, ("src/kernel.py", 31)),
        ("failed", {}, ("other.py", None)),
        ("failed", {"backend_ref": "torch_sdpa"}, ("cases/edge.yaml", None)),
        ("failed", {"backend_ref": "../sibling.py:Mine"}, ("cases/edge.yaml", None)),
    ],
)
def test_the_line_is_shown_else_the_backend_else_the_suite(make, header_of_file, outcome, fields, expected):
    record = make(outcome, **{"backend_ref": "./other.py:Mine"} | fields)
    assert place_to_show(record, header_of_file, "/work") == expected


def test_a_record_of_files_elsewhere_has_no_place(make, header):
    assert place_to_show(make("failed", backend_ref="package.module:Mine"), header, "/work") == ("", None)


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        ("./mine.py:Mine", "mine.py"),
        ("kernels/mine.py", "kernels/mine.py"),
        ("vllm:./mine.py:Mine", "mine.py"),
        ("/work/a/mine.py:Mine", "a/mine.py"),
        ("/workshop/mine.py:Mine", ""),
        ("package.pyx:Mine", ""),
    ],
)
def test_the_file_of_a_backend_is_named_from_the_root(reference, expected):
    assert backend_file(reference, "/work") == expected
