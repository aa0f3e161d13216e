"""What the parts of a spec are made of: the types of its values, and how strict its maps are."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema

from dgxlab.model import COMMIT, NAME, Expectation, Text
from dgxlab.units import share

T = TypeVar("T")

_OWNED_CMAKE = re.compile(
    r"CMAKE_(INSTALL_PREFIX|HOME_DIRECTORY|CACHEFILE_DIR|(RUNTIME|LIBRARY)_OUTPUT_DIRECTORY|\w*RPATH\w*)"
    r"|LLAMA_BUILD_COMMIT"
)

_OWNED_ENV: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"LD_.*"), "changes which libraries load, and so which arm is measured"),
    (re.compile(r"GGML_BACKEND_(DIR|PATH)"), "loads backends that this arm did not build"),
    (re.compile(r"PATH|HOME|TMPDIR"), "is the host's own: hosts.yaml has path_prepend and root"),
    (re.compile(r"DGXLAB_(ROOT|HOST|LOCKS|DB|CACHE|JOB\w*|TEST_\w*)"), "belongs to dgxlab itself"),
    (re.compile(r"GGML_NO_BACKTRACE"), "is set by dgxlab itself, to keep backtraces out of what it reads"),
    (re.compile(r"LLAMA_ARG_.*"), "sets a flag behind the bench entry's back: say it as a key or in args"),
)

_COMPILER_FLAGS = re.compile(r"\w*FLAGS\w*|CMAKE_\w*STANDARD_LIBRARIES\w*")
_SHELL = re.compile(r"[`$;&|<>()\\\n]")

_FLASH_ATTN = {"on": 1, "off": 0, "auto": -1}


# -- how strict maps are ----------------------------------------------------------------------------------------------


class Strict(BaseModel):
    """What every map of a spec has in common: no unknown keys, no silent conversions."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, use_attribute_docstrings=True)


class OneKind(Strict):
    """A map with exactly one key, which says what kind of thing it holds."""

    model_config = ConfigDict(json_schema_extra={"minProperties": 1, "maxProperties": 1})

    @model_validator(mode="after")
    def _one_kind(self) -> OneKind:
        keys = [field.alias or name for name, field in type(self).model_fields.items()]
        if len(self._given()) != 1:
            raise ValueError(f"must have exactly one of {', '.join(keys)}, with its own keys below it")
        return self

    @property
    def kind(self) -> tuple[str, Any]:
        """The key, and its value."""
        return self._given()[0]

    def _given(self) -> list[tuple[str, Any]]:
        keys = {name: field.alias or name for name, field in type(self).model_fields.items()}
        return [(key, value) for name, key in keys.items() if (value := getattr(self, name)) is not None]


class Keys:
    """Marks a record of dgxlab.model that a map becomes: its fields are the keys, with their defaults and their help.

    Args:
        without: Fields that a spec does not set.
        types: Other types than the record's own, by field.
    """

    def __init__(self, *without: str, **types: Any) -> None:
        self.without = without
        self.types = types

    def __get_pydantic_core_schema__(self, source: Any, inner: GetCoreSchemaHandler) -> CoreSchema:
        """Return the record's schema with these keys alone; the others get their defaults."""
        schema = inner(source)
        record: Any = inner.resolve_ref_schema(schema)["schema"]
        record["fields"] = [field for field in record["fields"] if field["name"] not in self.without]
        for field in record["fields"]:
            if field["name"] in self.types:
                place = field["schema"] if field["schema"]["type"] == "default" else field
                place["schema"] = inner.generate_schema(self.types[field["name"]])
        return core_schema.no_info_after_validator_function(lambda partial: source(**vars(partial)), schema)


class OneOrMany:
    """Marks a list in whose place a single scalar may be written."""

    def __get_pydantic_core_schema__(self, source: Any, inner: GetCoreSchemaHandler) -> CoreSchema:
        """Wrap a scalar before the list is validated."""
        return core_schema.no_info_before_validator_function(self.wrap, inner(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, inner: GetJsonSchemaHandler) -> dict[str, Any]:
        """Allow the item where the list is allowed."""
        array = inner(schema)
        return {"anyOf": [array["items"], array]}

    @staticmethod
    def wrap(value: Any) -> Any:
        """Return a list of one for a scalar; anything else is left to be refused."""
        return [value] if isinstance(value, (str, int, float)) else value


class NotNull:
    """Marks an optional type whose None is only ever the default: a key that is written has a value."""

    def __get_pydantic_core_schema__(self, source: Any, inner: GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema of the value alone."""
        nullable: Any = inner(source)
        value: CoreSchema = nullable["schema"]
        return value


# -- rules of values --------------------------------------------------------------------------------------------------


def shell_text(name: str, value: str) -> str:
    """Return what is wrong with flags of a compiler or linker: cmake hands them to a shell as they are; else ""."""
    unsafe = _SHELL.search(value) if _COMPILER_FLAGS.fullmatch(name) else None
    return f"holds {unsafe[0]!r}: flags are read by a shell, and may not be more than flags" if unsafe else ""


def _counted(text: str) -> str:
    try:
        return str(Expectation.parse(text))
    except ValueError:
        raise ValueError("must be all of a positive number of cases, as in 1103/1103") from None


def _cmake_key(key: str) -> str:
    if _OWNED_CMAKE.fullmatch(key):
        raise ValueError("cannot be set: dgxlab sets it, to find the binaries and to know what they load")
    return key


def _cmake_value(value: Any) -> Any:
    """Return cmake's text for a YAML value; floats are left to fail, because 9.0 and 9 are different architectures."""
    if isinstance(value, bool):
        return "ON" if value else "OFF"
    return str(value) if isinstance(value, int) else value


def _env_key(key: str) -> str:
    for pattern, why in _OWNED_ENV:
        if pattern.fullmatch(key):
            raise ValueError(f"cannot be set: it {why}")
    return key


def _param(value: Any) -> Any:
    if not isinstance(value, (str, int, float)) or value == "":
        raise ValueError("must be text, a number, true or false")
    return value


def _flash_attn(value: Any) -> Any:
    if isinstance(value, str):
        return _FLASH_ATTN.get(value, value)
    return int(value) if isinstance(value, bool) else value


def _flash_attn_known(value: int) -> int:
    if value not in (-1, 0, 1):
        raise ValueError('must be "on", "off" or "auto"')
    return value


def _share(value: Any) -> Any:
    """Return a share for its text; a number is one already."""
    if not isinstance(value, str):
        return value
    try:
        return share(value)
    except ValueError:
        raise ValueError("must be a share between 0 and 1, as in 2% or 0.02") from None


def _no_newline(text: str) -> str:
    if "\n" in text:
        raise ValueError("must be one line")
    return text


def _no_repeats(values: list[T]) -> list[T]:
    seen: set[Any] = set()
    for value in values:
        if value in seen:
            raise ValueError(f"holds {value} twice")
        seen.add(value)
    return values


# -- types ------------------------------------------------------------------------------------------------------------

Few = Annotated[list[T], AfterValidator(_no_repeats), OneOrMany()]
"""A scalar or a list without repetitions; it may be empty."""

Many = Annotated[list[T], Field(min_length=1), AfterValidator(_no_repeats), OneOrMany()]
"""A scalar or a list without repetitions, not empty."""

Maybe = Annotated[T | None, NotNull()]
"""A key that may be left out; None then, and never null in the file."""

Name = Annotated[str, Text(NAME.pattern, "a name of letters, digits, dots, dashes and underscores, 64 at most")]
Commit = Annotated[str, Text(COMMIT.pattern, "a full commit id: 40 hex digits, in lower case")]
CMakeKey = Annotated[
    str, Text(r"[A-Za-z_][A-Za-z0-9_]*", "a name of letters, digits and underscores"), AfterValidator(_cmake_key)
]
CMakeValue = Annotated[
    str, BeforeValidator(_cmake_value, json_schema_input_type=bool | int | str), AfterValidator(_no_newline)
]
EnvKey = Annotated[
    str, Text(r"[A-Z_][A-Z0-9_]*", "a name of capital letters, digits and underscores"), AfterValidator(_env_key)
]
Source = Annotated[
    str,
    Text(
        r"pypi:[A-Za-z0-9._-]+==[A-Za-z0-9._+!-]+|(https?|ssh|git|file)://[^\s@?#]+"
        r"|(ssh://)?[A-Za-z0-9._-]+@[^\s@:]+[:/][^\s@]+|(/|~/|\.\.?/)[^\n]*",
        "a git URL without a password, a path as /..., ~/... or ./..., or pypi:NAME==VERSION",
    ),
]
Op = Annotated[str, Text(r"[A-Z][A-Z0-9_]*", "one operation by ggml's name, as MUL_MAT")]
Column = Annotated[str, Text(r"[A-Za-z_][A-Za-z0-9_]*", "a parameter's name, as type_a")]
Counted = Annotated[str, AfterValidator(_counted), Field(json_schema_extra={"pattern": "^[0-9]+/[0-9]+$"})]
ModelPath = Annotated[str, Text(r"(/|~/)[^\n]*", "a path on the host, as /... or ~/...")]
Line = Annotated[str, Field(min_length=1), AfterValidator(_no_newline)]
Argument = Annotated[
    str,
    BeforeValidator(lambda value: str(value) if type(value) is int else value, json_schema_input_type=int | str),
    Field(min_length=1),
]
Param = Annotated[
    Any, AfterValidator(_param), Field(json_schema_extra={"type": ["string", "integer", "number", "boolean"]})
]
CpuMask = Annotated[str, Text(r"0x[0-9a-fA-F]{1,128}", 'a mask in hexadecimal, in quotes: "0xff"')]
GpuArch = Annotated[str, Text(r"native|sm_[0-9]{2,3}[af]?", "an architecture by nvcc's name, as sm_90, or native")]
Md5 = Annotated[str, Text(r"[0-9a-f]{32}", "an md5: 32 hex digits, in lower case")]
Cases = Annotated[str, Text(r"[0-9a-f]{16}", "a digest of cases as a gate reports it: 16 hex digits, in lower case")]
Ratio = Annotated[float, Field(gt=0, le=1e6)]
_Part = Annotated[float, Field(gt=0, lt=1)]
Share = Annotated[
    _Part,
    BeforeValidator(_share, json_schema_input_type=_Part | Annotated[str, Field(pattern="^ *[0-9.]+ *%? *$")]),
]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Whole = Annotated[int, Field(ge=0, le=2**31 - 1)]
Percent = Annotated[int, Field(ge=0, le=100)]
Layers = Annotated[int, Field(ge=-1, le=2**31 - 1)]
Seconds = Annotated[float, Field(gt=0, le=7 * 86400)]
KvType = Literal["f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl"]
SplitMode = Literal["none", "layer", "row", "tensor"]
FlashAttn = Annotated[
    int,
    BeforeValidator(_flash_attn, json_schema_input_type=bool | Literal["on", "off", "auto", -1, 0, 1]),
    AfterValidator(_flash_attn_known),
]
"""As llama-bench's column prints it: 1, 0, or -1 for auto."""

Env = dict[EnvKey, str]
"""Environment variables; values must be text."""

Against = dict[EnvKey, str | None]
"""What another environment has instead; null for a variable that it does not have."""

Args = Annotated[list[Argument], OneOrMany()]
"""Raw arguments of a program."""

Exclude = list[
    Annotated[
        dict[Column, Param],
        Field(min_length=1),
        AfterValidator(
            lambda rule: {key: _flash_attn(value) if key == "flash_attn" else value for key, value in rule.items()}
        ),
    ]
]
"""Cells to leave out."""
