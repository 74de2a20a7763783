"""`hilbert-monitor inspect`: every kind of checkpoint gives the head's numbers, and every broken one a sentence."""

import argparse
import json
import struct
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW
from typer.testing import CliRunner

from hilbert_monitor import ChainedOptimizer, Muon, RowNorm
from hilbert_monitor.cli import app
from hilbert_monitor.inspection.look import look
from hilbert_monitor.inspection.safetensors_file import SafetensorsFile
from hilbert_monitor.inspection.tensor_store import CheckpointError
from tests.support.decoders import Plain, Tied, loss_of, seeded
from tests.support.references import all_pairs_diameter
from tests.support.training import Module, fit

V, D = 61, 12


def trained(make=lambda m: AdamW(m.parameters(), lr=1e-2), kind=Plain, updates=5, **options):
    """A decoder and its optimizer after a few updates."""
    model = seeded(kind, V=V, d=D, **options)
    optimizer = make(model)
    for update in range(updates):
        optimizer.zero_grad()
        loss_of(model, update, V).backward()
        optimizer.step()
    return model, optimizer


def chained(head):
    """The head's optimizer beside AdamW for the rest."""

    def make(model):
        rest = [p for p in model.parameters() if p is not model.lm_head.weight]
        return ChainedOptimizer(AdamW(rest, lr=1e-2), head([model.lm_head.weight]))

    return make


def step_of_zero_gradient(model, optimizer):
    """What the optimizer's own next step does to the head, decay off, when the gradient is zero."""
    head = model.lm_head.weight
    with torch.no_grad():
        head.zero_()
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0
        for p in group["params"]:
            p.grad = torch.zeros_like(p)
    optimizer.step()
    return head.detach().double()


def run(*args):
    """Run the command; return its exit code and its output, without the frame and the breaks of its lines."""
    done = CliRunner().invoke(app, ["inspect", *map(str, args)], env={"TERMINAL_WIDTH": "1000", "COLUMNS": "1000"})
    return done.exit_code, " ".join(done.output.replace("│", " ").split())


def refused(path, **options):
    with pytest.raises(CheckpointError) as error:
        look(path, **options)
    return str(error.value)


# Kinds of files


def test_a_head_has_its_diameter_tokens_and_norms(tmp_path):
    model, _ = trained()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    found, U = look(tmp_path / "model.pt"), model.lm_head.weight.detach().double()
    assert (found.head, found.tokens, found.width, found.dtype) == ("lm_head.weight", V, D, "float32")
    assert found.diameter == pytest.approx(all_pairs_diameter(U), rel=1e-6)
    assert float((U[found.pair[0]] - U[found.pair[1]]).norm()) == pytest.approx(found.diameter, rel=1e-6)
    assert found.mean_row == pytest.approx(float(U.mean(0).norm()), rel=1e-5)
    assert found.row_norm == pytest.approx(float(U.norm(dim=1).mean()), rel=1e-6)
    assert found.spectral_norm == pytest.approx(float(torch.linalg.matrix_norm(U, 2)), rel=1e-6)
    assert (found.tied, found.bias, found.next) == ("", False, None)


def test_a_lightning_checkpoint_has_its_update_and_its_optimizer(tmp_path):
    module = Module("torch")
    fit(module)
    module.trainer.save_checkpoint(tmp_path / "last.ckpt")
    found = look(tmp_path / "last.ckpt", efficiency=0)
    assert (found.kind, found.step) == ("Lightning", module.trainer.global_step)
    assert found.head == "model.lm_head.weight"
    assert found.diameter == pytest.approx(all_pairs_diameter(module.model.lm_head.weight), rel=1e-6)
    assert found.next.optimizer == "AdamW"


@pytest.fixture(scope="module")
def hugging_face(tmp_path_factory):
    """Folders of Hugging Face: whole, in shards, as a pickle, and tied, with the trained models."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("hugging face")
    sizes = {"vocab_size": 97, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "logits_scaling": 4.0}
    torch.manual_seed(0)
    model = transformers.GraniteForCausalLM(transformers.GraniteConfig(**sizes, **heads, tie_word_embeddings=False))
    optimizer = AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        ids = torch.randint(97, (4, 8))
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    model.save_pretrained(folder / "checkpoint-3")
    model.save_pretrained(folder / "shards", max_shard_size="4KB")
    torch.save(optimizer.state_dict(), folder / "checkpoint-3" / "optimizer.pt")
    (folder / "pickle").mkdir()
    torch.save(model.state_dict(), folder / "pickle" / "pytorch_model.bin")
    (folder / "pickle" / "config.json").write_text(json.dumps(model.config.to_dict()))
    tied = transformers.GraniteForCausalLM(transformers.GraniteConfig(**sizes, **heads, tie_word_embeddings=True))
    tied.save_pretrained(folder / "tied")
    return SimpleNamespace(folder=folder, model=model, tied=tied, optimizer=optimizer)


@pytest.mark.parametrize("name", ["checkpoint-3", "shards", "pickle"])
def test_a_folder_of_hugging_face_is_read_whole_or_in_shards_with_its_logit_scale(hugging_face, name):
    found = look(hugging_face.folder / name, efficiency=0)
    expected = all_pairs_diameter(hugging_face.model.lm_head.weight) / 4
    assert (found.diameter, found.logit_scale) == (pytest.approx(expected, rel=1e-6), 0.25)
    assert found.tied == ""
    assert (len(list(hugging_face.folder.joinpath(name).glob("*.safetensors"))) > 1) == ("shards" in found.kind)


def test_in_a_sorted_file_the_heads_moments_are_those_whose_rows_sum_to_zero(hugging_face):
    found = look(hugging_face.folder / "checkpoint-3", efficiency=0)
    assert (found.step, found.next.count) == (3, 4)
    S = step_of_zero_gradient(hugging_face.model, hugging_face.optimizer)
    assert found.next.diameter == pytest.approx(all_pairs_diameter(S) / 4, rel=1e-4)
    assert "rows sum to zero" in found.next.matched


def test_a_head_that_a_file_does_not_have_is_the_embedding(hugging_face):
    found = look(hugging_face.folder / "tied")
    assert found.head == found.tied == "model.embed_tokens.weight"
    assert found.diameter == pytest.approx(all_pairs_diameter(hugging_face.tied.lm_head.weight) / 4, rel=1e-6)


def test_tied_tensors_of_a_torch_file_are_seen(tmp_path):
    model, _ = trained(kind=Tied)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    assert look(tmp_path / "model.pt").tied == "embed.weight"


def test_texts_of_tokens_come_from_a_tokenizer_beside_the_weights(tmp_path):
    from tokenizers import Tokenizer, models

    model, _ = trained()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    Tokenizer(models.WordLevel({f"word{i}": i for i in range(V)}, unk_token="word0")).save(
        str(tmp_path / "tokenizer.json")
    )
    found = look(tmp_path / "model.pt")
    assert found.pair_text == tuple(f"word{token}" for token in found.pair)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "is not a tokenizer.json" in refused(tmp_path / "model.pt")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_a_head_of_less_precision_is_measured_as_it_is_stored(tmp_path, dtype):
    U = torch.randn(40, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    torch.save({"model": {"lm_head.weight": U}}, tmp_path / "model.pt")
    assert look(tmp_path / "model.pt").diameter == pytest.approx(all_pairs_diameter(U.float()), rel=1e-6)


def test_a_head_stored_as_d_by_V_is_recognised_by_the_vocabulary_and_padding_is_left_out(tmp_path):
    U = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
    torch.save({"embed.weight": torch.randn(40, 8), "unembed": U.t().contiguous()}, tmp_path / "model.pt")
    found = look(tmp_path / "model.pt", vocab_size=37)
    assert (found.transposed, found.tokens, found.width) == (True, 37, 8)
    assert found.diameter == pytest.approx(all_pairs_diameter(U[:37]), rel=1e-6)


def test_nothing_but_the_head_is_read_of_a_safetensors_file(tmp_path):
    U, huge = torch.randn(40, 8, generator=torch.Generator().manual_seed(0)), 2**40
    header = {
        "model.layers.0.weight": {"dtype": "F32", "shape": [2**19, 2**19], "data_offsets": [0, huge]},
        "lm_head.weight": {"dtype": "F32", "shape": [40, 8], "data_offsets": [huge, huge + 1280]},
    }
    text = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:  # a terabyte, of which nearly all is a hole
        file.write(struct.pack("<Q", len(text)) + text)
        file.seek(huge, 1)
        file.write(U.numpy().tobytes())
    assert look(tmp_path / "model.safetensors").diameter == pytest.approx(all_pairs_diameter(U), rel=1e-6)


def test_our_reader_of_safetensors_reads_what_theirs_writes(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    tensors = {
        "a": torch.randn(3, 4).bfloat16(), "b": torch.arange(5), "empty": torch.empty(0, 3), "c": torch.tensor([True]),
        "scalar": torch.tensor(2.5, dtype=torch.float64), "odd": torch.arange(3, dtype=torch.int8),
    }  # fmt: skip
    safetensors.save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    file = SafetensorsFile(tmp_path / "x.safetensors")
    assert set(file.infos) == set(tensors)
    for name, x in tensors.items():
        torch.testing.assert_close(file.load(name), x)


# The next step


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda m: AdamW(m.parameters(), lr=1e-2), "AdamW"),
        (lambda m: Adam(m.parameters(), lr=1e-2, amsgrad=True, betas=(0.8, 0.9)), "Adam"),
        (lambda m: SGD(m.parameters(), lr=0.1, momentum=0.9), "SGD"),
        (lambda m: SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True), "SGD"),
        (chained(lambda head: RowNorm(head, lr=3e-3)), "RowNorm"),
        (chained(lambda head: RowNorm(head, lr=3e-3, center="both", weight_decay=0.1)), "RowNorm"),
        (chained(lambda head: Muon(head, lr=3e-3)), "Muon"),
        (lambda m: AdamW(m.named_parameters(), lr=1e-2), "AdamW"),
    ],
)
def test_the_next_step_is_that_of_the_optimizer_given_a_zero_gradient(tmp_path, make, name):
    model, optimizer = trained(make)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 5}, tmp_path / "model.pt")
    found = look(tmp_path / "model.pt", efficiency=0.05).next
    S = step_of_zero_gradient(model, optimizer)
    assert found.optimizer == name
    assert found.diameter == pytest.approx(all_pairs_diameter(S), rel=1e-4)
    assert float((S[found.pair[0]] - S[found.pair[1]]).norm()) == pytest.approx(found.diameter, rel=1e-4)
    assert found.spectral_norm == pytest.approx(float(torch.linalg.matrix_norm(S, 2)), rel=1e-4)
    assert 0 <= found.efficiency_lower <= found.efficiency_upper <= 1 + 1e-6
    if name in ("RowNorm", "Adam", "AdamW"):
        assert 0 < found.saturation <= 1 + 1e-6
        assert found.saturation == pytest.approx(found.diameter / found.ceiling)


def test_moments_that_may_be_an_embeddings_are_not_taken(tmp_path):
    model, optimizer = trained(lambda m: AdamW([m.embed.weight], lr=1e-2))  # the head is frozen
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "model.pt")
    found = look(tmp_path / "model.pt")
    assert found.next is None
    assert "was not told apart" in found.remarks[0]


def test_an_optimizer_that_is_not_known_makes_no_step(tmp_path):
    model, optimizer = trained(lambda m: torch.optim.NAdam(m.parameters(), lr=1e-2))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "model.pt")
    found = look(tmp_path / "model.pt")
    assert found.next is None
    assert "the step it makes is not known" in found.remarks[0]


# Errors


def test_a_file_that_is_no_checkpoint_is_refused_in_a_sentence(tmp_path):
    (tmp_path / "notes.txt").write_text("nothing")
    assert "is not a checkpoint, or is " in refused(tmp_path / "notes.txt")
    assert "does not exist" in refused(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    assert "is not a folder of Hugging Face" in refused(tmp_path / "empty")
    torch.save({"loss": 1.0}, tmp_path / "loss.pt")
    assert "has no model's weights: it is a dict with 'loss'" in refused(tmp_path / "loss.pt")
    (tmp_path / "x.safetensors").write_bytes(b"\xff" * 40)
    assert "is not a safetensors file" in refused(tmp_path / "x.safetensors")


@pytest.mark.parametrize("kept", [4, 40, 0.5])
def test_truncated_files_are_said_to_be_so(tmp_path, hugging_face, kept):
    for source, name in (("checkpoint-3/model.safetensors", "a.safetensors"), ("pickle/pytorch_model.bin", "a.bin")):
        data = (hugging_face.folder / source).read_bytes()
        (tmp_path / name).write_bytes(data[: kept if isinstance(kept, int) else int(kept * len(data))])
        assert "truncated" in (text := refused(tmp_path / name)) or "not a safetensors file" in text


def test_a_missing_shard_is_named(tmp_path, hugging_face):
    for path in (hugging_face.folder / "shards").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "model-00002-of-00002.safetensors").unlink(missing_ok=True)
    shard = sorted(tmp_path.glob("*.safetensors"))[-1]
    shard.unlink()
    assert f"such as {shard.name}: download" in refused(tmp_path)


class Settings:
    """A class of the user, in a checkpoint."""


def test_objects_that_would_run_code_are_named_and_need_trust(tmp_path):
    model, _ = trained()
    torch.save({"model": model.state_dict(), "settings": Settings()}, tmp_path / "model.pt")
    text = refused(tmp_path / "model.pt")
    assert "holds an object of tests.inspection.test_inspect.Settings" in text
    assert "pass --trust" in text
    assert look(tmp_path / "model.pt", trust=True).tokens == V
    torch.save({"model": model.state_dict(), "args": argparse.Namespace(lr=1)}, tmp_path / "model.pt")
    assert "argparse.Namespace" in refused(tmp_path / "model.pt")


def test_a_head_that_cannot_be_told_is_asked_for_with_the_candidates_by_shape(tmp_path):
    model = nn.ModuleDict({"embed": nn.Embedding(40, 8), "one": nn.Linear(8, 40), "two": nn.Linear(8, 40)})
    torch.save(model.state_dict(), tmp_path / "model.pt")
    text = refused(tmp_path / "model.pt")
    assert "could not tell which tensor is the LM head: pass --head with one of" in text
    assert "two.weight (40, 8)" in text
    found = look(tmp_path / "model.pt", head="two")
    assert (found.head, found.bias) == ("two.weight", True)
    assert "has no matrix 'three'" in refused(tmp_path / "model.pt", head="three")


def test_folders_of_other_kinds_say_what_to_do(tmp_path):
    (tmp_path / ".metadata").write_bytes(b"")
    assert "dcp_to_torch" in refused(tmp_path)
    (tmp_path / ".metadata").rename(tmp_path / "adapter_config.json")
    assert "merge_and_unload" in refused(tmp_path)


# The command


def test_several_checkpoints_are_a_table_a_figure_and_json(tmp_path):
    for updates in (2, 4):
        model, optimizer = trained(updates=updates)
        content = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": updates}
        torch.save(content, tmp_path / f"step{updates}.pt")
    paths = [tmp_path / "step2.pt", tmp_path / "step4.pt"]
    for figure in ("f.svg", "f.html"):
        code, shown = run(*paths, "--efficiency", 0, "--figure", tmp_path / figure, "--json", tmp_path / "f.json")
        assert code == 0, shown
        assert "next D(S)" in (tmp_path / figure).read_text()
    assert "step2.pt" in shown
    assert "the next gradient is zero" in shown
    rows = json.loads((tmp_path / "f.json").read_text())
    assert [row["step"] for row in rows] == [2, 4]
    assert f"{rows[1]['next']['diameter']:.4g}" in shown


def test_one_checkpoint_is_shown_in_full_and_errors_are_one_sentence(tmp_path):
    model, optimizer = trained()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 5}, tmp_path / "model.pt")
    code, shown = run(tmp_path / "model.pt", "--efficiency", 0.02)
    assert code == 0
    assert "lm_head.weight: 61 tokens x 12, float32" in shown
    assert "of the ceiling" in shown
    assert "of the best descent" in shown
    code, shown = run(tmp_path / "absent.pt")
    assert code == 2
    assert "does not exist" in shown
    assert "Traceback" not in shown
    assert "ends in .svg or .html" in run(tmp_path / "model.pt", "--figure", tmp_path / "f.png")[1]


def test_a_checkpoint_that_cannot_be_read_is_named_and_the_others_are_shown(tmp_path):
    for updates in (2, 4):
        model, _ = trained(updates=updates)
        torch.save({"model": model.state_dict(), "step": updates}, tmp_path / f"step{updates}.pt")
    (tmp_path / "torn.pt").write_bytes((tmp_path / "step2.pt").read_bytes()[:1000])
    names = ("step2.pt", "torn.pt", "absent.pt", "step4.pt")
    code, shown = run(*(tmp_path / name for name in names), "--json", tmp_path / "f.json")
    assert code == 2
    table, complaint = shown.split("written to", 1)
    assert "step2.pt" in table
    assert "step4.pt" in table
    assert "torn.pt" in complaint
    assert "absent.pt does not exist" in complaint
    assert "the other 2 of 4 are shown above" in complaint
    assert "Traceback" not in shown
    assert [row["step"] for row in json.loads((tmp_path / "f.json").read_text())] == [2, 4]


def test_a_stacked_figure_has_room_for_each_of_its_parts(tmp_path):
    model, optimizer = trained(updates=2)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 2}, tmp_path / "m.pt")
    assert run(tmp_path / "m.pt", "--efficiency", 0, "--figure", tmp_path / "f.svg")[0] == 0
    outer = ElementTree.fromstring((tmp_path / "f.svg").read_text())
    _, _, width, height = map(float, outer.get("viewBox").split())
    bottom = 0.0
    for part in outer:
        assert float(part.get("y")) >= bottom
        assert float(part.get("width")) <= width  # in units of the outer one: a point would be 4/3 of one
        bottom = float(part.get("y")) + float(part.get("height"))
    assert (len(outer), bottom) == (2, height)


def test_checkpoints_that_a_shell_sorted_by_name_are_shown_by_their_updates(tmp_path):
    for updates in (1, 2):
        torch.save(
            {"model": trained(updates=updates)[0].state_dict(), "step": updates * 5}, tmp_path / f"m{updates}.pt"
        )
    shown = run(tmp_path / "m2.pt", tmp_path / "m1.pt")[1]
    assert shown.index("m1.pt") < shown.index("m2.pt")


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [4, 4]},
        {"dtype": "F32", "shape": [4, 40], "data_offsets": [0, 64]},
        {"dtype": "F32", "shape": [4, 4], "data_offsets": [-64, 0]},
        {"dtype": "F32", "shape": [4, 4], "data_offsets": ["a", "b"]},
        7,
    ],
    ids=["no offsets", "another shape", "before the file", "no numbers", "no entry"],
)
def test_a_header_that_describes_no_tensor_is_refused(entry, tmp_path):
    header = json.dumps({"lm_head.weight": entry}).encode()
    (tmp_path / "m.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(64))
    assert "is damaged: its header describes 'lm_head.weight'" in refused(tmp_path / "m.safetensors")


def test_a_header_that_is_a_list_is_refused(tmp_path):
    (tmp_path / "m.safetensors").write_bytes(struct.pack("<Q", 2) + b"[]")
    assert "its header is no table" in refused(tmp_path / "m.safetensors")


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_pointer_of_git_lfs_is_called_one(name, tmp_path):
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n")
    assert "git lfs pull" in refused(tmp_path)


def test_a_model_that_was_saved_as_an_object_is_read_if_it_is_trusted(tmp_path):
    model, _ = trained(updates=1)
    for content in (model, {"model": model}):
        torch.save(content, tmp_path / "m.pt")
        assert "--trust" in refused(tmp_path / "m.pt")
        assert look(tmp_path / "m.pt", trust=True).head == "lm_head.weight"


def test_an_empty_head_and_more_tokens_than_rows_are_refused(tmp_path):
    torch.save({"lm_head.weight": torch.zeros(0, 8)}, tmp_path / "m.pt")
    assert "is empty, (0, 8)" in refused(tmp_path / "m.pt")
    torch.save({"lm_head.weight": torch.zeros(9, 8)}, tmp_path / "m.pt")
    assert "at most the 9 rows" in refused(tmp_path / "m.pt", vocab_size=10)


def test_a_folder_of_checkpoints_names_them(tmp_path):
    for number in (10, 2):
        (tmp_path / f"checkpoint-{number}").mkdir()
    assert "has 2 checkpoints" in (why := refused(tmp_path))
    assert "checkpoint-10" in why


def test_a_file_that_may_not_be_read_or_written_is_a_sentence(tmp_path, monkeypatch):
    torch.save({"lm_head.weight": torch.zeros(9, 8)}, tmp_path / "m.pt")
    code, shown = run(tmp_path / "m.pt", "--json", tmp_path / ("x" * 300))
    assert (code, "cannot write: " in shown) == (2, True)

    def forbidden(path, *_, **__):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(torch, "load", forbidden)
    code, shown = run(tmp_path / "m.pt")
    assert (code, "cannot read: " in shown, "truncated" in shown) == (2, True, False)
