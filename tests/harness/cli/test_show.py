"""``attncheck show``: the picture of a mask is the reference's mask, and the YAML is the same question."""

from dataclasses import replace
from pathlib import Path

import torch
from inline_snapshot import snapshot

from attncheck.cases.loader import load_suite, suite_names
from attncheck.cases.model import question
from attncheck.cases.yaml_text import case_yaml
from attncheck.harness.cli.show import case_lines, draw_mask
from attncheck.reference import layer_params
from attncheck.reference.attention.params import visible
from attncheck.reference.spec import LayerSpec, PaddingSpec, PathSpec, RequestSpec, TreeOptions

CASES = [case for name in suite_names() for case in load_suite(name).cases]
LAYER = LayerSpec(num_heads=1, num_kv_heads=1, head_size=8)


def test_pictures():
    window = replace(LAYER, sliding_window=2)
    assert draw_mask(window, PathSpec(), RequestSpec(query_len=3, seq_len=5), 80) == snapshot(
        ["3 rows x 5 keys", ".##..", "..##.", "...##"]
    )
    tree = PathSpec(name="tree", options=TreeOptions())
    rows = draw_mask(LAYER, tree, RequestSpec(query_len=4, seq_len=6), 80)[1:]
    assert rows == ["###...", "####..", "###.#.", "####.#"]
    assert draw_mask(LAYER, PathSpec(), RequestSpec(query_len=32, seq_len=64), 8)[:3] == snapshot(
        ["32 rows x 64 keys, a character is 2 x 8", "####+...", "####+..."]
    )


def reference_mask(case, request):
    """Row by row, by the reference's predicate and, of a tree, by going up from each row."""
    is_cross = request.encoder_len is not None
    keys = request.encoder_len if is_cross else request.total_len
    positions = torch.arange(keys - request.query_len, keys)
    sees = visible(layer_params(case.layer), positions[:, None], torch.arange(keys)[None])
    if isinstance(case.batch.path.options, TreeOptions):
        for row in range(request.query_len):
            above, node = {row}, row
            while (node := case.batch.path.options.parents[node]) >= 0:
                above.add(node)
            for other in set(range(request.query_len)) - above:
                sees[row, keys - request.query_len + other] = False
    return ["".join("#" if each else "." for each in row) for row in sees.tolist()]


def test_masks_are_those_of_the_reference():
    compared = set()
    for case in CASES:
        if case.layer.mla or case.batch.path.name in ("merge", "causal_conv1d", "fast_prefill"):
            continue
        for request in case.batch.requests:
            if request.query_len <= 16 and request.total_len <= 200:
                picture = draw_mask(case.layer, case.batch.path, request, 10_000)
                assert picture[1:] == reference_mask(case, request), case.key
                compared.add((case.batch.path.name, *case.layer.modifiers))
    paths = {("paged", "sliding_window"), ("tree",), ("cross",), ("encoder_only",), ("local", "attn_chunk_size")}
    assert paths <= compared


def test_the_yaml_is_the_same_question_with_batches_before_and_layers_beside(tmp_path):
    sinks = replace(CASES[0].layer, sliding_window=4, sinks=(0.5,) * CASES[0].layer.num_heads)
    before = (CASES[1].batch, replace(CASES[1].batch, padding=PaddingSpec(tokens=2)))
    many = replace(CASES[0], after=before, layers=(CASES[0].layer, sinks))
    for number, case in enumerate([*CASES[:: max(len(CASES) // 150, 1)], many]):
        path = tmp_path / f"{number}.yaml"
        path.write_text(case_yaml(case), encoding="utf-8")
        (again,) = load_suite(str(path)).cases
        assert question(again) == question(case), case.key
        for name in ("key", "checks", "tolerance", "inputs", "description", "hash", "after", "layers"):
            assert getattr(again, name) == getattr(case, name), case.key


def test_every_case_can_be_shown_and_keeps_to_the_width():
    width = 40
    for case in CASES[::7]:
        for line in "\n".join(case_lines(case, width)).splitlines():
            is_table = line.startswith("requests") or line[:1].isdigit()
            assert len(line) <= width or is_table or len(max(line.split(), key=len)) > width - 10, (case.key, line)


def test_a_case_is_found_in_any_suite_and_its_yaml_can_be_run(typed, folder):
    done = typed("show sinks/decode.float16")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("sinks/decode.float16\n")
    for words in ("sinks=True", "numerics", "requests  query_len  context  seq_len  pages"):
        assert words in done.out
    done = typed("show decode --suite smoke")
    assert done.code == 0
    assert done.err == snapshot("3 cases match; this is the first. The others: decode.bfloat16, decode.float32\n")
    Path("tree.yaml").write_text(typed("show smoke/verify-tree.3 --yaml").out, encoding="utf-8")
    assert typed("list cases --suite tree.yaml").out.startswith("smoke/verify-tree.3")
