"""Options of `remote_rm` and `judge` that cannot be."""

import pytest
from slime_core.errors import ConfigError
from slime_core.rewards.workers.calling import build_reward
from slime_rm.remote.judge import Judge
from slime_rm.remote.remote_rm import RemoteReward

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize(
    ("reference", "options", "words"),
    [
        (RemoteReward, {"rm_url": None}, "rm.rm_url: found nothing; wanted the address"),
        (RemoteReward, {"rm_url": "localhost:1"}, "server: found 'localhost:1'; wanted http://HOST:PORT"),
        (
            RemoteReward,
            {"rm_url": "http://h", "tries": 0},
            "options.tries: found 0; wanted greater than or equal to 1",
        ),
        (
            RemoteReward,
            {"rm_url": "http://h", "connections": 0, "request_timeout_s": 0.0},
            "options.connections: found 0(.|\n)*options.request_timeout_s: found 0.0",
        ),
        (Judge, {"judge_url": None, "judge_model": None}, "rm.judge_model: found nothing; wanted the name"),
        (
            Judge,
            {"judge_url": "http://u", "judge_model": "m", "template": "{answer}"},
            "judge template: found KeyError",
        ),
        (
            Judge,
            {"judge_url": "http://u", "judge_model": "m", "pattern": "no group"},
            "judge pattern: found 0 groups",
        ),
        (Judge, {"judge_url": "http://u", "judge_model": "m", "pattern": "("}, "wanted a regular expression"),
        (
            Judge,
            {"judge_url": "http://u", "judge_model": "m", "low": 5, "high": 5},
            "wanted a low below the high",
        ),
    ],
)
def test_wrong_options_are_refused(reference, options, words):
    with pytest.raises(ConfigError, match=words):
        build_reward(reference, options)
