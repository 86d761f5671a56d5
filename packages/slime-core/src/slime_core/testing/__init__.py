"""Small real parts for tests of loops, rollouts and plugins: a whole run in milliseconds, without torch."""
