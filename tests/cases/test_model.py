"""A case's identity: what its hash covers, and what it leaves out."""

from dataclasses import replace
from pathlib import Path

from attncheck.cases.grammar import parse_batch
from attncheck.cases.model import Case, Suite, Tolerance
from attncheck.reference.spec import (
    BatchSpec,
    CacheSpec,
    LayerSpec,
    PaddingSpec,
    PathSpec,
    RequestSpec,
    StridesSpec,
)

LAYER = LayerSpec(num_heads=8, num_kv_heads=2, head_size=64)
CACHE = CacheSpec()


def case(text="q5s37_3q1s200", layer=LAYER, cache=CACHE):
    return Case(suite="s", id="i", layer=layer, cache=cache, batch=BatchSpec(requests=parse_batch(text)))


def test_equal_questions_have_equal_hashes():
    listed = (RequestSpec(query_len=5, seq_len=37), RequestSpec(query_len=1, seq_len=200, count=3))
    assert replace(case(), batch=BatchSpec(requests=listed)).hash == case().hash
    assert case("q5s37_q1s200_2q1s200").hash == case("q5s37_3q1s200").hash
    assert case("q7s7").hash == case("q7").hash
    assert case(layer=replace(LAYER, dtype="bfloat16")).hash == case().hash
    assert case(cache=CacheSpec(block_size=16, k_scale=1.0)).hash == case().hash


def test_labels_do_not_count():
    other = replace(
        case(),
        suite="t",
        id="j",
        checks=("numerics",),
        tolerance=Tolerance(factor=2.0, reason="why"),
        description="d",
        origin="f:1",
        notes=("n",),
    )
    assert other.hash == case().hash
    assert hash(replace(case(), origin="a:1")) == hash(case())


def test_what_is_set_changes_the_hash():
    base = case()
    batch = base.batch
    others = [
        case("q5s38_3q1s200"),
        case("3q1s200_q5s37"),
        case(layer=replace(LAYER, sliding_window=4)),
        case(layer=replace(LAYER, scale=0.5)),
        case(cache=CacheSpec(layout="HND")),
        replace(base, inputs=("needles",)),
        replace(base, inputs=()),
        replace(base, after=(batch,)),
        replace(base, layers=(LAYER,)),
        replace(base, strides=StridesSpec(key="transposed")),
        replace(base, strides=StridesSpec(value="transposed")),
        replace(base, batch=replace(batch, padding=PaddingSpec(tokens=1))),
        replace(base, batch=replace(batch, path=PathSpec(name="spec_decode"))),
        replace(base, batch=replace(batch, requests=(RequestSpec(query_len=5, seq_len=37, shared_prefix=16),))),
    ]
    hashes = {other.hash for other in [base, *others]}
    assert len(hashes) == len(others) + 1


def test_a_suite_has_a_hash_of_its_cases():
    suite = Suite(name="s", description="", cases=(case(),), path=Path("s.yaml"))
    assert (len(suite), list(suite)) == (1, [case()])
    renamed = replace(suite, cases=(replace(case(), id="j"),))
    changed = replace(suite, cases=(case("q5"),))
    assert len({suite.hash, renamed.hash, changed.hash}) == 3
    assert replace(suite, name="t").hash == suite.hash
