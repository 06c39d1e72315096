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
    """Captures the outputs of chosen target layers during a forward (paper, section on context injection).

    Layer ids are 0-based decoder layer *outputs* (``hidden_states[i + 1]`` in transformers); ``-1`` is the output of
    the embedding. Forward hooks on just these modules keep nothing else alive, unlike ``output_hidden_states=True``.
    Hooks see every thread that runs the target, so captures of other threads are ignored.

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
        self._modules = [target.get_input_embeddings() if i == -1 else layers[i] for i in layer_ids]
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._captured: dict[int, torch.Tensor] = {}
        self._thread = threading.get_ident()

    def __enter__(self) -> TargetFeatures:
        self._thread = threading.get_ident()
        for slot, module in enumerate(self._modules):
            self._handles.append(module.register_forward_hook(self._hook(slot)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._captured.clear()

    def _hook(self, slot: int):
        def keep(module: nn.Module, args: tuple, output: torch.Tensor | tuple) -> None:
            if threading.get_ident() == self._thread:
                self._captured[slot] = output if isinstance(output, torch.Tensor) else output[0]

        return keep

    def take(self) -> torch.Tensor:
        """The features of the last forward, which are then forgotten.

        Returns:
            `torch.Tensor` of shape `(batch, sequence, len(layer_ids) * hidden_size)`: the captured outputs,
            concatenated in the order of `layer_ids`, on the device of the first of them.

        Raises:
            RuntimeError: if a layer was not run by this thread since the last call.
        """
        missing = [i for slot, i in enumerate(self.layer_ids) if slot not in self._captured]
        if missing:
            raise RuntimeError(
                f"Expected outputs of target layers {self.layer_ids}, got none of {missing}. A target whose forward "
                "was compiled or replaced hides its layers: pass the plain model to generate()."
            )
        first = self._captured[0]
        rows = [self._captured[slot].to(first.device) for slot in range(len(self.layer_ids))]
        self._captured.clear()
        return torch.cat(rows, dim=-1).detach()
