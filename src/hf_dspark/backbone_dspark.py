"""The layers of the drafter's backbone: dense, Qwen3-style, over injected target features.

Contract of one block (paper, section on the drafter): the input is [anchor, mask, mask, ...] at true positions; every
layer attends, without a causal mask, to the projected target features of all tokens before the anchor and to the
block itself; slot k predicts the token after slot k's position. The draft cache holds context rows only, so it is
never rolled back: rows of a block are concatenated behind it and forgotten.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from transformers import DynamicCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm, eager_attention_forward, rotate_half

from .configuration_dspark import DSparkConfig


class RotaryEmbedding:
    """Cosines and sines of absolute positions, always computed in float32.

    Frequencies are derived from the config on first use and live outside the module's buffers: buffers that are not
    saved come back from `from_pretrained` as garbage, and `.to(torch.bfloat16)` would round them.
    """

    def __init__(self, config: DSparkConfig):
        self.config = config
        self.inv_freq: torch.Tensor | None = None
        self.scaling = 1.0

    def _frequencies(self, device: torch.device) -> torch.Tensor:
        if self.inv_freq is None:
            parameters = self.config.rope_parameters
            if parameters["rope_type"] == "default":
                steps = torch.arange(0, self.config.head_dim, 2, dtype=torch.float32, device="cpu")
                self.inv_freq = parameters["rope_theta"] ** (-steps / self.config.head_dim)
            else:
                inv_freq, self.scaling = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](self.config, torch.device("cpu"))
                self.inv_freq = inv_freq.float()
        if self.inv_freq.device != device:
            self.inv_freq = self.inv_freq.to(device)
        return self.inv_freq

    def __call__(self, position_ids: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        angles = position_ids[..., None].float() * self._frequencies(position_ids.device)  # [batch, rows, head_dim/2]
        angles = torch.cat([angles, angles], dim=-1)[:, None]  # [batch, 1, rows, head_dim]
        return (angles.cos() * self.scaling).to(dtype), (angles.sin() * self.scaling).to(dtype)


class DSparkAttention(nn.Module):
    """Queries from the block; keys and values from the context followed by the block."""

    def __init__(self, config: DSparkConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = config.head_dim**-0.5
        self.is_causal = False
        sliding = config.layer_types[layer_idx] == "sliding_attention"
        self.window = config.sliding_window if sliding else None
        query, key = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, key, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, key, bias=config.attention_bias)
        self.o_proj = nn.Linear(query, config.hidden_size, bias=config.attention_bias)
        self.q_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def _heads(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.view(*rows.shape[:-1], -1, self.head_dim)

    def forward(
        self,
        hidden_states: torch.Tensor,  # [batch, queries, hidden]: the normalised block
        context: torch.Tensor,  # [batch, new, hidden]: projected target features, the same for every layer
        cos_sin: tuple[torch.Tensor, torch.Tensor],  # [batch, 1, new + queries, head_dim]
        cache: DynamicCache | None,
        attend: Callable | None,
    ) -> torch.Tensor:
        cos, sin = cos_sin
        new, queries = context.shape[1], hidden_states.shape[1]
        rows = torch.cat([context, hidden_states], dim=1)
        query = self.q_norm(self._heads(self.q_proj(hidden_states))).transpose(1, 2)
        key = self.k_norm(self._heads(self.k_proj(rows))).transpose(1, 2)
        value = self._heads(self.v_proj(rows)).transpose(1, 2)
        query = query * cos[:, :, -queries:] + rotate_half(query) * sin[:, :, -queries:]
        key = key * cos + rotate_half(key) * sin

        if cache is not None:
            past_key, past_value = cache.update(key[:, :, :new], value[:, :, :new], self.layer_idx)
            if self.window is not None:
                # A query's window ends at the anchor: every slot sees the same `window` context rows.
                past_key, past_value = past_key[:, :, -self.window :], past_value[:, :, -self.window :]
            key = torch.cat([past_key, key[:, :, new:]], dim=2)
            value = torch.cat([past_value, value[:, :, new:]], dim=2)
        elif self.window is not None and attend is None:
            raise ValueError(
                "Expected a draft cache for a drafter with sliding layers, got none. Pass cache=DynamicCache()."
            )

        if attend is None:
            attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        dropout = self.config.attention_dropout if self.training else 0.0
        output, _ = attend(self, query, key, value, None, dropout=dropout, scaling=self.scaling, is_causal=False)
        return self.o_proj(output.flatten(start_dim=2))


class DSparkLayer(GradientCheckpointingLayer):
    """Pre-norm attention and gated MLP; the context is read, never updated."""

    def __init__(self, config: DSparkConfig, layer_idx: int):
        super().__init__()
        self.self_attn = DSparkAttention(config, layer_idx)
        self.window = self.self_attn.window
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_states, context, cos_sin, cache, attend):
        block = self.input_layernorm(hidden_states)
        hidden_states = hidden_states + self.self_attn(block, context, cos_sin, cache, attend)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
