"""An agent program: asks a model for a sum, and once more where the answer is wrong. Exits with 0 if it gets the right one."""

import json
import os
import re
import sys

from anthropic import Anthropic

question = json.loads(os.environ["SLIME_TASK"])["prompt"]
a, b = map(int, re.findall(r"\d+", question))
client = Anthropic()  # address and key are in ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY
messages = [{"role": "user", "content": f"What is {a} + {b}? Answer with the number only."}]
for _ in range(2):
    answer = client.messages.create(model="policy", messages=messages, max_tokens=16)
    text = answer.content[0].text
    if text.strip().rstrip(".") == str(a + b):
        sys.exit(0)
    messages += [
        {"role": "assistant", "content": text},
        {"role": "user", "content": f"That is not right. Write the number alone. What is {a} + {b}?"},
    ]
sys.exit(1)
