"""Two processes (gloo) train as one does with the same global batch: losses, metrics and weights agree."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch.testing import assert_close

SCRIPT = Path(__file__).parent / "distributed_training.py"


def launch(output, *, processes, batch):
    # `accelerate launch` starts several processes on GPUs only; on CPUs torch's own launcher sets the same variables.
    output.mkdir()
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes),
        str(SCRIPT), str(output), str(batch),
    ]  # fmt: skip
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "1",
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads((output / "history.json").read_text()), load_file(output / "weights.safetensors")


def test_two_processes_train_like_one(tmp_path):
    one, weights = launch(tmp_path / "one", processes=1, batch=4)
    two, same = launch(tmp_path / "two", processes=2, batch=2)
    assert len(one["history"]) == len(two["history"]) == 5
    for ours, theirs in zip(one["history"], two["history"], strict=True):
        assert ours.keys() == theirs.keys()
        for key in ours:
            if key not in ("grad_norm", "learning_rate", "epoch"):
                assert theirs[key] == pytest.approx(ours[key], rel=1e-4, abs=1e-5), key
        assert theirs["grad_norm"] == pytest.approx(ours["grad_norm"], rel=1e-3)
    assert two["eval"] == pytest.approx(one["eval"])
    for name, weight in weights.items():
        assert_close(same[name], weight, rtol=0, atol=1e-4)
