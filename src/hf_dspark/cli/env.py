"""`hf-dspark env`: what a bug report needs."""

from __future__ import annotations

import importlib.metadata
import os
import platform

import torch

from .. import __version__

PACKAGES = ("torch", "transformers", "accelerate", "safetensors", "huggingface-hub", "tokenizers", "peft", "gguf")


def run() -> None:
    """Prints one `name: value` a line."""
    print(f"hf-dspark: {__version__}")
    print(f"python: {platform.python_version()} on {platform.system()} {platform.machine()}")
    for package in PACKAGES:
        try:
            print(f"{package}: {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            print(f"{package}: not installed")
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    else:
        threads = f"{torch.get_num_threads()} threads of {os.cpu_count()} cores"
        device = f"cpu, {threads}, {torch.backends.cpu.get_cpu_capability()}"
    print(f"device: {device}")
    print(f"hooks: {'off (HF_DSPARK_NO_PATCH)' if os.environ.get('HF_DSPARK_NO_PATCH') == '1' else 'on'}")
