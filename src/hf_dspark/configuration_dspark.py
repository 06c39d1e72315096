"""The drafter's configuration. Field names are the field's own; every mistake is found when it is made."""

from __future__ import annotations

from transformers import PreTrainedConfig
from transformers.utils import logging

logger = logging.get_logger(__name__)

MARKOV_HEAD_TYPES = ("vanilla", "gated", "rnn")
LAYER_TYPES = ("full_attention", "sliding_attention")
ROPE_TYPES = ("default", "linear", "yarn", "llama3")

OWN_FIELDS = (
    "confidence_threshold",
    "num_draft_tokens",
    "sts_temperatures",
    "chat_template_kwargs",
    "target_name_or_path",
)
DEEPSPEC_ARCHITECTURE = "Qwen3DSparkModel"
DEEPSPEC_FIELDS = [
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "initializer_range",
    "rms_norm_eps",
    "rope_parameters",
    "attention_bias",
    "attention_dropout",
    "sliding_window",
    "layer_types",
    "block_size",
    "mask_token_id",
    "target_layer_ids",
    "num_target_layers",
    "markov_head_type",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "dtype",
]


class DSparkConfig(PreTrainedConfig):
    """Configuration of a [`DSparkDrafter`].

    Args:
        vocab_size (`int`): size of the *target's* vocabulary, also when the drafter proposes from fewer tokens.
        hidden_size (`int`): width of the drafter, equal to the target's.
        block_size (`int`): draft tokens of one round, gamma in the paper.
        mask_token_id (`int`): a target token that never occurs in text; fills the slots after the anchor.
        target_layer_ids (`list[int]`): target layers that feed the drafter, 0-based decoder layer *outputs*, strictly
            increasing; -1 is the embedding. The last layer is refused: transformers returns it after the final norm.
        num_target_layers (`int`): depth of the target.
        markov_rank (`int`): rank of the sequential head's bias; 0 removes the head, which is DFlash.
        markov_head_type (`str`): "vanilla", "gated" or "rnn".
        enable_confidence_head (`bool`): whether the drafter estimates conditional acceptance.
        confidence_head_with_markov (`bool`): whether that estimate sees the previous token's Markov embedding.
        confidence_head_bias (`bool`): whether it has a bias.
        draft_vocab_size (`int`, *optional*): tokens the drafter can propose; `None` means all of them. A smaller
            drafter vocabulary brings its own frozen head rows and the map to target ids.
        own_embeddings (`bool`): whether the checkpoint carries copies of the target's embedding and head (DeepSpec
            does). Otherwise they are borrowed from the target at hand.
        confidence_threshold (`float`): the first slot whose confidence is below it ends the block; 0 keeps all.
        num_draft_tokens (`int`, *optional*): at most so many drafts are verified; the block is computed
            whole, then cut.
        sts_temperatures (`list[float]`, *optional*): one calibration temperature a slot (sequential temperature
            scaling): confidence = sigmoid(logit / temperature).
        target_name_or_path (`str`, *optional*): the target it was trained for.
        target_revision (`str`, *optional*): that target's revision.
        target_fingerprint (`str`, *optional*): hash of the target's weights, see `hf_dspark.fingerprint`.
        chat_template_kwargs (`dict`, *optional*): arguments of the chat template in training (thinking mode).
        backbone (`str`): layer family; "qwen3" is the dense one.

    The remaining fields are those of a Qwen3 layer: `intermediate_size`, `num_hidden_layers`, `num_attention_heads`,
    `num_key_value_heads`, `head_dim`, `hidden_act`, `max_position_embeddings`, `rms_norm_eps`, `rope_parameters`,
    `attention_bias`, `attention_dropout`, `sliding_window`, `layer_types`, `initializer_range`.

    Raises:
        ValueError: if fields contradict each other; says what was expected, what was given and what to do.
    """

    model_type = "dspark"
    has_no_defaults_at_init = True  # mask and layers depend on the target: there is no default drafter

    vocab_size: int = 151936
    hidden_size: int = 2560
    intermediate_size: int = 9728
    num_hidden_layers: int = 5
    num_attention_heads: int = 32
    num_key_value_heads: int | None = 8
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 40960
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    rope_parameters: dict | None = None
    attention_bias: bool = False
    attention_dropout: float | int = 0.0
    sliding_window: int | None = None
    layer_types: list[str] | None = None
    tie_word_embeddings: bool = False

    backbone: str = "qwen3"
    block_size: int = 7
    mask_token_id: int | None = None
    target_layer_ids: list[int] | None = None
    num_target_layers: int | None = None
    markov_rank: int = 256
    markov_head_type: str = "vanilla"
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True
    confidence_head_bias: bool = True
    draft_vocab_size: int | None = None
    own_embeddings: bool = False

    confidence_threshold: float | int = 0.0
    num_draft_tokens: int | None = None
    sts_temperatures: list[float] | None = None

    target_name_or_path: str | None = None
    target_revision: str | None = None
    target_fingerprint: str | None = None
    chat_template_kwargs: dict | None = None

    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs):
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.layer_types is None:
            self.layer_types = ["full_attention"] * self.num_hidden_layers
        super().__post_init__(**kwargs)
        self._check_target()
        self._check_heads()
        self._check_backbone()
        self.check_drafting()

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path, **kwargs):
        values, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        if values == {}:
            raise FileNotFoundError(
                f"Expected a DSpark drafter at {pretrained_model_name_or_path}, got no config.json, or an empty one. "
                "Give the drafter's own folder or repository; an adapter goes onto its drafter, with "
                "PeftModel.from_pretrained(drafter, folder)."
            )
        if not isinstance(values, dict):
            raise ValueError(f"Expected an object in config.json of {pretrained_model_name_or_path}, got {values!r}.")
        if values.get("model_type") == cls.model_type:
            return values, kwargs
        return cls._from_deepspec(values, pretrained_model_name_or_path), kwargs

    @classmethod
    def _from_deepspec(cls, values: dict, origin) -> dict:
        """Our fields from DeepSpec's flat config: the target's own config with drafter fields laid over it."""
        architecture = (values.get("architectures") or ["none"])[0]
        if architecture != DEEPSPEC_ARCHITECTURE:
            raise ValueError(
                f"Expected a DSpark drafter at {origin} (model_type 'dspark', or architectures "
                f"['{DEEPSPEC_ARCHITECTURE}']), got model_type {values.get('model_type')!r} with architecture "
                f"{architecture!r}. Give the drafter's own repository; a language model goes where the target goes."
            )
        if values.get("sliding_window") and not values.get("use_sliding_window"):
            values = {**values, "sliding_window": None}
        markov_rank = values.get("markov_rank", 0)
        confident = values.get("enable_confidence_head", False)
        kept = {key: values[key] for key in DEEPSPEC_FIELDS if key in values}
        return kept | {
            "model_type": cls.model_type,
            "markov_rank": markov_rank,
            "enable_confidence_head": confident,
            "confidence_head_with_markov": confident and values.get("confidence_head_with_markov", False),
            "own_embeddings": True,
        }

    def to_deepspec(self) -> dict:
        """This config in DeepSpec's flat layout (`architectures: ["Qwen3DSparkModel"]`).

        Raises:
            ValueError: if that layout cannot describe this drafter.
        """
        for impossible, what in (
            (self.draft_vocab_size is not None, f"draft_vocab_size {self.draft_vocab_size}"),
            (self.enable_confidence_head and not self.confidence_head_bias, "a confidence head without bias"),
        ):
            if impossible:
                raise ValueError(
                    f"Expected a drafter that DeepSpec's layout can describe, got one with {what}. "
                    "Save it in our own format (checkpoint_format='dspark')."
                )
        lost = [key for key in OWN_FIELDS if getattr(self, key)]
        if lost:
            logger.warning(f"DeepSpec's layout has no place for {', '.join(lost)}: hand them over separately.")
        kept = {key: getattr(self, key) for key in DEEPSPEC_FIELDS if getattr(self, key) is not None}
        return kept | {
            "architectures": [DEEPSPEC_ARCHITECTURE],
            "model_type": "qwen3",
            "use_sliding_window": self.sliding_window is not None,
            "enable_confidence_head": self.enable_confidence_head,
            "confidence_head_with_markov": self.confidence_head_with_markov,
            "markov_rank": self.markov_rank,
        }

    def _check_target(self) -> None:
        if self.target_layer_ids is None or not self.num_target_layers:
            raise ValueError(
                f"Expected target_layer_ids and num_target_layers, got {self.target_layer_ids} and "
                f"{self.num_target_layers}. Say which layers of the target feed the drafter and how many it has."
            )
        ids, last = list(self.target_layer_ids), self.num_target_layers - 1
        if not ids or ids != sorted(set(ids)) or ids[0] < -1 or ids[-1] >= last:
            reason = ""
            if ids and ids[-1] == last:
                reason = f" Layer {last} is the last one, whose output transformers returns after the final norm."
            raise ValueError(
                f"Expected target_layer_ids strictly increasing within [-1, {last - 1}] for a target of "
                f"{self.num_target_layers} layers, got {ids}.{reason} Choose layers before the last one."
            )
        eos = self.eos_token_id if isinstance(self.eos_token_id, list) else [self.eos_token_id]
        if self.mask_token_id is None:
            raise ValueError(
                "Expected mask_token_id, got None. Set it to a token of the target's vocabulary that never occurs in "
                "text (151669 for Qwen3, 4 for Gemma 4)."
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"Expected mask_token_id within the embedding table [0, {self.vocab_size}), got {self.mask_token_id}. "
                "Choose an id that the target's embedding has."
            )
        if self.mask_token_id in (self.pad_token_id, *eos):
            raise ValueError(
                f"Expected a mask_token_id that differs from the pad and eos tokens, got {self.mask_token_id} with "
                f"pad {self.pad_token_id} and eos {self.eos_token_id}. Choose a token that never occurs in text."
            )

    def _check_heads(self) -> None:
        if self.markov_head_type not in MARKOV_HEAD_TYPES:
            raise ValueError(
                f"Expected markov_head_type in {MARKOV_HEAD_TYPES}, got {self.markov_head_type!r}. "
                "Use 'vanilla' unless the checkpoint says otherwise."
            )
        if self.markov_rank < 0:
            raise ValueError(f"Expected markov_rank >= 0, got {self.markov_rank}. Use 0 for DFlash.")
        if self.markov_rank == 0 and self.enable_confidence_head and self.confidence_head_with_markov:
            raise ValueError(
                "Expected a Markov head for confidence_head_with_markov, got markov_rank 0. Set "
                "confidence_head_with_markov=False or enable_confidence_head=False."
            )
        if self.draft_vocab_size is not None and not 0 < self.draft_vocab_size <= self.vocab_size:
            raise ValueError(
                f"Expected draft_vocab_size within [1, {self.vocab_size}], got {self.draft_vocab_size}. "
                "Use None for the target's whole vocabulary."
            )

    def _check_backbone(self) -> None:
        if self.backbone != "qwen3":
            raise ValueError(f"Expected backbone 'qwen3', got {self.backbone!r}. No other layer family is supported.")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"Expected num_attention_heads to be a multiple of num_key_value_heads, got "
                f"{self.num_attention_heads} and {self.num_key_value_heads}. Every key head serves equally many "
                "query heads: take both numbers from the target's config."
            )
        unknown = sorted(set(self.layer_types) - set(LAYER_TYPES))
        if len(self.layer_types) != self.num_hidden_layers or unknown:
            raise ValueError(
                f"Expected {self.num_hidden_layers} layer_types out of {LAYER_TYPES}, got {self.layer_types}. "
                "Name one a layer, or set None for full attention."
            )
        if "sliding_attention" in self.layer_types and not self.sliding_window:
            raise ValueError(
                f"Expected sliding_window >= 1 for sliding_attention layers, got {self.sliding_window}. "
                "Set the window in tokens that the drafter was trained with."
            )
        rope_type = (self.rope_parameters or {}).get("rope_type", "default")
        if rope_type not in ROPE_TYPES:
            raise ValueError(
                f"Expected rope_type in {ROPE_TYPES}, got {rope_type!r}. Rotary embeddings that change with the "
                "length of the text would move keys that are already in the draft cache: train with one of these."
            )

    def check_drafting(self) -> None:
        """Checks the settings that may be changed on a loaded drafter.

        Raises:
            ValueError: if `confidence_threshold`, `num_draft_tokens` or `sts_temperatures` is out of range.
        """
        if self.block_size < 1:
            raise ValueError(f"Expected block_size >= 1, got {self.block_size}. It is the number of drafts a round.")
        if not 0 <= self.confidence_threshold <= 1:
            raise ValueError(
                f"Expected confidence_threshold within [0, 1], got {self.confidence_threshold}. "
                "0 verifies whole blocks."
            )
        if self.confidence_threshold > 0 and not self.enable_confidence_head:
            raise ValueError(
                f"Expected confidence_threshold 0 for a drafter without confidence head, got "
                f"{self.confidence_threshold}. Limit the draft with num_draft_tokens instead."
            )
        if self.num_draft_tokens is not None and not 0 <= self.num_draft_tokens <= self.block_size:
            raise ValueError(
                f"Expected num_draft_tokens within [0, {self.block_size}] (the block size), got "
                f"{self.num_draft_tokens}. A drafter proposes at most its block; None uses all of it."
            )
        temperatures = self.sts_temperatures
        if temperatures is not None and (len(temperatures) != self.block_size or min(temperatures) <= 0):
            raise ValueError(
                f"Expected {self.block_size} positive sts_temperatures, one a slot, got {temperatures}. "
                "Calibrate the drafter again, or set None."
            )
