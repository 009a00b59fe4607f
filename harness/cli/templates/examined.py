# test_mine.py
from pathlib import Path

import attncheck

BACKEND = f"{Path(__file__).with_name('mine.py')}:Mine"

test_mine = attncheck.backend_tests(BACKEND, suite="smoke", within="60s")
