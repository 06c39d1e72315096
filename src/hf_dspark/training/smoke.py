"""A tiny target of one's own: a small Llama over bytes, taught a handful of answers, which it then gives itself.

It makes a whole training run, from data to a drafter that `generate()` uses, possible in two minutes on any machine
without any download.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from transformers.utils import logging

SPECIAL_TOKENS = ["<s>", "</s>", "<mask>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}\n{{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
TOPICS = ("rivers", "bread", "the moon", "chess", "gardens", "trains", "maps", "bees", "rain", "music", "glass", "tea")
ANSWERS = {
    "Tell me about {}.": "There is much to say about {}. People have known it for a long time and still learn more.",
    "Why do we need {}?": "We need {} because life without it would be harder. That is why people look after it.",
    "Write a line on {}.": "Here is a line on {}: it is old, it is new, and it is never the same twice.",
    "What is best about {}?": "The best thing about {} is that anyone can enjoy it, in the morning and at night.",
}
TEACHING_STEPS, TEACHING_BATCH = 300, 12


def make_target(folder: Path) -> int:
    """Saves a Llama of four layers, taught `ANSWERS`, with its tokenizer.

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
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", mask_token="<mask>", pad_token="</s>"
    )
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
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    target = LlamaForCausalLM(config)
    _teach(target, fast)
    fast.save_pretrained(folder)
    target.save_pretrained(folder)
    return vocabulary["<mask>"]


def _conversations() -> list[list[dict[str, str]]]:
    return [
        [{"role": "user", "content": question.format(topic)}, {"role": "assistant", "content": answer.format(topic)}]
        for topic in TOPICS
        for question, answer in ANSWERS.items()
    ]


def _teach(target: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Next-token training on the answers, until the target knows them by heart."""
    texts = [tokenizer.apply_chat_template(turns, tokenize=False) for turns in _conversations()]
    tokens = tokenizer(texts, padding=True, return_tensors="pt", add_special_tokens=False)
    labels = tokens["input_ids"].masked_fill(tokens["attention_mask"] == 0, -100)
    optimizer = torch.optim.AdamW(target.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=TEACHING_STEPS)
    for _ in logging.tqdm(range(TEACHING_STEPS), desc="teaching a tiny target", unit="step"):
        rows = torch.randperm(len(texts))[:TEACHING_BATCH]
        target(**{key: value[rows] for key, value in tokens.items()}, labels=labels[rows]).loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


@torch.no_grad()
def write_responses(folder: Path, path: Path, held_out: Path) -> None:
    """The target's greedy answers to all questions, every fifth of them held out.

    Args:
        folder (`Path`): of the target.
        path, held_out (`Path`): JSONL files to write.
    """
    target = LlamaForCausalLM.from_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    rows = []
    for question, _ in _conversations():
        inputs = tokenizer.apply_chat_template(
            [question], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        ids = inputs["input_ids"]
        output = target.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=128, do_sample=False
        )
        length = ids.shape[1]
        rows.append({"prompt_ids": output[0, :length].tolist(), "response_ids": output[0, length:].tolist()})
    for where, chosen in ((path, [row for i, row in enumerate(rows) if i % 5]), (held_out, rows[::5])):
        where.write_text("".join(json.dumps(row) + "\n" for row in chosen), encoding="utf-8")
