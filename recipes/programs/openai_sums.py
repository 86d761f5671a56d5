"""An agent program: asks a model for a sum, and once more where the answer is wrong. Exits with 0 if it gets the right one."""

import json
import os
import re
import sys

from openai import OpenAI

question = json.loads(os.environ["SLIME_TASK"])["prompt"]
a, b = map(int, re.findall(r"\d+", question))
client = OpenAI()  # address and key are in OPENAI_BASE_URL and OPENAI_API_KEY
messages = [{"role": "user", "content": f"What is {a} + {b}? Answer with the number only."}]
for _ in range(2):
    answer = client.chat.completions.create(model="policy", messages=messages, max_tokens=16)
    text = answer.choices[0].message.content
    if text.strip().rstrip(".") == str(a + b):
        sys.exit(0)
    messages += [
        {"role": "assistant", "content": text},
        {"role": "user", "content": f"That is not right. Write the number alone. What is {a} + {b}?"},
    ]
sys.exit(1)
