"""Contract kit of model families in the trainer: what it computes of a model is what transformers computes."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from slime_core.testing.contracts.promises import answering, require
from slime_models.family.family import ModelFamily
from slime_models.hf.config import read_config
from slime_models.hf.folder import HfCheckpoint, save_hf
from torch import Tensor

from slime_megatron import compat
from slime_megatron.settings.section import MegatronSection
from slime_megatron.settings.section_roles import LoraSection

#: Largest difference of a logit, of a gradient relative to the largest of its tensor, and of a logit under adapters relative to the
#: largest: weights that adapters are merged into are rounded once more.
BOUND = 1e-5
#: The same where the trainer computes on CUDA: transformers computes on the CPU, so products are added up in other orders, and
#: exponentials and roots are rounded otherwise. On the CPU both call the same kernels, whose errors are alike for the most part.
BOUND_ON_CUDA = 4 * BOUND
#: Tokens of the longest sequence.
_LENGTH = 61


def random_model(
    config: Mapping[str, Any], folder: Path, *, seed: int = 0, shift: Mapping[str, float] | None = None
) -> Path:
    """Write the folder of a random float32 model that transformers makes of a config.json, and return it.

    Matrices are drawn larger than transformers draws them, so that logits spread; norms, biases and buffers are drawn around
    what it sets them to, so that they matter.

    Args:
        config: a parsed config.json, of a tiny model.
        folder: where to; may exist, and be empty.
        seed: of the draw.
        shift: last part of a parameter's name -> what is added to it, where what transformers sets it to would leave a part
            of the model without effect.
    """
    from transformers import AutoConfig

    tiny = {"pad_token_id": None} | dict(config)  # else its row of the embedding has no gradient
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        model = _class_of(config).from_config(AutoConfig.for_model(**tiny), dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator) * 0.15
            parameter.copy_(drawn + parameter if parameter.dim() == 1 else drawn)
            parameter += (shift or {}).get(name.rpartition(".")[2], 0.0)
        for name, buffer in model.named_buffers():
            if name in model.state_dict() and buffer.is_floating_point():
                buffer.add_(torch.randn(buffer.shape, generator=generator) * 0.15)
    model.save_pretrained(folder)
    return folder


def check_trained_family(family: ModelFamily, folder: Path, *, like: str | None = None) -> None:
    """Check what the trainer makes of a model of a family, in float32 and one process, against transformers.

    The trainer computes on the device that it takes on this machine, and transformers on the CPU. Logits and gradients are those of
    transformers, also where sequences are packed into one row and share what they begin with; weights come
    out as they went in, under all names of the folder; and adapters that are merged compute what adapters beside them do. Where
    the family has windows, they must be shorter than 40 tokens, else the check does not see them.

    Args:
        family: of the model.
        folder: Hugging Face folder of a tiny model, such as `random_model` writes.
        like: the `model_type` of transformers' class that computes the model, where the model's own has none.

    Raises:
        ContractError: says which promise is broken, and by how much.
    """
    compat.install()
    from slime_megatron.parallel.process_groups import World

    world = World(MegatronSection(), seed=1)
    try:
        _check(family, folder, like)
    finally:
        world.close()


def _check(family: ModelFamily, folder: Path, like: str | None) -> None:
    from slime_megatron.hf.shard import global_weights
    from slime_megatron.model.lora import add_adapters

    where = f"family {family.model_type}"
    with answering(where, "a model"):
        pair = _Pair(family, folder, like)
    pair.check_weights(where)
    sequences = pair.sequences()
    pair.check_logits(f"{where}: logits", sequences[:1])
    pair.check_logits(f"{where}: logits of packed sequences", sequences)
    pair.check_gradients(f"{where}: gradients", sequences)
    with answering(f"{where}: adapters", "adapters beside the linear layers"):
        names = global_weights(pair.model, pair.architecture)
        add_adapters(pair.model, names, LoraSection(rank=2, alpha=3.0), seed=1)
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for name, parameter in pair.model.named_parameters():
                if name.endswith("lora_b"):
                    parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator))
    before = pair.exported()
    with tempfile.TemporaryDirectory() as empty:
        pair.reference = _reference(save_hf(Path(empty) / "hf", before.items(), config_from=folder), like)
    changed = [name for name in before if not torch.equal(before[name], pair.stored[name])]
    require(bool(changed), f"{where}: adapters", found="the weights without them", wanted="other weights")
    pair.check_logits(f"{where}: logits with adapters", sequences, relative=True)


def _reference(folder: Path, like: str | None) -> Any:
    """Return transformers' model of a folder, that of the `model_type` `like` where it is given."""
    from transformers import AutoConfig

    config = read_config(folder)
    own: Any = {} if like is None else {"config": AutoConfig.for_model(**config | {"model_type": like})}
    model: Any = _class_of(config).from_pretrained(folder, dtype=torch.float32, **own)
    return model.eval()


def _class_of(config: Mapping[str, Any]) -> Any:
    """Return transformers' class of models that generate text: with a vision tower where config.json describes one."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if "vision_config" in config else AutoModelForCausalLM


class _Pair:
    """transformers' model of a folder, on the CPU, and the trainer's, on its device; what is returned of it is on the CPU."""

    def __init__(self, family: ModelFamily, folder: Path, like: str | None) -> None:
        from slime_megatron.hf.load_weights import load_weights
        from slime_megatron.importing import quiet
        from slime_megatron.model.family_layers import layers_of
        from slime_megatron.model.gpt import build_model
        from slime_megatron.parallel.process_groups import device

        self.device = device()
        self.bound = BOUND_ON_CUDA if self.device.type == "cuda" else BOUND
        self.family, self.stored = family, HfCheckpoint(folder)
        self.architecture = family.architecture(read_config(folder))
        self.layers = layers_of(family, self.architecture)
        self.reference = _reference(folder, like)
        with quiet():
            self.model = build_model(
                self.architecture,
                MegatronSection(),
                dtype=torch.float32,
                device=self.device,
                layers=self.layers,
            )
        load_weights(self.model, self.stored, family, self.architecture)

    def sequences(self) -> list[Tensor]:
        """Return sequences of several lengths; the last three begin with the same 23 tokens, and two of them with 37."""
        generator = torch.Generator().manual_seed(1)

        def drawn(n: int) -> Tensor:
            return torch.randint(0, self.architecture.vocab_size, (n,), generator=generator)

        shared = drawn(23)
        alone = [drawn(n) for n in (_LENGTH, 48, 19, 1)]
        longest, last = (torch.cat((shared, drawn(n))) for n in (31, 9))
        return [*alone, longest, torch.cat((longest[:37], drawn(8))), last]

    def exported(self) -> dict[str, Tensor]:
        """Return Hugging Face name -> tensor, adapters merged."""
        from slime_megatron.hf.export import hf_buckets

        buckets = hf_buckets(
            self.model, self.family, self.architecture, dtype=torch.float32, bucket_bytes=2**30
        )
        return {name: tensor.to("cpu", copy=True) for bucket in buckets for name, tensor in bucket}

    def check_weights(self, where: str) -> None:
        """Check that the model has the weights of the rules, and that each tensor of the folder comes out as it went in, no other."""
        from slime_megatron.hf.shard import global_weights

        apart = (
            global_weights(self.model, self.architecture).keys()
            ^ self.family.weights(self.architecture).keys()
        )
        require(
            not apart,
            f"{where}: weights of the model",
            found=f"{sorted(apart)[:3]} on one side only",
            wanted="those of the rules",
        )
        found = self.exported()
        stored = self.stored.keys() - self.family.left_over(self.stored, self.architecture)
        require(
            found.keys() == stored,
            f"{where}: weights out of the trainer",
            found=f"{sorted(found.keys() ^ stored)[:3]} on one side only",
            wanted="the names of the folder",
        )
        changed = [name for name in found if not torch.equal(found[name], self.stored[name])]
        require(not changed, where, found=f"{changed[:3]} changed", wanted="the numbers of the folder")

    def logits(self, sequences: Sequence[Tensor]) -> list[Tensor]:
        """Return the trainer's logits [tokens, vocab_size] of sequences packed into one row, the last three as one tree."""
        from slime_megatron.batch.packing import pack
        from slime_megatron.batch.trees.token_tree import TokenTree

        cos, sin = self.layers.rotary_tables(self.architecture, _LENGTH, dtype=torch.float32)
        shared = (0, 0, 0, 0, 0, 37, 23)[: len(sequences)]
        lengths = tuple(map(len, sequences))
        tree = TokenTree(lengths, shared, lengths)
        row = torch.cat([each[n:] for each, n in zip(sequences, shared, strict=True)]).to(self.device)
        packed = pack([tree], (cos.to(self.device), sin.to(self.device)))
        out = self.model(row[None], None, None, packed_seq_params=packed)[0].cpu()
        return [out[torch.from_numpy(path)] for path in tree.paths()]

    def check_logits(self, where: str, sequences: Sequence[Tensor], *, relative: bool = False) -> None:
        """Check logits against transformers', a sequence at a time."""
        with torch.no_grad(), answering(where, "logits"):
            wanted = torch.cat([self.reference(tokens[None]).logits[0] for tokens in sequences])
            largest = float((torch.cat(self.logits(sequences)) - wanted).abs().max())
            largest /= float(wanted.abs().max()) if relative else 1
        found, wanted_most = f"a difference of {largest:.1e}", f"at most {self.bound}"
        require(largest <= self.bound, where, found=found, wanted=wanted_most)

    def check_gradients(self, where: str, sequences: Sequence[Tensor]) -> None:
        """Check the gradients of log-probs, weighted at random, against transformers'."""
        generator = torch.Generator().manual_seed(3)
        weights = [torch.randn(len(each), generator=generator) for each in sequences]

        def loss(logits: Sequence[Tensor]) -> Tensor:
            parts = [
                weight[:-1] @ each.log_softmax(-1)[:-1].gather(1, tokens[1:, None]).squeeze(1)
                for each, tokens, weight in zip(logits, sequences, weights, strict=True)
            ]
            return torch.stack(parts).sum()

        with answering(where, "gradients"):
            loss(self.logits(sequences)).backward()
            loss([self.reference(tokens[None]).logits[0] for tokens in sequences]).backward()
            wanted = {name: each.grad for name, each in self.reference.named_parameters()}
            found = {name: gradient.cpu() for name, gradient in self._gradients()}
        compared = [name for name in found if wanted.get(name) is not None]
        require(bool(compared), where, found="none of transformers' names", wanted="some of them")
        apart = {
            name: float((found[name] - wanted[name]).abs().max() / wanted[name].abs().max())
            for name in compared
        }
        name = max(apart, key=apart.__getitem__)
        require(
            apart[name] <= self.bound,
            f"{where}: {name}",
            found=f"{apart[name]:.1e} apart",
            wanted=f"{self.bound}",
        )

    def _gradients(self) -> Any:
        """Yield (Hugging Face name, gradient), of weights that transformers may have several of in one parameter."""
        parameters = dict(self.model.named_parameters())
        names = self.family.parameter_names(self.architecture)
        lacking = [name for name in names if parameters[name].grad is None]
        assert not lacking, f"{lacking[:3]} have no gradient"
        yield from self.family.hf_tensors(
            ((name, parameters[name].grad) for name in names), self.architecture
        )
