"""An environment that scores by the grader of mathematics."""

from slime.rollout.rm_hub import grade_answer_verl
from slime.rollout.rm_hub.math_utils import extract_answer as extract_boxed_answer


class Environment:
    """Says whether an answer is right."""

    def __init__(self, *, ground_truth, max_turns):
        self.ground_truth, self.max_turns, self.turn = ground_truth, max_turns, 0

    def reset(self):
        self.turn = 0
        return {}, {"ground_truth_available": self.ground_truth is not None}

    def close(self):
        return

    def step(self, response_text):
        self.turn += 1
        answer = extract_boxed_answer(response_text) or response_text or "none"
        right = grade_answer_verl(f"\\boxed{{{answer}}}", self.ground_truth)
        return {"obs_str": "r" if right else "w", "role": "tool"}, right or self.turn >= self.max_turns, {}

    def format_observation(self, observation):
        return {"role": observation.get("role", "tool"), "content": observation.get("obs_str", "")}


def build_env(sample=None, args=None, **_):
    return Environment(ground_truth=sample.label, max_turns=args.max_turns)
