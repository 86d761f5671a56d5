"""A tokenizer for tests: a token a byte; and one that has longer tokens beside them."""

from __future__ import annotations

import json


class ByteTokenizer:
    """A token a byte; the template writes each message as `role: content` on a line."""

    eos_token_id = None

    def encode(self, text):
        return list(text.encode())

    def decode(self, tokens, *, skip_special_tokens=True):
        return bytes(tokens).decode(errors="replace")

    def apply_chat_template(self, messages, *, tools=None, **kwargs):
        lines = [f"{message['role']}: {message['content']}" for message in messages]
        return "\n".join(
            [f"tools: {json.dumps(tools)}"] * bool(tools) + lines + [kwargs.get("end", "assistant:")]
        )


class PieceTokenizer(ByteTokenizer):
    """Has other bytes than its own for some tokens."""

    def __init__(self, pieces):
        self.pieces = pieces

    def decode(self, tokens, *, skip_special_tokens=True):
        return b"".join(self.pieces.get(one, bytes([one])) for one in tokens).decode(errors="replace")
