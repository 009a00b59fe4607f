"""Earlier batches and layers, and batches beside a step: the finding names the one that matters."""

from dataclasses import replace

import pytest
import torch

from attncheck.backends.candidates.reference import ReferenceBackend, ReferenceBuilder, ReferenceImpl
from attncheck.backends.candidates.reference_mla import ReferenceMLABackend, ReferenceMLAImpl
from attncheck.backends.candidates.torch_sdpa import SDPABackend
from attncheck.backends.registry import load
from attncheck.cases.loader import load_suite
from attncheck.harness.checks import history as histories
from attncheck.harness.checks.again import RightRows
from attncheck.harness.checks.findings import Broken
from attncheck.harness.checks.history import (
    History,
    check_step,
    layer_of_another_group,
    layer_of_other_pages,
    loop_steps,
    mirror_layer,
    other_kind_of_layer,
    sharing_layer,
)
from attncheck.harness.driver.session import Session
from attncheck.harness.problem.problem import build_problem
from attncheck.harness.truth.truth import truth_of
from attncheck.reference.spec import AttentionType, MLASpec
from attncheck.reference.step_spec import TreeOptions

CPU = torch.device("cpu")


def begun(backend, case):
    """Run the first step of a backend class, or of the mutant of this name."""
    if isinstance(backend, str):
        backend = load(f"mutants:{backend}").backend
    problem = build_problem(case, 0)
    session = Session(backend, problem, CPU)
    return RightRows.of(problem, truth_of(problem, CPU), session.run(), backend.conventions), session


def everything(rows, session):
    """One thing at a time."""
    problem, backend, case = rows.problem, session.backend, rows.problem.case
    other, sharing = other_kind_of_layer(problem, backend), sharing_layer(rows, backend)
    group, pages = layer_of_another_group(problem, backend), layer_of_other_pages(rows, backend)
    assert other is not None
    assert pages is not None
    assert sharing is not None
    assert group is not None
    batches = [make(case) for make in (*histories.LARGER, *histories.SMALLER)]
    mirror = mirror_layer(rows)
    return {batch.kind: History(before=(batch,)) for batch in batches if batch is not None} | {
        "mirror": History(layers=(mirror,)),
        "sharing": History(layers=(sharing,)),
        "other": History(layers=(other,)),
        "group": History(layers=(group,)),
        "pages": History(layers=(pages,)),
        "unequal": History(layers=(mirror,), micro_batch=histories.half(case)),
    }


class Claims(ReferenceBackend):
    conventions = replace(ReferenceBackend.conventions, batch_invariant=True)


@pytest.mark.parametrize(
    ("backend", "layer"),
    [
        (SDPABackend, {}),
        (ReferenceBackend, {"sliding_window": 24}),
        (ReferenceBackend, {"dtype": "float16", "alibi": True, "head_size_v": 32}),
        (Claims, {}),
    ],
)
def test_a_right_backend_is_right_after_and_beside_everything(make_case, backend, layer):
    rows, session = begun(backend, make_case(**layer))
    for name, history in everything(rows, session).items():
        assert check_step(rows, session, history) is None, name
    assert histories.check_decode_loop(rows, session) is None


ALL = "41 of 41 rows are wrong, the first is row 0 "
LAST = "1 of 41 rows is wrong, the first is row 40 (request 2, position 129)"


@pytest.mark.parametrize(
    ("mutant", "history", "how"),
    [
        (
            "keeps-the-most-requests",
            "a batch of more requests",
            f"after a batch of more requests (q33_q7s60_q1s129_q1s129_q7s60_q33_q33): {LAST}",
        ),
        ("stays-split", "a batch of one request with many keys", f"many keys (q1s601): {ALL}"),
        (
            "keeps-the-mask-in-metadata",
            "other",
            "in a step with a layer with scale 0.0625, sliding_window 3, logits_soft_cap 2.0: 40 of 41 rows are wrong",
        ),
        (
            "gathers-once-a-step",
            "mirror",
            f"in a step with a second layer of the same kind: a second layer of the same kind: {ALL}",
        ),
        (
            "writes-for-sharing-layers",
            "sharing",
            f"in a step with a layer that shares its cache: a layer that shares its cache: {ALL}",
        ),
        (
            "table-of-the-latest-group",
            "group",
            f"in a step with a layer with head_size 32 in another group: {ALL}",
        ),
        (
            "bound-of-the-latest-build",
            "unequal",
            f"in a step with a batch of half the lengths (q1s65_q4s31_q17) as another micro-batch: {LAST}",
        ),
    ],
)
def test_the_finding_names_what_makes_the_difference(make_case, mutant, history, how):
    rows, session = begun(mutant, make_case((33, 33), (7, 61), (1, 130)))
    one = everything(rows, session)[history]
    # Much more is played; what does not matter is left out of the words.
    around = replace(one, before=(*one.before, histories.alike(rows.problem.case)))
    found = check_step(rows, session, around)
    assert found.summary.startswith("right in a first step, wrong ")
    assert how in found.summary


def test_a_plan_that_is_kept_for_an_address_is_that_of_an_earlier_step(make_case):
    class Builder(ReferenceBuilder):
        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            lens = common_attn_metadata.seq_lens
            key = lens.data_ptr(), tuple(lens.shape)
            # Both are held, so that the address cannot be that of a new tensor.
            _, plan = vars(self).setdefault("plans", {}).setdefault(key, (lens, lens.clone()))
            return super().build(common_prefix_len, replace(common_attn_metadata, seq_lens=plan), fast_build)

    backend = type("Keyed", (ReferenceBackend,), {"get_builder_cls": staticmethod(lambda: Builder)})
    case = make_case((1, 37), (1, 20), (1, 90))
    rows, session = begun(backend, case)
    earlier = histories.rearranged(case)
    assert earlier is not None
    found = check_step(rows, session, History(before=(earlier,)))
    assert isinstance(found, Broken)
    assert "wrong after a batch of the same requests in another order (q1s20_q1s90_q1s37): 3 of 3" in found.summary


def test_a_plan_that_is_kept_for_equal_query_lengths_has_the_contexts_of_an_earlier_step(make_case):
    class Builder(ReferenceBuilder):
        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            key = tuple(common_attn_metadata.query_start_loc_cpu.tolist())
            lens = vars(self).setdefault("plans", {}).setdefault(key, common_attn_metadata.seq_lens.clone())
            return super().build(common_prefix_len, replace(common_attn_metadata, seq_lens=lens), fast_build)

    backend = type("Keyed", (ReferenceBackend,), {"get_builder_cls": staticmethod(lambda: Builder)})
    case = make_case((1, 37), (3, 20), (7, 90))
    rows, session = begun(backend, case)
    found = check_step(rows, session, History(before=(histories.shifted(case),)))
    assert isinstance(found, Broken)
    assert "wrong after a batch of the same query lengths (q1s36_q3s21_q7s90): " in found.summary


@pytest.mark.parametrize("comes_after", [True, False])
@pytest.mark.parametrize(
    ("layer", "kept"),
    [
        ({"sinks": True}, "_sink_logits"),
        ({"alibi": True}, "alibi_slopes"),
        ({"mla": MLASpec(kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16)}, "_projections"),
    ],
)
def test_a_second_layer_has_weights_of_its_own(make_case, layer, kept, comes_after):
    """The wrong impls keep the weights of the layer that ran first, for all layers of equal sizes."""
    is_latent = "mla" in layer
    base, backend = (ReferenceMLAImpl, ReferenceMLABackend) if is_latent else (ReferenceImpl, ReferenceBackend)
    weights = []

    class Impl(base):  # type: ignore[misc, valid-type]
        def attend(self, *args):
            weights.append(getattr(self, kept))
            setattr(self, kept, weights[0])
            super().attend(*args)

    sizes = {"path": "mla", "num_kv_heads": 1, "head_size": 40, "num_heads": 4} if is_latent else {}
    case = make_case((1, 37), (5, 40), **layer, **sizes)
    wrong = type("Keeps", (backend,), {"get_impl_cls": staticmethod(lambda: Impl)})
    for tried in (backend, wrong):
        weights.clear()
        rows, session = begun(tried, case)
        weights.clear()
        mirror = mirror_layer(rows, comes_after=comes_after)
        found = check_step(rows, session, History(layers=(mirror,)))
        assert isinstance(found, Broken) is (tried is wrong)


def test_a_second_layer_has_scales_of_its_own(make_case):
    class Impl(ReferenceImpl):
        def forward(self, layer, *args, **keywords):
            scales.append(layer)
            return super().forward(scales[0], *args, **keywords)

    fp8 = {"kv_cache_dtype": "fp8_e4m3", "k_scale": (0.5, 0.25), "v_scale": 0.125}
    case = make_case((1, 37), (5, 40), cache=fp8, head_size=32)
    wrong = type("Keeps", (ReferenceBackend,), {"get_impl_cls": staticmethod(lambda: Impl)})
    for tried in (ReferenceBackend, wrong):
        scales = []
        rows, session = begun(tried, case)
        scales.clear()
        found = check_step(rows, session, History(layers=(mirror_layer(rows),)))
        assert isinstance(found, Broken) is (tried is wrong)


def test_the_codes_of_a_quantised_query_are_those_of_the_mirror_image(make_case):
    """An impl that quantises its query rounds both layers alike."""
    scales = {"kv_cache_dtype": "fp8_e4m3", "k_scale": 0.5, "v_scale": 0.125, "q_scale": (0.5, 0.25)}
    rows, _ = begun(ReferenceBackend, make_case((1, 37), (5, 40), cache=scales))
    mirror = mirror_layer(rows).layer.problem
    assert mirror.cache.q_scale == (0.125, 0.25)

    def codes(problem):
        group = problem.layer.num_heads // problem.layer.num_kv_heads
        of_heads = torch.tensor(problem.cache.q_scale).repeat_interleave(group)[:, None]
        return (problem.query.float() / of_heads).to(torch.float8_e4m3fn).float()

    assert torch.equal(codes(mirror), -codes(rows.problem).flip(1))


def test_pages_of_another_size_may_be_refused(make_case):
    class Builder(ReferenceBuilder):
        def __init__(self, spec, *rest):
            super().__init__(spec, *rest)
            if spec.block_size != 16:
                raise ValueError(f"block_size {spec.block_size}: only 16")

    backend = type("Refuses", (ReferenceBackend,), {"get_builder_cls": staticmethod(lambda: Builder)})
    rows, session = begun(backend, make_case())
    assert check_step(rows, session, everything(rows, session)["pages"]) is None


@pytest.mark.parametrize("is_kept_by", ["the builder", "the process"])
def test_groups_of_two_page_sizes_have_one_each(make_case, is_kept_by):
    class Builder(ReferenceBuilder):
        page = 0

        def __init__(self, kv_cache_spec, *rest):
            super().__init__(kv_cache_spec, *rest)
            (Builder if is_kept_by == "the process" else self).page = kv_cache_spec.block_size

        def build(self, *args, **keywords):
            made = super().build(*args, **keywords)
            table = made.common.block_table_tensor
            if self.page != self.kv_cache_spec.block_size:
                table = table[:, :1].expand_as(table)
            return replace(made, common=replace(made.common, block_table_tensor=table))

    backend = type("Tried", (ReferenceBackend,), {"get_builder_cls": staticmethod(lambda: Builder)})
    rows, session = begun(backend, make_case())
    found = check_step(rows, session, everything(rows, session)["pages"])
    if is_kept_by == "the builder":
        assert found is None
        return
    assert found is not None
    assert "in a step with a layer with block_size 32 in another group: " in found.summary


def test_a_field_that_a_layer_changes_is_named(make_case):
    rows, session = begun("shortens-the-metadata", make_case((5, 40), (1, 130)))
    found = check_step(rows, session, everything(rows, session)["mirror"])
    assert "forward of the layer changes metadata.seq_lens" in found.details
    assert found.meaning == "a layer changes the metadata, which all layers of the group share"


def test_metadata_that_cannot_be_compared_leave_the_finding(make_case):
    class Uncomparable:
        def __eq__(self, _):
            raise RuntimeError("no")

        __hash__ = None

    base = load("mutants:shortens-the-metadata").backend

    class Impl(base.get_impl_cls()):
        def forward(self, *args, **keywords):
            vars(args[5])["odd"] = Uncomparable()
            return super().forward(*args, **keywords)

    backend = type("Odd", (base,), {"get_impl_cls": staticmethod(lambda: Impl)})
    rows, session = begun(backend, make_case((5, 40), (1, 130)))
    found = check_step(rows, session, everything(rows, session)["mirror"])
    assert found.summary.startswith("right in a first step, wrong ")


def test_requests_that_go_on_are_judged_in_a_decode_loop(make_case):
    rows, session = begun("keeps-the-pages-of-a-request", make_case((1, 33), (5, 40), (33, 33), (1, 129)))
    found = histories.check_decode_loop(rows, session)
    assert "of a decode loop" in found.summary
    assert any("new tokens" in line for line in found.details)


def test_a_decode_loop_brings_every_row_of_the_case_once_and_ends_as_the_case_does(make_case):
    problem = build_problem(make_case((1, 33), (1, 15), (5, 40), (33, 33), (1, 130)), 0)
    rows = torch.cat([step.rows for step in loop_steps(problem)])
    assert rows[rows >= 0].sort().values.tolist() == list(range(len(problem.query)))
    *_, last = loop_steps(build_problem(make_case((1, 33), (1, 130)), 0))
    assert [(r.query_len, r.num_keys) for r in last.problem.requests] == [(1, 33), (1, 130)]


@pytest.mark.parametrize(
    ("path", "options", "layer"),
    [
        ("paged", None, {"causal": False}),
        ("paged", None, {"kv_sharing": True}),
        ("tree", TreeOptions(parents=(-1, 0, 0)), {}),
        ("encoder_only", None, {"attn_type": "encoder_only"}),
    ],
)
def test_there_is_no_decode_loop_where_rows_would_see_other_keys(make_case, path, options, layer):
    assert loop_steps(build_problem(make_case((3, 3), (3, 3), path=path, options=options, **layer), 0)) == ()


def test_a_group_that_a_builder_refuses_is_examined_without_the_other_kind_of_layer(make_case):
    class Refuses(ReferenceBackend):
        class Builder(ReferenceBackend.get_builder_cls()):
            def __init__(self, spec, names, config, device):
                super().__init__(spec, names, config, device)
                layers = config.compilation_config.static_forward_context
                if len({layers[name].impl.scale for name in names}) > 1:
                    raise NotImplementedError("layers of one scale only")

        @staticmethod
        def get_builder_cls():
            return Refuses.Builder

    rows, session = begun(Refuses, make_case())
    assert check_step(rows, session, everything(rows, session)["other"]) is None


def test_every_way_is_chosen(make_case):
    cases = [make_case((1, length), (2, 9)) for length in range(20, 40)]
    chosen = [histories.history_of(*begun(ReferenceBackend, case)) for case in cases]
    assert {len(history.before) for history in chosen} == {1, 2}
    assert {len(history.layers) for history in chosen} == {0, 1, 3}
    assert any(beside.layer.has_own_group for history in chosen for beside in history.layers)
    assert any(history.micro_batch is not None for history in chosen)


NAMED = """suite: named
defaults: {layer: {num_heads: 8, num_kv_heads: 2, head_size: 64, dtype: bfloat16}}
cases:
  - id: company
    batch: q1s37_q5s40
    after: [q40s60, 8q1s200]
    layers: [{sliding_window: 8}, {kv_sharing: true, logits_soft_cap: 5.0}, {head_size: 32}, {}]
"""


@pytest.mark.parametrize("backend", [ReferenceBackend, SDPABackend, "writes-for-sharing-layers"])
def test_a_case_names_the_batches_before_and_the_layers_beside(tmp_path, backend):
    (tmp_path / "named.yaml").write_text(NAMED)
    (case,) = load_suite(str(tmp_path / "named.yaml"))
    rows, session = begun(backend, case)
    history = histories.history_of(rows, session)
    assert "after the batch (q40s60) and the batch (8q1s200)" in history.in_words
    shared = [] if backend is SDPABackend else ["a layer with logits_soft_cap 5.0 that shares its cache"]
    assert [beside.layer.role for beside in history.layers] == [
        "a layer with sliding_window 8",
        *shared,  # torch_sdpa has no soft cap
        "a layer with head_size 32 in another group",
        "a second layer of the same kind",
    ]
    assert all(beside.rows is not None and bool(beside.rows.is_right.all()) for beside in history.layers)
    assert (check_step(rows, session, history) is None) is not isinstance(backend, str)


def lengths(batch):
    return batch and [(r.query_len, r.total_len) for r in batch.case.batch]


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (histories.alike, [(1, 37), (5, 40), (33, 33)]),
        (histories.shifted, [(1, 36), (5, 39), (33, 33)]),
        (histories.rearranged, [(5, 40), (33, 33), (1, 37)]),
        (histories.half, [(17, 17), (3, 20), (1, 19)]),
        (histories.longer, [(1, 89), (5, 91), (33, 49)]),
        (histories.more, [(1, 36), (5, 39), (33, 33), (33, 33), (5, 39), (1, 36), (1, 36)]),
        (histories.fewer, [(33, 33)]),
        (histories.prompts, [(37, 37), (40, 40), (33, 33)]),
        (histories.decodes, [(1, 37), (1, 36), (1, 1)]),
        (histories.many_keys, [(1, 601)]),
    ],
)
def test_the_lengths_of_each_kind(make_case, make, expected):
    batch = make(make_case((1, 37), (5, 40), (33, 33), padding=(1, 2)))
    assert lengths(batch) == expected
    assert batch.case.batch.padding.tokens == (
        2 if make in (histories.alike, histories.shifted, histories.rearranged) else 0
    )


def test_a_batch_that_would_be_the_case_s_own_kind_is_left_out(make_case):
    assert histories.decodes(make_case((1, 37), (1, 5))) is None
    assert histories.prompts(make_case((33, 33), (1, 1))) is None
    assert histories.fewer(make_case((33, 33))) is None
    assert histories.rearranged(make_case((1, 37), (1, 37))) is None
    assert lengths(histories.same_shape(make_case((1, 37), (1, 37)))) == [(1, 36), (1, 36)]
    assert lengths(histories.shifted(make_case((1, 37), (5, 90), (3, 50), (4, 4)))) == [
        (1, 36),
        (5, 90),
        (3, 51),
        (4, 4),
    ]
    assert lengths(histories.shifted(make_case((1, 90), (1, 90), (1, 20)))) == [(1, 90), (1, 89), (1, 21)]
    cross = make_case((1, 37), (1, 37), attn_type=AttentionType.ENCODER_DECODER, path="cross")
    assert histories.rearranged(cross) is None
    requests = tuple(replace(r, encoder_len=length) for r, length in zip(cross.batch, (9, 17), strict=True))
    unequal = histories.rearranged(replace(cross, batch=replace(cross.batch, requests=requests)))
    assert [r.encoder_len for r in unequal.case.batch] == [17, 9]
    encoder = make_case((9, 9), (3, 3), attn_type=AttentionType.ENCODER_ONLY)
    assert histories.many_keys(encoder) is None
    assert lengths(histories.longer(encoder)) == [(18, 18), (6, 6)]


def test_one_is_larger_and_one_smaller_and_all_occur_in_smoke():
    kinds, orders = set(), set()
    for case in load_suite("smoke"):
        pair = histories.earlier_batches(case)
        larger = {batch.kind for make in histories.LARGER if (batch := make(case)) is not None}
        is_large = [batch.kind in larger for batch in pair]
        assert sorted(is_large) == [False, True]
        kinds |= {batch.kind for batch in pair}
        orders.add(is_large[0])
    assert len(kinds) == len(histories.LARGER) + len(histories.SMALLER) + 1  # two kinds of the same shape
    assert orders == {False, True}
