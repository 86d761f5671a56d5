"""`BuildContext`: what factories of engines, trainers and other components get; `MemoryQuestion`: what is there before that."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from slime_core.files.json_text import parse_json
from slime_core.files.strict_read import read_text
from slime_core.protocols import Place, Role, Tokenizer
from slime_core.protocols.memory import Device

if TYPE_CHECKING:
    from slime_core.config.settings import Settings
    from slime_core.plugins.registry import Registry

SectionT = TypeVar("SectionT")


@dataclass(frozen=True, kw_only=True)
class Rank:
    """Which of the trainer's processes this one is, and where all of them meet.

    Whoever starts several processes gives each its own, and shows each the one device that it computes on.
    """

    number: int = 0
    """0 to `count` - 1; on one machine in a row."""
    count: int = 1
    """Processes of the trainer."""
    address: str = "127.0.0.1"
    """IP address of rank 0, that every rank can reach."""
    port: int = 0
    """TCP port at that address, which is reserved for them; 0 where there is one rank."""
    role: Role = "policy"
    """What it holds; numbers and counts are those of its role's ranks."""
    gpu: str | None = None
    """Id of the GPU that it was given, the only one that it sees; it must not compute on the CPU then."""


@dataclass(frozen=True, kw_only=True)
class BuildContext:
    """Everything a factory (`create_engine(build)`, `create_trainer(build)`, ...) may draw on.

    A factory reads the sections that it needs and hands on single values; it does not pass the context on.
    """

    settings: Settings
    """Resolved settings: those of core as `build.settings.rollout` and so on, a plugin's own as `build.section(SectionType)`."""
    registry: Registry
    """Resolves further plugins by group and name."""
    load_tokenizer: Callable[[], Tokenizer]
    """Returns the tokenizer of the model, the same at each call; the first one may take seconds."""
    model_path: Path
    """Local Hugging Face folder of the model."""
    run_dir: Path
    """Folder of this run."""
    evaluation: bool = False
    """Whether the component is for evaluation: a data source then hands out its held-out prompts."""
    rank: Rank = field(default_factory=Rank)
    """For a trainer's factory: which rank it builds; one whose capabilities say `ranked` may build one of several."""
    host: str = "127.0.0.1"
    """Address of this machine at which ranks and servers of the run reach it; the loopback address where none is elsewhere."""
    places: Mapping[int, Place] | None = None
    """For an engine's factory: where its processes are started, by the first GPU of each; None for this machine, whose GPUs
    are the engine's to count."""

    def section(self, section_type: type[SectionT]) -> SectionT:
        """Return the settings of the section that `section_type` declares."""
        return self.settings.section(section_type)

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the model, read when it is first asked for."""
        return self.load_tokenizer()

    @property
    def vocab_size(self) -> int | None:
        """How many token ids the model has, by its config.json or else by the tokenizer; None where neither says."""
        try:
            size = parse_json(read_text(self.model_path / "config.json"))["vocab_size"]
        except (OSError, ValueError, KeyError, TypeError):
            size = None
        if isinstance(size, int):
            return size
        return len(self.tokenizer) if isinstance(self.tokenizer, Sized) else None

    @property
    def engine_needs(self) -> frozenset[str]:
        """What completions must hold that not every engine offers (hook `slime_engine_needs`).

        An engine's capabilities list in `completions` what it puts into a completion when it is asked to.
        """
        answers = self.registry.hooks.slime_engine_needs(settings=self.settings)
        return frozenset(need for answer in answers for need in answer)


@dataclass(frozen=True, kw_only=True)
class MemoryQuestion:
    """What a trainer or an engine predicts its memory from; neither weights nor tokenizer need be there."""

    settings: Settings
    """Resolved settings of the run."""
    registry: Registry
    """Resolves further plugins by group and name."""
    model_path: Path
    """Hugging Face folder of the model; config.json is enough."""
    device: Device
    """What trainer and engine compute on."""
    prompt_tokens: int
    """Tokens of the longest prompt."""
    response_tokens: int | None = None
    """Tokens of the longest response, and of what an environment adds; as many as the settings allow when None."""

    def section(self, section_type: type[SectionT]) -> SectionT:
        """Return the settings of the section that `section_type` declares."""
        return self.settings.section(section_type)

    @property
    def longest_sample(self) -> int:
        """Most tokens of a sample that is trained on: prompt, response, and what an environment adds."""
        rollout, environment = self.settings.rollout, self.settings.environment
        if self.response_tokens is not None:
            return self.prompt_tokens + self.response_tokens
        longest = self.prompt_tokens + rollout.rollout_max_response_len
        if environment.environment is not None:
            longest += environment.max_environment_tokens
        return min(longest, rollout.rollout_max_context_len or longest)

    @property
    def longest_request(self) -> int:
        """Most tokens that an engine has of one request, those of an evaluation among them."""
        response = self.settings.eval.eval_max_response_len if self.response_tokens is None else None
        return max(self.longest_sample, self.prompt_tokens + (response or 0))
