"""Names of verifiers.v1."""

import asyncio
import hashlib
import inspect
import typing

from pydantic import BaseModel, ConfigDict, Field


class TaskConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")


class TasksetConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")
    id: str = ""
    task: TaskConfig = TaskConfig()


class AgentConfig(BaseModel):
    pass


class UserMessage(BaseModel):
    role: typing.Literal["user"] = "user"
    content: str


class SystemMessage(BaseModel):
    role: typing.Literal["system"] = "system"
    content: str


class AssistantMessage(BaseModel):
    role: typing.Literal["assistant"] = "assistant"
    content: str | None = None


Message = typing.Annotated[SystemMessage | UserMessage | AssistantMessage, Field(discriminator="role")]


class TaskData(BaseModel):
    model_config = ConfigDict(frozen=True)
    idx: int | None = None
    prompt: str | list[Message] | None = None
    system_prompt: str | None = None


class State(BaseModel):
    pass


class TraceTask(BaseModel):
    type: str
    data: typing.Any
    key: str
    hash: str


class AgentInfo(BaseModel):
    config: AgentConfig


class MessageNode(BaseModel):
    parent: int | None = None
    message: Message
    sampled: bool = False


class ModelCall(BaseModel):
    node: int
    finish_reason: str


class Reward(BaseModel):
    score: float
    weight: float


class Trace(BaseModel):
    task: TraceTask
    agent: AgentInfo
    nodes: list[MessageNode] = []
    calls: list[ModelCall] = []
    rewards: dict[str, Reward] = {}
    metrics: dict[str, float] = {}
    ok: bool = False

    @property
    def reward(self):
        return sum(reward.score * reward.weight for reward in self.rewards.values())

    @property
    def last_reply(self):
        return [node.message for node in self.nodes if node.sampled][-1].content.strip()

    @property
    def is_truncated(self):
        return self.calls[-1].finish_reason == "length"

    def stop(self, condition):
        pass


class Task[Data, S, Config]:
    NEEDS_CONTAINER = False

    def __init__(self, data, config=None):
        self.data, self.config = data, config

    @property
    def hash(self):
        return hashlib.sha256(self.data.model_dump_json().encode()).hexdigest()

    key = hash

    @classmethod
    def data_type(cls):
        return typing.get_args(cls.__orig_bases__[0])[0]

    @classmethod
    def toolsets(cls, config):
        return []

    async def setup(self, trace, runtime):
        pass

    async def finalize(self, trace, runtime):
        pass

    def plugged_judges(self):
        return []

    def hooks(self, kind):
        return [getattr(self, name) for name in dir(type(self)) if hasattr(getattr(type(self), name), kind)]

    async def score(self, trace):
        async def call(scorer):
            given = {"task": self.data, "trace": trace}
            return await scorer(**{name: given[name] for name in inspect.signature(scorer).parameters})

        metrics, rewards = self.hooks("metric"), self.hooks("reward")
        for scorer, value in zip(metrics, await asyncio.gather(*map(call, metrics)), strict=True):
            trace.metrics[scorer.__name__] = value
        for scorer, value in zip(rewards, await asyncio.gather(*map(call, rewards)), strict=True):
            trace.rewards[scorer.__name__] = Reward(score=value, weight=scorer._vf_weight)


class Taskset[T, Config]:
    INFINITE = False

    def __init__(self, config):
        self.config = config

    def __iter__(self):
        for idx, task in enumerate(self.load()):
            task.data = task.data.model_copy(update={"idx": idx})
            yield task

    @classmethod
    def task_type(cls):
        return typing.get_args(cls.__orig_bases__[0])[0]

    @classmethod
    def toolsets(cls, config):
        return []


class SingleAgentEnv:
    pass


def reward(weight=1.0):
    def mark(function):
        function.reward, function._vf_weight = True, weight
        return function

    return mark


def metric(function):
    function.metric = True
    return function
