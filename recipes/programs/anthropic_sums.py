"""An agent program: asks a model for a sum, and once more where the answer is wrong. Exits with 0 if it gets the right one."""

import json
import re
import sys

from anthropic import Anthropic

question = json.load(sys.stdin)["prompt"]
a, b = map(int, re.findall(r"\d+", question))
client = Anthropic()  # address and key are in ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY
EXAMPLES = (("2 + 3", "5"), ("7 + 1", "8"), ("6 + 6", "12"))
messages = []
for shown, value in EXAMPLES:
    messages += [{"role": "user", "content": f"What is {shown}?"}, {"role": "assistant", "content": value}]
messages.append({"role": "user", "content": f"What is {a} + {b}?"})
for _ in range(2):
    answer = client.messages.create(model="policy", messages=messages, max_tokens=8)
    text = answer.content[0].text
    if text.strip() == str(a + b):
        sys.exit(0)
    messages += [
        {"role": "assistant", "content": text},
        {"role": "user", "content": f"That is not right. What is {a} + {b}?"},
    ]
sys.exit(1)
