"""Tests run offline, on one thread and with warnings as errors (see pyproject.toml)."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def fixed_seed():
    """Every test starts from the same random state."""
    torch.manual_seed(0)
