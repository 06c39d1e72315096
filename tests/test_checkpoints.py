"""Files: what is saved comes back bit for bit, and a file that is not what its config says is one clear error."""

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

import hf_dspark
from hf_dspark import DraftContext, DSparkConfig, DSparkDrafter, Trace, fingerprint
from tiny import VOCAB, drafter_config, letter_tokenizer, perfect, prompt, tiny_drafter, tiny_target

DATA = Path(__file__).parent / "data"
DEEPSPEC = {"vanilla": DATA / "qwen3", "gated": DATA / "variants/qwen3_gated", "rnn": DATA / "variants/qwen3_rnn"}
DEEPSPEC["dflash"] = DATA / "variants/qwen3_dflash"


def block(drafter):
    # A copy has its weights in fresh memory: those of a file lie at any address, where sums may round otherwise.
    drafter = copy.deepcopy(drafter)
    torch.manual_seed(0)
    context = DraftContext()
    context.append(torch.randn(1, 9, 2 * drafter.config.hidden_size), torch.arange(9)[None])
    return drafter.propose(context, torch.tensor([5]), do_sample=True)


def assert_same(ours, theirs):
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for name, weight in ours.state_dict().items():
        assert torch.equal(weight, theirs.state_dict()[name]), name


def edit(folder, out, *, drop=(), add=(), config=()):
    """A copy of a checkpoint with tensors dropped, tensors added, or config fields changed."""
    shutil.copytree(folder, out, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    for name in drop:
        del tensors[name]
    save_file({**tensors, **dict(add)}, out / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((folder / "config.json").read_text()) | dict(config)
    (out / "config.json").write_text(json.dumps(values))
    return out


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize(
    "changes", [{}, {"own_embeddings": True}, {"draft_vocab_size": 20}, {"sts_temperatures": [2.0] * 5}]
)
def test_our_format_round_trip(tmp_path, head, changes):
    target = tiny_target(dtype=torch.float32)
    drafter = tiny_drafter(target, markov_head_type=head, confidence_threshold=0.25, **changes)
    if "draft_vocab_size" in changes:
        drafter.draft_token_ids.copy_(torch.arange(20) * 2)
    drafter.save_pretrained(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    loaded = DSparkDrafter.from_pretrained(tmp_path)
    assert_same(drafter, loaded)
    assert loaded.config.confidence_threshold == 0.25
    assert loaded.config.sts_temperatures == changes.get("sts_temperatures")
    assert torch.equal(block(drafter.bind(target)).logits, block(loaded.bind(target)).logits)


def test_loading_leaves_no_buffer_to_chance(tmp_path, monkeypatch):
    target = tiny_target(dtype=torch.float32)
    drafter = tiny_drafter(target, sts_temperatures=[1.5] * 5, draft_vocab_size=20).bind(target)
    before = block(drafter)
    drafter.save_pretrained(tmp_path)
    empty = torch.empty_like

    def poisoned(*args, **kwargs):
        memory = empty(*args, **kwargs)
        return memory.fill_(torch.nan) if memory.is_floating_point() and not memory.is_meta else memory

    monkeypatch.setattr(torch, "empty_like", poisoned)
    for placement in ({}, {"device_map": "cpu"}, {"device_map": {"": "cpu"}}):
        after = block(DSparkDrafter.from_pretrained(tmp_path, **placement).bind(target))
        assert torch.equal(before.logits, after.logits)
        assert torch.equal(before.confidence_logits, after.confidence_logits)


@pytest.mark.parametrize("head", DEEPSPEC)
def test_deepspec_layout_round_trip(tmp_path, head):
    drafter = DSparkDrafter.from_pretrained(DEEPSPEC[head])
    drafter.save_pretrained(tmp_path, checkpoint_format="deepspec")
    theirs, ours = load_file(DEEPSPEC[head] / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    config = json.loads((tmp_path / "config.json").read_text())
    reference = json.loads((DEEPSPEC[head] / "config.json").read_text())
    for key in ("architectures", "model_type", "block_size", "mask_token_id", "target_layer_ids", "num_target_layers",
                "rope_parameters", "vocab_size", "layer_types"):  # fmt: skip
        assert config[key] == reference[key]
    assert_same(drafter, DSparkDrafter.from_pretrained(tmp_path))


def test_deepspec_layout_copies_what_was_borrowed(tmp_path):
    target = tiny_target(dtype=torch.float32)
    drafter = tiny_drafter(target).bind(target)
    drafter.save_pretrained(tmp_path, checkpoint_format="deepspec")
    tensors = load_file(tmp_path / "model.safetensors")
    torch.testing.assert_close(tensors["embed_tokens.weight"], target.get_input_embeddings().weight.detach())
    torch.testing.assert_close(tensors["lm_head.weight"], target.get_output_embeddings().weight.detach())
    loaded = DSparkDrafter.from_pretrained(tmp_path)
    torch.testing.assert_close(block(loaded).logits, block(drafter).logits)


def test_deepspec_layout_without_the_targets_copies_borrows(tmp_path):
    target = AutoModelForCausalLM.from_pretrained(DATA / "e2e_qwen3" / "target")
    stripped = edit(DATA / "e2e_qwen3" / "draft", tmp_path, drop=["embed_tokens.weight", "lm_head.weight"])
    drafter = DSparkDrafter.from_pretrained(stripped)
    assert not drafter.config.own_embeddings
    ids = load_file(DATA / "e2e_qwen3" / "io.safetensors")["p0.prompt"]
    plain = target.generate(ids, max_new_tokens=30, do_sample=False, eos_token_id=None)
    with Trace() as trace:
        output = target.generate(ids, max_new_tokens=30, do_sample=False, eos_token_id=None, assistant_model=drafter)
    assert torch.equal(output, plain)
    assert trace.accepted > 5


@pytest.mark.parametrize(
    "changes", [{"draft_vocab_size": 20}, {"confidence_head_bias": False}], ids=["draft vocabulary", "no bias"]
)
def test_deepspec_layout_refuses_what_it_cannot_hold(tmp_path, changes):
    with pytest.raises(ValueError, match="Expected a drafter that DeepSpec's layout can describe"):
        tiny_drafter(**changes).save_pretrained(tmp_path, checkpoint_format="deepspec")
    with pytest.raises(ValueError, match="Expected checkpoint_format"):
        tiny_drafter().save_pretrained(tmp_path, checkpoint_format="gguf")


def test_deepspec_sliding_window_noise_is_ignored(tmp_path):
    noise = {"sliding_window": 4096, "use_sliding_window": False, "partial_rotary_factor": 0.25}
    drafter = DSparkDrafter.from_pretrained(edit(DEEPSPEC["vanilla"], tmp_path, config=noise))
    assert drafter.config.sliding_window is None
    reference = DSparkDrafter.from_pretrained(DEEPSPEC["vanilla"])
    context = [DraftContext(), DraftContext()]
    for one in context:
        torch.manual_seed(0)
        one.append(torch.randn(1, 5, 96), torch.arange(5)[None])
    ours, theirs = (
        model.propose(one, torch.tensor([5])) for model, one in zip((drafter, reference), context, strict=True)
    )
    assert torch.equal(ours.confidence_logits, theirs.confidence_logits)


def test_saving_after_generation_holds_no_tensor_of_the_target(tmp_path):
    target = tiny_target(dtype=torch.float32)
    drafter = tiny_drafter(target).bind(target)
    target.generate(prompt(), assistant_model=drafter, max_new_tokens=10)
    drafter.save_pretrained(tmp_path)
    names = set(load_file(tmp_path / "model.safetensors"))
    layer = [
        *(f"self_attn.{name}_{kind}.weight" for name, kind in
          (("q", "proj"), ("k", "proj"), ("v", "proj"), ("o", "proj"), ("q", "norm"), ("k", "norm"))),
        *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
        "input_layernorm.weight", "post_attention_layernorm.weight",
    ]  # fmt: skip
    assert names == {
        "fc.weight", "hidden_norm.weight", "norm.weight", "markov_head.markov_w1.weight",
        "markov_head.markov_w2.weight",
        "confidence_head.proj.weight", "confidence_head.proj.bias",
        *(f"layers.{index}.{name}" for index in range(2) for name in layer),
    }  # fmt: skip
    loaded = DSparkDrafter.from_pretrained(tmp_path).bind(target)
    assert torch.equal(block(drafter).logits, block(loaded).logits)


def test_copies_of_the_target_are_frozen_and_a_copy_of_a_drafter_borrows_the_same_target(tmp_path):
    target = tiny_target(dtype=torch.float32)
    drafter = tiny_drafter(target, own_embeddings=True)
    drafter.save_pretrained(tmp_path)
    for model in (drafter, DSparkDrafter.from_pretrained(tmp_path)):
        frozen = {name for name, weight in model.named_parameters() if not weight.requires_grad}
        assert frozen == {"embed_tokens.weight", "lm_head.weight"}
    bound = tiny_drafter(target).bind(target)
    assert copy.deepcopy(bound).bound.head is target.get_output_embeddings()
    assert not any("bound" in name for name, _ in bound.named_modules())


KEYS = {
    "markov_head.markov_w2.weight": "vanilla",
    "markov_head.gate_proj.bias": "gated",
    "markov_head.joint_proj.weight": "rnn",
    "confidence_head.proj.bias": "vanilla",
    "fc.weight": "vanilla",
    "layers.1.self_attn.q_norm.weight": "dflash",
    "embed_tokens.weight": "vanilla",
}


@pytest.mark.parametrize("key", KEYS)
def test_a_missing_tensor_is_named(tmp_path, key):
    with pytest.raises(ValueError, match=rf"missing \['{key}'\]"):
        DSparkDrafter.from_pretrained(edit(DEEPSPEC[KEYS[key]], tmp_path, drop=[key]))


@pytest.mark.parametrize("key", ["markov_head.markov_w1.weight", "confidence_head.proj.weight", "layers.2.extra"])
def test_an_extra_tensor_is_named(tmp_path, key):
    with pytest.raises(ValueError, match=rf"unexpected \['{key}'\]"):
        DSparkDrafter.from_pretrained(edit(DEEPSPEC["dflash"], tmp_path, add={key: torch.zeros(2, 2)}))


def test_tensors_of_another_shape_are_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"Expected tensors of the shapes that the config of .* check hidden_size"):
        DSparkDrafter.from_pretrained(edit(DEEPSPEC["vanilla"], tmp_path, config={"markov_rank": 4}))


def test_heads_that_the_config_leaves_out_are_an_error_not_a_dflash_drafter(tmp_path):
    without = {"markov_rank": 0, "enable_confidence_head": False}
    with pytest.raises(ValueError, match=r"unexpected .*confidence_head.proj.weight.*markov_head.markov_w1.weight"):
        DSparkDrafter.from_pretrained(edit(DEEPSPEC["vanilla"], tmp_path, config=without))


def test_a_draft_vocabulary_without_its_map_is_an_error(tmp_path):
    tiny_drafter(draft_vocab_size=20).save_pretrained(tmp_path / "whole")
    with pytest.raises(ValueError, match=r"missing \['draft_token_ids'\]"):
        DSparkDrafter.from_pretrained(edit(tmp_path / "whole", tmp_path / "cut", drop=["draft_token_ids"]))


@pytest.mark.parametrize("ids", [[3, 3, 5], [1, 2, VOCAB], [-1, 0, 1]], ids=["twice", "too large", "negative"])
def test_a_damaged_map_of_the_draft_vocabulary_is_an_error(tmp_path, ids):
    tiny_drafter(draft_vocab_size=3).save_pretrained(tmp_path / "whole")
    damaged = edit(tmp_path / "whole", tmp_path / "damaged", add={"draft_token_ids": torch.tensor(ids)})
    with pytest.raises(ValueError, match=r"Expected draft_token_ids to be different target ids .* The map is damaged"):
        DSparkDrafter.from_pretrained(damaged)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("model.safetensors", "no file named model.safetensors"),
        ("config.json", "Expected a DSpark drafter at .* got no"),
    ],
)
def test_a_missing_file_is_named(tmp_path, file, message):
    tiny_drafter().save_pretrained(tmp_path)
    (tmp_path / file).unlink()
    with pytest.raises(OSError, match=message):
        DSparkDrafter.from_pretrained(tmp_path)


def test_a_truncated_file_is_one_clear_error(tmp_path):
    tiny_drafter().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"Expected complete safetensors files .* Download it again"):
        DSparkDrafter.from_pretrained(tmp_path)


def test_a_language_model_is_no_drafter_and_a_drafter_no_target(tmp_path):
    target = tiny_target(dtype=torch.float32)
    target.save_pretrained(tmp_path / "target")
    tiny_drafter(target).save_pretrained(tmp_path / "drafter")
    with pytest.raises(ValueError, match=r"Expected a DSpark drafter at .* got model_type 'llama'"):
        DSparkDrafter.from_pretrained(tmp_path / "target")
    with pytest.raises(ValueError, match="Expected a language model as the target, got the drafter"):
        hf_dspark.load(tmp_path / "drafter", target=tmp_path / "drafter")
    with pytest.raises(ValueError, match="Expected a language model as the target, got the drafter"):
        hf_dspark.load(tmp_path / "drafter", target=DEEPSPEC["vanilla"])
    with pytest.raises(ValueError, match="Expected target_name_or_path"):
        hf_dspark.load(tmp_path / "drafter")
    with pytest.raises(FileNotFoundError, match="no such folder"):
        hf_dspark.load(tmp_path / "nowhere")


@pytest.fixture
def pair(tmp_path):
    """Folders of a target with a tokenizer, and of a drafter that names it and knows its weights."""
    target = tiny_target(dtype=torch.float32)
    target.save_pretrained(tmp_path / "target")
    letter_tokenizer().save_pretrained(tmp_path / "target")
    named = {"target_name_or_path": str(tmp_path / "target"), "target_fingerprint": fingerprint(target)}
    tiny_drafter(target, **named).save_pretrained(tmp_path / "drafter")
    return tmp_path


@pytest.fixture
def warnings_of_loading(monkeypatch):
    said = []
    monkeypatch.setattr(hf_dspark.loading.logger, "warning", said.append)
    return said


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_load_finds_the_target_that_the_drafter_names(pair, warnings_of_loading, dtype):
    target, tokenizer, drafter = hf_dspark.load(pair / "drafter", dtype=dtype)
    assert target.dtype == drafter.dtype == dtype
    assert target.name_or_path == str(pair / "target")
    assert not warnings_of_loading
    inputs = tokenizer("fghij", return_tensors="pt", return_token_type_ids=False)
    with Trace() as trace:
        target.generate(**inputs, assistant_model=drafter, max_new_tokens=12, do_sample=False)
    assert trace.drafted > 0


def test_other_weights_than_the_trained_ones_are_told_aloud(pair, warnings_of_loading):
    other = tiny_target(dtype=torch.float32, seed=9)
    other.save_pretrained(pair / "target")
    hf_dspark.load(pair / "drafter", dtype=torch.float32)
    assert len(warnings_of_loading) == 1
    assert f"got {fingerprint(other)}. The output stays exact" in warnings_of_loading[0]


def test_a_truncated_target_is_one_clear_error(pair):
    file = pair / "target" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"Expected complete safetensors files in .*target.* Download it again"):
        hf_dspark.load(pair / "drafter")


def test_deepspec_layout_says_what_it_has_no_place_for(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(hf_dspark.configuration_dspark.logger, "warning", said.append)
    drafter = tiny_drafter(own_embeddings=True, sts_temperatures=[2.0] * 5, confidence_threshold=0.5)
    drafter.save_pretrained(tmp_path, checkpoint_format="deepspec")
    assert len(said) == 1
    assert "confidence_threshold, sts_temperatures" in said[0]


def test_a_deepspec_checkpoint_behind_plain_auto_classes_is_refused():
    target = AutoModelForCausalLM.from_pretrained(DATA / "e2e_qwen3" / "target")
    lost = AutoModel.from_pretrained(DATA / "e2e_qwen3" / "draft")
    with pytest.raises(
        ValueError, match=r"got Qwen3Model built from a DSpark checkpoint.*DSparkDrafter.from_pretrained"
    ):
        target.generate(prompt(), assistant_model=lost, max_new_tokens=5)


def test_auto_classes_know_our_format(tmp_path):
    tiny_drafter().save_pretrained(tmp_path)
    assert isinstance(AutoConfig.from_pretrained(tmp_path), DSparkConfig)
    assert isinstance(AutoModel.from_pretrained(tmp_path), DSparkDrafter)
    ours, loaded = drafter_config().to_dict(), DSparkConfig.from_pretrained(tmp_path).to_dict()
    changed = {key for key in ours if ours[key] != loaded.get(key)}
    assert changed <= {"architectures", "dtype"}


def test_fingerprints_know_weights_not_dtypes():
    target = tiny_target(dtype=torch.float32)
    assert fingerprint(target) == fingerprint(copy.deepcopy(target).to(torch.bfloat16))
    other = tiny_target(dtype=torch.float32, seed=9)
    assert fingerprint(target) != fingerprint(other)


def test_summary_says_what_the_drafter_is():
    text = tiny_drafter(draft_vocab_size=20, target_name_or_path="org/model").summary()
    for part in ("org/model", "block size       5", "vanilla, rank 8", f"20 of {VOCAB}", "[0, 2] of 4"):
        assert part in text
    assert perfect(tiny_target()).summary()
