"""`hf-dspark data`: from prompts to features, and every mistake is one line."""

import sys

import pytest
import torch

from chat import WORDS, chat_target, chat_tokenizer, rows_of
from hf_dspark.cli.main import main
from hf_dspark.training.cache import FeatureCache
from hf_dspark.training.data import default_target_layers, read_samples
from hf_dspark.training.responses import check_responses
from tiny import VOCAB, tiny_target


@pytest.fixture(scope="module")
def tokenizer():
    return chat_tokenizer()


@pytest.fixture(scope="module")
def target():
    return chat_target()


@pytest.fixture(scope="module")
def folder(target, tokenizer, tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    target.save_pretrained(root / "target")
    tokenizer.save_pretrained(root / "target")
    other = tiny_target(dtype=torch.float32, num_hidden_layers=2, seed=1)
    other.save_pretrained(root / "other")
    tokenizer.save_pretrained(root / "other")
    (root / "prompts.jsonl").write_text('{"turns": ["w9 w10"]}\n{"turns"\n{"turns": ["w11"]}\n{"turns": ["NO"]}\n')
    return root


def call(monkeypatch, capfd, *arguments):
    """Runs `hf-dspark data`; returns exit status, stdout and stderr."""
    monkeypatch.setattr(sys, "argv", ["hf-dspark", "data", *map(str, arguments)])
    status = 0
    try:
        main()
    except SystemExit as stop:
        status = stop.code or 0
    captured = capfd.readouterr()
    return status, captured.out, captured.err


def test_from_prompts_to_features(monkeypatch, capfd, caplog, folder, tmp_path):
    output, where = tmp_path / "a.jsonl", ["--target", folder / "target"]
    options = [*where, "--max-new-tokens", 6, "--chat-template-kwargs", '{"slowly": true}']
    status, out, err = call(monkeypatch, capfd, "regenerate", folder / "prompts.jsonl", output, *options)
    assert status == 0, err
    assert out.startswith("answered 2 prompts, skipped 2 (1 broken, 1 refused by the chat template), ")
    assert out.endswith(f" tokens/s: {output}\n")
    assert "in line 2 of" in caplog.text
    assert [row["prompt_ids"][-1] for row in rows_of(output)] == [WORDS.index("w45")] * 2
    status, out, _ = call(monkeypatch, capfd, "regenerate", folder / "prompts.jsonl", output, *options)
    assert "nothing was left to do" in out
    status, out, err = call(monkeypatch, capfd, "cache", output, tmp_path / "f", *where, "--target-layers", "0")
    assert status == 0, err
    assert (
        f"stored features of 2 samples, {sum(len(s.input_ids) for s in read_samples(output, vocab_size=VOCAB))}" in out
    )
    assert " GB a million)" in " ".join(err.split())
    assert FeatureCache(tmp_path / "f").manifest["layer_ids"] == [0]
    arguments = ["cache", output, tmp_path / "g", "--target", folder / "other", "--bits", 8]
    status, _, err = call(monkeypatch, capfd, *arguments)
    assert status == 1
    assert "Expected the target that wrote" in err.strip().splitlines()[-1]


def test_synthesize_counts_what_it_removed(monkeypatch, capfd, folder, tmp_path):
    output = tmp_path / "a.jsonl"
    options = ["--target", folder / "target", "--max-new-tokens", 4, "--max-tokens", 16, "--min-tokens", 2]
    openings = ["--opening", "w8", "--opening", "w9"]
    status, out, err = call(monkeypatch, capfd, "synthesize", output, *options, *openings, "--count", 4)
    assert status == 0, err
    turns, answers = out.splitlines()
    assert turns.startswith("wrote 4 user turns, removed ")
    assert " unfinished" in turns
    assert turns.endswith(f": {output}.prompts.jsonl")
    written = len(rows_of(output))
    assert answers.startswith(f"answered {written} prompts, skipped {4 - written}")
    texts = [row["messages"][0]["content"] for row in rows_of(tmp_path / "a.jsonl.prompts.jsonl")]
    assert {text.split()[0] for text in texts} == {"w8", "w9"}


MISTAKES = {
    "no prompts": (["regenerate", "nowhere.jsonl", "out"], "got no file at nowhere.jsonl"),
    "no dataset": (["regenerate", "nobody/nothing", "out"], "a local JSONL file with `turns` or `messages` needs no"),
    "template arguments": (
        ["regenerate", "prompts", "out", "--chat-template-kwargs", "[1]"],
        "Expected a JSON object such as '{\"enable_thinking\": false}' in --chat-template-kwargs, got '[1]'",
    ),
    "dtype": (["regenerate", "prompts", "out", "--dtype", "int8"], "Expected --dtype out of"),
    "no target": (["synthesize", "out", "--count", "2", "--target", "./no/such/target"], "no such folder"),
    "no responses": (["cache", "nowhere.jsonl", "out"], "got no file at nowhere.jsonl"),
    "no rows": (["cache", "prompts", "out", "--target", "target"], "lists `prompt_ids` and `response_ids`"),
    "layers": (["cache", "prompts", "out", "--target-layers", "a"], "Expected layer numbers"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_one_line(monkeypatch, capfd, folder, tmp_path, case):
    arguments, message = MISTAKES[case]
    names = {"prompts": folder / "prompts.jsonl", "out": tmp_path / "out", "target": folder / "target"}
    status, out, err = call(monkeypatch, capfd, *(names.get(argument, argument) for argument in arguments))
    assert status == 1
    assert out == ""
    lines = [line for line in err.splitlines() if line.startswith("hf-dspark: ")]
    assert len(lines) == 1
    assert message in lines[0]
    assert "Traceback" not in err


def test_responses_of_unknown_origin_are_taken(target, tmp_path):
    (tmp_path / "a.jsonl").write_text("{}")
    check_responses(tmp_path / "a.jsonl", target)


def test_default_layers_are_spread():
    assert default_target_layers(30) == [1, 8, 14, 21, 28]
    assert default_target_layers(2) == [0]
    assert default_target_layers(4) == [1, 2]
