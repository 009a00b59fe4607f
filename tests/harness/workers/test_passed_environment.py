"""The process of a backend gets the variables it may need, and a secret only where it is named."""

import pytest

from attncheck.harness.run.options import read_given
from attncheck.harness.workers.limits import passed_environment, variables_read

NEEDED = ("PATH", "HOME", "LC_ALL", "PYTHONPATH", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "VLLM_CACHE_ROOT", "CC")
OTHERS = ("GITHUB_TOKEN", "AWS_SECRET_ACCESS_KEY", "https_proxy", "DATABASE_URL", "PATHS")
SECRET = ("VLLM_API_KEY", "ATTNCHECK_TOKEN", "NVIDIA_PASSWORD", "XDG_SECRET", "CUDA_CREDENTIALS", "TORCH_hub_token")
ALL = dict.fromkeys((*NEEDED, *OTHERS, *SECRET), "x")


def test_what_is_usual_is_passed_but_for_secrets():
    assert tuple(passed_environment(ALL)) == NEEDED


@pytest.mark.parametrize(
    ("pattern", "added"),
    [
        ("DATABASE_URL", {"DATABASE_URL"}),
        ("GITHUB_*", {"GITHUB_TOKEN"}),
        ("VLLM_API_KEY,https_proxy ,", {"VLLM_API_KEY", "https_proxy"}),
        ("*", {*OTHERS, *SECRET}),
        ("NOWHERE", set()),
    ],
)
def test_a_pattern_adds_all_that_it_matches(pattern, added):
    assert set(passed_environment(ALL, read_given("pass_env", pattern.split()))) == {*NEEDED, *added}


def test_the_variables_that_a_file_and_the_modules_beside_it_look_up_are_named(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import helper.part\nfrom os import environ, getenv\nimport os  # os.getenv('COMMENT')\n"
        "a = os.environ['ITEM']; b = os.environ.get('GET', ''); c = environ.pop('POP'); d = 'IN' in environ\n"
        "e = os.getenv('GETENV'); f = getenv('BARE'); g = {}.get('OTHER'); os.environ[a] = os.environ['STORED'] = ''\n"
    )
    (tmp_path / "helper.py").write_text("import mine, os\nos.getenv('HELPER')\n")
    (tmp_path / "stranger.py").write_text("import os\nos.getenv('STRANGER')\n")
    read = variables_read(tmp_path / "mine.py")
    assert read == {"ITEM", "GET", "POP", "IN", "GETENV", "BARE", "HELPER"}
    (tmp_path / "broken.py").write_text("def (")
    assert variables_read(tmp_path / "broken.py") == variables_read(tmp_path / "none.py") == set()
