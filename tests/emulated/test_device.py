"""The instrument itself: what the emulated device refuses, counts and waits for."""

import copy
import pickle

import pytest
import torch
from torch import nn

from hilbert_monitor.monitor.deferred import DeviceNumbers
from tests.support.emulation.device import NAME, EmulatedDevice

REFUSED = {
    "a sum": lambda x: x + torch.ones(4),
    "a product": lambda x: x @ torch.ones(4, 2),
    "rows to select": lambda x: x.index_select(0, torch.tensor([1])),
    "a number in a list": lambda x: torch.stack([x[0, 0], torch.tensor(1.0)]),
    "values to put": lambda x: x.index_put_((torch.tensor([1]).to(NAME),), torch.ones(1, 4)),
    "a result": lambda x: torch.mm(x, x, out=torch.empty(4, 4)),
}
TAKEN = {
    "a number of the CPU": lambda x: x * torch.tensor(2.0),
    "a number to fill with": lambda x: x.fill_(torch.tensor(2.0)),
    "a step": lambda x: torch._foreach_mul([x], torch.tensor(2.0)),
    "a copy to the host": lambda x: torch.empty(4, 4).copy_(x),
    "a copy from it": lambda x: x.copy_(torch.ones(4, 4)),
    "an index of the host": lambda x: x[torch.tensor([1, 2])],
}
WAITS = {
    "item": lambda x: x[0, 0].item(),
    "float": lambda x: float(x.sum()),
    "bool": lambda x: bool((x > 0).any()),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "a copy to pageable memory": lambda x: torch.empty(4, 4).copy_(x),
    "a tensor from the host": lambda x: torch.tensor([1.0], device=NAME),
    "new_tensor": lambda x: x.new_tensor([1.0]),
    "an index of the host": lambda x: x[torch.tensor([1, 2])],
    "nonzero": lambda x: x.nonzero(),
    "masked_select": lambda x: x.masked_select(x > 0),
    "a mask": lambda x: x[x > 0],
    "values for a mask": lambda x: x.index_put_((x > 0,), torch.ones(16, device=NAME)[: int((x.cpu() > 0).sum())]),
    "equal": lambda x: torch.equal(x, x),
    "unique": lambda x: x.unique(),
    "repeats": lambda x: x[0].repeat_interleave(torch.ones(4, dtype=torch.long, device=NAME)),
    "eigh": lambda x: torch.linalg.eigh(x @ x.T),
    "synchronize": lambda x: torch.emulated.synchronize(),
}
MORE = {"values for a mask": 2}
GOES_ON = {
    "a product": lambda x: x @ x,
    "topk": lambda x: x.topk(2),
    "one number for a mask": lambda x: x.__setitem__(x > 0, 0.0),
    "repeats of a known number": lambda x: x[0].repeat_interleave(
        torch.ones(4, dtype=torch.long, device=NAME), output_size=4
    ),
    "a copy that does not block": lambda x: x.copy_(torch.ones(4, 4), non_blocking=True),
    "argmax": lambda x: x[x.argmax(0)],
    "where": lambda x: torch.where(x > 0, x, 0.0),
}


def counted(call):
    with EmulatedDevice() as device:
        x = device.tensor(torch.arange(16.0).view(4, 4) - 7)
        with device.counted() as counts:
            call(x)
    return counts


@pytest.mark.parametrize("name", REFUSED)
def test_tensors_of_two_devices_are_refused(name):
    with pytest.raises(RuntimeError, match="same device"):
        counted(REFUSED[name])


def test_what_cuda_takes_of_the_cpu_is_taken():
    for call in TAKEN.values():
        counted(call)


def test_what_waits_inside_cuda_is_a_wait():
    found = {name: counted(call).total.waits for name, call in WAITS.items()}
    assert found == dict.fromkeys(WAITS, 1) | MORE


def test_what_goes_on_is_none():
    assert {name: counted(call).total.waits for name, call in GOES_ON.items()} == dict.fromkeys(GOES_ON, 0)


def test_views_and_metadata_are_no_kernels():
    counts = counted(
        lambda x: (
            x[1:],
            x.T,
            x.view(2, 8),
            x[:, None].expand(4, 3, 4),
            x.detach(),
            x.new_empty(3),
            x.shape,
            x.unbind(),
        )
    )
    assert counts.total.kernels == 0


def test_bytes_are_those_read_and_written_and_flops_those_of_products():
    with EmulatedDevice() as device:
        x, y = device.tensor(torch.randn(50, 40)), device.tensor(torch.randn(40, 30))
        cases = {
            "product": (lambda: x @ y, 4 * (2000 + 1200 + 1500), 2 * 50 * 40 * 30),
            "into": (lambda: torch.mm(x, y, out=torch.empty(50, 30, device=NAME)), 4 * 4700, 2 * 50 * 40 * 30),
            "sum": (lambda: x.sum(1), 4 * (2000 + 50), 2000),
            "in place": (lambda: x.add_(1), 4 * (2000 + 2000), 2000),
            "fill": (lambda: x.zero_(), 4 * 2000, 2000),
            "rows": (lambda: x.index_select(0, torch.arange(5, device=NAME)), 40 + 4 * 400 + 40, 2000 + 5),
            "column": (lambda: x + x[:, :1].expand(50, 40), 4 * (2000 + 50 + 2000), 2000),
        }
        found = {}
        for name, (call, *_) in cases.items():
            with device.counted() as counts:
                call()
            found[name] = counts.total.bytes, counts.total.flops
    assert found == {name: (moved, flops) for name, (_, moved, flops) in cases.items()}


def test_work_is_noted_by_line_of_the_package():
    from hilbert_monitor.geometry import row_norm

    with EmulatedDevice() as device:
        x = device.tensor(torch.randn(5, 3))
        x.sum()
        row_norm(x)
    elsewhere, ours = device.counts.of(["elsewhere"]), device.counts.within("geometry/")
    assert elsewhere.kernels == 1
    assert ours.kernels > 1
    assert all(place.partition(":")[2].isdigit() for place in device.counts.lines if place != "elsewhere")


def sent(x):
    numbers = DeviceNumbers()
    numbers.add("x", x)
    numbers.send()
    return numbers


def test_numbers_are_those_of_when_they_were_sent_and_are_waited_for_if_the_device_is_behind():
    with EmulatedDevice(backlog=3) as device:
        x = device.tensor(torch.tensor([1.0, 2.5], dtype=torch.float64))
        numbers = sent(x)
        for _ in range(4):
            x.zero_()  # the device comes as far as the copy
        assert numbers.read() == {"x": [1.0, 2.5]}
        assert device.counts.total.waits == 0
        assert sent(x + 1).read() == {"x": [1.0, 1.0]}
        assert device.counts.total.waits == 1


def test_a_wait_for_anything_lets_the_device_catch_up():
    with EmulatedDevice(backlog=1000) as device:
        x = device.tensor(torch.ones(3))
        numbers = sent(x)
        float(x.sum())
        assert device.counts.total.waits == 1
        assert numbers.read() == {"x": [1.0, 1.0, 1.0]}
        assert device.counts.total.waits == 1


def test_products_are_cast_under_autocast_and_sums_are_not():
    with EmulatedDevice() as device, torch.autocast(NAME, torch.bfloat16):
        x = device.tensor(torch.randn(4, 4))
        y = nn.Linear(4, 4).to(NAME)(x)
        assert y.dtype == torch.bfloat16
        assert y.softmax(-1).dtype == y.sum().dtype == torch.float32
    with EmulatedDevice() as device:
        assert nn.Linear(4, 4).to(NAME)(device.tensor(torch.randn(4, 4))).dtype == torch.float32


def test_tensors_are_copied_and_pickled():
    with EmulatedDevice() as device:
        x = nn.Parameter(device.tensor(torch.randn(3)))
        for again in (copy.deepcopy(x), pickle.loads(pickle.dumps(x))):
            assert again.device == x.device
            assert isinstance(again, nn.Parameter)
            assert again.tolist() == x.tolist()


def test_outside_of_its_mode_there_is_no_such_device():
    with EmulatedDevice():
        assert torch.emulated.is_available()
    assert not torch.emulated.is_available()
    with torch.random.fork_rng():
        torch.randn(3)
    assert torch.tensor([1.0]).device.type == "cpu"
