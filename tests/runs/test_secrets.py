"""Values that look like secrets are masked, and settings of a model are not."""

import pytest

from hilbert_monitor.runs.secrets import mask_secrets

SECRET = "sk-4711-XyZ"


@pytest.mark.parametrize(
    "config",
    [
        {"api_key": SECRET},
        {"wandb": {"apiKey": SECRET}},
        {"HF_TOKEN": SECRET},
        {"hub-token": [SECRET]},
        {"aws.secret": {"id": 1, "value": SECRET}},
        {"password": 4711, "pwd": SECRET},
        {"credentials": SECRET},
        {"database": f"postgresql://me:{SECRET}@db.example:5432/runs"},
        {"database": f"redis://:p@ss/{SECRET}@cache"},
        {"store": [f"see https://me:{SECRET}@store.example/a and more"]},
        {"url": f"https://store.example/upload?user=me&token={SECRET}&part=1"},
        {"command": f"train.py --api-key={SECRET} --lr 0.1"},
        {"command": f"train.py --api-key {SECRET} --lr 0.1"},
        {"argv": ["train.py", "--api-key", SECRET, "--lr", "0.1"]},
        {"cfg": f"{{'lr': 0.1, 'logger': {{'api_key': '{SECRET}', 'name': 'a'}}}}"},
        {"cfg": f'{{"token": "{SECRET} with a space"}}'},
        {"cfg": f"Namespace(lr=0.1, api_key='{SECRET}...cut"},
        {"headers": {"Authorization": f"Bearer {SECRET}"}},
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
        "max_tokens": 10**9,
        "num_key_value_heads": 8,
        "eos_token": "</s>",
        "pad_token_id": 0,
        "keyboard": "qwerty",
        "monkey": "a",
        "token": None,
        "use_auth_token": False,
        "api_key": "",
        "optimizer": {"lr": 1e-3, "betas": [0.9, 0.95]},
        "data": "s3://bucket/tokens/train:v2",
        "note": "max_tokens=100, lr=0.1, remote git@example.com:me/repo",
        "time": "12:30",
    }
    assert mask_secrets(config) == config


def test_further_names_can_be_given():
    assert mask_secrets({"pin": 17, "deep": {"pin": "a"}}, ["pin"]) == {"pin": "***", "deep": {"pin": "***"}}
