"""Building blocks of a spec: the types of its values, and the strictness of its maps."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, TypeVar

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

from dgxlab.model import COMMIT, NAME, SERIES, Expectation, Text
from dgxlab.units import share

T = TypeVar("T")

_OWNED_CMAKE = re.compile(
    r"CMAKE_(INSTALL_PREFIX|HOME_DIRECTORY|CACHEFILE_DIR|(RUNTIME|LIBRARY)_OUTPUT_DIRECTORY|\w*RPATH\w*)"
    r"|LLAMA_BUILD_COMMIT"
)
_OWNED_ENV = {
    r"LD_.*": "changes which libraries load, and so which arm is measured",
    r"GGML_BACKEND_(DIR|PATH)": "loads backends that this arm did not build",
    r"PATH|HOME|TMPDIR": "is the host's own: hosts.yaml has path_prepend and root",
    r"DGXLAB_(ROOT|HOST|LOCKS|DB|CACHE|JOB\w*|TEST_\w*)": "belongs to dgxlab itself",
    r"GGML_NO_BACKTRACE": "is set by dgxlab itself, to keep backtraces out of what it reads",
    r"LLAMA_ARG_.*": "sets a flag behind the bench entry's back: say it as a key or in args",
}
_COMPILER_FLAGS = re.compile(r"\w*FLAGS\w*|CMAKE_\w*STANDARD_LIBRARIES\w*")
_SHELL = re.compile(r"[`$;&|<>()\\\n]")


# -- how strict maps are ----------------------------------------------------------------------------------------------


class Strict(BaseModel):
    """Base of every map of a spec: no unknown keys, no silent conversions."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, defer_build=True)


class OneKind(Strict):
    """A map with exactly one key, which names the kind of its value."""

    model_config = ConfigDict(json_schema_extra={"minProperties": 1, "maxProperties": 1})

    @model_validator(mode="after")
    def _one_kind(self) -> OneKind:
        if len(self.model_fields_set) != 1:
            keys = ", ".join(field.alias or name for name, field in type(self).model_fields.items())
            raise ValueError(f"must have exactly one of {keys}, with its own keys below it")
        return self

    @property
    def kind(self) -> tuple[str, Any]:
        """The name of the map's only key, and the value of that key."""
        (name,) = self.model_fields_set
        return type(self).model_fields[name].alias or name, getattr(self, name)


class Keys:
    """Annotation of a record of dgxlab.model: a map is decoded to the record, and its keys are the record's fields.

    Fields that `without` names are no keys, and keep their defaults; the `types` of others are stricter than theirs.
    """

    def __init__(self, *without: str, **types: Any) -> None:
        self.without = without
        self.types = types

    def __get_pydantic_core_schema__(self, source: Any, inner: GetCoreSchemaHandler) -> CoreSchema:
        """Change the record's own schema: leave out fields, and exchange types."""
        schema = inner(source)
        record: Any = inner.resolve_ref_schema(schema)["schema"]
        record["fields"] = [field for field in record["fields"] if field["name"] not in self.without]
        for field in record["fields"]:
            if field["name"] in self.types:
                place = field["schema"] if field["schema"]["type"] == "default" else field
                place["schema"] = inner.generate_schema(self.types[field["name"]])
                if default := place.get("default_factory", tuple)():  # one that says something to editors
                    del place["default_factory"]
                    place["default"] = default
        return core_schema.no_info_after_validator_function(lambda partial: source(**vars(partial)), schema)


class _OneOrMany:
    """Marks a list that may also be written as a single scalar."""

    def __get_pydantic_core_schema__(self, source: Any, inner: GetCoreSchemaHandler) -> CoreSchema:
        """Wrap a scalar before the list is validated."""
        return core_schema.no_info_before_validator_function(
            lambda value: [value] if isinstance(value, str | int | float) else value, inner(source)
        )

    def __get_pydantic_json_schema__(self, schema: CoreSchema, inner: GetJsonSchemaHandler) -> dict[str, Any]:
        """Allow the item where the list is allowed."""
        array = inner(schema)
        return {"anyOf": [array["items"], array]}


# -- rules of values --------------------------------------------------------------------------------------------------


def unsafe_flags(name: str, value: str) -> str:
    """Return why a variable's value is refused, "" if it is not: cmake passes compiler and linker flags to a shell."""
    unsafe = _SHELL.search(value) if _COMPILER_FLAGS.fullmatch(name) else None
    return f"holds {unsafe[0]!r}: flags are read by a shell, and may not be more than flags" if unsafe else ""


def _must(fits: Callable[[Any], object], why: str) -> AfterValidator:
    def check(value: T) -> T:
        if not fits(value):
            raise ValueError(why)
        return value

    return AfterValidator(check)


def _counted(text: str) -> Expectation:
    try:
        return Expectation.parse(text)
    except ValueError:
        raise ValueError("must be all of a positive number of cases, as in 1103/1103") from None


def _cmake_value(value: Any) -> Any:
    """Return cmake's text for a YAML value; floats are left to fail, because 9.0 and 9 are different architectures."""
    if isinstance(value, bool):
        return "ON" if value else "OFF"
    return str(value) if isinstance(value, int) else value


def _env_key(key: str) -> str:
    for pattern, why in _OWNED_ENV.items():
        if re.fullmatch(pattern, key):
            raise ValueError(f"cannot be set: it {why}")
    return key


def _flash_attn(value: Any) -> Any:
    if isinstance(value, str):
        return {"on": 1, "off": 0, "auto": -1}.get(value, value)
    return int(value) if isinstance(value, bool) else value


def _share(value: Any) -> Any:
    try:
        part = share(value) if isinstance(value, str) else value
    except ValueError:
        part = 0.0
    if isinstance(part, int | float) and not 0 < part < 1:
        raise ValueError("must be a share between 0 and 1, as in 2% or 0.02")
    return part


def _no_repeats(values: list[T]) -> list[T]:
    seen: set[T] = set()
    for value in values:
        if value in seen:
            raise ValueError(f"holds {value} twice")
        seen.add(value)
    return values


# -- types ------------------------------------------------------------------------------------------------------------

_ONE_LINE = _must(lambda text: "\n" not in text, "must be one line")
_CMAKE_OWNED = "cannot be set: dgxlab sets it, to find the binaries and to know what they load"

Few = Annotated[list[T], AfterValidator(_no_repeats), _OneOrMany()]
"""A scalar or a list without repetitions; it may be empty."""
Many = Annotated[list[T], Field(min_length=1), AfterValidator(_no_repeats), _OneOrMany()]
"""A scalar or a list without repetitions, not empty."""
if TYPE_CHECKING:
    Maybe: TypeAlias = T | None
else:
    Maybe = Annotated[T, "may be left out"]  # None then, which is not validated; a null in the file is refused
Name = Annotated[str, Text(NAME.pattern, "a name of letters, digits, dots, dashes and underscores, 64 at most")]
HostName = Annotated[str, Text(f"{NAME.pattern}(/{NAME.pattern})?", "a host's name, or CLUSTER/NODE")]
SeriesName = Annotated[str, Text(SERIES.pattern, "a series' name, and numbers of its patches unless all: name:1-2,4")]
Commit = Annotated[str, Text(COMMIT.pattern, "a full commit id: 40 hex digits, in lower case")]
CMakeKey = Annotated[
    str,
    Text(r"[A-Za-z_][A-Za-z0-9_]*", "a name of letters, digits and underscores"),
    _must(lambda key: not _OWNED_CMAKE.fullmatch(key), _CMAKE_OWNED),
]
CMakeValue = Annotated[str, BeforeValidator(_cmake_value, json_schema_input_type=bool | int | str), _ONE_LINE]
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
Counted = Annotated[
    str,
    BeforeValidator(lambda value: str(value) if type(value) is int else value, json_schema_input_type=str),
    AfterValidator(_counted),
    Field(json_schema_extra={"pattern": "^[0-9]+/[0-9]+$"}),
]
ModelPath = Annotated[str, Text(r"(/|~/)[^\n]*", "a path on the host, as /... or ~/...")]
Line = Annotated[str, Field(min_length=1), _ONE_LINE]
Argument = Annotated[
    str,
    BeforeValidator(lambda value: str(value) if type(value) is int else value, json_schema_input_type=int | str),
    Field(min_length=1),
]
Param = Annotated[
    Any,
    _must(lambda value: isinstance(value, str | int | float) and value != "", "must be text, a number, true or false"),
    Field(json_schema_extra={"type": ["string", "integer", "number", "boolean"]}),
]
CpuMask = Annotated[str, Text(r"0x[0-9a-fA-F]{1,128}", 'a mask in hexadecimal, in quotes: "0xff"')]
GpuArch = Annotated[str, Text(r"native|sm_[0-9]{2,3}[af]?", "an architecture by nvcc's name, as sm_90, or native")]
Md5 = Annotated[str, Text(r"[0-9a-f]{32}", "an md5: 32 hex digits, in lower case")]
Cases = Annotated[str, Text(r"[0-9a-f]{16}", "a digest of cases as a gate reports it: 16 hex digits, in lower case")]
Ratio = Annotated[float, Field(gt=0, le=1e6)]
_Part = Annotated[float, Field(gt=0, lt=1)]
Share = Annotated[
    _Part, BeforeValidator(_share, json_schema_input_type=_Part | Annotated[str, Field(pattern="^ *[0-9.]+ *%? *$")])
]
Half = Annotated[Share, _must(lambda value: value <= 0.5, "must be at most 50%, or 0.5")]
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
    _must(lambda value: value in (-1, 0, 1), 'must be "on", "off" or "auto"'),
]
"""As llama.cpp's column prints it: 1, 0, or -1 for auto."""
Env = dict[EnvKey, str]
Against = dict[EnvKey, str | None]  # variables that differ in another environment; null for an unset variable
Args = Annotated[list[Argument], _OneOrMany()]  # raw arguments of a program
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
