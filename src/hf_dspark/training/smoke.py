"""A tiny target of one's own: random weights, a tokenizer of bytes, and the target's answers to a few prompts.

It makes a whole training run, from data to a drafter that `generate()` uses, possible in two minutes on any machine
without any download. What such a target says means nothing; how it says it is as deterministic as a large one.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

SPECIAL_TOKENS = ["<s>", "</s>", "<mask>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}\n{{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
TOPICS = ("rivers", "bread", "the moon", "chess", "gardens", "trains", "maps", "bees")
QUESTIONS = ("Tell me about {}.", "Why do we need {}?", "Write a line on {}.", "What is best about {}?")


def make_target(folder: Path) -> int:
    """Saves a random Llama of four layers with its tokenizer.

    Args:
        folder (`Path`): where to; what is there already is kept.

    Returns:
        `int`: its mask token id.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    if (folder / "config.json").is_file():
        return vocabulary["<mask>"]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", mask_token="<mask>")
    fast.chat_template = CHAT_TEMPLATE
    set_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.1,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    target = LlamaForCausalLM(config)
    with torch.no_grad():
        target.lm_head.weight.mul_(8)  # as sure of its words as a trained model
        target.lm_head.weight[: len(SPECIAL_TOKENS)] = 0  # never the most likely ones
    fast.save_pretrained(folder)
    target.save_pretrained(folder)
    return vocabulary["<mask>"]


@torch.no_grad()
def write_responses(folder: Path, path: Path, held_out: Path) -> None:
    """The target's greedy answers to 32 prompts, every fourth of them held out.

    Args:
        folder (`Path`): of the target.
        path, held_out (`Path`): JSONL files to write.
    """
    target = LlamaForCausalLM.from_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    rows = []
    for text in (question.format(topic) for topic in TOPICS for question in QUESTIONS):
        message = [{"role": "user", "content": text}]
        inputs = tokenizer.apply_chat_template(
            message, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        ids = inputs["input_ids"]
        output = target.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=64, do_sample=False, eos_token_id=None
        )
        length = ids.shape[1]
        rows.append({"prompt_ids": output[0, :length].tolist(), "response_ids": output[0, length:].tolist()})
    for where, chosen in ((path, [row for i, row in enumerate(rows) if i % 4]), (held_out, rows[::4])):
        where.write_text("".join(json.dumps(row) + "\n" for row in chosen), encoding="utf-8")
