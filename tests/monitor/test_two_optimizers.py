"""A head whose bias has an optimizer of its own, and optimizers that are replaced while they are watched."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW, RMSprop

from hilbert_monitor import Probe, watch
from tests.support.references import all_pairs_diameter

V, D = 50, 8


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(V, D), nn.Linear(D, D), nn.ReLU(), nn.Linear(D, V))


def backward(model, seed):
    tokens = torch.randint(V, (4, 9), generator=torch.Generator().manual_seed(seed))
    cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()


def rows(head):
    return torch.cat([head.weight, head.bias[:, None]], 1).detach().double()


@pytest.mark.parametrize("of_bias", [AdamW, SGD])
@pytest.mark.parametrize("of_weight", [AdamW, RMSprop])
@pytest.mark.parametrize("weight_first", [True, False])
def test_a_bias_with_an_optimizer_of_its_own_is_measured_in_its_updates_in_any_order(weight_first, of_weight, of_bias):
    decoder = model()
    head = decoder[3]
    others = [p for p in decoder.parameters() if p is not head.bias]
    optimizers = [of_weight(others, lr=1e-3, weight_decay=0.0), of_bias([head.bias], lr=1e-2, weight_decay=0.0)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Probe(decoder, optimizers, head="3", diameter_every=5, perturbation_every=0, strict=True) as probe:
            for update in range(1, 12):
                decoder.zero_grad()
                backward(decoder, update)
                before = rows(head)
                for optimizer in optimizers if weight_first else optimizers[::-1]:
                    optimizer.step()
                    optimizer.zero_grad()
                record = probe.record()
                assert (record.diameter is not None) == (update % 5 == 0)
                if record.diameter is not None:
                    assert record.diameter == pytest.approx(all_pairs_diameter(rows(head) - before), rel=1e-3)


def test_a_bias_whose_optimizer_makes_no_step_adds_nothing():
    decoder = model()
    head = decoder[3]
    weight = AdamW([p for p in decoder.parameters() if p is not head.bias], lr=1e-3, weight_decay=0.0)
    bias = AdamW([head.bias], lr=1.0, weight_decay=0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Probe(decoder, [weight, bias], head="3", diameter_every=1, perturbation_every=0, strict=True) as probe:
            for update in range(6):
                decoder.zero_grad()
                backward(decoder, update)
                before = rows(head)
                weight.step()
                if update < 2:
                    bias.step()
                record = probe.record()
                assert record.diameter == pytest.approx(all_pairs_diameter(rows(head) - before), rel=1e-3)


def test_the_first_steps_of_an_optimizer_that_takes_over_are_compared_with_the_weights():
    decoder = model()
    head = decoder[3].requires_grad_(True)
    decoder[3].bias.requires_grad_(False)
    first = AdamW(decoder.parameters(), lr=1e-3, weight_decay=0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Probe(decoder, first, head="3", diameter_every=100, perturbation_every=0, strict=True) as probe:
            optimizer = first
            for update in range(20):
                if update == 8:
                    optimizer = AdamW(decoder.parameters(), lr=1e-3, weight_decay=0.0)
                    optimizer.register_step_post_hook(lambda *_: head.weight.data.mul_(1.1))
                decoder.zero_grad()
                backward(decoder, update)
                optimizer.step()
                if not probe.stepped:
                    probe.notice_update([optimizer])
                probe.record()
            assert any("moves the head's weights" in remark or "away from where" in remark for remark in probe.remarks)


class Unhookable(AdamW):
    """Takes no hooks."""

    def register_step_pre_hook(self, hook):
        raise RuntimeError("no hooks here")


def test_a_run_whose_optimizer_takes_no_hooks_is_not_measured_and_goes_on():
    decoder = model()
    optimizer = Unhookable(decoder.parameters(), lr=1e-3)
    with pytest.warns(UserWarning, match=r"start failed \(RuntimeError: no hooks here\)"):
        run = watch(decoder, optimizer, head="3", run_dir=None).start()
    assert run.session.probe is None
    backward(decoder, 0)
    optimizer.step()
    run.step()
    run.close()
