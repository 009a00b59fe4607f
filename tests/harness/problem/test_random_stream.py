"""Random integers: fixed for ever, uniform enough, independent of each other."""

import torch

from attncheck.harness.problem.pages import RandomStream


def test_the_stream_is_what_it_was_on_every_other_machine() -> None:
    # Philox4x64-10 with a key from SHA-256; these numbers are the definition, not a measurement.
    first = RandomStream("pinned").int8(2, 3)
    assert first.tolist() == [[-43, -30, -99], [-103, -61, 88]]


def test_other_parts_give_another_stream() -> None:
    assert RandomStream(0, "a").int8(64).tolist() != RandomStream(1, "a").int8(64).tolist()
    assert RandomStream("1", "2").int8(64).tolist() != RandomStream("12").int8(64).tolist()


def test_int8_is_centred_and_never_minus_128() -> None:
    values = RandomStream("many").int8(1 << 16)
    assert values.min() == -127
    assert values.max() == 127
    assert abs(float(values.double().mean())) < 1.0
    assert abs(float(values.double().std()) - 73.6) < 1.0  # sqrt((255**2 - 1) / 12)


def test_uniform_fills_a_float32_mantissa() -> None:
    values = RandomStream("many").uniform(1 << 14)
    assert -2 <= float(values.min()) < -1.99
    assert 1.99 < float(values.max()) < 2
    assert abs(float(values.mean())) < 0.05
    mantissas = values.to(torch.float32).view(torch.int32) & 0xFF
    assert len(mantissas.unique()) == 256, "the last bits are in use"
