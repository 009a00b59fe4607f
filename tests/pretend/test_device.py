"""The pretend device against what CUDA does: where tensors lie, what is refused, what is counted."""

import numpy as np
import pytest
import torch
from pretend_cuda import Settings, present

HOST = torch.arange(6.0)


def acts(device, *kinds):
    return [act for act in device.acts if act.kind in kinds]


def test_a_tensor_lies_where_it_was_made_and_so_does_what_is_computed_from_it(device):
    found = torch.zeros(2, 3, device="cuda")
    assert [each.device.type for each in (found, found + 1, found[0], found.clone(), torch.ones_like(found))] == [
        "cuda"
    ] * 5
    assert [each.device.type for each in (HOST, HOST + 1, found.cpu(), torch.ones_like(found, device="cpu"))] == [
        "cpu"
    ] * 4
    assert found.is_cuda
    assert found.get_device() == 0
    assert not HOST.is_cuda


@pytest.mark.parametrize(
    "mix",
    [
        lambda held, host: held + host,
        lambda held, host: host.add_(held),
        lambda held, host: torch.cat([held, host]),
        lambda held, host: host[held.long()],
        lambda held, host: held.index_put_((held.long(),), host),
        lambda held, host: torch.cat([held, torch.tensor([])]),
    ],
)
def test_tensors_of_two_devices_are_refused(device, mix):
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        mix(HOST.cuda(), HOST.clone())
    assert [act.kind for act in acts(device, "mixed")] == ["mixed"]


def test_one_number_of_the_host_is_taken_by_a_kernel_and_an_index_of_the_host_is_copied(device):
    held = HOST.cuda()
    assert (held * torch.tensor(2.0)).tolist() == [0, 2, 4, 6, 8, 10]
    device.acts.clear()
    assert held[torch.tensor([1, 2])].device.type == "cuda"
    assert [act.what for act in acts(device, "wait")] == ["aten::index"]


def test_what_the_host_waits_for_and_copies_is_noted_with_its_line(device):
    held = HOST.to("cuda")
    held.sum().item()
    held.cpu()
    torch.tensor([1.0], device="cuda")
    torch.cuda.synchronize()
    held.copy_(HOST, non_blocking=True)
    held.nonzero()
    held.tolist()
    here = test_what_the_host_waits_for_and_copies_is_noted_with_its_line.__code__
    kinds = ["to device", "to host", "to host", "to device", "wait", "to device", "wait", "to host"]
    lines = [here.co_firstlineno + line for line in range(1, 9)]
    assert [act.kind for act in device.acts] == kinds
    assert [act.place for act in device.acts] == [f"{__file__}:{line} {here.co_name}" for line in lines]


def test_views_and_new_memory_launch_nothing_and_operators_launch_once(device):
    held = torch.empty(2, 3, device="cuda")
    held.t()[0].unsqueeze(0)
    torch.empty_like(held)
    assert not device.launches
    held.zero_()
    held.add_(1)
    held.mul_(2)
    assert device.launches == {"aten::zero_": 1, "aten::add_": 1, "aten::mul_": 1}


def test_memory_of_the_device_is_no_numpy_array(device):
    with pytest.raises(TypeError, match="to numpy"):
        HOST.cuda().numpy()
    with pytest.raises(TypeError, match="to numpy"):
        np.asarray(HOST.cuda())
    assert HOST.cuda().cpu().numpy().tolist() == HOST.tolist()


@pytest.mark.parametrize(("named", "of"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_a_generator_draws_for_its_own_device(device, named, of):
    assert torch.randn(2, device=named, generator=torch.Generator(named)).device.type == named
    with pytest.raises(RuntimeError, match=f"Expected a '{named}' device type for generator but found '{of}'"):
        torch.randn(2, device=named, generator=torch.Generator(of))


@pytest.mark.parametrize(
    "wait",
    [
        lambda held: held.item(),
        lambda held: held.to("cpu"),
        lambda held: held.fill_(1) == torch.tensor([1.0], device="cuda"),
    ],
)
def test_sync_debug_mode_raises_at_what_waits(device, wait):
    held = torch.ones(1, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    held.to("cpu", non_blocking=True)
    with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
        wait(held)
    torch.cuda.set_sync_debug_mode("default")
    wait(held)


def test_memory_is_taken_given_back_and_used_up():
    mib = 2**20
    with present(Settings(total_memory=8 * mib)):
        held = torch.empty(3 * mib, dtype=torch.uint8, device="cuda")
        view = held[mib:]
        del held
        assert torch.cuda.mem_get_info() == (5 * mib, 8 * mib)
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 6291456 bytes, 5242880 are free"):
            torch.empty(6 * mib, dtype=torch.uint8, device="cuda")
        del view
        assert torch.cuda.mem_get_info() == (8 * mib, 8 * mib)
        assert torch.empty(6 * mib, dtype=torch.uint8, device="cuda").is_cuda


def test_in_exclusive_process_mode_the_first_context_keeps_others_out(tmp_path):
    settings = Settings(lock=str(tmp_path / "lock"))
    with present(settings):
        with present(settings):
            assert torch.cuda.is_available()  # it creates no context
            torch.cuda.synchronize()
        with present(settings) as second:
            torch.cuda.synchronize()
            with present(settings), pytest.raises(torch.AcceleratorError, match="busy or unavailable"):
                torch.zeros(1, device="cuda")
            second.close()
            torch.cuda.synchronize()


FLOAT8_CALLS = {
    "index": lambda codes: codes[torch.tensor([0, 2], device="cuda")],
    "empty_like": torch.empty_like,
    "view": lambda codes: codes.view(torch.uint8).view(2, 3),
    "copy_": lambda codes: codes.copy_(torch.ones(6, device="cuda")),
}


@pytest.mark.parametrize("call", FLOAT8_CALLS.values(), ids=FLOAT8_CALLS)
def test_float8_has_the_operators_of_cuda(device, call):
    assert call(HOST.cuda().to(torch.float8_e4m3fn)).is_cuda


@pytest.mark.parametrize("call", [lambda codes: codes.where(codes.isnan(), codes), torch.isnan, torch.neg])
def test_float8_has_no_others(device, call):
    with pytest.raises(NotImplementedError, match="not implemented for float8"):
        call(HOST.cuda().to(torch.float8_e4m3fn))


def test_what_torch_makes_on_the_way_lies_beside_its_arguments(device):
    """Without a fused kernel for such sizes torch makes a causal mask of its own."""
    query, value = torch.ones(1, 2, 3, 8, device="cuda"), torch.ones(1, 2, 3, 4, device="cuda")
    assert torch.nn.functional.scaled_dot_product_attention(query, query, value, is_causal=True).is_cuda
    assert torch.zeros(3).device.type == "cpu"
