"""An environment written with OpenEnv, served at the port that is given: one guesses a number, which is the seed."""

from __future__ import annotations

import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    """A guess."""

    message: str


class Told(Observation):
    """What the game says."""

    text: str = ""


class Game(Environment):
    """Says higher or lower."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._number, self._state = 0, State()

    def reset(self, seed=None, episode_id=None, **_):
        """Begin a game."""
        self._number, self._state = 7 if seed is None else seed, State(episode_id=episode_id)
        return Told(text="Guess.")

    def step(self, action, timeout_s=None, **_):
        """Answer a guess."""
        self._state.step_count += 1
        guess = int(action.message)
        text = "right" if guess == self._number else "higher" if guess < self._number else "lower"
        return Told(text=text, done=text == "right", reward=float(text == "right"))

    @property
    def state(self):
        """Where the game is."""
        return self._state


uvicorn.run(
    create_fastapi_app(Game, Guess, Told, max_concurrent_envs=2),
    host="127.0.0.1",
    port=int(sys.argv[1]),
    log_level="warning",
)
