"""The process of a backend gets the variables it may need, and a secret only where it is named."""

import pytest

from attncheck.harness.workers.passed_environment import passed_environment, read_patterns

NEEDED = ("PATH", "HOME", "LC_ALL", "PYTHONPATH", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "VLLM_CACHE_ROOT", "CC")
OTHERS = ("GITHUB_TOKEN", "AWS_SECRET_ACCESS_KEY", "https_proxy", "DATABASE_URL", "PATHS")
SECRET = ("VLLM_API_KEY", "ATTNCHECK_TOKEN", "NVIDIA_PASSWORD", "XDG_SECRET", "CUDA_CREDENTIALS", "TORCH_hub_token")
ALL = dict.fromkeys((*NEEDED, *OTHERS, *SECRET), "x")


def test_what_is_usual_is_passed_but_for_secrets() -> None:
    assert tuple(passed_environment(ALL)) == NEEDED


@pytest.mark.parametrize(
    ("pattern", "added"),
    [
        ("DATABASE_URL", {"DATABASE_URL"}),
        ("GITHUB_*", {"GITHUB_TOKEN"}),
        ("VLLM_API_KEY,https_proxy", {"VLLM_API_KEY", "https_proxy"}),
        ("*", {*OTHERS, *SECRET}),
        ("NOWHERE", set()),
    ],
)
def test_a_pattern_adds_all_that_it_matches(pattern: str, added: set[str]) -> None:
    assert set(passed_environment(ALL, read_patterns([pattern]))) == {*NEEDED, *added}


def test_values_are_kept_and_words_may_be_repeated() -> None:
    assert passed_environment({"A": "1", "B": "2", "C": "3"}, read_patterns(["A", " B ,"])) == {"A": "1", "B": "2"}
