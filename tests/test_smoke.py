"""`hf-dspark train --preset smoke`: from nothing to a drafter that `generate()` uses, and again without training."""

import json
import sys

import pytest
import torch
from safetensors.torch import load_file

import hf_dspark
from hf_dspark.cli.main import main
from hf_dspark.training.recipe import SHAPE


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    output = tmp_path_factory.mktemp("smoke") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["hf-dspark", "train", str(output), "--preset", "smoke", "--max-steps", "150"])
        with pytest.raises(SystemExit) as stop:
            main()
    assert not stop.value.code
    return output


def test_its_drafter_is_accepted_and_changes_nothing(run):
    target, tokenizer, drafter = hf_dspark.load(run / "drafter", target=run / "target", dtype=torch.float32)
    held_out = [json.loads(line)["prompt_ids"] for line in (run / "held-out.jsonl").read_text().splitlines()]
    with hf_dspark.Trace() as trace:
        for ids in held_out[:4]:
            options = {"max_new_tokens": 80, "do_sample": False}
            prompt = torch.tensor([ids])
            plain = target.generate(prompt, **options)
            assert torch.equal(target.generate(prompt, assistant_model=drafter, **options), plain)
            assert "is" in tokenizer.decode(plain[0, len(ids) :])  # English, not noise
    assert trace.drafted > 0
    assert trace.accepted_length > 2


def test_its_folder_says_how_it_was_made(run):
    recipe = json.loads((run / "recipe.json").read_text())
    assert recipe["settings"]["max_steps"] == 150
    assert set(recipe["data_sha256"]) == {"responses.jsonl", "held-out.jsonl"}
    assert {"torch", "transformers"} <= set(recipe["versions"])
    assert (run / "train_command.txt").read_text() == f"hf-dspark train {run} --preset smoke --max-steps 150\n"


def test_a_finished_run_trains_no_further(run, monkeypatch):
    state = max(run.glob("checkpoint-*")) / "trainer_state.json"
    before = state.read_bytes()
    monkeypatch.setattr(sys, "argv", ["hf-dspark", "train", str(run), "--preset", "smoke", "--max-steps", "150"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert not stop.value.code
    assert state.read_bytes() == before


def test_a_drafter_is_trained_further_in_its_own_shape(run, tmp_path, monkeypatch):
    files = [arg for name in ("responses", "held-out") for arg in ("--responses", str(run / f"{name}.jsonl"))]
    options = ["--start-from", str(run / "drafter"), "--target", str(run / "target"), *files]

    def start(output, rate):
        command = ["hf-dspark", "train", str(output), *options, "--max-steps", "2", "--learning-rate", rate]
        monkeypatch.setattr(sys, "argv", command)
        with pytest.raises(SystemExit) as stop:
            main()
        assert not stop.value.code
        return load_file(output / "drafter" / "model.safetensors")

    before = load_file(run / "drafter" / "model.safetensors")
    still, moved = start(tmp_path / "still", "0"), start(tmp_path / "moved", "1e-2")
    assert before.keys() == still.keys() == moved.keys()
    assert all(torch.equal(before[name], still[name]) for name in before)
    assert not torch.equal(before["fc.weight"], moved["fc.weight"])
    recipe = json.loads((tmp_path / "moved" / "recipe.json").read_text())
    first = json.loads((run / "recipe.json").read_text())["settings"]
    assert {name: recipe["settings"][name] for name in SHAPE} == {
        **{name: first[name] for name in SHAPE},
        "target_layers": recipe["settings"]["target_layers"],
    }
    assert set(recipe["data_sha256"]) == {"responses.jsonl", "held-out.jsonl"}
