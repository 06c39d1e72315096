"""What the drafter reads from the target is what the named layers put out, at the true positions.

An id that is off by one, the post-norm output of the last layer, or a block seeded one position early would cost
acceptance without any error; so these are checked value for value.
"""

import pytest
import torch

from hf_dspark.features_dspark import TargetFeatures, decoder_layers
from tiny import assert_greedy_identity, drafter_config, prompt, tiny_drafter, tiny_target


@pytest.fixture(scope="module")
def llama():
    return tiny_target("llama")


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_features_are_the_outputs_of_the_named_layers(family):
    target = tiny_target(family)
    ids = [-1, 0, 1, 2]  # the embedding, the first layers, and the last but one
    seen = {}
    modules = {-1: target.get_input_embeddings(), **dict(enumerate(decoder_layers(target)))}
    for index in ids:
        modules[index].register_forward_hook(
            lambda module, args, output, index=index: seen.__setitem__(
                index, output if isinstance(output, torch.Tensor) else output[0]
            )
        )
    with TargetFeatures(target, ids) as features, torch.no_grad():
        states = target(prompt(), output_hidden_states=True).hidden_states
        taken = features.take().chunk(len(ids), dim=-1)
    for index, rows in zip(ids, taken, strict=True):
        assert torch.equal(rows, seen[index])
        if not (family == "gemma2" and index == -1):  # gemma scales its embedding outside or inside the module
            assert torch.equal(rows, states[index + 1])


def test_the_last_layer_is_refused(llama):
    with pytest.raises(ValueError, match=r"Layer 3 is the last one.*after the final norm"):
        drafter_config(llama, target_layer_ids=[0, 3])


@pytest.mark.parametrize("depth", [1, 100, 4000])
def test_drafting_step_by_step_equals_one_forward_at_true_positions(depth):
    """After prefill and rounds, a block is that of a single forward over all features at their true positions."""
    target = tiny_target("llama", max_position_embeddings=8192)
    drafter = tiny_drafter(target, max_position_embeddings=8192)
    original, calls = drafter.forward, []

    def recording(**kwargs):
        output = original(**kwargs)
        calls.append((kwargs, output.last_hidden_state))
        return output

    drafter.forward = recording
    trace = assert_greedy_identity(target, drafter, prompt(depth), max_new_tokens=12)
    assert trace.verified > 0
    context = torch.cat([call["context_hidden_states"] for call, _ in calls], dim=1)
    noise, states = calls[-1][0]["noise_embeds"], calls[-1][1]
    positions = torch.arange(context.shape[1] + noise.shape[1])[None]
    assert context.shape[1] >= depth + 5
    with torch.no_grad():
        once = original(noise_embeds=noise, context_hidden_states=context, position_ids=positions)
    torch.testing.assert_close(states, once.last_hidden_state, rtol=0, atol=1e-5)
