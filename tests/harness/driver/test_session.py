"""Sessions: the call order of a model runner, and what is seen when a backend misbehaves."""

from typing import Any

import pytest
import torch

from attncheck.backends.candidates.reference import ReferenceBackend, ReferenceBuilder, ReferenceImpl
from attncheck.backends.conventions import Conventions
from attncheck.harness.driver.foreign_code import StageError
from attncheck.harness.driver.observation import Raised, capture_exception
from attncheck.harness.driver.pool import same_bytes
from attncheck.harness.driver.session import Fill, Session
from attncheck.harness.problem.problem import build_problem
from attncheck.harness.truth.truth import truth_of
from attncheck.reference.spec import AttentionType, RequestSpec

CPU = torch.device("cpu")


class Variant(ReferenceBackend):
    """The reference with other classes."""

    Impl: Any = ReferenceImpl
    Builder: Any = ReferenceBuilder

    @classmethod
    def get_impl_cls(cls) -> Any:
        return cls.Impl

    @classmethod
    def get_builder_cls(cls) -> Any:
        return cls.Builder


def variant(**members: Any) -> type[Variant]:
    return type("Variant", (Variant,), members)


def impl(**members: Any) -> type[Variant]:
    return variant(Impl=type("Impl", (ReferenceImpl,), members))


def session(backend: Any, case: Any) -> Session:
    return Session(backend, build_problem(case, 0), CPU)


def run(backend: Any, case: Any) -> Any:
    return session(backend, case).run()


def refused(backend: Any, case: Any) -> Raised:
    """Return what a stage raises, of the construction of the session or of its step."""
    with pytest.raises(StageError) as failure:
        run(backend, case)
    return failure.value.raised


def test_the_output_is_the_truth_rounded_once(make_case: Any) -> None:
    problem = build_problem(make_case(padding=(1, 2)), 0)
    truth = truth_of(problem, CPU)
    seen = Session(ReferenceBackend, problem, CPU).run()
    assert torch.equal(seen.output[:40], truth.out.to(torch.bfloat16))
    assert seen.output.shape == (42, 8, 64)
    assert not seen.unwritten.any()
    assert (seen.changed, seen.breaches, seen.protocol) == ((), (), ())


@pytest.mark.parametrize("start", [0, 3])
@pytest.mark.parametrize("size", [1, 8, 21])
def test_one_byte_makes_two_images_differ(start: int, size: int) -> None:
    memory = torch.full((24,), 255, dtype=torch.uint8)
    image, other = memory[start : start + size], memory.clone()[start : start + size]
    assert same_bytes(image.view(torch.int8), other)
    other[-1] = 254
    assert not same_bytes(image, other)


def test_rows_come_back_in_the_problems_order_after_reordering(make_case: Any) -> None:
    seen_orders = []

    class Builder(ReferenceBuilder):
        reorder_batch_threshold = 1

        def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
            seen_orders.append(common_attn_metadata.query_start_loc_cpu.diff().tolist())
            return super().build(common_prefix_len, common_attn_metadata, fast_build)

    case = make_case((5, 9), (1, 30), (3, 3), (1, 8))
    plain, reordered = run(ReferenceBackend, case), run(variant(Builder=Builder), case)
    assert seen_orders == [[1, 1, 5, 3]]
    assert torch.equal(plain.output, reordered.output)
    assert torch.equal(plain.lse, reordered.lse)


@pytest.mark.parametrize(
    ("members", "stage"),
    [
        ({"__init__": lambda *_a, **_k: 1 / 0}, "construct"),
        ({"forward": lambda *_a, **_k: 1 / 0}, "forward"),
    ],
)
def test_whatever_is_raised_comes_back_with_its_stage(make_case: Any, members: Any, stage: str) -> None:
    raised = refused(impl(**members), make_case())
    assert (raised.stage, raised.error_type) == (stage, "ZeroDivisionError")
    assert not raised.is_refusal
    assert "ZeroDivisionError" in raised.trace


def test_a_refusal_after_writing_is_none(make_case: Any) -> None:
    def late(self: Any, *args: Any, **kwargs: Any) -> None:
        ReferenceImpl.forward(self, *args, **kwargs)
        raise ValueError("too late")

    raised = refused(impl(forward=late), make_case())
    assert raised.touched == ("the output", "the cache")
    assert not raised.is_refusal


def test_an_early_refusal_is_one(make_case: Any) -> None:
    def early(self: Any, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("not today")

    raised = refused(impl(forward=early), make_case())
    assert raised.is_refusal
    assert raised.message == "not today"


def test_writes_outside_the_output_are_seen(make_case: Any) -> None:
    def attend(self: Any, *args: Any) -> None:
        ReferenceImpl.attend(self, *args)
        output = args[6]
        beyond = output.as_strided((1, *output.shape[1:]), output.stride(), output.storage_offset() + output.numel())
        beyond.zero_()

    assert run(impl(attend=attend), make_case()).breaches == ("output",)


def test_unwritten_rows_are_distinguished_from_rows_of_nan(make_case: Any) -> None:
    def attend(self: Any, *args: Any) -> None:
        ReferenceImpl.attend(self, *args[:6], args[6].clone(), args[7])
        args[6][:30] = float("nan")

    seen = run(impl(attend=attend), make_case())
    assert seen.unwritten.nonzero().flatten().tolist() == list(range(30, 40))


def test_changed_inputs_and_metadata_are_named(make_case: Any) -> None:
    def attend(self: Any, *args: Any) -> None:
        ReferenceImpl.attend(self, *args)
        args[1].mul_(2)
        args[5].common.seq_lens.add_(1)
        args[5].common.slot_mapping = args[5].common.slot_mapping.to("meta")
        args[5].common.max_seq_len = 3

    changed = run(impl(attend=attend), make_case()).changed
    assert changed == ("query", "metadata.seq_lens", "metadata.max_seq_len", "metadata.slot_mapping")


def test_a_backend_without_codec_is_filled_through_its_own_writer(make_case: Any) -> None:
    case = make_case((1, 37), (5, 40))
    plain = run(ReferenceBackend, case)
    without = run(variant(kv_cache_codec=classmethod(lambda *_: None)), case)
    assert torch.equal(plain.output, without.output)


def test_the_cache_update_outside_forward_is_called_first(make_case: Any) -> None:
    calls = []

    def update(self: Any, layer: Any, key: Any, value: Any, kv_cache: Any, slots: Any) -> None:
        calls.append(len(slots))
        self.write(layer, key, value, *self._cache_views(kv_cache), slots)

    separate = type("Impl", (ReferenceImpl,), {"do_kv_cache_update": update, "brings_writer": True})
    backend = variant(Impl=separate, forward_includes_kv_cache_update=False)
    case = make_case(padding=(0, 2))
    assert torch.equal(run(backend, case).output, run(ReferenceBackend, case).output)
    assert calls == [42]


def test_a_codec_that_cannot_be_trusted_stops_the_session(make_case: Any) -> None:
    class Crossed:
        """Reads values where keys are."""

        def __init__(self, codec: Any) -> None:
            self.codec = codec

        def write(self, *args: Any) -> None:
            self.codec.write(*args)

        def read(self, *args: Any) -> Any:
            return self.codec.read(*args)[::-1]

    def kv_cache_codec(cls: Any, layer: Any, cache: Any) -> Any:
        return Crossed(ReferenceBackend.kv_cache_codec(layer, cache))

    raised = refused(variant(kv_cache_codec=classmethod(kv_cache_codec)), make_case())
    assert raised.stage == "cache"
    assert "cannot be trusted with keys" in raised.message


def test_a_cache_that_cannot_be_filled_is_an_error(make_case: Any) -> None:
    reader = type("Impl", (ReferenceImpl,), {"brings_writer": False})
    backend = variant(Impl=reader, kv_cache_codec=classmethod(lambda *_: None))
    assert "brings neither a writer nor a cache codec" in refused(backend, make_case()).message


def test_poison_reaches_every_foreign_slot_and_nothing_else(make_case: Any) -> None:
    problem = build_problem(make_case(sliding_window=16), 0)
    pool = Session(ReferenceBackend, problem, CPU).pool
    assert pool is not None
    cache = pool.filled(float("nan"))
    assert pool.codec is not None
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


def test_padding_requests_get_the_seq_len_a_backend_needs(make_case: Any) -> None:
    lens = []

    class Builder(ReferenceBuilder):
        def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
            lens.append(common_attn_metadata.seq_lens.tolist())
            return super().build(common_prefix_len, common_attn_metadata, fast_build)

    run(variant(Builder=Builder, conventions=Conventions(pad_seq_len=1)), make_case((1, 5), padding=(2, 2)))
    assert lens == [[5, 1, 1]]


def test_undeclared_config_attributes_are_refused_by_name(make_case: Any) -> None:
    class Builder(ReferenceBuilder):
        def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any) -> None:
            super().__init__(kv_cache_spec, layer_names, vllm_config, device)
            vllm_config.cache_config.enable_prefix_caching  # noqa: B018

    message = refused(variant(Builder=Builder), make_case()).message
    assert "vllm_config.cache_config has no 'enable_prefix_caching'" in message


def test_cross_attention_writes_first_step_rows_only(make_case: Any) -> None:
    first = RequestSpec(query_len=4, seq_len=4, encoder_len=30)
    later = RequestSpec(query_len=1, seq_len=9, encoder_len=21)
    problem = build_problem(make_case(first, later, attn_type=AttentionType.ENCODER_DECODER), 0)
    seen = Session(ReferenceBackend, problem, CPU).run()
    assert torch.equal(seen.output, truth_of(problem, CPU).out.to(torch.bfloat16))


def test_the_profiling_call_needs_no_metadata(make_case: Any) -> None:
    idle = session(ReferenceBackend, make_case()).run_without_metadata()
    assert isinstance(idle, torch.Tensor)
    assert bool(torch.isfinite(idle).all())


@pytest.mark.parametrize(
    ("wrong", "note"),
    [
        (lambda output: (output, None), "forward returned a tuple"),
        (lambda output: output.to("meta"), "forward returned a tensor of device meta"),
    ],
)
def test_what_is_no_output_is_a_broken_promise_and_not_the_end(make_case: Any, wrong: Any, note: str) -> None:
    def forward(self: Any, *args: Any, **keywords: Any) -> Any:
        return wrong(ReferenceImpl.forward(self, *args, **keywords))

    tried = session(impl(forward=forward), make_case())
    seen = tried.run()
    assert note in seen.protocol[0]
    assert isinstance(tried.run_without_metadata(), torch.Tensor)


def test_a_step_is_what_it_was_after_its_inputs_were_spoiled(make_case: Any) -> None:
    def attend(self: Any, *args: Any) -> None:
        ReferenceImpl.attend(self, *args)
        common = args[5].common
        for tensor in (*args[1:4], common.seq_lens, common.seq_lens_cpu, common.block_table_tensor):
            tensor.zero_()

    problem = build_problem(make_case(padding=(0, 2)), 0)
    tried, right = Session(impl(attend=attend), problem, CPU), Session(ReferenceBackend, problem, CPU).run()
    for _ in range(2):
        assert torch.equal(tried.run().output, right.output)


def test_a_session_beside_has_the_codec_of_the_first_and_memory_of_its_own(make_case: Any) -> None:
    layers = []

    def kv_cache_codec(cls: Any, layer: Any, cache: Any) -> Any:
        layers.append(layer)
        return ReferenceBackend.kv_cache_codec(layer, cache)

    backend = variant(kv_cache_codec=classmethod(kv_cache_codec))
    problem, other = (build_problem(make_case(*lens), 0) for lens in (((1, 37),), ((1, 40),)))
    first = Session(backend, problem, CPU)
    second = Session(backend, other, CPU, later=(problem,), pool=first.pool)
    assert first.pool is not None
    assert second.pool is not None
    assert second.pool.kv_cache.data_ptr() != first.pool.kv_cache.data_ptr()
    assert torch.equal(second.run().output, run(ReferenceBackend, other.case).output)
    assert torch.equal(second.beside(problem).run().output, run(ReferenceBackend, problem.case).output)
    assert second.beside(problem).pool is first.pool
    assert len(layers) == 1
    scaled = build_problem(make_case((1, 37), cache={"layout": "HND"}), 0)
    Session(backend, scaled, CPU, pool=first.pool)
    assert len(layers) == 2


def test_a_codec_that_breaks_later_is_what_the_step_raised(make_case: Any) -> None:
    class Codec:
        def __init__(self, inner: Any) -> None:
            self.read, self._write = inner.read, inner.write

        def write(self, kv_cache: Any, slots: Any, key: Any, value: Any) -> None:
            if key.isnan().any():
                raise OSError("no NaN here")
            self._write(kv_cache, slots, key, value)

    honest = ReferenceBackend.kv_cache_codec
    backend = variant(kv_cache_codec=staticmethod(lambda layer, cache: Codec(honest(layer, cache))))
    with pytest.raises(StageError) as failure:
        session(backend, make_case()).run(Fill(poison=float("nan")))
    raised = failure.value.raised
    assert (raised.stage, raised.message) == ("cache", "no NaN here")


def test_a_threshold_that_is_no_number_is_the_builders_fault(make_case: Any) -> None:
    builder = type("Builder", (ReferenceBuilder,), {"reorder_batch_threshold": "many"})
    with pytest.raises(StageError) as caught:
        session(variant(Builder=builder), make_case()).begin()
    assert caught.value.raised.stage == "builder"


def test_an_exception_without_a_message_is_still_named() -> None:
    class MuteError(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert "RuntimeError" in capture_exception("forward", MuteError()).message


def test_the_kernels_that_an_impl_names_are_sorted_and_known_after_a_step(make_case: Any) -> None:
    def forward(self: Any, *given: Any, **more: Any) -> Any:
        self.chosen_kernels = ["math", "flash", "math"]
        return ReferenceImpl.forward(self, *given, **more)

    tried = session(impl(forward=forward), make_case())
    assert tried.chosen_kernels == ()
    tried.run()
    assert tried.chosen_kernels == ("flash", "math")


@pytest.mark.parametrize("wrong", ["flash", None, 3, ["flash", None], [""]])
def test_kernels_that_are_no_names_are_an_error_of_the_backend(wrong: Any, make_case: Any) -> None:
    made = type("Impl", (ReferenceImpl,), {"chosen_kernels": property(lambda _: wrong, lambda _, value: None)})
    tried = session(variant(Impl=made), make_case())
    with pytest.raises(StageError) as caught:
        _ = tried.chosen_kernels
    assert caught.value.raised.in_words == (
        f"chosen_kernels raised TypeError: Impl.chosen_kernels is {wrong!r}; a collection of names is right"
    )
