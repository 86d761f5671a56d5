"""Finding a taskset by the name of its module."""

import importlib
import typing

import verifiers.v1 as vf


def taskset_class(name):
    module = importlib.import_module(name)
    return getattr(module, module.__all__[0])


def environment_class(name):
    return vf.SingleAgentEnv


def taskset_config_type(name):
    return typing.get_args(taskset_class(name).__orig_bases__[0])[1]
