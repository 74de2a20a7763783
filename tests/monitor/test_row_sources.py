"""Rows of the increment are formed on demand: no V x d matrix of the monitor's, and the same numbers in every form."""

import msgspec
import pytest
import torch
from torch import nn
from torch.nn.functional import linear
from torch.optim import SGD, AdamW

from hilbert_monitor import Probe
from hilbert_monitor.monitor import measure
from hilbert_monitor.monitor.panel import Panel
from hilbert_monitor.optim import RowNorm
from tests.support.allocations import Allocations
from tests.support.decoders import Plain, loss_of, seeded
from tests.support.references import all_pairs_diameter, deltas

V, D, SCALE = 61, 12, -0.5
TEXT = torch.randint(V, (4, 9), generator=torch.Generator().manual_seed(1))
MAKES = {
    "AdamW": lambda head, rest: AdamW([*head, *rest], lr=1e-2, weight_decay=0.1),
    "SGD with momentum": lambda head, rest: SGD([*head, *rest], lr=0.1, momentum=0.9),
    "RowNorm": lambda head, rest: RowNorm(head, lr=0.1),
}


# Nothing of V x d


@pytest.mark.parametrize("exact", [False, True], ids=["ordinary", "exact"])
@pytest.mark.parametrize("make", MAKES)
def test_a_step_of_the_monitor_allocates_no_matrix_of_the_vocabulary(make, exact):
    """Chunks on a CPU have a million entries, and V x d is four million: half of that is no chunk and no vector."""
    many, width = 65_536, 64

    def allocations(watched):
        model = seeded(Plain, V=many, d=width, blocks=0)
        head = model.lm_head.weight
        optimizer = MAKES[make]([head], [])
        options = {"diameter_every": int(exact), "perturbation_every": 0, "bounds": True, "strict": True}
        probe = Probe(model, optimizer, **options).attach() if watched else None
        for seed in range(3):  # of these the first makes the state
            optimizer.zero_grad()
            loss_of(model, seed, many).backward()
            with Allocations(many * width // 2) as seen:
                optimizer.step()
                record = probe.record() if watched else None
        if watched:
            assert record.increment_from == "state"
            assert (record.diameter is not None) == exact
            assert record.diameter_upper > 0
        return sorted(seen.made)

    assert allocations(True) == allocations(False)


# Every form of a head


class Stored(nn.Module):
    """A head stored as (d, V), with a bias."""

    def __init__(self, rows):
        super().__init__()
        self.weight, self.bias = nn.Parameter(0.3 * torch.randn(D, rows)), nn.Parameter(torch.randn(rows))

    def forward(self, x):
        return x @ self.weight + self.bias


class Bare(Plain):
    """A head that is a parameter of the model itself."""

    def __init__(self, **options):
        super().__init__(**options)
        del self.lm_head
        self.unembed = nn.Parameter(0.3 * torch.randn(V, D))

    def forward(self, tokens):
        return linear(self.hidden(tokens), self.unembed)


def stored(rows=V):
    model = Plain(V=V, d=D)
    model.lm_head = Stored(rows)
    return model


FORMS = {
    "plain": (lambda: Plain(V=V, d=D), {}),
    "padded": (lambda: Plain(V=V, d=D, head_rows=V + 7), {"vocab_size": V}),
    "bias": (lambda: Plain(V=V, d=D, bias=True), {}),
    "padded, with a bias": (lambda: Plain(V=V, d=D, bias=True, head_rows=V + 7), {"vocab_size": V}),
    "frozen bias": (lambda: Plain(V=V, d=D, bias=True), {}),
    "transposed, with a bias": (stored, {"head": "lm_head"}),
    "transposed, padded": (lambda: stored(V + 7), {"head": "lm_head", "vocab_size": V}),
    "bare": (lambda: Bare(V=V, d=D), {"head": "unembed", "hidden": lambda model, ids: model.hidden(ids)}),
}


def rows_of(model):
    """The head's weight (V, d) and its bias (V, 1), whole, in fp64."""
    head = getattr(model, "lm_head", None)
    U = model.unembed if head is None else head.weight.t() if isinstance(head, Stored) else head.weight
    bias = getattr(head, "bias", None)
    return U.detach().double()[:V].clone(), None if bias is None else bias.detach().double()[:V, None].clone()


@pytest.mark.parametrize("make", ["AdamW", "SGD with momentum"])
@pytest.mark.parametrize("form", FORMS)
def test_the_records_of_a_head_are_those_of_its_whole_matrices(form, make):
    """The increment as a matrix, formed outside of the monitor in fp64, makes the numbers of the record."""
    build, options = FORMS[form]
    model = seeded(build)
    if form == "frozen bias":
        model.lm_head.bias.requires_grad_(False)
    optimizer = MAKES[make]([p for p in model.parameters() if p.requires_grad], [])
    kept = 1 - 1e-2 * 0.1 if make == "AdamW" else 1.0
    options |= {"panel": Panel.of_tokens(TEXT, 20), "diameter_every": 1, "perturbation_every": 3, "logit_scale": SCALE}
    with Probe(model, optimizer, strict=True, **options) as probe:
        for update in range(3):
            optimizer.zero_grad()
            loss_of(model, update, V).backward()
            U, bias = rows_of(model)
            optimizer.step()
            record = probe.record()
    after, bias_after = rows_of(model)
    S, M = after - kept * U, after
    H = model.hidden(TEXT).detach().reshape(-1, D)[:20].double()
    extended = torch.cat([H, torch.ones(len(H), 1)], 1)
    if bias is not None:
        M = torch.cat([M, bias_after], 1)
    if bias is not None and form != "frozen bias":
        S = torch.cat([S, bias_after - kept * bias], 1)
    S, M, states = SCALE * S, SCALE * M, extended if S.shape[1] > D else H
    logits = (extended if M.shape[1] > D else H) @ M.T
    assert record.diameter == pytest.approx(all_pairs_diameter(S), rel=1e-4)
    assert record.perturbation_rms == pytest.approx(float(deltas(S, states).square().mean().sqrt()), rel=1e-4)
    assert record.row_norm == pytest.approx(float(S.norm(dim=1).max()), rel=1e-4)
    assert record.log_z_rms == pytest.approx(float(logits.logsumexp(1).square().mean().sqrt()), rel=1e-4)
    assert record.logit_max == pytest.approx(float(logits.abs().max()), rel=1e-4)
    assert record.head_row_norm == pytest.approx(abs(SCALE) * float(after.norm(dim=1).mean()), rel=1e-4)
    assert record.spectral_norm >= float(torch.linalg.matrix_norm(S, 2)) * (1 - 1e-5)
    whole = measure.exact_diameter(S.float()) | measure.increment_quality(S.float())
    for name in ("radius", "gauge_waste", "spectral_norm"):
        assert getattr(record, name) == pytest.approx(whole[name], rel=1e-2), name
    assert msgspec.json.decode(msgspec.json.encode(record), type=type(record)) == record
