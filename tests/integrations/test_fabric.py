"""`watch` of Fabric: what is particular about its loops."""

import pytest
import torch
from lightning.fabric import Fabric

from hilbert_monitor.integrations import fabric as hilbert
from tests.support.decoders import Plain, loss_of, seeded
from tests.support.sinks import Recorder

OPTIONS = {"run_dir": None, "strict": True, "diameter_every": 1}


def fabric_of(**options):
    fabric = Fabric(accelerator="cpu", devices=1, **options)
    return fabric, *set_up(fabric)


def set_up(fabric):
    model = seeded(Plain)
    return fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))


def update(fabric, model, optimizer, number=0):
    loss = loss_of(model, number)
    fabric.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def test_steps_of_another_optimizer_of_the_same_fabric_are_none_of_the_run():
    fabric, model, optimizer = fabric_of(callbacks=[object()])  # a list that all its optimizers share
    other = set_up(fabric)
    with hilbert.watch(fabric, model, optimizer, **OPTIONS) as run:
        update(fabric, model, optimizer)
        update(fabric, *other)
    assert run.loop.updates == 1


def test_losses_of_two_models_of_one_fabric_are_told_apart_also_where_gradients_are_accumulated():
    fabric, model, optimizer = fabric_of()
    other, other_optimizer = set_up(fabric)
    first, second, expected = Recorder(), Recorder(), []
    with (
        hilbert.watch(fabric, model, optimizer, sinks=[first], **OPTIONS),
        hilbert.watch(fabric, other, other_optimizer, sinks=[second], **OPTIONS),
    ):
        for number in range(0, 6, 2):
            losses = [loss_of(model, number), loss_of(other, 50 + number)]
            losses += [loss_of(model, number + 1), loss_of(other, 51 + number)]
            for loss in losses:
                fabric.backward(loss)
            for one in (optimizer, other_optimizer):
                one.step()
                one.zero_grad(set_to_none=number == 0)
            expected.append([loss.item() for loss in losses])
    assert [record.train_loss for record in first.records] == pytest.approx([a + c for a, _, c, _ in expected])
    assert [record.train_loss for record in second.records] == pytest.approx([b + d for _, b, _, d in expected])


def test_a_run_that_ends_before_a_later_one_leaves_it_its_losses():
    fabric, model, optimizer = fabric_of()
    kept = Recorder()
    first = hilbert.watch(fabric, model, optimizer, **OPTIONS).start()
    second = hilbert.watch(fabric, model, optimizer, sinks=[kept], **OPTIONS).start()
    first.close()
    loss = update(fabric, model, optimizer)
    second.close()
    assert kept.records[-1].train_loss == pytest.approx(loss)


def test_a_call_of_step_as_other_loops_need_it_adds_nothing():
    fabric, model, optimizer = fabric_of()
    kept = Recorder()
    with hilbert.watch(fabric, model, optimizer, sinks=[kept], **OPTIONS) as run:
        run.start()  # nor does this
        losses = []
        for number in range(2):
            losses.append(update(fabric, model, optimizer, number))
            run.step(losses[-1], tokens=7)
    assert [record.train_loss for record in kept.records] == pytest.approx(losses)
    assert run.loop.updates == 2


def test_fabric_comes_first():
    fabric, model, optimizer = fabric_of()
    with pytest.raises(TypeError, match="Fabric comes first"):
        hilbert.watch(model, fabric, optimizer)
