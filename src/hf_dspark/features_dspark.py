"""Reading the target: which decoder layers feed the drafter, and how their outputs are captured.

Contract: `TargetFeatures` yields exactly the rows that one thread's target forwards produced, for the layers of
``target_layer_ids``, and leaves nothing on the target when it closes, also after an exception.
"""

from __future__ import annotations

import threading
from types import TracebackType

import torch
from torch import nn
from transformers import PreTrainedModel


def decoder_layers(target: PreTrainedModel) -> nn.ModuleList:
    """The decoder layers of `target`, in order.

    Args:
        target (`PreTrainedModel`): a decoder-only model with a language modelling head.

    Returns:
        `nn.ModuleList`: one module per decoder layer, ``num_hidden_layers`` of them.

    Raises:
        ValueError: if the model holds no list of ``num_hidden_layers`` decoder layers.
    """
    count = target.config.get_text_config().num_hidden_layers
    decoder = target.get_decoder()
    for module in decoder.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise ValueError(
        f"Expected a decoder with {count} layers in one nn.ModuleList, got {type(target).__name__} without one. "
        "Use a decoder-only transformers model as the target."
    )


class TargetFeatures:
    """Captures the outputs of chosen target layers during forwards (paper, context injection).

    Layer ids are 0-based decoder layer *outputs* (``hidden_states[i + 1]`` in transformers); ``-1`` is the output of
    the embedding. Forward hooks on just these modules keep nothing else alive, unlike ``output_hidden_states=True``.
    Hooks see every thread that runs the target, so only forwards of the thread that opened the capture count.

    Args:
        target (`PreTrainedModel`): the model to read.
        layer_ids (`list[int]`): layers to capture, in the order in which they are concatenated.

    Example:
        >>> with TargetFeatures(target, [1, 9, 17]) as features:
        ...     target(input_ids)
        ...     context = features.take()  # [batch, sequence, 3 * hidden_size]
    """

    def __init__(self, target: PreTrainedModel, layer_ids: list[int]):
        layers = decoder_layers(target)
        self.layer_ids = layer_ids
        self._captured: list[list[torch.Tensor]] = [[] for _ in layer_ids]
        modules = [target.get_input_embeddings() if i == -1 else layers[i] for i in layer_ids]
        thread = threading.get_ident()
        self._handles = [
            module.register_forward_hook(_keep(rows, thread))
            for module, rows in zip(modules, self._captured, strict=True)
        ]

    def close(self) -> None:
        """Takes the hooks off the target."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __enter__(self) -> TargetFeatures:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def take(self) -> torch.Tensor:
        """The features of all forwards since the last call, which are then forgotten.

        Returns:
            `torch.Tensor` of shape `(batch, rows, len(layer_ids) * hidden_size)`: the captured outputs, concatenated
            in the order of `layer_ids`, on the device of the first of them. Several forwards (a chunked prefill)
            follow each other along the rows.

        Raises:
            RuntimeError: if a layer was not run by this thread since the last call.
        """
        missing = [i for i, rows in zip(self.layer_ids, self._captured, strict=True) if not rows]
        if missing:
            raise RuntimeError(
                f"Expected outputs of target layers {self.layer_ids}, got none of {missing}. A target whose forward "
                "was compiled or replaced hides its layers: pass the plain model to generate()."
            )
        device = self._captured[0][0].device
        layers = [torch.cat(rows, dim=1).to(device) for rows in self._captured]
        for rows in self._captured:
            rows.clear()
        return torch.cat(layers, dim=-1)


def _keep(rows: list[torch.Tensor], thread: int):
    """A hook that appends a module's output to `rows`. It holds no reference to the capture object, so that a
    capture nobody closed is closed when it is collected."""

    def hook(module: nn.Module, args: tuple, output: torch.Tensor | tuple) -> None:
        if threading.get_ident() == thread:
            rows.append((output if isinstance(output, torch.Tensor) else output[0]).detach())

    return hook
