"""An agent library that blocks: it is run in a thread, and asks the server by a client of its own."""

import asyncio
import json
import urllib.request

from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample


class Client:
    """Blocks; made of the run's arguments."""

    def __init__(self, args):
        self.url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
        self.connections = (
            args.sglang_server_concurrency * args.rollout_num_gpus // args.rollout_num_gpus_per_engine
        )

    def ask(self, ids, params):
        body = json.dumps(
            {"input_ids": ids, "sampling_params": params, "return_logprob": True, "stream": False}
        )
        request = urllib.request.Request(self.url, body.encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as response:
            return json.loads(response.read())


def work(args, tokenizer, prompt, params):
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    first = Client(args).ask(ids, params)
    ids = ids + [pair[1] for pair in first["meta_info"]["output_token_logprobs"]]
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    payload = {"input_ids": ids, "sampling_params": params, "return_logprob": True}
    second = asyncio.run(post(url, payload))
    return [first, second]


async def generate(args, sample: Sample, sampling_params) -> Sample:
    state = GenerateState(args)
    params = {name: sampling_params[name] for name in ["max_new_tokens", "temperature", "top_p"]}
    sample.tokens = state.tokenizer.encode(sample.prompt, add_special_tokens=False)
    for output in await asyncio.to_thread(work, args, state.tokenizer, sample.prompt, params):
        pairs = output["meta_info"]["output_token_logprobs"]
        sample.append_response_tokens(
            args,
            tokens=[pair[1] for pair in pairs],
            log_probs=[pair[0] for pair in pairs],
            meta_info=output["meta_info"],
            text=output["text"],
        )
    return sample
