"""Tiny random models for tests: targets of each family, drafters that are random, perfect, adversarial or broken."""

from __future__ import annotations

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from hf_dspark import DraftBlock, DSparkConfig, DSparkDrafter, Trace

VOCAB = 48
MASK = 47
LETTERS = [chr(ord("a") + i) if i < 26 else chr(ord("A") + i - 26) for i in range(VOCAB)]
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": 12}),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM, {"sliding_window": 12, "final_logit_softcapping": 20.0}),
}


def tiny_target(
    family: str = "llama", *, dtype: torch.dtype = torch.float64, seed: int = 0, **changes
) -> PreTrainedModel:
    """A random target of a family; float64 unless a test is about another dtype."""
    config_class, model_class, extra = FAMILIES[family]
    torch.manual_seed(seed)
    model = model_class(config_class(**{**SHAPE, **extra, **changes})).to(dtype).eval()
    model.generation_config.eos_token_id = None
    return model


def drafter_config(target: PreTrainedModel | None = None, **changes) -> DSparkConfig:
    """A drafter's config for a tiny target."""
    shape = {key: SHAPE[key] for key in SHAPE if key not in ("initializer_range",)}
    text = None if target is None else target.config.get_text_config()
    if text is not None:
        shape |= {"vocab_size": text.vocab_size, "hidden_size": text.hidden_size}
    return DSparkConfig(
        **{
            **shape,
            "num_hidden_layers": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "block_size": 5,
            "mask_token_id": MASK,
            "target_layer_ids": [0, 2],
            "num_target_layers": 4 if text is None else text.num_hidden_layers,
            "markov_rank": 8,
            "initializer_range": 0.3,
            **changes,
        }
    )


def tiny_drafter(
    target: PreTrainedModel | None = None, *, seed: int = 1, cls: type = DSparkDrafter, **changes
) -> DSparkDrafter:
    """A random drafter for a tiny target, in the target's dtype."""
    torch.manual_seed(seed)
    drafter = cls(drafter_config(target, **changes)).eval()
    return drafter if target is None else drafter.to(target.dtype)


class ScriptedDrafter(DSparkDrafter):
    """A drafter whose tokens are decided by `script(prefix_ids [1, length], n) -> list of token ids`.

    It takes the same features as a real one. Under sampling its distribution is one-hot (no logits), which the accept
    rule must treat as such.
    """

    script = None

    @torch.no_grad()
    def propose(
        self, context, anchor_ids, *, num_draft_tokens=None, do_sample=False, processors=None, prefix_ids=None
    ):
        context.take(self.device, self.dtype)
        keep = self.config.block_size if num_draft_tokens is None else min(self.config.block_size, num_draft_tokens)
        tokens = torch.tensor([list(self.script(prefix_ids, keep))[:keep]], dtype=torch.long)
        return DraftBlock(tokens, None, None, torch.tensor([tokens.shape[1]]))


def perfect(target: PreTrainedModel, **changes) -> ScriptedDrafter:
    """Always drafts what the target would say greedily (without processors)."""
    drafter = tiny_drafter(target, cls=ScriptedDrafter, **changes)

    def script(prefix, keep):
        ids = prefix
        for _ in range(keep):
            ids = torch.cat([ids, target(ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
        return ids[0, prefix.shape[1] :].tolist()

    drafter.script = script
    return drafter


def adversarial(target: PreTrainedModel, **changes) -> ScriptedDrafter:
    """Always drafts what the target would never say first."""
    drafter = tiny_drafter(target, cls=ScriptedDrafter, **changes)
    drafter.script = lambda prefix, keep: target(prefix, use_cache=False).logits[0, -1].argsort()[:keep].tolist()
    return drafter


def mixed(target: PreTrainedModel, **changes) -> ScriptedDrafter:
    """Right for a number of slots that changes with the length of the text, then wrong: every acceptance occurs."""
    drafter = tiny_drafter(target, cls=ScriptedDrafter, **changes)
    true = perfect(target, **changes).script

    def script(prefix, keep):
        tokens, right = true(prefix, keep), prefix.shape[1] * 7 % 4 + (prefix.shape[1] % 3 == 0) * 2
        return [token if slot < right else (token + 1) % VOCAB for slot, token in enumerate(tokens)]

    drafter.script = script
    return drafter


def broken(target: PreTrainedModel, **changes) -> DSparkDrafter:
    """A drafter whose weights are NaN."""
    drafter = tiny_drafter(target, **changes)
    with torch.no_grad():
        for weight in drafter.parameters():
            weight.fill_(torch.nan)
    return drafter


def prompt(length: int = 7, *, seed: int = 3) -> torch.Tensor:
    """Random prompt ids, `(1, length)`."""
    return torch.randint(2, VOCAB - 1, (1, length), generator=torch.Generator().manual_seed(seed))


def greedy_pair(target: PreTrainedModel, drafter: DSparkDrafter, ids: torch.Tensor, fresh=dict, **options):
    """Plain and drafted greedy generation, and the trace of the latter; `fresh()` gives options that have a memory."""
    plain = target.generate(ids, do_sample=False, **options, **fresh())
    with Trace() as trace:
        drafted = target.generate(ids, do_sample=False, assistant_model=drafter, **options, **fresh())
    return plain, drafted, trace


def assert_greedy_identity(target: PreTrainedModel, drafter: DSparkDrafter, ids: torch.Tensor, fresh=dict, **options):
    """Drafted greedy ids equal plain ones, and drafts were really verified; returns the trace."""
    plain, drafted, trace = greedy_pair(target, drafter, ids, fresh, **options)
    assert drafted.tolist() == plain.tolist()
    assert trace.verified > 0
    return trace


def letter_tokenizer() -> PreTrainedTokenizerFast:
    """One letter a token, so that any two tokens of a text make a stop string."""
    core = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(LETTERS)}, unk_token="a"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="a", eos_token="b")
