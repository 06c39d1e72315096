"""DSpark speculative decoding for transformers: the same text, in fewer forwards of the large model.

>>> from transformers import AutoModelForCausalLM
>>> from hf_dspark import DSparkDrafter
>>> target = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-4B", dtype="auto")
>>> drafter = DSparkDrafter.from_pretrained("deepseek-ai/dspark_qwen3_4b_block7", dtype="auto")
>>> out = target.generate(**inputs, assistant_model=drafter, max_new_tokens=256)

Importing the package teaches `generate()` to use drafters (`hf_dspark.unpatch()` takes that back) and registers
[`DSparkConfig`] and [`DSparkDrafter`] with transformers' Auto classes.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING

from transformers import AutoConfig, AutoModel

from .configuration_dspark import DSparkConfig
from .context_dspark import DraftBlock, DraftContext
from .drafting_dspark import DSparkCandidateGenerator
from .hooks_dspark import patch, unpatch, use_stock_loop
from .modeling_dspark import DSparkDrafter, DSparkOutput

if TYPE_CHECKING:
    from .decoding.trace import Trace
    from .loading import fingerprint, load, load_demo
    from .training.trainer import DSparkTrainer, DSparkTrainingArguments

__version__ = "0.1.0"

_LAZY = {
    "DSparkTrainer": ".training.trainer",
    "DSparkTrainingArguments": ".training.trainer",
    "Trace": ".decoding.trace",
    "fingerprint": ".loading",
    "load": ".loading",
    "load_demo": ".loading",
}

__all__ = [
    "DSparkCandidateGenerator",
    "DSparkConfig",
    "DSparkDrafter",
    "DSparkOutput",
    "DSparkTrainer",
    "DSparkTrainingArguments",
    "DraftBlock",
    "DraftContext",
    "Trace",
    "fingerprint",
    "load",
    "load_demo",
    "patch",
    "unpatch",
    "use_stock_loop",
]


def __getattr__(name: str):
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


AutoConfig.register(DSparkConfig.model_type, DSparkConfig, exist_ok=True)
AutoModel.register(DSparkConfig, DSparkDrafter, exist_ok=True)
if os.environ.get("HF_DSPARK_NO_PATCH", "0") != "1":
    patch()
