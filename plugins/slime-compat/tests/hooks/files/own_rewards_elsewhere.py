"""Rewards that hand `args` on, in every way that `settings_read` knows."""

import functools


class Judge:
    """Keeps `args`."""

    def __init__(self, args):
        self.settings = args


def kept(args, sample):
    return Judge(args).settings


def bound(args, sample):
    return functools.partial(print, args)


def looked_at(args, sample):
    return vars(args)
