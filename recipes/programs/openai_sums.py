"""An agent program: asks a model for a sum, and once more where the answer is wrong. Exits with 0 if it gets the right one."""

import json
import re
import sys

from openai import OpenAI

question = json.load(sys.stdin)["prompt"]
a, b = map(int, re.findall(r"\d+", question))
client = OpenAI()  # address and key are in OPENAI_BASE_URL and OPENAI_API_KEY
EXAMPLES = (("2 + 3", "5"), ("7 + 1", "8"), ("6 + 6", "12"))
messages = []
for shown, value in EXAMPLES:
    messages += [{"role": "user", "content": f"What is {shown}?"}, {"role": "assistant", "content": value}]
messages.append({"role": "user", "content": f"What is {a} + {b}?"})
for _ in range(2):
    answer = client.chat.completions.create(model="policy", messages=messages, max_tokens=8)
    text = answer.choices[0].message.content
    if text.strip() == str(a + b):
        sys.exit(0)
    messages += [
        {"role": "assistant", "content": text},
        {"role": "user", "content": f"That is not right. What is {a} + {b}?"},
    ]
sys.exit(1)
