"""A tokenizer of a token a byte with a chat template, and an engine that says what a function of the prompt's text says."""

from __future__ import annotations

import asyncio
import json
import re

from slime_core.protocols import Completion

MARKS = {"<|end|>": 256, "<|begin|>": 257}
_SPELT = {number: mark for mark, number in MARKS.items()}
END = MARKS["<|end|>"]


class ByteChat:
    """Messages stand between marks; tools are a message of their own; calls are JSON between `<tool_call>` tags."""

    eos_token_id = END

    def __len__(self):
        return 258

    def encode(self, text):
        parts = re.split(r"(<\|end\|>|<\|begin\|>)", text)
        return [one for part in parts for one in ([MARKS[part]] if part in MARKS else part.encode())]

    def decode(self, tokens, *, skip_special_tokens=True):
        out = bytearray()
        for token in tokens:
            if token < 256:
                out.append(token)
            elif not skip_special_tokens:
                out += _SPELT[token].encode()
        return out.decode(errors="replace")

    def apply_chat_template(self, messages, *, tools=None, add_generation_prompt=True, **variables):
        shown = [{"role": "tools", "content": json.dumps(tools)}] * bool(tools) + list(messages)
        text = "".join(f"<|begin|>{one['role']}\n{self.said(one)}<|end|>\n" for one in shown)
        return text + "<|begin|>assistant\n" * add_generation_prompt

    def said(self, message):
        """Return what a message says, and calls."""
        calls = [
            json.dumps({"name": call["function"]["name"], "arguments": call["function"]["arguments"]})
            for call in message.get("tool_calls", ())
        ]
        parts = [message["content"], *(f"<tool_call>\n{call}\n</tool_call>" for call in calls)]
        return "\n".join(part for part in parts if part)


class SilentChat(ByteChat):
    """Does not show calls."""

    def said(self, message):
        return message["content"]


class SayingEngine:
    """Says `say(text of the prompt)`; each id has a log-prob of its own. `gate` holds answers back while it is closed."""

    def __init__(self, say, *, tokenizer=None):
        self.say, self.tokenizer = say, tokenizer or ByteChat()
        self.requests = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.version = "1"

    async def generate(self, tokens, params, *, session_id=None, images=()):
        await self.gate.wait()
        await asyncio.sleep(0)
        said = self.say(self.tokenizer.decode(tokens, skip_special_tokens=False))
        if isinstance(said, Exception):
            raise said
        if said is None:
            return Completion(tokens=[], log_probs=[], finish_reason="abort", weight_version=self.version)
        ids, reason = [*self.tokenizer.encode(said), END], "stop"
        for stop in params.stop:
            if stop in said:
                ids = self.tokenizer.encode(said[: said.index(stop) + len(stop)])
        if len(ids) > params.max_new_tokens:
            ids, reason = ids[: params.max_new_tokens], "length"
        n = sum(len(one[1]) for one in self.requests)
        log_probs = [-(n + i + 1) / 4096 for i in range(len(ids))]
        self.requests.append((list(tokens), ids, log_probs))
        return Completion(tokens=ids, log_probs=log_probs, finish_reason=reason, weight_version=self.version)


def last_of(text, role):
    """Return what the last message of a role says in a rendered prompt."""
    return text.rpartition(f"<|begin|>{role}\n")[2].partition("<|end|>")[0]
