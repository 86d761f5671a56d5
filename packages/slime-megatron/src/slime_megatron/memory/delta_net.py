"""What a gated delta net keeps of a token for its backward pass, counted from `families.delta_net` and `slime_models.delta_rule`."""

from __future__ import annotations

from slime_models.family.families.delta_net import DeltaNetArchitecture

_FLOAT32 = 4
#: Tokens of a chunk: `slime_models.delta_rule.CHUNK`, which cannot be imported without torch.
CHUNK = 64


def delta_net_token_bytes(architecture: DeltaNetArchitecture, *, share: int, dtype_bytes: int) -> int:
    """Return the bytes that one rank keeps of a token of a long sequence, without those of the layer's norm and input.

    Args:
        architecture: of the model.
        share: ranks among which the heads are shared out.
        dtype_bytes: of a number of the dtype that is computed in.
    """
    a = architecture
    heads, key_heads = a.linear_num_value_heads // share, a.linear_num_key_heads // share
    key, value, width = a.linear_key_size // share, a.linear_value_size // share, a.linear_value_head_dim
    each, channels, repeated = dtype_bytes, a.linear_qkv_size // share, heads * a.linear_key_head_dim
    # The projection, of which the gates are a part or a copy; inputs and outputs of the convolution; queries, keys and values.
    found = (each * a.linear_in_size // share) if each == _FLOAT32 else _FLOAT32 * value
    found += 2 * each * channels + _FLOAT32 * channels
    in_float32 = 2 * key  # keys of length 1, and scaled queries
    in_float32 += CHUNK * (
        4 * heads + 2 * key_heads
    )  # products of a chunk's tokens, with and without decay and beta
    in_float32 += (
        2 * repeated + (repeated + value) + value
    )  # what is read and written, the solution, the corrected values
    in_float32 += repeated * width // CHUNK  # a state for each chunk
    in_float32 += 2 * value + 8 * heads  # norm and gates of the output; numbers of each head
    return found + _FLOAT32 * in_float32 + 3 * each * value
