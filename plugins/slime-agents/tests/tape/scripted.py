"""An engine that says what a script has it say, and a client that answers it as agent programs do."""

from __future__ import annotations

import copy
import dataclasses
import json

from slime_agents.formats.calls import ToolCall
from slime_core.protocols import Completion


@dataclasses.dataclass
class Request:
    prompt: list
    ids: list
    log_probs: list


class ScriptedEngine:
    """Answers each request with the next ids of its script; the log-prob of each id is a number of its own."""

    def __init__(self):
        self.next: list = []
        self.requests: list[Request] = []
        self._n = 0

    async def generate(self, tokens, params, *, session_id=None, images=()):
        ids, reason = self.next.pop(0)
        ids = ids[: params.max_new_tokens]
        log_probs = [-(self._n + i + 1) / 1024 for i in range(len(ids))]
        self._n += len(ids)
        self.requests.append(Request(list(tokens), list(ids), log_probs))
        return Completion(tokens=list(ids), log_probs=log_probs, finish_reason=reason, weight_version="1")


WORDS = [
    "yes",
    " no",
    "\n",
    "  ",
    "héllo",
    "日本",
    "🙂🙃",
    "\t- item",
    "x = 1\n\n\ny = 2",
    "</p>",
    "{",
    '"',
    "  end",
]


def a_turn(rng, tokenizer, tool_format, ends, *, with_tools):
    """Return the ids of a random turn and how it ended: text, calls, nothing at all, or cut off, also within a character."""
    kind = rng.choice(["text", "text", "calls", "calls", "nothing", "cut", "thought", "malformed", "noise"])
    text = "".join(rng.choices(WORDS, k=rng.randint(0, 6)))
    if kind == "noise":
        ids = [rng.randrange(17, 49152) for _ in range(rng.randint(1, 12))]
        return [*ids, rng.choice(ends)], "stop"
    if kind == "nothing":
        return [rng.choice(ends)], "stop"
    if kind == "thought":
        text = f"<think>\n{text}\n</think>\n\n{''.join(rng.choices(WORDS, k=3))}"
    if kind == "calls" and with_tools:
        text += "\n" + tool_format.write([a_call(rng) for _ in range(rng.choice([1, 1, 2, 3]))])
    if kind == "malformed":
        text += rng.choice(
            [
                '<tool_call>\n{"name": 3',
                '{"name": "look", "parameters": ',
                "<tool_call>look<arg_key>",
                "<tool_call>\n<function=look>\n<parameter=query>\nx\n</function>\n</tool_call>",
            ]
        )
    ids = tokenizer.encode(text)
    if kind == "cut":
        ids = ids[: rng.randint(0, len(ids))]
        return (ids, "length") if ids else ([rng.choice(ends)], "stop")
    return [*ids, rng.choice(ends)], "stop"


def a_call(rng):
    name = rng.choice(["look", "run_code"])
    values = ["a\nb\n\n  c", "日本", '"quoted"', 7, 1.5, True, None, ["x", {"y": 2}], "7", ""]
    return ToolCall(
        name, {key: rng.choice(values) for key in rng.sample(["query", "code", "n"], k=rng.randint(0, 3))}
    )


def echo(rng, message):
    """Return the message as some client sends it back."""
    sent = copy.deepcopy(message)
    if rng.random() < 0.7:
        sent.pop("reasoning_content", None)
    for i, call in enumerate(sent.get("tool_calls", [])):
        call["function"]["arguments"] = json.dumps(
            call["function"]["arguments"], indent=rng.choice([None, 2])
        )
        if rng.random() < 0.3:
            call["id"] = f"toolu_{i}"
    style = rng.choice(["as it is", "stripped", "parts", "none"])
    if style == "stripped":
        sent["content"] = sent["content"].strip()
    elif style == "parts":
        sent["content"] = [{"type": "text", "text": sent["content"]}]
    elif style == "none" and not sent["content"].strip():
        sent["content"] = None
    return sent


def answers(rng, message):
    """Return what a client says after a turn: results of its calls, or something of the user's, or both."""
    said = "".join(rng.choices(WORDS, k=rng.randint(1, 4)))
    results = [
        {
            "role": "tool",
            "tool_call_id": call["id"],
            "name": call["function"]["name"],
            "content": f"{said}{i}",
        }
        for i, call in enumerate(message.get("tool_calls", []))
    ]
    if results and rng.random() < 0.8:
        return results
    return [*results, {"role": "user", "content": f"go on {said}"}]
