"""`Layout`: how many ranks share what."""

from __future__ import annotations

from dataclasses import dataclass

from slime_megatron.settings.section import MegatronSection


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes of the parallel groups that the ranks of a trainer are divided into."""

    ranks: int
    """All."""
    tensor: int = 1
    """That share each layer's matrices."""
    pipeline: int = 1
    """That share the layers."""
    context: int = 1
    """That share the tokens of a sequence."""
    experts: int = 1
    """That share the experts."""
    expert_tensor: int = 1
    """That share each expert's matrices."""
    sequence: bool = False
    """Whether tensor-parallel ranks share the tokens, too."""

    @classmethod
    def of(cls, section: MegatronSection, ranks: int) -> Layout:
        """Return the layout of so many ranks; the sizes divide them (`parallel_checks`)."""
        return cls(
            ranks=ranks,
            tensor=section.tensor_model_parallel_size,
            pipeline=section.pipeline_model_parallel_size,
            context=section.context_parallel_size,
            experts=section.expert_model_parallel_size,
            expert_tensor=section.expert_tensor_parallel_size or section.tensor_model_parallel_size,
            sequence=section.sequence_parallel,
        )

    @property
    def data(self) -> int:
        """Replicas of the model, each with samples of its own."""
        return self.ranks // (self.tensor * self.pipeline * self.context)

    @property
    def optimizer_shards(self) -> int:
        """Ranks that hold the same weights outside of experts: a distributed optimizer shares its state among them."""
        return self.data * self.context

    @property
    def expert_optimizer_shards(self) -> int:
        """Ranks that hold the same experts."""
        return self.ranks // (self.expert_tensor * self.experts * self.pipeline)
