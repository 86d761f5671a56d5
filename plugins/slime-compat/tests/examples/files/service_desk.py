"""An agent in an environment with a simulated user: its result becomes a sample of its own."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample


class Status(Enum):
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"


@dataclass
class InteractionResult:
    prompt: str
    reward: float = 0.0
    response: str = ""
    tokens: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    info: dict[str, Any] = field(default_factory=dict)
    status: Status = Status.COMPLETED


class Desk:
    """Wants the letter after its own, twice."""

    def __init__(self, task_index):
        self.letter, self.turns = chr(97 + task_index % 10), 0

    def reset(self):
        return self.letter

    def step(self, text):
        self.turns += 1
        reward = float(text.startswith(chr(ord(self.letter) + 1)))
        return "y", reward, self.turns == 2, {"turns": self.turns}


class Agent:
    """Answers the desk."""

    async def asolve(self, env, rollout_args, sampling_params, max_num_steps=30):
        state = GenerateState(rollout_args)
        url = f"http://{rollout_args.sglang_router_ip}:{rollout_args.sglang_router_port}/generate"
        messages = [{"role": "user", "content": env.reset()}]
        text = state.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        result = InteractionResult(
            prompt=text, tokens=state.tokenizer(text, add_special_tokens=False)["input_ids"]
        )
        for _ in range(max_num_steps):
            text = state.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            output = await post(url, {"text": text, "sampling_params": sampling_params})
            if output["meta_info"]["finish_reason"]["type"] == "abort":
                result.status = Status.ABORTED
                return result
            messages.append({"role": "assistant", "content": output["text"]})
            observation, result.reward, done, result.info = env.step(output["text"])
            messages.append({"role": "user", "content": observation})
            for trained, said in ((1, output["text"]), (0, observation)):
                ids = state.tokenizer(said, add_special_tokens=False)["input_ids"]
                result.tokens += ids
                result.loss_mask += [trained] * len(ids)
            result.response += output["text"] + observation
            if done:
                return result
        result.status = Status.TRUNCATED
        return result


def to_sample(result, task_index):
    sample = Sample(
        index=task_index,
        prompt=result.prompt,
        tokens=result.tokens,
        response=result.response,
        reward=result.reward,
        loss_mask=result.loss_mask,
        status=Sample.Status(result.status.value),
        metadata=result.info,
    )
    sample.response_length = len(result.loss_mask)
    return sample


async def generate(args: dict[str, Any], sample: Sample, sampling_params: dict) -> Sample:
    task_index = ord(sample.prompt) - 97
    return to_sample(await Agent().asolve(Desk(task_index), args, sampling_params), task_index)
