"""Models that Accelerate shards by FSDP2, in a loop of one's own and in Hugging Face's Trainer.

Accelerate chooses DDP for CPUs: its state is set by hand. What it then does is its own.
"""

import pytest
import torch

import hilbert_monitor
from tests.support.adapters import OPTIONS, Model, items, loader, rank_environment
from tests.support.ranks import in_ranks
from tests.support.references import all_pairs_diameter
from tests.support.sinks import Recorder

accelerate = pytest.importorskip("accelerate")
pytestmark = pytest.mark.filterwarnings("ignore")
UPDATES, ROWS = 4, 4


def sharding(accelerator):
    """Let an Accelerator shard by FSDP2."""
    accelerator.state.distributed_type = accelerate.utils.DistributedType.FSDP
    accelerator.state.fsdp_plugin = accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        cpu_ram_efficient_loading=False,
        state_dict_type="SHARDED_STATE_DICT",
    )
    return accelerator


class Heads:
    """Copies of a sharded head before each update, and after the last."""

    def __init__(self, head):
        self.head, self.copies = head, []

    def copy(self):
        self.copies.append(self.head().full_tensor().detach().double())

    def diameters(self):
        return [all_pairs_diameter(after - before) for before, after in zip(self.copies, self.copies[1:], strict=False)]


def loop(rank, world, folder, kept):
    model = Model(0.0)
    accelerator = sharding(accelerate.Accelerator(cpu=True))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0))
    heads = Heads(lambda: model.decoder.lm_head.weight)
    with hilbert_monitor.watch(
        model, optimizer, panel=loader(1, 16), sinks=[kept], run_dir=None, **OPTIONS | {"diameter_every": 1}
    ) as run:
        for batch in loader(0, ROWS * UPDATES, rank, world):
            heads.copy()
            loss = model(**batch)["loss"]
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            run.step(loss)
    heads.copy()
    return heads.diameters()


def trainer(rank, world, folder, kept):
    import transformers

    from hilbert_monitor.integrations.transformers import HilbertCallback

    args = transformers.TrainingArguments(
        output_dir=folder, max_steps=UPDATES, per_device_train_batch_size=ROWS, learning_rate=1e-2, report_to=[],
        use_cpu=True, disable_tqdm=True, save_strategy="no", lr_scheduler_type="constant", max_grad_norm=0.5,
    )  # fmt: skip
    trained = transformers.Trainer(
        Model(0.0), args, train_dataset=items(0, 64), eval_dataset=items(1, 16), callbacks=[]
    )
    sharding(trained.accelerator)
    trained.is_fsdp_enabled = True
    heads = Heads(lambda: trained.model.decoder.lm_head.weight)

    class Copies(transformers.TrainerCallback):
        def on_step_begin(self, *_, **__):
            heads.copy()

    trained.add_callback(Copies())
    HilbertCallback(panel=loader(1, 16), sinks=[kept], run_dir=None, **OPTIONS | {"diameter_every": 1}).attach(trained)
    trained.train()
    heads.copy()
    return heads.diameters()


def records_of_a_rank(rank, world, train, folder):
    rank_environment(rank, world)
    kept = Recorder()
    diameters = train(rank, world, folder, kept)
    return diameters, [(record.diameter, record.perturbation_rms, record.train_loss) for record in kept.records]


@pytest.mark.few(1)
@pytest.mark.parametrize("train", [loop, trainer], ids=["loop", "Trainer"])
def test_a_head_that_accelerate_shards_is_measured_where_its_rows_are(train, tmp_path):
    (diameters, records), (others, nothing) = in_ranks(records_of_a_rank, tmp_path, train, str(tmp_path))
    assert diameters == others
    assert nothing == []
    assert [record[0] for record in records] == pytest.approx(diameters, rel=1e-4)
    assert records[-1][1] > 0
    assert records[-1][2] > 0
