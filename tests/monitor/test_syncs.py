"""How often a measurement asks the device for a number: on a GPU each time the host waits for all that it has queued.

Counted on a CPU, where the same operations run: items, and operations whose result has a size that only the device
knows. A copy to the host is seen where it is asked for by name.
"""

import traceback
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.optim import AdamW
from torch.utils._python_dispatch import TorchDispatchMode

import hilbert_monitor
from hilbert_monitor import Probe, pretraining_optimizer
from hilbert_monitor.monitor.panel import Panel
from hilbert_monitor.monitor.probe import CHECKED
from tests.support.decoders import Plain, seeded

PACKAGE = Path(hilbert_monitor.__file__).parent
SIZES, WIDTH = (2000, 8000), 32
aten = torch.ops.aten
WAITS = {
    aten._local_scalar_dense: "item",
    aten.nonzero: "nonzero",
    aten.masked_select: "masked_select",
    aten.equal: "equal",
    aten._unique2: "unique",
    aten.unique_dim: "unique",
    aten.unique_consecutive: "unique",
    aten._linalg_eigh: "eigh",
}
"""Operations after which the host has read something of the device; eigh reads whether it converged."""
ON_THE_HOST = {
    *(("radius.py", "solved"), ("radius.py", "support"), ("radius.py", "radius")),
    ("_norms.py", "_within"),
    ("undo.py", "_equal_on_the_host"),
}
"""Functions that work on what is on the CPU, such as a few rows that were brought there: they read no device."""
INDEXED = (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index)


class Waits(TorchDispatchMode):
    """Counts what would wait, by operation and by the line of the package that asked for it.

    Only calls from the monitor count: an optimizer's own step is its own affair.
    """

    def __init__(self, monkeypatch):
        super().__init__()
        self.seen = Counter()
        for name in ("tolist", "cpu"):
            monkeypatch.setattr(torch.Tensor, name, self._named(name), raising=False)

    def _named(self, name):
        original = getattr(torch.Tensor, name)

        def call(tensor, *args, **kwargs):
            self.note(name)
            return original(tensor, *args, **kwargs)

        return call

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        packet = func.overloadpacket
        if packet in WAITS:
            self.note(WAITS[packet])
        elif packet in INDEXED and any(getattr(i, "dtype", None) in (torch.bool, torch.uint8) for i in args[1]):
            self.note("boolean index")
        elif packet is aten.repeat_interleave and kwargs.get("output_size") is None:
            self.note("repeat_interleave")
        return func(*args, **(kwargs or {}))

    def note(self, operation):
        frames = [f for f in traceback.extract_stack() if PACKAGE in Path(f.filename).parents]
        if ON_THE_HOST & {(Path(f.filename).name, f.name) for f in frames}:
            return
        if any(Path(f.filename).parent.name == "monitor" for f in frames):
            last = frames[-1]
            self.seen[operation, f"{Path(last.filename).relative_to(PACKAGE)}:{last.lineno}", last.line] += 1

    def by_operation(self):
        total = Counter()
        for (operation, *_), number in self.seen.items():
            total[operation] += number
        return dict(total)

    @property
    def total(self):
        return sum(self.seen.values())

    def table(self):
        """Lines of code by the number of waits, for whoever has to reduce them."""
        lines = [f"{n:5} {where:32} {what:14} {code}" for (what, where, code), n in self.seen.most_common()]
        return "\n".join([f"{self.total} waits", *lines])


def waits_of_a_step(V, make, *, updates=3, **options):
    """What the last of a few updates waits for, and its record."""
    model = seeded(Plain, V=V, d=WIDTH)
    optimizer = AdamW(model.parameters(), lr=1e-3) if make == "torch" else pretraining_optimizer(model, make)
    draw = torch.Generator().manual_seed(1)
    text = (V * torch.rand(8, 33, generator=draw) ** 3).long()  # some tokens are frequent, most are not there
    panel = Panel.of_tokens(text, 200)
    with pytest.MonkeyPatch.context() as patched, Probe(model, optimizer, panel=panel, strict=True, **options) as probe:
        for update in range(1, updates + 1):
            optimizer.zero_grad()
            cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten()).backward()
            if update < updates:
                optimizer.step()
                probe.record()
        with Waits(patched) as waits:
            optimizer.step()
            record = probe.record()
    return waits, record


BRACKET = {"diameter_every": 0, "perturbation_every": 0, "bracket": True}
EXACT = {"diameter_every": 1, "perturbation_every": 0}
PERTURBATION = {"diameter_every": 0, "perturbation_every": 1, "bracket": False}


@pytest.mark.parametrize(("make", "most"), [("torch", 4), ("adamw", 4), ("rownorm", 2)])
def test_bounds_of_a_step_wait_a_few_times_whatever_the_vocabulary(make, most):
    """Two of an Adam head's are of its count of steps, which torch has on the host unless the kernel is fused."""
    found = [waits_of_a_step(V, make, updates=CHECKED + 1, **BRACKET) for V in SIZES]
    assert all(record.diameter_upper >= record.diameter_lower > 0 for _, record in found)
    small, large = (waits for waits, _ in found)
    assert large.total <= most, large.table()
    assert small.by_operation() == large.by_operation()


@pytest.mark.parametrize(("make", "updates"), [("torch", 8), ("adamw", 3), ("rownorm", 1), ("rownorm", 8)])
def test_an_exact_step_waits_for_its_hubs_and_not_for_every_row(make, updates):
    """The search reads back what each round left, and the rounds are as many as the hubs ask for.

    Measured on these increments: 31 to 49, of which some 15 are not the search's. A bound with room, since a pair more
    or less in the walk changes the rounds; nothing bounds them on a sphere, where every row is a hub.
    """
    for V in SIZES:
        waits, record = waits_of_a_step(V, make, updates=updates, **EXACT)
        assert record.diameter > 0
        assert waits.total <= 100, waits.table()


@pytest.mark.parametrize(("make", "most"), [("torch", 27), ("adamw", 27), ("rownorm", 26)])
def test_the_perturbation_of_a_panel_waits_a_few_times_whatever_the_vocabulary(make, most):
    """Eight of them read what the ranks have gathered, and two narrow the panel: all on the host already.

    Five tell what the step is worth: two numbers of the increment, and brackets of the head before and after it.
    """
    found = [waits_of_a_step(V, make, updates=CHECKED + 1, **PERTURBATION) for V in SIZES]
    assert all(record.perturbation_rms > 0 for _, record in found)
    small, large = (waits for waits, _ in found)
    assert large.total <= most, large.table()
    assert small.by_operation() == large.by_operation()


def test_a_step_that_is_not_measured_does_not_wait():
    waits, record = waits_of_a_step(2000, "torch", diameter_every=0, perturbation_every=0, bracket=False)
    assert record.diameter_lower is None
    assert waits.total == 0, waits.table()


def test_what_waits_is_seen_and_where():
    def states(model, batch):
        return model.hidden(batch)

    def waiting(model, batch):
        x = model.hidden(batch)
        float(x.sum()), x[x > 0], x[0, 0, 0].tolist(), x.nonzero(), torch.equal(x, x), x.cpu(), x[torch.tensor(1)]
        torch.linalg.eigh(x[0].T @ x[0])
        return x

    plain, more = (waits_of_a_step(2000, "rownorm", hidden=hidden, **PERTURBATION)[0] for hidden in (states, waiting))
    added = Counter(more.by_operation())
    added.subtract(plain.by_operation())
    batches = added["eigh"]
    assert batches > 0
    names = ("boolean index", "tolist", "nonzero", "equal", "cpu", "eigh")
    assert added == Counter(dict.fromkeys(names, batches) | {"item": 2 * batches})
    assert {where.partition(":")[0] for (what, where, _) in more.seen if what == "eigh"} == {"monitor/hidden.py"}
