"""Schemas of tools: of Python functions from their signatures, and checks of those that are given."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

import jsonschema
from pydantic import BaseModel, ConfigDict, create_model
from slime_core.errors import PluginError

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def wrong_schema(schema: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a tool's schema (`name`, `description`, `parameters`); None where nothing is."""
    name, parameters = schema.get("name"), schema.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        return f"its name is {name!r}; wanted 1 to 64 letters, digits, _ and -"
    if not isinstance(schema.get("description", ""), str):
        return "its description is no text"
    if not isinstance(parameters, Mapping) or parameters.get("type") != "object":
        return 'its parameters are no JSON Schema of an object; wanted {type = "object", properties = {...}}'
    try:
        jsonschema.Draft202012Validator.check_schema(parameters)
    except jsonschema.SchemaError as error:
        place = "".join(f".{one}" for one in error.absolute_path)
        return f"parameters{place}: {error.message}"
    missing = [one for one in parameters.get("required", ()) if one not in parameters.get("properties", {})]
    return f"it requires {missing}, which are none of its properties" if missing else None


def checked(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema that is right.

    Raises:
        PluginError: says what is wrong with it.
    """
    if why := wrong_schema(schema):
        raise PluginError(f"the tool {schema.get('name')!r}: {why}")
    return {
        "name": schema["name"],
        "description": schema.get("description", ""),
        "parameters": schema["parameters"],
    }


def model_of(name: str, function: Callable[..., Any]) -> type[BaseModel]:
    """Return a model of a function's arguments, which reads them from JSON.

    Raises:
        PluginError: a parameter has no type, or one that has no JSON Schema, or cannot be given by name.
    """
    try:
        hints = get_type_hints(function, include_extras=True)
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError, NameError) as error:
        raise PluginError(f"the tool {name!r}: its signature cannot be read: {error}") from error
    fields: dict[str, Any] = {}
    for one in parameters:
        if one.kind not in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY):
            raise PluginError(f"the tool {name!r}: the parameter {one.name} cannot be given by name")
        if one.name not in hints:
            raise PluginError(
                f"the tool {name!r}: the parameter {one.name} has no type; annotate it, as in `{one.name}: str`"
            )
        fields[one.name] = (hints[one.name], ... if one.default is one.empty else one.default)
    try:
        made: type[BaseModel] = create_model(
            f"{name}_arguments", __config__=ConfigDict(extra="forbid"), **fields
        )
        made.model_json_schema()
    except Exception as error:  # pydantic has several for a type that it cannot write
        raise PluginError(
            f"the tool {name!r}: its types have no JSON Schema: {str(error).splitlines()[0]}"
        ) from error
    return made


def schema_of(name: str, function: Callable[..., Any], model: type[BaseModel]) -> dict[str, Any]:
    """Return the schema of a function: its docstring, and the model of its arguments."""
    parameters = model.model_json_schema()
    parameters.pop("title", None)
    for one in parameters.get("properties", {}).values():
        one.pop("title", None)
    parameters.setdefault("properties", {})
    return checked({"name": name, "description": inspect.getdoc(function) or "", "parameters": parameters})
