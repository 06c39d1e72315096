"""Recipes: what overrides what, mistakes by name, and a run that resumes only as itself."""

import dataclasses
import hashlib
import json
import shlex
import sys

import pytest
import torch
import transformers

from hf_dspark.training.recipe import PRESETS, Recipe, read_recipe, record

FILES = {
    "recipe.yaml": "max_steps: 77\nlearning_rate: 1e-3\ntarget_layers: [0, 2]\nonline: true\ntarget: null\n",
    "recipe.json": json.dumps(
        {"max_steps": 77, "learning_rate": 1e-3, "target_layers": [0, 2], "online": True, "target": None}, indent="\t"
    ),
}


@pytest.fixture
def write(tmp_path):
    def to(name, content):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return to


# ------------------------------------------------------------------ reading


@pytest.mark.parametrize("name", FILES)
def test_a_file_overrides_a_preset_and_options_override_both(write, name):
    file = write(name, FILES[name])
    preset = PRESETS["smoke"]
    recipe = read_recipe("smoke", file, {"learning_rate": 0.5, "seed": 3, "online": None})
    assert recipe.batch_size == preset["batch_size"] != Recipe().batch_size  # of the preset
    assert recipe.max_steps == 77 != preset["max_steps"]  # of the file
    assert recipe.target_layers == [0, 2]
    assert recipe.online is True
    assert recipe.learning_rate == 0.5  # of an option
    assert recipe.seed == 3
    assert recipe.bits == Recipe().bits
    assert read_recipe(None, file, {}).learning_rate == 1e-3


def test_an_empty_option_is_not_given_and_a_false_one_is():
    assert read_recipe("qwen3-4b", None, {"online": None}).online is True
    assert read_recipe("qwen3-4b", None, {"online": False}).online is False


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_a_recipe(preset):
    recipe = read_recipe(preset, None, {})
    assert dataclasses.asdict(recipe).items() >= PRESETS[preset].items()


@pytest.mark.parametrize("text", ["1e-3", "1.0e-3", "0.001", "'1e-3'"])
def test_numbers_of_yaml_need_no_point(write, text):
    assert read_recipe(None, write("a.yaml", f"learning_rate: {text}"), {}).learning_rate == 1e-3


def test_a_whole_number_may_stand_for_a_float(write):
    weight = read_recipe(None, write("a.yaml", "tv_weight: 1"), {}).tv_weight
    assert (weight, type(weight)) == (1.0, float)


MISTAKES = {
    "unknown key": ("a.yaml", "steps: 5", "Expected settings out of target, .*, got 'steps' in .*a.yaml"),
    "text for int": ("a.yaml", "max_steps: many", "Expected max_steps of type int, got 'many' in .*a.yaml"),
    "float for int": ("a.json", '{"max_steps": 1.5}', "Expected max_steps of type int, got 1.5 in .*a.json"),
    "bool for int": ("a.yaml", "layers: true", "Expected layers of type int, got True"),
    "null for int": ("a.yaml", "layers:", "Expected layers of type int, got None"),
    "text for float": ("a.yaml", "learning_rate: fast", "Expected learning_rate of type float, got 'fast'"),
    "int for bool": ("a.yaml", "online: 1", "Expected online of type bool, got 1"),
    "int for text": ("a.yaml", "target: 4", r"Expected target of type str \| None, got 4"),
    "layers of text": ("a.json", '{"target_layers": ["1"]}', r"Expected target_layers of type list.*, got \['1'\]"),
    "one layer": ("a.yaml", "target_layers: 3", "Expected target_layers of type list.*, got 3"),
    "a list": ("a.yaml", "- max_steps", "Expected settings such as `max_steps: 1000`, got list in .*a.yaml"),
    "nothing": ("a.yaml", "", "Expected settings such as .*, got NoneType in .*a.yaml"),
    "broken yaml": ("a.yaml", "a: [1", r"Expected a YAML or JSON file of settings, got [\s\S]* in .*a.yaml"),
    "broken json": ("a.json", '{"layers": 1,}', "Expected a YAML or JSON file of settings, got .* in .*a.json"),
    "no text": ("a.yaml", b"\xff\xfe\x00\xd8", "Expected a YAML or JSON file of settings, got .* in .*a.yaml"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_in_a_file_is_named(write, case):
    name, content, message = MISTAKES[case]
    with pytest.raises(ValueError, match=message):
        read_recipe(None, write(name, content), {})


def test_no_file_and_a_folder_are_no_settings(tmp_path):
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(FileNotFoundError, match=f"Expected a YAML or JSON file .*, got no file at {path}"):
            read_recipe(None, path, {})


def test_an_unknown_preset_is_refused():
    with pytest.raises(ValueError, match="Expected a preset of smoke, smollm2, qwen3-4b, got 'llama'"):
        read_recipe("llama", None, {})


def test_a_shape_is_given_once(write):
    assert read_recipe("smollm2", None, {"start_from": "mine"}).start_from == "mine"  # a preset's shape gives way
    for file, options in ((None, {"layers": 3}), (write("a.yaml", "layers: 3"), {})):
        with pytest.raises(ValueError, match=r"Expected the shape of mine, .* got layers too"):
            read_recipe(None, file, {"start_from": "mine", **options})


AT_LEAST_ONE = ("layers", "block_size", "max_length", "max_steps", "batch_size", "anchors", "eval_steps")


@pytest.mark.parametrize("name", AT_LEAST_ONE)
def test_counts_start_at_one(name):
    assert getattr(read_recipe(None, None, {name: 1}), name) == 1
    with pytest.raises(ValueError, match=f"Expected {name} >= 1, got 0"):
        read_recipe(None, None, {name: 0})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layers": 3, "copy_layers": [1, 2]}, r"Expected 3 layers in copy_layers, .*, got \[1, 2\]"),
        ({"copy_layers": [1, 2, 3]}, "Expected 2 layers in copy_layers"),
        ({"decay_share": 1.5}, r"Expected decay_share within \[0, 1\], got 1.5"),
        ({"likelihood_first": -0.1}, r"Expected likelihood_first within \[0, 1\], got -0.1"),
        ({"bits": 4}, "Expected bits to be 8 or 16, got 4"),
    ],
)
def test_values_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        read_recipe(None, None, settings)


# ------------------------------------------------------------------ recording


@pytest.fixture
def data(write):
    return [write("responses.jsonl", "rows\n"), write("held-out.jsonl", "other rows\n")]


def test_the_record_is_all_a_run_depends_on(tmp_path, data, monkeypatch):
    command = ["hf-dspark", "train", "my run", "--target-layers", "0,2"]
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/hf-dspark", *command[1:]])
    recipe = read_recipe("smollm2", None, {"seed": 4})
    record(tmp_path / "a" / "run", recipe, data)
    saved = json.loads((tmp_path / "a" / "run" / "recipe.json").read_text())
    assert Recipe(**saved["settings"]) == recipe
    assert saved["data_sha256"] == {path.name: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in data}
    assert saved["versions"].keys() == {"python", "torch", "transformers", "accelerate"}
    assert saved["versions"]["torch"] == torch.__version__
    assert saved["versions"]["transformers"] == transformers.__version__
    line = (tmp_path / "a" / "run" / "train_command.txt").read_text()
    assert line.endswith("\n")
    assert shlex.split(line) == command


def test_a_run_resumes_as_itself_longer_if_wanted(tmp_path, data, monkeypatch):
    recipe = Recipe(max_steps=10)
    record(tmp_path / "run", recipe, data)
    record(tmp_path / "run", recipe, data)
    longer = dataclasses.replace(recipe, max_steps=20, eval_steps=5)
    record(tmp_path / "run", longer, data)
    assert Recipe(**json.loads((tmp_path / "run" / "recipe.json").read_text())["settings"]) == longer


def test_other_settings_are_another_run(tmp_path, data):
    record(tmp_path, Recipe(), data)
    before = (tmp_path / "recipe.json").read_bytes()
    with pytest.raises(ValueError, match=r"which has layers 2 \(now 3\), seed 0 \(now 1\). Give another folder"):
        record(tmp_path, Recipe(layers=3, seed=1, max_steps=5), data)
    assert (tmp_path / "recipe.json").read_bytes() == before


@pytest.mark.parametrize("number", [0, 1])
def test_other_data_is_another_run(tmp_path, data, number):
    record(tmp_path / "run", Recipe(), data)
    data[number].write_text("new rows\n")
    with pytest.raises(ValueError, match=r"which has data \{.*\} \(now \{.*\}\)"):
        record(tmp_path / "run", Recipe(), data)
    with pytest.raises(ValueError, match="which has data"):
        record(tmp_path / "run", Recipe(), data[1 - number :][:1])


@pytest.mark.parametrize("changed", ["train", "eval"])
def test_files_of_one_name_are_told_apart(tmp_path, changed):
    files = [tmp_path / folder / "responses.jsonl" for folder in ("train", "eval")]
    for file in files:
        file.parent.mkdir()
        file.write_text(f"rows of {file.parent.name}\n")
    record(tmp_path / "run", Recipe(), files)
    record(tmp_path / "run", Recipe(), files)
    (tmp_path / changed / "responses.jsonl").write_text("new rows\n")
    with pytest.raises(ValueError, match="which has data"):
        record(tmp_path / "run", Recipe(), files)


@pytest.mark.parametrize("content", ["{", "[]", '{"settings": {}}'])
def test_a_damaged_record_is_no_reason_to_start_again(tmp_path, data, content):
    (tmp_path / "recipe.json").write_text(content)
    with pytest.raises(ValueError, match=r"Expected the recipe of a run in .*recipe.json, got .* Give another folder"):
        record(tmp_path, Recipe(), data)
