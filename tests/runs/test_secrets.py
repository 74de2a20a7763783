"""Values that look like secrets are masked, and settings of a model are not."""

import time
from dataclasses import dataclass

import pytest

from hilbert_monitor.runs.files import to_json
from hilbert_monitor.runs.secrets import mask_message, mask_secrets

SECRET = "sk-4711-XyZ"


@pytest.mark.parametrize(
    "config",
    [
        *({"api_key": SECRET}, {"wandb": {"apiKey": SECRET}}, {"HF_TOKEN": SECRET}, {"hub-token": [SECRET]}),
        *({"aws.secret": {"id": 1, "value": SECRET}}, {"password": 4711, "pwd": SECRET}, {"credentials": SECRET}),
        {"database": f"postgresql://me:{SECRET}@db.example:5432/runs"},
        {"database": f"redis://:p@ss/{SECRET}@cache"},
        {"store": [f"see https://me:{SECRET}@store.example/a and more"]},
        {"url": f"https://store.example/upload?user=me&token={SECRET}&part=1"},
        *({"command": f"train.py --api-key={SECRET} --lr 0.1"}, {"command": f"train.py --api-key {SECRET} --lr 0.1"}),
        {"argv": ["train.py", "--api-key", SECRET, "--lr", "0.1"]},
        {"cfg": f"{{'lr': 0.1, 'logger': {{'api_key': '{SECRET}', 'name': 'a'}}}}"},
        *({"cfg": f'{{"token": "{SECRET} with a space"}}'}, {"cfg": f"Namespace(lr=0.1, api_key='{SECRET}...cut"}),
        *({"headers": {"Authorization": f"Bearer {SECRET}"}}, {"headers": f"Authorization: Bearer {SECRET}"}),
        {"access_tokens": [SECRET], "ssh_keys": [SECRET]},
        {"cfg": f"Config(logger=Logger(lr=0.1, api_key='{SECRET}'))"},
        {"cfg": f"api_key=SecretStr('{SECRET}'), lr=0.1"},
        {"cfg": f"{{'api_key': b'{SECRET}', 'token': ['{SECRET}']}}"},
        {"cfg": f"{{'credentials': {{'user': 'a', 'value': '{SECRET}'}}}}"},
        *({"cfg": repr({"password": f"""a'b"{SECRET}"""})}, {"cfg": f"password  =  {SECRET}"}),
        *({"pairs": [["api_key", SECRET], ["lr", 0.1]]}, {"env": [{"name": "HF_TOKEN", "value": SECRET}]}),
        *({"argv": ["train.py", "-api-key", SECRET]}, {"keys": {"openai": SECRET}}),
        {"PGPASSWORD": SECRET, "dbpassword": SECRET, "clientsecret": SECRET, "db_pass": SECRET},
        {"hftoken": SECRET, "accesstoken": SECRET, "wandbapikey": SECRET, "audio_api_key": SECRET},
        *({f"https://me:{SECRET}@store.example": 1}, {"note": f"logged in with sk-proj-abcdefghijklmnop{SECRET}"}),
        {"clone": f"https://ghp_abcdefghijklmnop{SECRET}@git.example/me/repo"},
        {"key_text": f"-----BEGIN RSA PRIVATE KEY-----\n{SECRET}\n-----END RSA PRIVATE KEY-----"},
        *({"wandb_api_key": "deadbeefdeadbeef4711"}, {"api_key": 10**16 + 4711}),
    ],
)
def test_a_secret_is_masked(config):
    text = str(mask_secrets(config))
    assert SECRET not in text
    assert "4711" not in text
    assert "***" in text


def test_the_rest_of_a_text_stays():
    masked = mask_secrets({"command": f"train.py --lr 0.1 --token={SECRET} --seed 3"})
    assert masked == {"command": "train.py --lr 0.1 --token=*** --seed 3"}
    assert mask_secrets(f"postgresql://me:{SECRET}@db:5432/runs") == "postgresql://***@db:5432/runs"


def test_settings_of_a_model_stay():
    config = {
        "tokenizer": "gpt2",
        "tokens": {"eos_token": "</s>", "pad_token_id": 0, "start_token": "<s>", "stop_tokens": ["</s>", "<|end|>"]},
        "numbers": {"max_tokens": 10**9, "num_key_value_heads": 8, "max_new_tokens": "4096", "train_tokens": "10B"},
        "none": {"token": None, "use_auth_token": False, "api_key": "", "pass": None},
        "passes": {"num_pass": 5, "forward_pass": "fused-kernel.v2"},
        "keys": ["image", "label"],
        "names": {"keyboard": "qwerty", "monkey": "a", "text_key": "caption", "key_norm": {"eps": 1e-6}},
        "optimizer": {"lr": 1e-3, "betas": [0.9, 0.95]},
        "data": "s3://bucket/tokens/train:v2",
        "note": "max_tokens=100, lr=0.1, remote git@example.com:me/repo",
        "time": "12:30",
        "about": {"token_dropout": "a-b-c", "include_num_input_tokens_seen": "no", "suppress_tokens": [1, 2, 220]},
        "kinds": {"token_type": "bpe", "tokens_path": "/data/tokens.bin"},
        "layer": "Attention(key=Linear(in_features=4, out_features=4), value=Linear(4, 4))",
        "urls": ["http://localhost:8000/users/me@example.com", "http://a:80/,http://b:81/x"],
    }
    assert mask_secrets(config) == config


def test_names_that_are_given_win():
    assert mask_secrets({"pin": 17, "deep": {"pin": "a"}}, ["pin"]) == {"pin": "***", "deep": {"pin": "***"}}
    assert mask_secrets({"name": "lr", "value": 3}, ["value"]) == {"name": "lr", "value": "***"}


@dataclass
class Logger:
    api_key: str


def test_a_secret_in_a_dataclass_is_masked():
    assert mask_secrets(to_json({"settings": [Logger(SECRET)]})) == {"settings": ["Logger(api_key='***')"]}


def test_a_message_keeps_names_of_parameters_and_loses_secrets():
    text = "size mismatch for token_embedding.weight: copying a param with shape torch.Size([4])"
    for message, shown in (
        (f"refused: api_key={SECRET}", "refused: api_key=***"),
        (f"refused: {{'token': '{SECRET}'}}", "refused: {'token': '***'}"),
        (text, text),
        ("password: hunter2", "password: ***"),
        ("Authorization: Bearer abcdefgh1234567890", "Authorization: Bearer ***"),
    ):
        assert mask_message(message) == shown


PIECES = ["a", "-", "--a ", "--a-", "=", " ", "http://h:1/,", "://a:", "key='", "key=(", "key=[1],", "'", "\\", "sk-"]


@pytest.mark.parametrize("piece", [*PIECES, "a.b:"])
def test_a_long_text_takes_little_time(piece):
    text = piece * (100_000 // len(piece))
    start = time.process_time()
    mask_secrets(text)
    mask_secrets(text + ")" * 10_000)
    assert time.process_time() - start < 20.0  # a tenth of a second, or minutes if it is quadratic
