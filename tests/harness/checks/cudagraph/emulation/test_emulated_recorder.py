"""Replays are exact: the emulated recorder against the same code run eagerly."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import layer_norm, scaled_dot_product_attention

from attncheck.harness.checks.cudagraph.emulation import EmulatedRecorder

CPU = torch.device("cpu")


class Buffers:
    """Persistent inputs, refilled in place, and a second set for the eager answer."""

    def __init__(self, seed: int) -> None:
        self.x = torch.empty(4, 6)
        self.y = torch.empty(4, 6)
        self.index = torch.empty(5, dtype=torch.int64)
        self.lens = torch.empty(4, dtype=torch.int32)
        self.codes = torch.empty(4, 8, dtype=torch.uint8)
        self.out = torch.empty(4, 6)
        self.fill(seed)

    def fill(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x.copy_(torch.randn(4, 6, generator=generator))
        self.y.copy_(torch.randn(4, 6, generator=generator))
        self.index.copy_(torch.randperm(4, generator=generator).repeat(2)[:5])
        self.lens.copy_(torch.randint(0, 7, (4,), generator=generator))
        self.codes.copy_(torch.randint(0, 120, (4, 8), generator=generator))
        self.out.fill_(torch.nan)

    def state(self) -> list[Tensor]:
        return [self.x, self.y, self.index, self.lens, self.codes, self.out]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(
        torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for a, b in zip(left, right, strict=True)
    )


def arithmetic(b: Buffers) -> None:
    b.out.copy_((b.x + 2 * b.y).exp_().sub_(1).div(3).neg().abs() ** 2)


def views(b: Buffers) -> None:
    heads = b.x.view(4, 2, 3).transpose(0, 1)
    heads[1].mul_(2)
    first, second = b.y.split(3, dim=1)
    b.out[:, :3] = heads.reshape(8, 3)[:4] + first
    b.out[:, 3:].copy_(second.flip(1))
    b.out.unbind(0)[2].t().zero_()


def geometry_changed_later(b: Buffers) -> None:
    x = b.x.clone()
    b.out.copy_(x)
    x.t_()
    b.out.view(6, 4).add_(x)
    x.resize_(3, 8).unsqueeze_(0)
    b.out.view(1, 3, 8).mul_(x)


def out_arguments(b: Buffers) -> None:
    torch.add(b.x, b.y, alpha=3, out=b.out)
    grown = torch.empty(0, device=CPU)
    torch.mul(b.out, b.y, out=grown)
    torch.arange(6, out=b.out[0])
    b.out[1] = grown[1]


def several_outputs(b: Buffers) -> None:
    values, order = b.x.sort(dim=1)
    top, places = b.y.topk(2, dim=1)
    largest, where = b.x.max(dim=0)
    b.out.copy_(values + order + largest + where)
    b.out[:, :2] += top * places
    b.out[:, 4:] += torch.stack(torch.var_mean(b.y, dim=1), 1)
    b.out += torch.frexp(b.x).exponent


def indexing(b: Buffers) -> None:
    b.out.copy_(b.x[b.index[:4]])
    b.out[b.index[:2], 1] = b.y[b.index[2:4], 3]
    b.out[:, b.index[:1]] *= 2
    b.out.index_add_(0, b.index[:4], b.y)
    b.out.index_put_((b.index, torch.zeros_like(b.index)), b.y[0, :5], accumulate=True)
    b.out.index_copy_(1, b.index[:1], b.x[:, :1])
    b.out.scatter_(1, b.index[:1, None].expand(4, 1), b.y)
    b.out.scatter_reduce_(1, b.index[None, :3].expand(4, 3) % 2, b.y, reduce="amax")
    b.out += b.y.gather(0, b.index[:4, None].expand(4, 6)) + torch.take_along_dim(b.x, b.index[None, :1], dim=1)


def masks(b: Buffers) -> None:
    mask = torch.arange(6, device=b.lens.device)[None] < b.lens[:, None]
    scores = b.x.masked_fill(~mask, float("-inf"))
    b.out.copy_(torch.where(mask, scores.softmax(-1), 0.0))
    b.out[mask & (b.y > 0)] = 5
    b.out.nan_to_num_(7.0)
    b.y[~mask] = -1.0


def joined(b: Buffers) -> None:
    wide = torch.cat([b.x, b.y, b.x[:, :2]], dim=1)
    deep = torch.stack((b.x, b.y))
    torch.cat([wide[:, :3], deep[1, :, 3:]], dim=1, out=b.out)
    first, second = torch._foreach_mul([b.x, b.y], 2.0)
    torch._foreach_add_([b.out, b.y], [first, second])


def dtypes(b: Buffers) -> None:
    half = b.x.to(torch.bfloat16)
    rounded = half.float().to(torch.float64).type(torch.float16)
    stored = b.codes.view(torch.float8_e4m3fn)
    b.out.copy_(rounded + stored.to(torch.float32)[:, :6])
    b.codes[:2].view(torch.float8_e4m3fn).copy_(b.y[:2, :1].expand(2, 8).to(torch.float8_e4m3fn))
    b.lens.copy_(b.x.sum(1).int())


def attention(b: Buffers) -> None:
    q, k, v = (t.view(1, 2, 2, 6) for t in (b.x, b.y, b.x * 2))
    b.out.view(1, 2, 2, 6).copy_(scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3))
    b.out += scaled_dot_product_attention(q, k, v, attn_mask=(k[..., 0] > q[..., 1])[..., None]).view(4, 6)
    b.out += torch.einsum("th,sh->ts", b.x, b.y)[:, :1] + layer_norm(b.x, (6,))


def made_inside(b: Buffers) -> None:
    total = torch.zeros(6, device=CPU)
    total += b.x[0]
    filled = torch.full_like(b.x, 3).add_(torch.ones_like(b.y)).add_(b.x.new_zeros(6))
    unset = torch.empty_like(b.x).copy_(b.y)
    scale = torch.scalar_tensor(0.5, device=CPU)
    b.out.copy_(total + filled + unset * scale + torch.linspace(0, 1, 6, device=CPU).mul_(2))


def repeated(b: Buffers) -> None:
    rows = torch.repeat_interleave(torch.arange(4, device=CPU), b.lens * 0 + 2, output_size=8)
    b.out.copy_(b.x[rows[::2]])
    b.out += torch.nonzero_static(b.y > 0, size=4)[:, :1]
    b.lens.cumsum_(0)
    b.out += torch.searchsorted(b.lens, torch.arange(4, device=CPU, dtype=torch.int32))[:, None]


def inference(b: Buffers) -> None:
    with torch.inference_mode():
        made = b.x + 1
        made += b.y
        b.out.copy_(made)


FORWARDS = [
    arithmetic,
    views,
    geometry_changed_later,
    out_arguments,
    several_outputs,
    indexing,
    masks,
    joined,
    dtypes,
    attention,
    made_inside,
    repeated,
    inference,
]


@pytest.mark.parametrize("forward", FORWARDS, ids=lambda forward: forward.__name__)
def test_a_replay_gives_what_eager_code_gives(forward: Callable[[Buffers], None]) -> None:
    ours, eager = Buffers(0), Buffers(0)
    with torch.no_grad():
        recording = EmulatedRecorder().record(lambda: lambda: forward(ours))
        for _ in range(2):  # the warm-up, and the recorded run
            forward(eager)
        assert same(ours.state(), eager.state())
        for seed in (1, 2, 2):  # the same twice: a replay leaves nothing behind for the next
            ours.fill(seed)
            eager.fill(seed)
            recording.replay()
            forward(eager)
            assert same(ours.state(), eager.state())


def test_python_numbers_python_code_and_the_recorded_tensor_are_frozen() -> None:
    settings, out = {"scale": 2.0, "calls": 0, "x": torch.ones(3)}, torch.zeros(3)
    recorded = settings["x"]

    def forward() -> None:
        settings["calls"] += 1
        out.copy_(settings["x"] * settings["scale"])

    recording = EmulatedRecorder().record(lambda: forward)
    settings |= {"scale": 5.0, "x": torch.full((3,), 9.0)}
    recorded.fill_(3)
    recording.replay()
    assert out.tolist() == [6.0] * 3
    assert settings["calls"] == 2


def test_metadata_are_prepared_anew_for_each_run() -> None:
    prepared: list[int] = []
    out = torch.zeros(1)

    def prepare() -> Callable[[], object]:
        prepared.append(len(prepared))
        number = len(prepared)
        return lambda: out.fill_(number)

    EmulatedRecorder().record(prepare).replay()
    assert prepared == [0, 1]
    assert out.item() == 2


def test_memory_without_contents_keeps_what_is_put_there() -> None:
    made: list[Tensor] = []
    out = torch.zeros(3)

    def forward() -> None:
        made[:] = [torch.empty(3, device=out.device)]
        out.copy_(made[0])

    recording = EmulatedRecorder().record(lambda: forward)
    made[0].fill_(7)
    recording.replay()
    assert out.tolist() == [7.0] * 3


def test_random_numbers_are_drawn_anew() -> None:
    out = torch.zeros(8)
    recording = EmulatedRecorder().record(lambda: lambda: out.copy_(torch.rand(8, device=out.device)))
    first = out.clone()
    recording.replay()
    assert not torch.equal(out, first)
