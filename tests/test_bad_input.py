"""Every known mistake is one clear line (expected, got, what to do), told before the target computes anything."""

import json
import re

import pytest
import torch

from hf_dspark.training.data import read_samples
from tiny import MASK, drafter_config, prompt, tiny_drafter, tiny_target

CONFIGS = {
    "no layers": ({"target_layer_ids": None}, "Expected target_layer_ids and num_target_layers, got None"),
    "no depth": ({"num_target_layers": None}, "got .* and None"),
    "last layer": ({"target_layer_ids": [0, 3]}, r"within \[-1, 2\] .* got \[0, 3\]. Layer 3 is the last one"),
    "beyond": ({"target_layer_ids": [0, 7]}, r"within \[-1, 2\]"),
    "below": ({"target_layer_ids": [-2, 1]}, r"within \[-1, 2\]"),
    "unordered": ({"target_layer_ids": [2, 0]}, "strictly increasing"),
    "twice": ({"target_layer_ids": [1, 1]}, "strictly increasing"),
    "empty": ({"target_layer_ids": []}, "strictly increasing"),
    "no mask": ({"mask_token_id": None}, "Expected mask_token_id, got None. Set it to"),
    "mask outside": ({"mask_token_id": 48}, r"within the embedding table \[0, 48\), got 48"),
    "mask negative": ({"mask_token_id": -1}, "within the embedding table"),
    "mask is pad": ({"mask_token_id": 0}, "differs from the pad and eos tokens, got 0"),
    "mask is eos": ({"eos_token_id": [3, MASK]}, "differs from the pad and eos tokens"),
    "head type": ({"markov_head_type": "lstm"}, "Expected markov_head_type in .* got 'lstm'"),
    "rank": ({"markov_rank": -1}, "Expected markov_rank >= 0, got -1"),
    "confidence on nothing": ({"markov_rank": 0}, "Expected a Markov head for confidence_head_with_markov"),
    "draft vocabulary": ({"draft_vocab_size": 49}, r"Expected draft_vocab_size within \[1, 48\], got 49"),
    "backbone": ({"backbone": "mamba"}, "Expected backbone 'qwen3', got 'mamba'"),
    "heads": ({"num_key_value_heads": 3}, "multiple of num_key_value_heads, got 4 and 3"),
    "layer types": ({"layer_types": ["full_attention"]}, "Expected 2 layer_types"),
    "unknown layer": ({"layer_types": ["full_attention", "mamba"]}, "Expected 2 layer_types"),
    "no window": ({"layer_types": ["sliding_attention"] * 2}, "Expected sliding_window >= 1"),
    "rotary": (
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}},
        "Expected rope_type in .* got 'dynamic'",
    ),
    "block": ({"block_size": 0}, "Expected block_size >= 1, got 0"),
    "threshold": ({"confidence_threshold": 1.5}, r"Expected confidence_threshold within \[0, 1\], got 1.5"),
    "threshold below": ({"confidence_threshold": -0.1}, r"Expected confidence_threshold within \[0, 1\], got -0.1"),
    "threshold no number": ({"confidence_threshold": float("nan")}, "Expected confidence_threshold .* got nan"),
    "threshold without head": (
        {"confidence_threshold": 0.5, "enable_confidence_head": False},
        "Expected confidence_threshold 0 for a drafter without confidence head, got 0.5",
    ),
    "drafts": ({"num_draft_tokens": 6}, r"Expected num_draft_tokens within \[0, 5\] \(the block size\), got 6"),
    "negative drafts": ({"num_draft_tokens": -1}, r"Expected num_draft_tokens within \[0, 5\]"),
    "temperatures": ({"sts_temperatures": [1.0, 2.0]}, "Expected 5 positive sts_temperatures"),
    "cold": ({"sts_temperatures": [1.0, 1.0, 0.0, 1.0, 1.0]}, "Expected 5 positive sts_temperatures"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_wrong_config_says_what_is_wrong(case):
    changes, message = CONFIGS[case]
    with pytest.raises(ValueError, match=message) as error:
        drafter_config(**changes)
    assert re.fullmatch(r"Expected .+, got .+\. [A-Z0-9].+\.", str(error.value))  # expected, got, what to do


def refuse(target, drafter, message, **options):
    """`generate()` must raise before any forward of the target."""
    forwards = []
    handle = target.register_forward_pre_hook(lambda *_: forwards.append(1))
    try:
        with pytest.raises(ValueError, match=message):
            target.generate(**{"inputs": prompt(), "max_new_tokens": 5, **options}, assistant_model=drafter)
    finally:
        handle.remove()
    assert not forwards


TARGETS = {
    "hidden size": ({"hidden_size": 64}, "Expected a target with hidden size 32, got 64 from LlamaForCausalLM"),
    "depth": ({"num_hidden_layers": 3}, "number of layers 4, got 3 .* trained for another model"),
    "vocabulary": ({"vocab_size": 50}, "vocabulary size 48, got 50"),
}


@pytest.mark.parametrize("case", TARGETS)
def test_a_target_that_does_not_fit_is_refused(case):
    changes, message = TARGETS[case]
    drafter = tiny_drafter(tiny_target())
    refuse(tiny_target(**changes), drafter, message)
    with pytest.raises(ValueError, match=message):
        drafter.bind(tiny_target(**changes))


def test_settings_on_a_loaded_drafter_are_checked():
    target = tiny_target()
    drafter = tiny_drafter(target)
    drafter.config.num_draft_tokens = 6
    refuse(target, drafter, "Expected num_draft_tokens")
    drafter.config.num_draft_tokens = None
    drafter.config.confidence_threshold = -0.1
    refuse(target, drafter, "Expected confidence_threshold")


def test_an_empty_prompt_is_refused():
    target = tiny_target()
    refuse(
        target, tiny_drafter(target), "Expected at least one prompt token", inputs=torch.empty(1, 0, dtype=torch.long)
    )


def test_an_unbound_drafter_says_how_to_bind():
    with pytest.raises(ValueError, match=r"Expected a target to borrow the embedding from.*drafter.bind\(target\)"):
        tiny_drafter().embed(torch.tensor([1]))


ROWS = {
    "no json": ("{", "in line 2"),
    "no lists": (json.dumps({"prompt": "hi"}), "lists `prompt_ids` and `response_ids`.* in line 2"),
    "outside": (
        json.dumps({"prompt_ids": [1], "response_ids": [99, 2]}),
        r"Expected token ids in \[0, 48\), got 99 in line 2",
    ),
}


@pytest.mark.parametrize("case", ROWS)
def test_a_bad_training_row_is_named_by_its_line(tmp_path, case):
    line, message = ROWS[case]
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt_ids": [1, 2], "response_ids": [3, 4]}) + "\n" + line + "\n")
    with pytest.raises(ValueError, match=message):
        read_samples(file, vocab_size=48)


def test_no_training_data_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="got no file at"):
        read_samples(tmp_path / "none.jsonl", vocab_size=48)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="Expected at least one prompt with a response"):
        read_samples(tmp_path / "empty.jsonl", vocab_size=48)


def test_a_hybrid_target_is_refused_by_its_layer_type():
    target = tiny_target()
    drafter = tiny_drafter(target)
    target.config.layer_types = ["full_attention", "linear_attention", "full_attention", "conv"]
    refuse(target, drafter, "got LlamaForCausalLM with layers of type conv, linear_attention. Recurrent state cannot")
