"""Recipes: every setting of a training run in one place, with the presets of `hf-dspark train`.

A run's recipe is a preset, changed by a file, changed by options. It is written beside the checkpoints together with
what else the result depends on, so that a run can be repeated, and is resumed only as itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers
import yaml

RECIPE_FILE = "recipe.json"
COMMAND_FILE = "train_command.txt"


@dataclass(frozen=True)
class Recipe:
    """Settings of a run.

    Args:
        target (`str`, *optional*): folder or Hub id; `None` is the bundled target.
        start_from (`str`, *optional*): folder or Hub id of a drafter to go on training; the shape is then its own.
        layers, block_size, markov_rank, markov_head_type, draft_vocab_size: the drafter's shape, as in `DSparkConfig`;
            `markov_rank=0` trains DFlash.
        target_layers (`list[int]`, *optional*): layers that feed the drafter; `None` spreads five over the target.
        mask_token_id (`int`, *optional*): a token that never occurs in text; the bundled target's is known.
        copy_layers (`list[int]`, *optional*): target layers that the drafter's layers start from.
        max_length (`int`): tokens of a sample.
        online (`bool`): run the target in every step instead of caching its features.
        bits (`int`): 16 or 8, of cached features.
        max_steps, learning_rate, batch_size, anchors, seed: of the optimisation; `anchors` blocks a sequence.
        decay_share (`float`): share of the steps over which the learning rate falls to zero, at the end.
        ce_weight, kl_weight, tv_weight, confidence_weight, loss_decay, likelihood_first: of the objective, see
            `DSparkTrainingArguments`.
        eval_steps (`int`): steps between evaluations and checkpoints.
        gradient_checkpointing, torch_compile (`bool`): as in transformers.
    """

    target: str | None = None
    start_from: str | None = None
    layers: int = 2
    block_size: int = 7
    markov_rank: int = 64
    markov_head_type: str = "vanilla"
    draft_vocab_size: int | None = None
    target_layers: list[int] | None = None
    mask_token_id: int | None = None
    copy_layers: list[int] | None = None
    max_length: int = 2048
    online: bool = False
    bits: int = 16
    max_steps: int = 10_000
    learning_rate: float = 1e-3
    batch_size: int = 4
    anchors: int = 32
    decay_share: float = 0.25
    ce_weight: float = 0.0
    kl_weight: float = 0.1
    tv_weight: float = 0.9
    confidence_weight: float = 0.3
    loss_decay: float = 4.0
    likelihood_first: float = 0.6
    eval_steps: int = 500
    gradient_checkpointing: bool = False
    torch_compile: bool = False
    seed: int = 0

    def __post_init__(self):
        if self.copy_layers is not None and len(self.copy_layers) != self.layers:
            raise ValueError(
                f"Expected {self.layers} layers in copy_layers, one a drafter layer, got {self.copy_layers}."
            )
        for name in ("layers", "block_size", "max_length", "max_steps", "batch_size", "anchors", "eval_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"Expected {name} >= 1, got {getattr(self, name)}.")
        for name in ("decay_share", "likelihood_first"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"Expected {name} within [0, 1], got {getattr(self, name)}.")
        if self.bits not in (8, 16):
            raise ValueError(f"Expected bits to be 8 or 16, got {self.bits}.")


# Fields that a drafter to start from decides.
SHAPE = (
    "layers",
    "block_size",
    "markov_rank",
    "markov_head_type",
    "draft_vocab_size",
    "target_layers",
    "mask_token_id",
    "copy_layers",
)

PRESETS: dict[str, dict[str, Any]] = {
    # A tiny random target that the run makes for itself: shows in two minutes that everything is in place.
    "smoke": {
        "draft_vocab_size": 256,
        "markov_rank": 32,
        "max_steps": 300,
        "learning_rate": 3e-3,
        "batch_size": 8,
        "anchors": 32,
        "likelihood_first": 1.0,
        "eval_steps": 150,
    },
    # The bundled drafter.
    "smollm2": {
        "draft_vocab_size": 8192,
        "copy_layers": [28, 29],
        "target_layers": [1, 8, 15, 22, 28],
        "max_length": 1024,
        "max_steps": 4600,
        "decay_share": 0.35,
    },
    # The paper's: five layers, rank 256, 512 sequences a step; several GPUs, with `accelerate launch`.
    "qwen3-4b": {
        "target": "Qwen/Qwen3-4B",
        "layers": 5,
        "markov_rank": 256,
        "target_layers": [1, 9, 17, 25, 33],
        "mask_token_id": 151669,
        "max_length": 4096,
        "online": True,
        "learning_rate": 6e-4,
        "anchors": 512,
        "ce_weight": 0.1,
        "kl_weight": 0.0,
        "tv_weight": 0.9,
        "confidence_weight": 1.0,
        "likelihood_first": 0.0,
    },
}


def read_recipe(preset: str | None, file: Path | None, options: dict[str, Any]) -> Recipe:
    """The recipe of a run: defaults, then the preset, then the file, then options.

    Args:
        preset (`str`, *optional*): a key of `PRESETS`.
        file (`Path`, *optional*): YAML or JSON with fields of [`Recipe`].
        options (`dict`): fields given by name; `None` means not given.

    Returns:
        [`Recipe`].

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if a preset, a field or a value is unknown, or if a shape is given besides `start_from`.
    """
    if preset is not None and preset not in PRESETS:
        raise ValueError(f"Expected a preset of {', '.join(PRESETS)}, got {preset!r}.")
    given = _read_file(file) if file is not None else {}
    given |= {name: value for name, value in options.items() if value is not None}
    if given.get("start_from") is not None:
        shape = [name for name in SHAPE if given.get(name) is not None]
        if shape:
            raise ValueError(
                f"Expected the shape of {given['start_from']}, from which training starts, got {', '.join(shape)} "
                "too. Leave one of the two out."
            )
    return Recipe(**({**PRESETS[preset], **given} if preset else given))


def _read_file(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise FileNotFoundError(f"Expected a YAML or JSON file of settings, got no file at {file}.")
    parse = json.loads if file.suffix == ".json" else yaml.safe_load
    try:
        settings = parse(file.read_text(encoding="utf-8"))
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"Expected a YAML or JSON file of settings, got {error} in {file}.") from error
    fields = {field.name: field for field in dataclasses.fields(Recipe)}
    if not isinstance(settings, dict):
        raise ValueError(f"Expected settings such as `max_steps: 1000`, got {type(settings).__name__} in {file}.")
    for name, value in settings.items():
        if name not in fields:
            raise ValueError(f"Expected settings out of {', '.join(fields)}, got {name!r} in {file}.")
        if fields[name].type == "float" and isinstance(value, str):
            with contextlib.suppress(ValueError):
                value = float(value)  # 1e-3 without a point is text in YAML
        if not _fits(value, str(fields[name].type)):
            raise ValueError(f"Expected {name} of type {fields[name].type}, got {value!r} in {file}.")
        if fields[name].type == "float":
            settings[name] = float(value)
    return settings


def _fits(value: Any, annotation: str) -> bool:
    """Whether a value read from a file has the type of its field; a whole number may stand for a float."""
    if value is None:
        return "None" in annotation
    kind = annotation.split(" |")[0]
    if kind == "list[int]":
        return isinstance(value, list) and all(type(item) is int for item in value)
    kinds = {"int": (int,), "float": (int, float), "bool": (bool,), "str": (str,)}[kind]
    return type(value) in kinds


def record(output: Path, recipe: Recipe, responses: list[Path]) -> None:
    """Writes the recipe, versions, data hashes and the command line into the output folder.

    A run resumes only with the settings and data it began with; its length and the steps between checkpoints may
    change.

    Raises:
        ValueError: if the folder belongs to a run of other settings or other data.
    """
    settings = dataclasses.asdict(recipe)
    digests: dict[str, Any] = {}
    for file in responses:  # files of one name in different folders share a digest
        digests.setdefault(file.name, hashlib.sha256()).update(file.read_bytes())
    data = {name: digest.hexdigest()[:16] for name, digest in digests.items()}
    path = output / RECIPE_FILE
    if path.is_file():
        try:
            saved = json.loads(path.read_text(encoding="utf-8"))
            before = {**saved["settings"], "data": saved["data_sha256"]}
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"Expected the recipe of a run in {path}, got {error!r}. Give another folder.") from error
        now = {**settings, "data": data}
        changed = [name for name in now if name not in ("max_steps", "eval_steps") and now[name] != before.get(name)]
        if changed:
            described = ", ".join(f"{name} {before.get(name)!r} (now {now[name]!r})" for name in changed)
            raise ValueError(
                f"Expected the settings of the run in {output}, which has {described}. Give another folder, or the "
                "same options to resume."
            )
    output.mkdir(parents=True, exist_ok=True)
    versions = {
        "python": ".".join(map(str, sys.version_info[:3])),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "accelerate": accelerate.__version__,
    }
    text = json.dumps({"settings": settings, "data_sha256": data, "versions": versions}, indent=2)
    path.write_text(text + "\n", encoding="utf-8")
    (output / COMMAND_FILE).write_text(shlex.join(["hf-dspark", *sys.argv[1:]]) + "\n", encoding="utf-8")
