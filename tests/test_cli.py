"""The command line: what it prints, and that every mistake is one line on stderr with exit status 1."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import hf_dspark
from hf_dspark import DSparkDrafter, DSparkTrainer
from hf_dspark.cli.main import main
from tiny import MASK, VOCAB, tiny_drafter, tiny_target

FOLDERS = ("drafter", "target", "truncated", "no tokenizer", "responses.jsonl")
TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny target with a tokenizer, and a drafter that names it."""
    root = tmp_path_factory.mktemp("models")
    words = {f"w{index}": index for index in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w2"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w2", pad_token="w0", bos_token="w1")
    fast.chat_template = TEMPLATE
    target = tiny_target(dtype=torch.float32)
    target.save_pretrained(root / "target")
    fast.save_pretrained(root / "target")
    tiny_drafter(target, target_name_or_path=str(root / "target")).save_pretrained(root / "drafter")
    target.save_pretrained(root / "no tokenizer")
    weights = shutil.copytree(root / "target", root / "truncated") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    (root / "prompts.jsonl").write_text(
        '{"turns": ["w5 w9 w11"]}\n{"messages": [{"role": "user", "content": "w7"}]}\n'
    )
    rows = [{"prompt_ids": [1, 5 + n], "response_ids": [9, 10, 11 + n, 12, 13, 14, 15, 9, 10, 11]} for n in range(6)]
    (root / "responses.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


def call(monkeypatch, capfd, *arguments):
    """Runs the command line; returns exit status, stdout and stderr."""
    monkeypatch.setattr(sys, "argv", ["hf-dspark", *map(str, arguments)])
    status = 0
    try:
        main()
    except SystemExit as stop:
        status = stop.code or 0
    captured = capfd.readouterr()
    return status, captured.out, captured.err


def test_env_names_versions_and_device(monkeypatch, capfd):
    status, out, _ = call(monkeypatch, capfd, "env")
    assert status == 0
    for name in ("hf-dspark", "python", "torch", "transformers", "huggingface-hub", "device", "hooks"):
        assert re.search(rf"^{name}: \S+", out, re.MULTILINE)


def test_generate_streams_and_reports(monkeypatch, capfd, folder):
    status, out, _ = call(
        monkeypatch, capfd, "generate", "w5 w6", "--drafter", folder / "drafter", "--dtype", "float32",
        "--max-new-tokens", 12,
    )  # fmt: skip
    assert status == 0
    assert "accepted draft  target's own" in out
    assert re.search(r"12 tokens · [\d.]+ tok/s · accepted length \d\.\d\d · \d+ rounds", out)
    report = json.loads(
        call(
            monkeypatch, capfd, "generate", "w5 w6", "--drafter", folder / "drafter", "--dtype", "float32",
            "--max-new-tokens", 12, "--json",
        )[1]
    )  # fmt: skip
    assert out.startswith(report["text"])
    assert report["tokens"] == 12
    assert report["drafted"] > 0
    assert report["speedup"] is None


def test_accepted_drafts_have_one_colour_and_the_targets_own_another():
    from hf_dspark.cli.generate import DRAFTED, OWN, ColouredStream

    shown = []
    stream = ColouredStream(SimpleNamespace(print=lambda text, **_: shown.append((text.plain, text.style))), Bytes())
    stream.put(ord("a"), OWN)
    stream.round(SimpleNamespace(committed=[ord("b"), *"é".encode(), ord("c")], accepted=3))
    assert shown == [("a", OWN), ("b", DRAFTED), ("é", DRAFTED), ("c", OWN)]  # half a character waits for the rest


class Bytes:
    """A tokenizer of UTF-8 bytes."""

    def decode(self, ids, **_):
        return bytes(ids).decode(errors="replace")


def test_a_seed_repeats_a_sampled_answer(monkeypatch, capfd, folder):
    options = ["--drafter", folder / "drafter", "--dtype", "float32", "--max-new-tokens", 16, "--json"]
    reports = [
        json.loads(call(monkeypatch, capfd, "generate", "w5", *options, "--temperature", 1, "--seed", seed)[1])
        for seed in (3, 3, 4)
    ]
    assert reports[0]["text"] == reports[1]["text"] != reports[2]["text"]
    assert reports[0]["verified"] > 0


def test_compare_measures_and_checks_identity(monkeypatch, capfd, folder):
    options = ["--drafter", folder / "drafter", "--dtype", "float32", "--max-new-tokens", 8, "--compare", "--json"]
    report = json.loads(call(monkeypatch, capfd, "generate", "w5 w6", *options)[1])
    assert report["identical"] is True
    assert report["verified"] > 0
    assert report["speedup"] > 0
    assert report["plain_tokens_per_second"] > 0
    sampled = json.loads(call(monkeypatch, capfd, "generate", "w5 w6", *options, "--temperature", 1)[1])
    assert sampled["identical"] is None


def test_a_loss_of_speed_and_missing_drafts_are_said():
    from hf_dspark.cli.generate import _status

    report = {
        "tokens": 5, "tokens_per_second": 1.0, "accepted_length": 1.0, "rounds": 5, "speedup": 0.5, "verified": 0,
        "plain_tokens_per_second": 2.0, "identical": False, "largest_gap": 0.125, "dtype": "bfloat16",
    }  # fmt: skip
    line = _status(report)
    for part in ("drafting is slower than plain decoding on this machine", "nothing was drafted", "within 0.125"):
        assert part in line


def test_settings_reach_the_drafter(monkeypatch, capfd, folder):
    options = ["--drafter", folder / "drafter", "--dtype", "float32", "--max-new-tokens", 8, "--json"]
    cut = json.loads(call(monkeypatch, capfd, "generate", "w5", *options, "--num-draft-tokens", 2)[1])
    assert cut["verified"] <= 2 * cut["rounds"]
    nothing = json.loads(call(monkeypatch, capfd, "generate", "w5", *options, "--confidence-threshold", 1)[1])
    assert nothing["verified"] == 0
    assert nothing["text"] == cut["text"]


def test_measure_prints_a_row_a_file(monkeypatch, capfd, folder):
    options = ["--drafter", folder / "drafter", "--dtype", "float32", "--max-new-tokens", 8]
    status, out, _ = call(monkeypatch, capfd, "measure", folder / "prompts.jsonl", *options, "--speed")
    assert status == 0
    assert "prompts" in out
    assert "2 of 2" in out


def test_train_end_to_end(monkeypatch, capfd, folder, tmp_path):
    options = [
        "--target", folder / "target", "--eval-responses", folder / "responses.jsonl", "--layers", 1,
        "--target-layers", "0,2", "--mask-token-id", MASK, "--markov-rank", 8, "--max-steps", 4, "--eval-steps", 2,
        "--batch-size", 2, "--draft-vocab-size", 24,
    ]  # fmt: skip
    train = ["train", tmp_path, "--responses", folder / "responses.jsonl", *options]
    status, out, err = call(monkeypatch, capfd, *train)
    assert status == 0, err
    assert f"saved {tmp_path / 'drafter'}" in out
    drafter = DSparkDrafter.from_pretrained(tmp_path / "drafter")
    assert drafter.dtype == torch.bfloat16
    assert 9 in drafter.draft_token_ids.tolist()
    status, out, _ = call(monkeypatch, capfd, "generate", "w5", "--drafter", tmp_path / "drafter", "--json")
    assert status == 0
    assert json.loads(out)["drafted"] > 0

    status, _, err = call(monkeypatch, capfd, *train, "--layers", 2)
    assert status == 1
    assert "layers 1 (now 2)" in err.strip().splitlines()[-1]
    steps, taken, compute_loss = ["--max-steps", 6], [], DSparkTrainer.compute_loss
    monkeypatch.setattr(
        DSparkTrainer, "compute_loss", lambda *args, **kw: taken.append(1) or compute_loss(*args, **kw)
    )
    status, _, err = call(monkeypatch, capfd, *train, *steps)
    assert status == 0, err
    assert (tmp_path / "checkpoint-6").is_dir()
    assert len(taken) == 2  # steps 5 and 6: the first four are not repeated


MISTAKES = {
    "empty prompt": (["generate", " "], "Expected a prompt with some text"),
    "drafts": (["generate", "w5", "--drafter", "drafter", "--num-draft-tokens", "6"], "Expected num_draft_tok"),
    "threshold": (["generate", "w5", "--drafter", "drafter", "--confidence-threshold", "2"], "Expected confidence_"),
    "dtype": (["generate", "w5", "--dtype", "int8"], "Expected --dtype out of"),
    "language model as drafter": (["generate", "w5", "--drafter", "target"], "Expected a DSpark drafter at"),
    "drafter as target": (
        ["generate", "w5", "--drafter", "drafter", "--target", "drafter"],
        "Expected a language model as the target",
    ),
    "no such folder": (["generate", "w5", "--drafter", "./nowhere/at/all"], "no such folder"),
    "truncated target": (["generate", "w5", "--drafter", "drafter", "--target", "truncated"], "Expected complete saf"),
    "no tokenizer": (["generate", "w5", "--drafter", "drafter", "--target", "no tokenizer"], "tokenizer"),
    "not on the Hub": (["generate", "w5", "--drafter", "nobody/nothing"], "connect"),
    "no prompts": (["measure", "nowhere.jsonl"], "Expected a JSONL file of prompts"),
    "bad prompts": (["measure", "responses.jsonl"], "Expected an object with text in `turns` or `messages`"),
    "layer numbers": (["train", "out", "--responses", "responses.jsonl", "--target-layers", "a,b"],
                      "Expected layer numbers"),
    "no mask": (["train", "out", "--responses", "responses.jsonl", "--target", "target", "--target-layers", "0,2"],
                "Expected mask_token_id, got None"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_one_line(monkeypatch, capfd, folder, tmp_path, case):
    arguments, message = MISTAKES[case]
    names = {name: folder / name for name in FOLDERS} | {"out": tmp_path}
    status, out, err = call(monkeypatch, capfd, *(names.get(argument, argument) for argument in arguments))
    assert status == 1
    assert out == ""
    lines = [line for line in err.splitlines() if line.strip() and "it/s]" not in line]
    assert len(lines) == 1
    assert lines[0].startswith("hf-dspark: ")
    assert message in lines[0]


def test_importing_the_package_loads_nothing_it_does_not_need():
    heavy = "import sys; print(*({'peft', 'datasets', 'sklearn', 'matplotlib', 'typer'} & sys.modules.keys()))"
    # Older transformers import sklearn for their own assisted decoding as soon as a class with generate() is touched.
    code, before = f"import hf_dspark; {heavy}", f"from transformers import GenerationMixin; {heavy}"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    anyway = subprocess.run([sys.executable, "-c", before], capture_output=True, text=True, check=True).stdout.split()
    assert set(loaded) <= set(anyway)


def test_every_public_name_is_there():
    for name in hf_dspark.__all__:
        assert getattr(hf_dspark, name) is not None
    assert set(dir(hf_dspark)) == set(hf_dspark.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = hf_dspark.nothing
    assert (Path(hf_dspark.__file__).parent / "py.typed").exists()


def test_settings_that_cannot_be_do_not_block_a_folder(monkeypatch, capfd, folder, tmp_path):
    options = ["--responses", folder / "responses.jsonl", "--target", folder / "target", "--mask-token-id", MASK]
    options += ["--target-layers", "0,2", "--layers", 1]
    status, _, err = call(monkeypatch, capfd, "train", tmp_path / "run", *options, "--copy-layers", 99)
    assert status == 1, err
    assert not (tmp_path / "run" / "recipe.json").exists()
