"""A user's generate function with a tool, as the reference system's documents describe one."""

from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample

MAX_TURNS = 2


def call_tool(text):
    """Answer a question: the letter after the last one."""
    return chr(97 + (ord(text[-1]) - 96) % 26) if text else "a"


async def generate(args, sample: Sample, sampling_params) -> Sample:
    """Let policy and tool take turns; tokens of the tool are not trained on."""
    assert not args.partial_rollout
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    prompt_ids = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    response, response_ids, loss_mask, log_probs = "", [], [], []
    for turn in range(MAX_TURNS):
        payload = {
            "input_ids": prompt_ids + response_ids,
            "sampling_params": sampling_params,
            "return_logprob": True,
        }
        output = await post(url, payload)
        meta = output["meta_info"]
        if meta["finish_reason"]["type"] == "abort":
            sample.status = Sample.Status.ABORTED
            return sample
        new_ids = [item[1] for item in meta["output_token_logprobs"]]
        response_ids += new_ids
        log_probs += [item[0] for item in meta["output_token_logprobs"]]
        loss_mask += [1] * len(new_ids)
        response += output["text"]
        if turn + 1 < MAX_TURNS:
            seen = call_tool(output["text"])
            ids = state.tokenizer(seen, add_special_tokens=False)["input_ids"]
            response_ids += ids
            log_probs += [0.0] * len(ids)
            loss_mask += [0] * len(ids)
            response += seen
    sample.tokens = prompt_ids + response_ids
    sample.response_length = len(response_ids)
    sample.response = response
    sample.loss_mask = loss_mask
    sample.rollout_log_probs = log_probs
    sample.metadata["tool_calls"] = MAX_TURNS - 1
    match meta["finish_reason"]["type"]:
        case "length":
            sample.status = Sample.Status.TRUNCATED
        case "stop":
            sample.status = Sample.Status.COMPLETED
    return sample


async def generate_appending(args, sample, sampling_params, evaluation=False):
    """Do the same by the method that keeps everything aligned."""
    state = GenerateState(args)
    sample.tokens = state.tokenizer.encode(sample.prompt, add_special_tokens=False)
    for turn in range(MAX_TURNS):
        output = await post(
            f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate",
            {"input_ids": sample.tokens, "sampling_params": sampling_params, "return_logprob": True},
        )
        logprobs = output["meta_info"]["output_token_logprobs"]
        sample.append_response_tokens(
            args,
            tokens=[token for _, token, _ in logprobs],
            log_probs=[log_prob for log_prob, _, _ in logprobs],
            meta_info=output["meta_info"],
            text=output["text"],
        )
        if turn + 1 < MAX_TURNS:
            ids = state.tokenizer.encode(call_tool(output["text"]))
            sample.append_response_tokens(args, tokens=ids, trainable=False, text=state.tokenizer.decode(ids))
    sample.metadata["evaluation"] = evaluation
    return sample


async def reward_func(args, sample, **kwargs):
    """Count letters of the label."""
    if not isinstance(sample, Sample):
        raise TypeError("Sample must be an instance of Sample class.")
    sample.metadata["scored_by"] = "reward_func"
    return {"score": float(sample.response.count(sample.label)), "length": float(sample.response_length)}
