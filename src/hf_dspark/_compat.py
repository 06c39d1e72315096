"""Every condition on the version of transformers, each with the version that deletes it.

Supported: transformers >= 5.14. Tested on 5.14.1, 5.17.0 and the newest release.
"""

from __future__ import annotations

import transformers
from packaging.version import Version

VERSION = Version(transformers.__version__)

# 5.24 renamed the cache argument and output of models from `past_key_values`. Delete when 5.24 is the oldest.
CACHE = "cache" if Version("5.24.0.dev0") <= VERSION else "past_key_values"

# Before 5.17 a sliding cache layer cannot be rolled back once it is full; generate() uses full layers for assisted
# decoding there, but a cache that the user passes may have them. Delete when 5.17 is the oldest.
SLIDING_CACHE_ROLLS_BACK = Version("5.17.0.dev0") <= VERSION

# 5.24 renamed the training argument from `gradient_checkpointing`. Delete when 5.24 is the oldest.
CHECKPOINTING = "activation_checkpointing" if Version("5.24.0.dev0") <= VERSION else "gradient_checkpointing"


def gguf_arguments() -> dict:
    """Arguments of `from_pretrained` that load a GGUF file as a plain, dequantised model.

    Later releases keep weights packed if they can, which is slower on a CPU; older ones always unpack. Delete the
    condition when 5.17 is the oldest.
    """
    if Version("5.17.0.dev0") > VERSION:
        return {}
    from transformers.utils.quantization_config import GgufConfig

    return {"quantization_config": GgufConfig(dequantize=True)}
