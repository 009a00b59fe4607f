"""Sessions: the call order of a model runner, and what is seen when a backend misbehaves."""

from dataclasses import replace

import pytest
import torch

from attncheck.backends.candidates.reference import ReferenceBackend, ReferenceBuilder, ReferenceImpl
from attncheck.backends.conventions import Conventions
from attncheck.harness.driver.foreign_code import StageError
from attncheck.harness.driver.pool import same_bytes
from attncheck.harness.driver.session import Fill, Session
from attncheck.harness.problem.problem import build_problem
from attncheck.harness.truth.truth import truth_of

CPU = torch.device("cpu")


def variant(impl=ReferenceImpl, builder=ReferenceBuilder, **members):
    """Return the reference with other classes and members."""
    made = {"get_impl_cls": staticmethod(lambda: impl), "get_builder_cls": staticmethod(lambda: builder)}
    return type("Variant", (ReferenceBackend,), made | members)


def impl(**members):
    return variant(type("Impl", (ReferenceImpl,), members))


def session(backend, case):
    return Session(backend, build_problem(case, 0), CPU)


def run(backend, case):
    return session(backend, case).run()


def refused(backend, case):
    """Return what a stage raises, of the construction of the session or of its step."""
    with pytest.raises(StageError) as failure:
        run(backend, case)
    return failure.value.raised


def test_the_output_is_the_truth_rounded_once(make_case):
    problem = build_problem(make_case(padding=(1, 2)), 0)
    seen = Session(ReferenceBackend, problem, CPU).run()
    assert torch.equal(seen.output[:40], truth_of(problem, CPU).out.to(torch.bfloat16))
    assert seen.output.shape == (42, 8, 64)
    assert not seen.unwritten.any()
    assert (seen.changed, seen.breaches, seen.protocol) == ((), (), ())


@pytest.mark.parametrize("size", [1, 8, 21])
def test_one_byte_makes_two_images_differ(size):
    for start in (0, 3):
        memory = torch.full((24,), 255, dtype=torch.uint8)
        image, other = memory[start : start + size], memory.clone()[start : start + size]
        assert same_bytes(image.view(torch.int8), other)
        other[-1] = 254
        assert not same_bytes(image, other)


def fails(*_args, **_more):
    return 1 / 0


def refuses(*_args, **_more):
    raise NotImplementedError("not today")


def refuses_late(self, *args, **more):
    ReferenceImpl.forward(self, *args, **more)
    raise ValueError("too late")


class ReadsTheConfig(ReferenceBuilder):
    def __init__(self, *args):
        super().__init__(*args)
        self.vllm_config.cache_config.enable_prefix_caching  # noqa: B018


class CrossedCodec:
    """Reads values where keys are, and takes no NaN."""

    def __init__(self, layer, cache, *, crosses):
        self.codec, self.crosses = ReferenceBackend.kv_cache_codec(layer, cache), crosses

    def write(self, kv_cache, slots, key, value):
        if key.isnan().any():
            raise OSError("no NaN here")
        self.codec.write(kv_cache, slots, key, value)

    def read(self, *args):
        rows = self.codec.read(*args)
        return rows[::-1] if self.crosses else rows


@pytest.mark.parametrize(
    ("backend", "stage", "message", "is_refusal"),
    [
        (impl(__init__=fails), "construct", "division by zero", False),
        (impl(forward=fails), "forward", "division by zero", False),
        (impl(forward=refuses), "forward", "not today", True),
        (impl(forward=refuses_late), "forward", "too late", False),
        (
            variant(builder=type("Builder", (ReferenceBuilder,), {"reorder_batch_threshold": "many"})),
            "builder",
            "not supported between instances",
            False,
        ),
        (variant(builder=ReadsTheConfig), "builder", "cache_config has no 'enable_prefix_caching'", False),
        (
            variant(kv_cache_codec=staticmethod(lambda *of: CrossedCodec(*of, crosses=True))),
            "cache",
            "cannot be trusted with keys",
            False,
        ),
        (
            variant(
                type("Impl", (ReferenceImpl,), {"brings_writer": False}), kv_cache_codec=staticmethod(lambda *_: None)
            ),
            "cache",
            "brings neither a writer nor a cache codec",
            True,
        ),
    ],
)
def test_whatever_is_raised_comes_back_with_its_stage(make_case, backend, stage, message, is_refusal):
    raised = refused(backend, make_case())
    assert (raised.stage, raised.is_refusal) == (stage, is_refusal)
    assert message in raised.message
    assert raised.touched == (("the output", "the cache") if message == "too late" else ())


def test_a_codec_that_breaks_later_is_what_the_step_raised(make_case):
    backend = variant(kv_cache_codec=staticmethod(lambda *of: CrossedCodec(*of, crosses=False)))
    with pytest.raises(StageError) as failure:
        session(backend, make_case()).run(Fill(poison=float("nan")))
    assert (failure.value.raised.stage, failure.value.raised.message) == ("cache", "no NaN here")


def test_rows_unwritten_writes_outside_the_output_and_changed_inputs_are_seen(make_case):
    def attend(self, *args):
        output, common = args[6], args[5].common
        ReferenceImpl.attend(self, *args[:6], output.clone(), args[7])
        output[:30] = float("nan")
        beyond = output.as_strided((1, *output.shape[1:]), output.stride(), output.storage_offset() + output.numel())
        beyond.zero_()
        args[1].mul_(2)
        common.seq_lens.add_(1)
        common.slot_mapping = common.slot_mapping.to("meta")
        common.max_seq_len = 3

    class Builder(ReferenceBuilder):
        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            made = super().build(common_prefix_len, common_attn_metadata, fast_build)
            return replace(made, common=common_attn_metadata)

    seen = run(variant(impl=impl(attend=attend).get_impl_cls(), builder=Builder), make_case())
    assert seen.unwritten.nonzero().flatten().tolist() == list(range(30, 40))
    assert seen.breaches == ("output",)
    assert seen.changed == ("query", "metadata.seq_lens", "metadata.max_seq_len", "metadata.slot_mapping")


def test_poison_reaches_every_foreign_slot_and_nothing_else(make_case):
    problem = build_problem(make_case(sliding_window=16), 0)
    pool = Session(ReferenceBackend, problem, CPU).pool
    cache = pool.filled(float("nan"))
    key, value = pool.codec.read(cache, torch.arange(problem.num_blocks * 16))
    poisoned = torch.isnan(key).all(dim=(1, 2)) & torch.isnan(value).all(dim=(1, 2))
    clean = torch.isfinite(key).all(dim=(1, 2)) & torch.isfinite(value).all(dim=(1, 2))
    assert bool((poisoned ^ clean).all())
    # The last request decodes position 129 with 16 keys in sight: its pages before position 112 are free for others.
    r = problem.requests[3]
    assert bool(poisoned[problem.key_slots[r.base : r.base + 112]].all())
    assert bool(clean[problem.key_slots[r.base + 112 : r.base + 130]].all())
    assert set(pool.regions) == {
        "the null page",
        "the unused tail of a last page",
        "pages of no request",
        "pages the window has left behind",
    }


def test_padding_requests_get_the_seq_len_a_backend_needs(make_case):
    lens = []

    class Builder(ReferenceBuilder):
        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            lens.append(common_attn_metadata.seq_lens.tolist())
            return super().build(common_prefix_len, common_attn_metadata, fast_build)

    run(variant(builder=Builder, conventions=Conventions(pad_seq_len=1)), make_case((1, 5), padding=(2, 2)))
    assert lens == [[5, 1, 1]]


def test_a_step_is_what_it_was_after_a_codec_spoiled_its_slots(make_case):
    class Codec(CrossedCodec):
        spoils = False

        def write(self, kv_cache, slots, key, value):
            super().write(kv_cache, slots, key, value)
            if self.spoils:
                slots.zero_()

    members = {"kv_cache_codec": staticmethod(lambda *of: Codec(*of, crosses=False))}
    tried = session(variant(impl(brings_writer=False).get_impl_cls(), **members), make_case())
    step = tried.prepared().step
    slots = step.slot_mapping.clone()
    tried.pool.codec.spoils = True
    tried.run()
    assert torch.equal(step.slot_mapping, slots)


def test_a_step_is_what_it_was_after_its_inputs_were_spoiled(make_case):
    def attend(self, *args):
        ReferenceImpl.attend(self, *args)
        common = args[5].common
        for tensor in (*args[1:4], common.seq_lens, common.seq_lens_cpu, common.block_table_tensor):
            tensor.zero_()

    case = make_case(padding=(0, 2))
    tried, right = session(impl(attend=attend), case), run(ReferenceBackend, case)
    for _ in range(2):
        assert torch.equal(tried.run().output, right.output)


def test_a_session_beside_has_the_codec_of_the_first_and_memory_of_its_own(make_case):
    layers = []

    def kv_cache_codec(cls, layer, cache):
        layers.append(layer)
        return ReferenceBackend.kv_cache_codec(layer, cache)

    backend = variant(kv_cache_codec=classmethod(kv_cache_codec))
    problem, other = (build_problem(make_case(*lens), 0) for lens in (((1, 37),), ((1, 40),)))
    first = Session(backend, problem, CPU)
    second = Session(backend, other, CPU, later=(problem,), pool=first.pool)
    assert second.pool.kv_cache.data_ptr() != first.pool.kv_cache.data_ptr()
    assert torch.equal(second.run().output, run(ReferenceBackend, other.case).output)
    assert torch.equal(second.beside(problem).run().output, run(ReferenceBackend, problem.case).output)
    assert second.beside(problem).pool is first.pool
    assert len(layers) == 1
    scaled = build_problem(make_case((1, 37), cache={"layout": "HND"}), 0)
    Session(backend, scaled, CPU, pool=first.pool)
    assert len(layers) == 2


def test_the_kernels_that_an_impl_names_are_sorted_and_known_after_a_step(make_case):
    def forward(self, *given, **more):
        self.chosen_kernels = ["math", "flash", "math"]
        return ReferenceImpl.forward(self, *given, **more)

    tried = session(impl(forward=forward), make_case())
    assert tried.chosen_kernels == ()
    tried.run()
    assert tried.chosen_kernels == ("flash", "math")
    for wrong in ("flash", None, 3, ["flash", None], [""]):
        tried.impl.chosen_kernels = wrong
        with pytest.raises(StageError) as caught:
            _ = tried.chosen_kernels
        assert caught.value.raised.in_words == (
            f"chosen_kernels raised TypeError: Impl.chosen_kernels is {wrong!r}; a collection of names is right"
        )
