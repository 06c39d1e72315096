"""`generate(assistant_model=drafter)` fits into transformers: nothing else changes, and what cannot work says so.

Covers the hooks on `GenerationMixin`, one clear error for each impossible request before any token, and what a drafter
meets in practice: adapters, offloading, other dtypes, pipelines, streamers, threads, wrapped embeddings and heads.
"""

import copy
import inspect
import logging
import os
import subprocess
import sys
import threading

import pytest
import torch
from accelerate import cpu_offload
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    DynamicCache,
    GenerationMixin,
    LogitsProcessor,
    MambaConfig,
    MambaForCausalLM,
    Qwen3Config,
    Qwen3Model,
    T5Config,
    T5ForConditionalGeneration,
    TextIteratorStreamer,
    pipeline,
)

import hf_dspark
from hf_dspark import DSparkDrafter, Trace
from hf_dspark._compat import CACHE, SLIDING_CACHE_ROLLS_BACK
from hf_dspark.evaluation.audit import audit_greedy
from test_stops import LENGTH, both
from tiny import (
    SHAPE,
    VOCAB,
    assert_greedy_identity,
    drafter_config,
    greedy_pair,
    letter_tokenizer,
    mixed,
    perfect,
    prompt,
    tiny_drafter,
    tiny_target,
)

HOOKED = ("_get_candidate_generator", "_validate_generation_mode", "_assisted_decoding")


@pytest.fixture(scope="module")
def llama():
    return tiny_target("llama")


@pytest.fixture(scope="module")
def tokenizer():
    return letter_tokenizer()


def hooks_on(target):
    return sum(len(module._forward_hooks) for module in target.modules())


# -------------------------------------------------------------------- the hooks on transformers


def test_the_targets_generation_config_stays_as_it_is(llama):
    before = copy.deepcopy(llama.generation_config.to_dict())
    assert_greedy_identity(llama, mixed(llama), prompt(), max_new_tokens=12)
    assert llama.generation_config.to_dict() == before


def test_other_ways_to_assist_still_work(llama):
    plain = llama.generate(prompt(), do_sample=False, max_new_tokens=16)
    small = tiny_target("llama", num_hidden_layers=1)
    with Trace() as trace:
        assert (
            llama.generate(prompt(), do_sample=False, max_new_tokens=16, assistant_model=small).tolist()
            == plain.tolist()
        )
        looked_up = llama.generate(prompt(), do_sample=False, max_new_tokens=16, prompt_lookup_num_tokens=3)
    assert looked_up.tolist() == plain.tolist()
    assert not trace.rounds


def test_patching_twice_and_taking_it_back(llama):
    patched = [getattr(GenerationMixin, name) for name in HOOKED]
    hf_dspark.patch()
    assert [getattr(GenerationMixin, name) for name in HOOKED] == patched
    try:
        hf_dspark.unpatch()
        originals = [getattr(GenerationMixin, name) for name in HOOKED]
        assert [wrapper.__wrapped__ for wrapper in patched] == originals
        hf_dspark.unpatch()
        assert [getattr(GenerationMixin, name) for name in HOOKED] == originals
    finally:
        hf_dspark.patch()
    assert_greedy_identity(llama, mixed(llama), prompt(), max_new_tokens=8)


def test_an_environment_variable_leaves_transformers_alone():
    code = (
        "import hf_dspark; from transformers import GenerationMixin as G; "
        f"assert not any(hasattr(getattr(G, name), '_dspark_original') for name in {HOOKED}); "
        "hf_dspark.patch(); "
        f"assert all(hasattr(getattr(G, name), '_dspark_original') for name in {HOOKED})"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "HF_DSPARK_NO_PATCH": "1"})


def test_the_wrapped_methods_take_the_arguments_that_the_hooks_pass_on():
    """A change of these private signatures in a new transformers must be met here first."""
    names = {name: list(inspect.signature(getattr(GenerationMixin, name)).parameters) for name in HOOKED}
    assert {"generation_config", "logits_processor", "model_kwargs", "assistant_model"} <= set(names[HOOKED[0]])
    assert names[HOOKED[1]] == ["self", "generation_mode", "generation_config", "generation_mode_kwargs"]
    expected = {
        "input_ids",
        "logits_processor",
        "stopping_criteria",
        "generation_config",
        "synced_gpus",
        "streamer",
        "inputs_tensor",
        "assistant_model",
        "assistant_tokenizer",
        "tokenizer",
        "model_kwargs",
    }
    assert set(names[HOOKED[2]]) - {"self"} == expected


def test_the_trace_proves_what_happened(llama):
    trace = assert_greedy_identity(llama, perfect(llama), prompt(), max_new_tokens=20)
    assert trace.tokens == 19  # the first token comes from the prefill
    assert 0 < trace.accepted <= trace.verified <= trace.drafted
    assert trace.tokens == sum(min(record.accepted + 1, len(record.committed)) for record in trace.rounds)


def test_a_generation_without_drafts_warns(llama, caplog):
    logger = logging.getLogger("hf_dspark")
    logger.addHandler(caplog.handler)
    try:
        drafter = tiny_drafter(llama, num_draft_tokens=0)
        plain, drafted, trace = greedy_pair(llama, drafter, prompt(), max_new_tokens=8)
    finally:
        logger.removeHandler(caplog.handler)
    assert drafted.tolist() == plain.tolist()
    assert trace.drafted == 0
    assert "Nothing was drafted" in caplog.text


# -------------------------------------------------------------------- what cannot work


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 3}, r"Expected greedy .*, got .*num_beams=3.*Set num_beams=1"),
        (
            {"do_sample": True, "num_return_sequences": 2},
            r"Expected num_return_sequences=1.*got 2.*Call generate\(\) once",
        ),
        ({"use_cache": False}, r"Expected use_cache=True.*got False.*Leave use_cache"),
    ],
)
def test_an_impossible_option_is_one_clear_error(llama, options, message):
    with pytest.raises(ValueError, match=message):
        llama.generate(prompt(), max_new_tokens=5, assistant_model=tiny_drafter(llama), **options)
    assert hooks_on(llama) == 0


def test_a_batch_and_an_empty_prompt_are_errors(llama):
    drafter = tiny_drafter(llama)
    with pytest.raises(ValueError, match=r"Expected one prompt.*got a batch of 2.*once for each prompt"):
        llama.generate(prompt().repeat(2, 1), max_new_tokens=5, assistant_model=drafter)
    with pytest.raises(ValueError, match=r"Expected at least one prompt token, got an empty prompt.*bos"):
        llama.generate(torch.zeros(1, 0, dtype=torch.long), max_new_tokens=5, assistant_model=drafter)


def test_targets_that_cannot_be_drafted_for_are_errors():
    shape = {"vocab_size": VOCAB, "pad_token_id": 0, "eos_token_id": None}
    mamba = MambaForCausalLM(MambaConfig(hidden_size=32, num_hidden_layers=4, state_size=4, bos_token_id=1, **shape))
    with pytest.raises(
        ValueError, match=r"Expected a target whose cache can drop .*got MambaForCausalLM.*without assistant"
    ):
        mamba.generate(prompt(), max_new_tokens=5, assistant_model=tiny_drafter())
    t5 = T5ForConditionalGeneration(
        T5Config(d_model=32, d_kv=8, d_ff=32, num_layers=4, num_heads=4, decoder_start_token_id=0, **shape)
    )
    with pytest.raises(ValueError, match=r"Expected a decoder-only target, got T5"):
        t5.generate(prompt(), max_new_tokens=5, assistant_model=tiny_drafter())


def test_a_checkpoint_loaded_through_a_plain_class_is_one_clear_error(llama):
    shape = {key: value for key, value in SHAPE.items() if key != "eos_token_id"}
    lost = Qwen3Model(Qwen3Config(**shape, target_layer_ids=[0, 2], mask_token_id=47))
    with pytest.raises(ValueError, match=r"Expected a DSparkDrafter, got Qwen3Model.*DSparkDrafter.from_pretrained"):
        llama.generate(prompt(), max_new_tokens=5, assistant_model=lost)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_target_layers": 6}, "number of layers 6, got 4"),
        ({"hidden_size": 64}, "hidden size 64, got 32"),
        ({"vocab_size": 50}, "vocabulary size 50, got 48"),
    ],
)
def test_a_drafter_of_another_target_is_one_clear_error(llama, changes, message):
    stranger = DSparkDrafter(drafter_config(llama, **changes))
    with pytest.raises(ValueError, match=message):
        llama.generate(prompt(), max_new_tokens=5, assistant_model=stranger)


# -------------------------------------------------------------------- what a drafter meets


# Before 5.24 transformers takes the meta weights of an offloaded model for its device.
@pytest.mark.filterwarnings("ignore:You are calling .generate.. with the `input_ids` being on:UserWarning")
def test_an_offloaded_target_says_the_same(llama):
    target = tiny_target("llama")
    cpu_offload(target, execution_device="cpu")
    plain = llama.generate(prompt(), do_sample=False, max_new_tokens=16)
    with Trace() as trace:
        drafted = target.generate(prompt(), do_sample=False, max_new_tokens=16, assistant_model=tiny_drafter(llama))
    assert drafted.tolist() == plain.tolist()
    assert trace.verified > 0


# peft 0.21 asks transformers 5.24 by a name that is going away.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_an_adapted_target_says_what_its_adapter_says():
    target = tiny_target("llama")
    base = target.generate(prompt(), do_sample=False, max_new_tokens=16)
    lora = {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"], "init_lora_weights": False}
    adapted = get_peft_model(target, LoraConfig(**lora), adapter_name="first").double()
    adapted.add_adapter("second", LoraConfig(**lora))
    adapted.double()
    texts = [base.tolist()]
    for name in ("first", "second", "first"):
        adapted.set_adapter(name)
        plain = adapted.generate(input_ids=prompt(), do_sample=False, max_new_tokens=16)
        for make in (tiny_drafter, mixed):
            with Trace() as trace:
                drafted = adapted.generate(
                    input_ids=prompt(), do_sample=False, max_new_tokens=16, assistant_model=make(target)
                )
            assert drafted.tolist() == plain.tolist()
            assert trace.verified > 0
        texts.append(plain.tolist())
    assert texts[1] == texts[3]
    assert texts[0] != texts[1] != texts[2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_drafter_in_another_dtype_changes_nothing(llama, dtype):
    assert_greedy_identity(llama, tiny_drafter(llama).to(dtype), prompt(), max_new_tokens=16)


def test_bfloat16_tokens_are_within_rounding_of_the_targets_choice():
    target = tiny_target("llama", dtype=torch.bfloat16)
    for make in (mixed, tiny_drafter):
        with Trace() as trace:
            text = target.generate(prompt(), do_sample=False, max_new_tokens=40, assistant_model=make(target))
        assert trace.verified > 0
        audit = audit_greedy(target, text, LENGTH)
        assert audit.largest_gap <= 0.25  # logits near 8 step by 1/32 in bfloat16
    wrong = text.clone()
    wrong[0, -1] = (wrong[0, -1] + 1) % VOCAB
    assert audit_greedy(target, wrong, LENGTH).largest_gap > 0.25


def test_a_pipeline_takes_a_drafter(tokenizer):
    target = tiny_target("llama", dtype=torch.float32)
    options = {"do_sample": False, "max_new_tokens": 12}
    plain = pipeline("text-generation", model=target, tokenizer=tokenizer)("hello", **options)
    drafted = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=tiny_drafter(target))
    with Trace() as trace:
        assert drafted("hello", **options) == plain
    assert trace.verified > 0


def test_an_iterator_streams_the_same_text(llama, tokenizer):
    texts = []
    for drafter in (None, mixed(llama)):
        streamer = TextIteratorStreamer(tokenizer, timeout=60)
        with Trace() as trace:
            llama.generate(prompt(), do_sample=False, max_new_tokens=16, assistant_model=drafter, streamer=streamer)
        texts.append(list(streamer))
    assert texts[0] == texts[1]
    assert trace.verified > 0
    assert len("".join(texts[0])) == LENGTH + 16
    both(llama, perfect(llama), max_new_tokens=16)


class Failing(LogitsProcessor):
    def __call__(self, input_ids, scores):
        if input_ids.shape[1] == LENGTH + 5:
            raise RuntimeError("broken processor")
        return scores


def test_no_hook_stays_on_the_target(llama):
    drafter = perfect(llama)
    assert_greedy_identity(llama, drafter, prompt(), max_new_tokens=8)
    assert hooks_on(llama) == 0
    with pytest.raises(RuntimeError, match="broken processor"):
        llama.generate(prompt(), max_new_tokens=12, assistant_model=drafter, logits_processor=[Failing()])
    assert hooks_on(llama) == 0


def test_another_thread_on_the_same_target_disturbs_nothing(llama):
    drafter = tiny_drafter(llama)
    alone = assert_greedy_identity(llama, drafter, prompt(), max_new_tokens=40)
    other = prompt(11, seed=5)
    serial = llama.generate(other, do_sample=False, max_new_tokens=30).tolist()
    results, stop = [], threading.Event()

    def generate():
        while not stop.is_set():
            results.append(llama.generate(other, do_sample=False, max_new_tokens=30).tolist())

    thread = threading.Thread(target=generate)
    thread.start()
    try:
        beside = assert_greedy_identity(llama, drafter, prompt(), max_new_tokens=40)
    finally:
        stop.set()
        thread.join()
    assert results
    assert all(result == serial for result in results)
    # The same drafts: the drafter saw the features of its own thread only.
    assert [record.drafted for record in beside.rounds] == [record.drafted for record in alone.rounds]


class Sealed(nn.Module):
    """Computes, but has no matrix to look at, like a packed or offloaded layer."""

    def __init__(self, inner):
        super().__init__()
        object.__setattr__(self, "inner", inner)

    def forward(self, inputs):
        return self.inner(inputs)

    @property
    def weight(self):
        raise AssertionError("this layer may be called, not read")


def test_embedding_and_head_are_called_and_never_read(llama):
    sealed = tiny_target("llama")
    sealed.set_input_embeddings(Sealed(sealed.get_input_embeddings()))
    sealed.set_output_embeddings(Sealed(sealed.get_output_embeddings()))
    for make in (tiny_drafter, perfect):
        bare = assert_greedy_identity(llama, make(llama), prompt(), max_new_tokens=12)
        trace = assert_greedy_identity(sealed, make(llama), prompt(), max_new_tokens=12)
        assert [record.drafted for record in trace.rounds] == [record.drafted for record in bare.rounds]


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("stop_at", [3, 4, 5, 6, 8])
def test_a_users_cache_survives_an_exception(family, stop_at):
    """After a streamer raised, the cache holds the committed tokens but the last, and the next turn is plain's."""
    if family == "mistral" and not SLIDING_CACHE_ROLLS_BACK:
        return  # such a cache is refused there before any token
    target = tiny_target(family)

    class Raises:
        def __init__(self):
            self.tokens = []

        def put(self, value):
            self.tokens += value.flatten().tolist()
            if len(self.tokens) == 7 + stop_at:
                raise RuntimeError("closed")

        def end(self):
            pass

    streamer, cache = Raises(), DynamicCache(config=target.config)
    with Trace() as trace, pytest.raises(RuntimeError, match="closed"):
        target.generate(
            prompt(), max_new_tokens=20, do_sample=False, assistant_model=mixed(target), streamer=streamer,
            **{CACHE: cache},
        )  # fmt: skip
    assert cache.get_seq_length() == len(streamer.tokens) - 1
    assert not any(getattr(layer, "record_past", False) for layer in cache.layers)
    text = torch.tensor([[*streamer.tokens, 5, 6]])
    again = target.generate(text, max_new_tokens=8, do_sample=False, **{CACHE: cache})
    assert torch.equal(again, target.generate(text, max_new_tokens=8, do_sample=False))
    assert trace.rounds or stop_at < 8


def test_attentions_asked_of_a_target_that_returns_none():
    target = tiny_target(attn_implementation="sdpa")
    with Trace() as trace:
        output = target.generate(
            prompt(), max_new_tokens=10, do_sample=False, assistant_model=mixed(target), output_attentions=True,
            return_dict_in_generate=True,
        )  # fmt: skip
    assert trace.verified > 0
    assert torch.equal(output.sequences, target.generate(prompt(), max_new_tokens=10, do_sample=False))


def test_a_trace_may_be_entered_again():
    target = tiny_target()
    drafter, trace = mixed(target), Trace()
    for _ in range(2):
        with trace, trace:
            target.generate(prompt(), max_new_tokens=6, do_sample=False, assistant_model=drafter)
    rounds = len(trace.rounds)
    target.generate(prompt(), max_new_tokens=6, do_sample=False, assistant_model=drafter)
    assert len(trace.rounds) == rounds > 0
