# test_mine.py
from pathlib import Path

import attncheck

BACKEND = f"{Path(__file__).with_name('mine.py')}:Mine"


def test_mine():
    examination = attncheck.examine(BACKEND, suite="smoke")
    assert examination.passed, examination
