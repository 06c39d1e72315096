"""Adapters on a drafter: trained alone, saved alone, switched, merged and taken off, and always losslessly in use."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file
from torch.testing import assert_close

from hf_dspark import DSparkDrafter, DSparkTrainer, DSparkTrainingArguments, Trace, use_stock_loop
from hf_dspark.training.anchors import draw_anchors
from hf_dspark.training.blocks import draft_logits, teacher_forced
from hf_dspark.training.cache import FeatureCache
from hf_dspark.training.data import TrainingSample
from hf_dspark.training.replay import replay_greedy
from hf_dspark.training.trainer import collate
from tiny import assert_greedy_identity, letter_tokenizer, prompt, tiny_drafter, tiny_target

# peft 0.21 asks transformers 5.24 by a name that is going away.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

BACKBONE = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "fc"]
HEADS = pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])


@pytest.fixture(scope="module")
def target():
    return tiny_target(dtype=torch.float32)


@pytest.fixture(scope="module")
def cache(target, tmp_path_factory):
    samples = []
    for seed in range(8):
        text = target.generate(prompt(5, seed=seed), max_new_tokens=24, do_sample=False)
        samples.append(TrainingSample(tuple(text[0].tolist()), 5))
    return FeatureCache.build(target, samples, tmp_path_factory.mktemp("features"), layer_ids=[0, 2])


def lora(**changes):
    modules = [*BACKBONE, "joint_proj", "markov_w1", "markov_w2"]
    return LoraConfig(**{"r": 4, "target_modules": modules, "modules_to_save": ["confidence_head"], **changes})


def adapted(target, head="vanilla", **changes):
    return get_peft_model(tiny_drafter(target, markov_head_type=head).bind(target), lora(**changes))


def random_adapter(target, head="vanilla", *, seed=5):
    drafter = tiny_drafter(target, markov_head_type=head).bind(target)
    torch.manual_seed(seed)
    return get_peft_model(drafter, lora(init_lora_weights=False)).eval()


def train(drafter, cache, path, *, resume_from=None, **changes):
    options = {
        "output_dir": str(path), "max_steps": 20, "learning_rate": 1e-2, "per_device_train_batch_size": 4,
        "anchors_per_sample": 8, "logging_steps": 1, "save_steps": 10, "use_cpu": True, "report_to": "none",
        "disable_tqdm": True, "kl_weight": 1.0, "tv_weight": 0.1,
    }  # fmt: skip
    trainer = DSparkTrainer(drafter, DSparkTrainingArguments(**{**options, **changes}), cache)
    trainer.train(resume_from_checkpoint=resume_from)
    drafter.eval()
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


@torch.no_grad()
def outputs(drafter, cache):
    """Draft logits and confidence logits on every sample."""
    batch = collate([cache[index] for index in range(len(cache))])
    anchors = draw_anchors(batch["loss_mask"], batch["lengths"], batch.pop("index"), 6, seed=0, step=0)
    blocks = teacher_forced(drafter, **batch, anchors=anchors)
    return torch.cat([draft_logits(drafter, blocks.hidden, blocks.latent), blocks.confidence_logits[:, None]], dim=1)


def drafts(target, drafter):
    """Everything drafted for a prompt, while the text is plain generation's."""
    plain = target.generate(prompt(), do_sample=False, max_new_tokens=24)
    with Trace() as trace:
        text = target.generate(prompt(), do_sample=False, max_new_tokens=24, assistant_model=drafter)
    assert text.tolist() == plain.tolist()
    assert trace.verified > 0
    return [record.drafted for record in trace.rounds]


# ------------------------------------------------------------------ training


@HEADS
def test_adapters_learn_and_the_drafter_stays_as_it_was(target, cache, tmp_path, head):
    before = {name: weight.clone() for name, weight in tiny_drafter(target, markov_head_type=head).named_parameters()}
    model = adapted(target, head)
    history = train(model, cache, tmp_path)
    assert len(history) == 20
    assert sum(history[-5:]) < 0.9 * sum(history[:5])

    found = {}
    for name, weight in model.get_base_model().named_parameters():
        if "lora_" not in name and "modules_to_save" not in name:
            found[name.replace(".base_layer", "").replace(".original_module", "")] = weight
        else:
            assert weight.requires_grad
    assert found.keys() == before.keys()
    assert all(torch.equal(weight, before[name]) for name, weight in found.items())
    assert not any(weight.requires_grad for weight in found.values())
    halves = {name: weight for name, weight in model.named_parameters() if "lora_" in name}
    assert all(weight.any() for weight in halves.values())  # one half of each pair starts at zero
    owners = {name.split(".lora_")[0].split(".")[-1] for name in halves}
    assert owners == {*BACKBONE, "markov_w1", "markov_w2"} | ({"joint_proj"} if head == "rnn" else set())


def test_training_goes_on_exactly_from_a_checkpoint_of_adapters(target, cache, tmp_path):
    whole = adapted(target)
    history = train(whole, cache, tmp_path)
    resumed = adapted(target)
    again = train(resumed, cache, tmp_path, resume_from=str(tmp_path / "checkpoint-10"))
    assert again[10:] == pytest.approx(history[10:], abs=1e-6)
    assert_close(outputs(resumed.get_base_model(), cache), outputs(whole.get_base_model(), cache), rtol=0, atol=1e-5)


def test_dropout_and_dora_train_too(target, cache, tmp_path):
    model = adapted(target, lora_dropout=0.1, use_dora=True, target_modules=[*BACKBONE, "markov_w2"])
    history = train(model, cache, tmp_path, save_strategy="no")
    assert sum(history[-5:]) < 0.9 * sum(history[:5])
    drafts(target, model)


def test_an_adapted_drafter_is_evaluated_as_itself(target, cache, tmp_path):
    model = random_adapter(target)
    arguments = DSparkTrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", disable_tqdm=True)
    metrics = DSparkTrainer(model, arguments, cache, eval_data=cache).evaluate()
    assert metrics["eval_accepted_length"] == replay_greedy(model.get_base_model(), cache).accepted_length


# ------------------------------------------------------------------ files


@HEADS
def test_only_the_adapter_is_saved_and_it_comes_back(target, cache, tmp_path, head):
    model = adapted(target, head)
    train(model, cache, tmp_path / "run")
    model.save_pretrained(tmp_path / "adapter")
    for folder in (tmp_path / "adapter", tmp_path / "run" / "checkpoint-20"):
        assert (folder / "adapter_config.json").is_file()
        assert not (folder / "model.safetensors").exists()
        assert not (folder / "config.json").exists()
        saved = load_file(folder / "adapter_model.safetensors")
        assert all("lora_" in name or "confidence_head" in name for name in saved)
        assert sum(map(torch.numel, saved.values())) == sum(w.numel() for w in model.parameters() if w.requires_grad)

        base = tiny_drafter(target, markov_head_type=head).bind(target)
        loaded = PeftModel.from_pretrained(base, folder)
        assert torch.equal(outputs(loaded.get_base_model(), cache), outputs(model.get_base_model(), cache))
        assert drafts(target, loaded) == drafts(target, model)
    plain = tiny_drafter(target, markov_head_type=head)
    assert drafts(target, plain) != drafts(target, model)


@HEADS
def test_a_merged_adapter_is_a_drafter_like_any_other(target, cache, tmp_path, head):
    model = random_adapter(target, head)
    expected, drafted = outputs(model.get_base_model(), cache), drafts(target, model)
    merged = model.merge_and_unload()
    assert type(merged) is DSparkDrafter
    assert_close(outputs(merged, cache), expected, rtol=0, atol=1e-3)
    assert drafts(target, merged) == drafted

    merged.save_pretrained(tmp_path)
    loaded = DSparkDrafter.from_pretrained(tmp_path).bind(target)
    weights = merged.state_dict()
    assert weights.keys() == tiny_drafter(target, markov_head_type=head).state_dict().keys()
    assert all(torch.equal(weight, weights[name]) for name, weight in loaded.state_dict().items())
    assert_close(outputs(loaded, cache), outputs(merged, cache), rtol=0, atol=1e-4)
    trace = assert_greedy_identity(target, loaded, prompt(), max_new_tokens=24)
    assert trace.drafted > 0


def test_unloading_gives_the_drafter_back(target, cache):
    model = random_adapter(target)
    assert drafts(target, model) != drafts(target, tiny_drafter(target))
    drafter = model.unload()
    assert type(drafter) is DSparkDrafter
    assert torch.equal(outputs(drafter, cache), outputs(tiny_drafter(target).bind(target), cache))
    assert drafts(target, drafter) == drafts(target, tiny_drafter(target))


def test_an_adapter_alone_is_no_drafter(target, tmp_path):
    random_adapter(target).save_pretrained(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"got no config.json.* PeftModel.from_pretrained\(drafter"):
        DSparkDrafter.from_pretrained(tmp_path)


# ------------------------------------------------------------------ use


def test_adapters_are_switched(target, tmp_path):
    random_adapter(target, seed=6).save_pretrained(tmp_path)
    model = random_adapter(target, seed=5)
    first = drafts(target, model)
    model.load_adapter(tmp_path, adapter_name="second")
    assert drafts(target, model) == first
    model.set_adapter("second")
    second = drafts(target, model)
    model.set_adapter("default")
    assert drafts(target, model) == first
    with model.disable_adapter():
        none = drafts(target, model)
    assert none == drafts(target, tiny_drafter(target))
    assert first != second != none != first
    assert drafts(target, model) == first


def test_sampling_and_the_stock_loop_draft_with_the_adapter(target):
    model = random_adapter(target)
    first = drafts(target, model)[0]
    with use_stock_loop():
        assert drafts(target, model)[0] == first
    texts = []
    for drafter in (model, model.get_base_model()):
        torch.manual_seed(0)
        with Trace() as trace:
            texts.append(target.generate(prompt(), do_sample=True, max_new_tokens=24, assistant_model=drafter))
        assert trace.verified > 0
    assert torch.equal(*texts)


def test_the_adapter_of_an_assistant_that_is_no_drafter_is_left_to_transformers(target):
    assistant = get_peft_model(tiny_target(dtype=torch.float32, seed=1), LoraConfig(target_modules=["q_proj"]))
    plain = target.generate(prompt(), do_sample=False, max_new_tokens=12)
    with Trace() as trace:
        text = target.generate(prompt(), do_sample=False, max_new_tokens=12, assistant_model=assistant)
    assert text.tolist() == plain.tolist()
    assert not trace.rounds


SHAPE = {"num_virtual_tokens": 3, "task_type": "FEATURE_EXTRACTION", "token_dim": 32, "num_layers": 2}
ON_THE_INPUT = {
    "prompt tuning": PromptTuningConfig(**SHAPE, num_attention_heads=4),
    "prefix tuning": PrefixTuningConfig(**SHAPE, num_attention_heads=4),
}


@pytest.mark.parametrize("case", ON_THE_INPUT)
def test_adapters_on_the_input_are_refused_instead_of_left_out(target, cache, tmp_path, case):
    model = get_peft_model(tiny_drafter(target).bind(target), ON_THE_INPUT[case])
    message = r"^Expected an adapter inside the layers of a DSpark drafter, got \w+Config, which .*\. Use Lora"
    with pytest.raises(ValueError, match=message):
        target.generate(prompt(), do_sample=False, max_new_tokens=4, assistant_model=model)
    with pytest.raises(ValueError, match=message):
        train(model, cache, tmp_path)


# ------------------------------------------------------------------ the example

EXAMPLE = Path(__file__).parent.parent / "examples" / "adapt_to_domain.py"


def test_the_example_adapts_a_tiny_pair(tmp_path):
    example = runpy.run_path(str(EXAMPLE))
    target, tokenizer = tiny_target(dtype=torch.float32), letter_tokenizer()
    training, held_out = (example["domain_prompts"](part, 6) for part in ("training", "held out"))
    assert training == example["domain_prompts"]("training", 6)
    folder = example["train_adapter"](
        target, tokenizer, tiny_drafter(target), training, tmp_path, steps=3, rank=4, max_new_tokens=12
    )
    assert {file.name for file in folder.glob("*.safetensors")} == {"adapter_model.safetensors"}
    drafter = PeftModel.from_pretrained(tiny_drafter(target), folder)
    assert 1 <= example["accepted_length"](target, tokenizer, drafter, held_out, 12) <= 6
    assert drafts(target, drafter) != drafts(target, tiny_drafter(target))


def test_the_example_says_how_to_run_it():
    shown = subprocess.run([sys.executable, EXAMPLE, "--help"], capture_output=True, text=True, check=True).stdout
    assert "python examples/adapt_to_domain.py" in shown
    assert "--held-out" in shown
