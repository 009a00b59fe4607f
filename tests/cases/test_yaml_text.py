"""Several cases as one file: read back, they are the same, and what they share is written once."""

import yaml

from attncheck.cases.loader import load_file, load_suite
from attncheck.cases.yaml_text import suite_yaml


def test_a_file_of_cases_reads_back_as_these_cases(tmp_path):
    for name in ("smoke", "mla", "fp8_kv"):
        cases = load_suite(name).cases
        path = tmp_path / f"{name}.yaml"
        path.write_text(suite_yaml(name, "all of it", cases))
        read = load_file(path)
        assert [(case.id, case.hash, case.checks) for case in read] == [(c.id, c.hash, c.checks) for c in cases]


def test_defaults_hold_what_all_cases_share_and_a_weight_is_read(tmp_path):
    path = tmp_path / "two.yaml"
    path.write_text(
        "suite: two\n"
        "defaults: {layer: {num_heads: 8, num_kv_heads: 2, head_size: 64}}\n"
        "cases:\n"
        "- {id: a, batch: 2q1s30, weight: 2.5}\n"
        "- {id: b, batch: q9, layer: {sliding_window: 4}}\n"
    )
    cases = load_file(path).cases
    assert [case.weight for case in cases] == [2.5, None]
    document = yaml.safe_load(suite_yaml("two", "", cases))
    assert document["defaults"] == {"layer": {"num_heads": 8, "num_kv_heads": 2, "head_size": 64}}
    assert document["cases"][0] == {"id": "a", "weight": 2.5, "batch": "2q1s30"}
    assert document["cases"][1]["layer"] == {"sliding_window": 4}
