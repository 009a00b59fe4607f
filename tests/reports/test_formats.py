"""The table of formats is complete, and loads no format that is not chosen."""

import subprocess
import sys

import pytest

from attncheck.reports.formats import FORMATS


def test_the_table_itself_loads_no_format():
    program = (
        "import sys\n"
        "import attncheck.reports.formats\n"
        "loaded = {name for name in sys.modules if name.startswith('attncheck.reports.')}\n"
        "light = {'attncheck.reports.formats', 'attncheck.reports.terminal', 'attncheck.reports.terminal.columns'}\n"
        "assert loaded <= light, loaded\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", FORMATS)
def test_every_renderer_has_words_in_the_help(name):
    form = FORMATS[name]
    assert form.about_runs
    assert bool(form.about_comparison) == (form.render_comparison is not None)
