"""The key of a run's servers: who sees it."""

from __future__ import annotations

import copy
import pickle

from slime_sglang.http.api_key import new_key


def test_a_key_is_hidden_where_values_are_shown_and_kept_where_they_are_copied() -> None:
    key = new_key()
    copies = [pickle.loads(pickle.dumps(key)), copy.deepcopy(key)]
    assert all(repr({"api_key": each}) == "{'api_key': '***'}" for each in (key, *copies))
    assert f"{key}" == str(copies[0]) == str(copies[1])
    assert key != new_key()
