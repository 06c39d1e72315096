"""A tiny pair with a chat template of special tokens, for tests of training data."""

import json

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tiny import VOCAB, tiny_target

NAMES = ["<pad>", "<unk>", "<|im_start|>", "<|im_end|>", "user", "assistant", "system", "NO"]
WORDS = NAMES + [f"w{index}" for index in range(len(NAMES), VOCAB)]
END = WORDS.index("<|im_end|>")
TEMPLATE = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|> system w46 <|im_end|> {% endif %}"
    "{% for message in messages %}{% if message['content'] == 'NO' %}{{ raise_exception('not so') }}{% endif %}"
    "<|im_start|> {{ message['role'] }} {{ message['content'] }} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% if slowly %}w45 {% endif %}{% endif %}"
)


def chat_tokenizer():
    core = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"unk_token": "<unk>", "pad_token": "<pad>", "bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, **special)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def chat_target():
    target = tiny_target(dtype=torch.float32, num_hidden_layers=2)
    target.generation_config.eos_token_id = END
    return target


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]
