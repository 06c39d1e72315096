"""The drafter: backbone and heads in one `PreTrainedModel`, and how it proposes a block.

Contract: a drafter holds no state between calls and never owns the target. What a generation needs to remember lives
in a [`DraftContext`]; the target's embedding and head are borrowed as modules and called, so quantised and offloaded
targets work, and they are never registered, saved, moved or trained.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn
from transformers import DynamicCache, LogitsProcessorList, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_NAME, ModelOutput

from .backbone_dspark import DSparkLayer, Qwen3RMSNorm, RotaryEmbedding
from .configuration_dspark import DSparkConfig
from .context_dspark import DraftBlock, DraftContext, TargetModules
from .heads_dspark import MARKOV_HEADS, ConfidenceHead, MarkovHead, confidence, threshold_lengths


@dataclass
class DSparkOutput(ModelOutput):
    """Output of [`DSparkDrafter.backbone`].

    Args:
        last_hidden_state (`torch.Tensor` of shape `(batch, queries, hidden_size)`): block states after the final norm.
        cache (`DynamicCache`, *optional*): the draft cache, with the new context rows in it.
    """

    last_hidden_state: torch.Tensor | None = None
    cache: DynamicCache | None = None


class DSparkDrafter(PreTrainedModel):
    """A DSpark drafter: `target.generate(**inputs, assistant_model=drafter)`.

    Args:
        config ([`DSparkConfig`]): shape of the drafter, and of the target it belongs to.
    """

    config_class = DSparkConfig
    base_model_prefix = ""
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar[list[str]] = ["DSparkLayer"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def __init__(self, config: DSparkConfig):
        super().__init__(config)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(len(config.target_layer_ids) * hidden, hidden, bias=False)
        self.hidden_norm = Qwen3RMSNorm(hidden, eps=eps)
        self.layers = nn.ModuleList(DSparkLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = Qwen3RMSNorm(hidden, eps=eps)
        self.rotary = RotaryEmbedding(config)
        self.markov_head: MarkovHead | None = None
        self.confidence_head: ConfidenceHead | None = None
        self.embed_tokens: nn.Embedding | None = None
        self.lm_head: nn.Linear | None = None
        self.bound: TargetModules | None = None
        if config.markov_rank:
            self.markov_head = MARKOV_HEADS[config.markov_head_type](config)
        if config.enable_confidence_head:
            self.confidence_head = ConfidenceHead(config)
        if config.own_embeddings:
            self.embed_tokens = nn.Embedding(config.vocab_size, hidden)
        if config.own_embeddings or config.draft_vocab_size is not None:
            rows = config.draft_vocab_size or config.vocab_size
            self.lm_head = nn.Linear(hidden, rows, bias=False)
        if config.draft_vocab_size is not None:
            # Draft id -> target id. Saved with the weights: without it every draft would be wrong.
            self.register_buffer("draft_token_ids", torch.arange(config.draft_vocab_size), persistent=True)
        self.post_init()
        self._freeze_copies()

    def _freeze_copies(self) -> None:
        """The target's embedding and head are shared and frozen (paper); copies of them are never trained."""
        for copied in (self.embed_tokens, self.lm_head):
            if copied is not None:
                copied.requires_grad_(False)

    # ---------------------------------------------------------------- the target

    def borrow(self, target: PreTrainedModel) -> TargetModules:
        """Checks that this drafter fits `target` and returns what it borrows from it; changes neither.

        Args:
            target (`PreTrainedModel`): the model to draft for.

        Raises:
            ValueError: if vocabulary, width, depth or a tied module differ, before any computation.
        """
        config, text = self.config, target.config.get_text_config()
        for ours, theirs, what in (
            (config.vocab_size, text.vocab_size, "vocabulary size"),
            (config.hidden_size, text.hidden_size, "hidden size"),
            (config.num_target_layers, text.num_hidden_layers, "number of layers"),
        ):
            if ours != theirs:
                raise ValueError(
                    f"Expected a target with {what} {ours}, got {theirs} from {type(target).__name__}. This drafter "
                    f"was trained for {config.target_name_or_path or 'another model'}: load that target, or a "
                    "drafter for this one."
                )
        head = target.get_output_embeddings()
        if head is None:
            raise ValueError(
                f"Expected a target with a language modelling head, got {type(target).__name__}. "
                "Load it with AutoModelForCausalLM."
            )
        return TargetModules(target.get_input_embeddings(), head)

    def bind(self, target: PreTrainedModel) -> DSparkDrafter:
        """Borrows the target's embedding and head, for use outside `generate()` (which borrows by itself).

        Args:
            target (`PreTrainedModel`): the model to draft for.

        Returns:
            this drafter.

        Raises:
            ValueError: if the drafter does not fit the target.
        """
        self.bound = self.borrow(target)
        return self

    def _module(self, name: str, modules: TargetModules | None) -> nn.Module:
        modules = modules or self.bound
        if modules is None:
            raise ValueError(
                f"Expected a target to borrow the {name} from, got none: this drafter has no copy of its own. "
                "Call drafter.bind(target) first."
            )
        return modules.embed if name == "embedding" else modules.head

    def embed(self, token_ids: torch.Tensor, modules: TargetModules | None = None) -> torch.Tensor:
        """Input embeddings of target token ids, `(..., hidden_size)`, in the drafter's dtype and on its device."""
        module = self._module("embedding", modules) if self.embed_tokens is None else self.embed_tokens
        return module(_to_module(token_ids, module)).to(self.device, self.dtype)

    def base_logits(self, hidden: torch.Tensor, modules: TargetModules | None = None) -> torch.Tensor:
        """Base logits U of backbone outputs over the draft vocabulary, `(..., draft_vocab)`, in float32."""
        module = self._module("head", modules) if self.lm_head is None else self.lm_head
        weight = next(module.parameters(), None)
        dtype = weight.dtype if weight is not None and weight.is_floating_point() else hidden.dtype
        return module(_to_module(hidden.to(dtype), module)).to(hidden.device, torch.float32)

    def get_candidate_generator(
        self,
        target: PreTrainedModel,
        *,
        generation_config: Any,
        logits_processor: LogitsProcessorList,
        model_kwargs: dict[str, Any],
        **kwargs: Any,
    ):
        """The protocol by which `generate()` finds out how to draft: any assistant with this method is asked.

        Args:
            target (`PreTrainedModel`): the model that generates.
            generation_config, logits_processor, model_kwargs, kwargs: the keywords of transformers'
                `_get_candidate_generator`.

        Returns:
            a `CandidateGenerator` for one `generate()` call.
        """
        from .drafting_dspark import DSparkCandidateGenerator

        return DSparkCandidateGenerator(target, self, generation_config, logits_processor, model_kwargs)

    # ---------------------------------------------------------------- the block

    def forward(self, *args: Any, step: Callable[[DSparkDrafter], Any] | None = None, **kwargs: Any) -> Any:
        """The backbone on a block, see [`DSparkDrafter.backbone`]; or `step(self)`, a whole training step: wrappers
        for several devices (DDP, FSDP) prepare weights and gradients around this method alone."""
        return self.backbone(*args, **kwargs) if step is None else step(self)

    def backbone(
        self,
        noise_embeds: torch.Tensor,
        context_hidden_states: torch.Tensor,
        position_ids: torch.Tensor,
        cache: DynamicCache | None = None,
        attend: Callable | None = None,
    ) -> DSparkOutput:
        """One pass of the backbone over the slots of a block, or of many blocks in training.

        Args:
            noise_embeds (`torch.Tensor` of shape `(batch, queries, hidden_size)`): embeddings of [anchor, mask, ...].
            context_hidden_states (`torch.Tensor` of shape `(batch, new, layers * hidden_size)`): target features of
                tokens that the cache does not hold yet, concatenated in the order of `target_layer_ids`.
            position_ids (`torch.Tensor` of shape `(batch, new + queries)`): true positions, context first.
            cache (`DynamicCache`, *optional*): context rows of earlier calls; the new ones are added.
            attend (`Callable`, *optional*): attention function in place of the configured one, called like those of
                transformers; it decides which rows a query sees. By default a query sees all cached, new and block
                rows (within the window of sliding layers).

        Returns:
            [`DSparkOutput`]: states after the final norm, `(batch, queries, hidden_size)`, and the cache.
        """
        context = self.hidden_norm(self.fc(context_hidden_states))
        cos_sin = self.rotary(position_ids, noise_embeds.dtype)
        hidden_states = noise_embeds
        for layer in self.layers:
            hidden_states = layer(hidden_states, context, cos_sin, cache, attend)
        return DSparkOutput(last_hidden_state=self.norm(hidden_states), cache=cache)

    @torch.no_grad()
    def propose(
        self,
        context: DraftContext,
        anchor_ids: torch.Tensor,
        *,
        num_draft_tokens: int | None = None,
        do_sample: bool = False,
        processors: LogitsProcessorList | None = None,
        prefix_ids: torch.Tensor | None = None,
    ) -> DraftBlock:
        """Drafts one block: backbone, sequential head, confidences and the length worth verifying.

        Args:
            context ([`DraftContext`]): the features of all tokens before the anchors; new ones go to its cache.
            anchor_ids (`torch.Tensor` of shape `(R,)`): the last committed token of each request.
            num_draft_tokens (`int`, *optional*): keep so many slots of the (always whole) block, if fewer than the
                config's.
            do_sample (`bool`): draw the drafts, or take the most likely ones.
            processors (`LogitsProcessorList`, *optional*): applied to each slot's logits in the target's vocabulary.
            prefix_ids (`torch.Tensor` of shape `(R, length)`, *optional*): committed tokens, anchors included, for the
                processors.

        Returns:
            [`DraftBlock`]: at most `num_draft_tokens` drafts; fewer if the processors leave no draft token possible.
        """
        config, device = self.config, self.device
        keep = config.block_size if config.num_draft_tokens is None else config.num_draft_tokens
        keep = keep if num_draft_tokens is None else min(keep, num_draft_tokens)
        anchor_ids = anchor_ids.to(device)
        masks = anchor_ids.new_full((len(anchor_ids), config.block_size - 1), config.mask_token_id)
        features, positions = context.take(device, self.dtype)
        slots = torch.arange(config.block_size, device=device) + context.next_position
        hidden = self(
            noise_embeds=self.embed(torch.cat([anchor_ids[:, None], masks], dim=1), context.modules),
            context_hidden_states=features,
            position_ids=torch.cat([positions, slots.expand(len(anchor_ids), -1)], dim=1),
            cache=context.cache,
        ).last_hidden_state[:, :keep]
        base = self.base_logits(hidden, context.modules)  # [R, keep, draft_vocab]

        tokens, logits, embeddings = [], [], []
        previous, state = anchor_ids, None
        for slot in range(keep):
            row = base[:, slot]
            if self.markov_head is not None:
                embedding = self.markov_head.markov_w1(previous)
                latent, state = self.markov_head.latent(embedding, hidden[:, slot], state)
                row = row + self.markov_head.markov_w2(latent).float()
            if do_sample or processors:
                scores = self.to_target_vocabulary(row)
                if processors:
                    scores = processors(prefix_ids, scores)
                probabilities = scores.softmax(dim=-1)
                if not bool(probabilities.sum(dim=-1).isfinite().all()):
                    break  # nothing the drafter can propose is allowed here (or its logits are no numbers)
                previous = torch.multinomial(probabilities, 1)[:, 0] if do_sample else scores.argmax(dim=-1)
                if prefix_ids is not None:
                    prefix_ids = torch.cat([prefix_ids, previous[:, None].to(prefix_ids)], dim=1)
                logits.append(scores)
            else:
                previous = self.to_target_ids(row.argmax(dim=-1))
            if self.markov_head is not None:
                embeddings.append(embedding)
            tokens.append(previous)

        token_ids = torch.stack(tokens, dim=1) if tokens else anchor_ids.new_empty(len(anchor_ids), 0)
        lengths = torch.full((len(anchor_ids),), len(tokens), device=device)
        confidence_logits = None
        if self.confidence_head is not None and tokens:
            before = torch.stack(embeddings, dim=1) if embeddings else None
            confidence_logits = self.confidence_head(hidden[:, : len(tokens)], before).float()
            if config.confidence_threshold > 0:
                confidences = confidence(confidence_logits, config.sts_temperatures)
                lengths = threshold_lengths(confidences, config.confidence_threshold)
        return DraftBlock(
            token_ids=token_ids,
            logits=torch.stack(logits, dim=1) if do_sample and logits else None,
            confidence_logits=confidence_logits,
            lengths=lengths,
        )

    def to_target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Target token ids of draft vocabulary ids, any shape."""
        return draft_ids if self.config.draft_vocab_size is None else self.draft_token_ids[draft_ids]

    def to_target_vocabulary(self, logits: torch.Tensor) -> torch.Tensor:
        """Draft logits `(R, draft_vocab)` over the target's vocabulary, `(R, vocab_size)`; -inf elsewhere."""
        if self.config.draft_vocab_size is None:
            return logits
        scattered = logits.new_full((*logits.shape[:-1], self.config.vocab_size), -torch.inf)
        scattered[..., self.draft_token_ids] = logits
        return scattered

    # ---------------------------------------------------------------- files

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, config=None, **kwargs):
        """Loads a drafter from a folder or the Hub, in our format or in DeepSpec's (`Qwen3DSparkModel`).

        Args:
            pretrained_model_name_or_path (`str` or `Path`): as in transformers, like all other arguments.

        Raises:
            ValueError: if the checkpoint is no DSpark drafter, is truncated, or its tensors are not exactly those that
                its config describes: a head that is silently left out would cost acceptance without any error.
        """
        hub = {
            key: kwargs[key]
            for key in ("revision", "subfolder", "token", "cache_dir", "local_files_only")
            if key in kwargs
        }
        if not isinstance(config, DSparkConfig):
            fields = DSparkConfig.__dataclass_fields__.keys() - {"dtype"}
            changes = {key: kwargs.pop(key) for key in fields & kwargs.keys()}
            config = DSparkConfig.from_pretrained(config or pretrained_model_name_or_path, **hub, **changes)
        wants_info = kwargs.pop("output_loading_info", False)
        try:
            with complete_files(pretrained_model_name_or_path):
                drafter, info = super().from_pretrained(
                    pretrained_model_name_or_path, *model_args, config=config, output_loading_info=True, **kwargs
                )
        except RuntimeError as error:
            if "ignore_mismatched_sizes" not in str(error):
                raise
            raise ValueError(
                f"Expected tensors of the shapes that the config of {pretrained_model_name_or_path} describes, got "
                "others. The config and the weights do not belong together: check hidden_size, markov_rank, "
                "and draft_vocab_size."
            ) from error
        missing, unexpected = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
        if config.own_embeddings and missing == ["embed_tokens.weight", "lm_head.weight"] and not unexpected:
            # DeepSpec's layout without the target's copies: borrow them.
            config.own_embeddings = False
            return cls.from_pretrained(
                pretrained_model_name_or_path, *model_args, config=config, output_loading_info=wants_info, **kwargs
            )
        if missing or unexpected:
            raise ValueError(
                f"Expected exactly the tensors that the config of {pretrained_model_name_or_path} describes, got "
                f"missing {missing or 'none'} and unexpected {unexpected or 'none'}. The config and the weights do "
                "not belong together: check markov_rank, markov_head_type, the confidence head and draft_vocab_size."
            )
        if config.draft_vocab_size is not None:
            ids = drafter.draft_token_ids
            if ids.min() < 0 or ids.max() >= config.vocab_size or len(ids.unique()) < len(ids):
                raise ValueError(
                    f"Expected draft_token_ids to be different target ids in [0, {config.vocab_size}), got ids from "
                    f"{ids.min()} to {ids.max()}, {len(ids.unique())} different of {len(ids)}. The map is damaged."
                )
        drafter._freeze_copies()  # loading replaces parameters
        return (drafter, info) if wants_info else drafter

    def save_pretrained(self, save_directory, *args: Any, checkpoint_format: str = "dspark", **kwargs: Any) -> None:
        """Saves the drafter; never a tensor that is only borrowed.

        Args:
            save_directory (`str` or `Path`): the folder to write.
            checkpoint_format (`str`): "dspark" (ours), or "deepspec": the flat layout that DeepSpec and the serving
                engines read, with copies of the target's embedding and head (bind the drafter first).

        Raises:
            ValueError: if the format is unknown, or DeepSpec's cannot hold this drafter.
        """
        if checkpoint_format == "dspark":
            super().save_pretrained(save_directory, *args, **kwargs)
        elif checkpoint_format == "deepspec":
            config = self.config.to_deepspec()
            tensors = dict(self.state_dict())
            if self.embed_tokens is None:
                # Called, not indexed: a quantised or offloaded module has no plain matrix to copy.
                tokens = torch.arange(self.config.vocab_size, device=self.device)
                unit = torch.eye(self.config.hidden_size, device=self.device, dtype=self.dtype)
                tensors["embed_tokens.weight"] = self.embed(tokens)
                tensors["lm_head.weight"] = self.base_logits(unit).T.to(self.dtype)
            directory = Path(save_directory)
            directory.mkdir(parents=True, exist_ok=True)
            tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
            save_file(tensors, directory / SAFE_WEIGHTS_NAME, metadata={"format": "pt"})
            config["dtype"] = str(self.dtype).removeprefix("torch.")
            (directory / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        else:
            raise ValueError(f"Expected checkpoint_format 'dspark' or 'deepspec', got {checkpoint_format!r}.")

    def summary(self) -> str:
        """What this drafter is, in a few lines: shape, heads, target and parameters by part."""
        config = self.config
        parts = {
            "backbone": [self.fc, self.hidden_norm, self.layers, self.norm],
            "sequential head": [self.markov_head],
            "confidence head": [self.confidence_head],
            "copies of the target": [self.embed_tokens, self.lm_head],
        }
        sizes = {
            name: sum(weight.numel() for module in modules if module is not None for weight in module.parameters())
            for name, modules in parts.items()
        }
        head = f"{config.markov_head_type}, rank {config.markov_rank}" if config.markov_rank else "none (DFlash)"
        vocabulary = config.draft_vocab_size or config.vocab_size
        return "\n".join(
            [
                f"DSpark drafter for {config.target_name_or_path or 'an unnamed target'}",
                f"  block size       {config.block_size}",
                f"  layers           {config.num_hidden_layers} x {config.hidden_size}",
                f"  target layers    {list(config.target_layer_ids)} of {config.num_target_layers}",
                f"  sequential head  {head}",
                f"  confidence head  {'yes' if config.enable_confidence_head else 'no'}",
                f"  draft vocabulary {vocabulary:,} of {config.vocab_size:,}",
                *(f"  {name + ':':22} {size:>13,} parameters" for name, size in sizes.items() if size),
                f"  {'all:':22} {sum(sizes.values()):>13,} parameters",
            ]
        )


@contextmanager
def complete_files(origin: str | Path) -> Iterator[None]:
    """Raises ValueError if a safetensors file that is read inside turns out to be damaged."""
    try:
        yield
    except SafetensorError as error:
        raise ValueError(
            f"Expected complete safetensors files in {origin}, got a file that cannot be read ({error}). "
            "Download it again."
        ) from error


def _to_module(tensor: torch.Tensor, module: nn.Module) -> torch.Tensor:
    """`tensor` where `module` computes. Offloaded modules have meta weights and move their inputs themselves."""
    weight = next(module.parameters(), None)
    return tensor if weight is None or weight.is_meta else tensor.to(weight.device)
