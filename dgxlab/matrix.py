"""From a bench entry's matrix to launches: one fresh process each, and the cells it must give.

backend-ops     one launch for all cells of an entry
llama-bench     one launch for all sizes at one setting of the other axes; one repetition more than asked, the first
                is thrown away because it is cold
batched-bench   one launch for all npl at one (npp, ntg, other axes), the whole list twice, because the first call of a
                size pays for buffers and kernels that the second finds; and a spare row last, because the tool can
                lose what it printed just before it exits
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from dgxlab.errors import SpecError
from dgxlab.model import BackendOpsBench, BatchedBench, Bench, Cell, Experiment, LlamaBench, Param

LLAMA_BENCH_FLAGS = {
    "n_depth": "-d",
    "n_batch": "-b",
    "n_ubatch": "-ub",
    "type_k": "-ctk",
    "type_v": "-ctv",
    "n_threads": "-t",
    "n_gpu_layers": "-ngl",
    "n_cpu_moe": "-ncmoe",
    "flash_attn": "-fa",
    "split_mode": "-sm",
    "main_gpu": "-mg",
    "no_kv_offload": "-nkvo",
    "embeddings": "-embd",
    "use_mmap": "-mmp",
    "cpu_mask": "-C",
    "cpu_strict": "--cpu-strict",
    "poll": "--poll",
}
"""Axis (llama-bench's column name) to flag."""

BATCHED_FLAGS = {
    "n_ctx": "-c",
    "n_batch": "-b",
    "n_ubatch": "-ub",
    "type_k": "-ctk",
    "type_v": "-ctv",
    "n_threads": "-t",
    "n_gpu_layers": "-ngl",
    "flash_attn": "-fa",
    "split_mode": "-sm",
    "main_gpu": "-mg",
}

FLASH_ATTN = {"on": 1, "1": 1, "true": 1, "off": 0, "0": 0, "false": 0, "auto": -1, "-1": -1}
"""What a spec may say, to what the tools print."""

CTX_STEP = 256
"""llama.cpp rounds the context of each sequence up to this."""

ALTERNATIVES = 200
"""Up to this many cells a selection that is no full product is spelled out; above, more shapes run than asked."""


@dataclass(frozen=True)
class Launch:
    """One process to start and the cells it must give."""

    tool: str
    cells: tuple[Cell, ...]
    argv: tuple[str, ...]
    model: str
    env: Mapping[str, str]
    limit_s: float


Wanted = Callable[[str, Mapping[str, str], Cell], bool]
"""(model name, environment, cell) -> whether it must be measured."""

Keep = Callable[[str, Cell], bool]
"""(model name, cell) -> whether it must be measured, of one entry."""


def launches(experiment: Experiment, wanted: Wanted = lambda model, env, cell: True) -> Iterator[Launch]:
    """Expand every bench entry into launches, with the unwanted cells left out of them."""
    for number, entry in enumerate(experiment.bench):
        env = {**experiment.env, **entry.env}
        some = False
        for launch in expand(entry, env, lambda model, cell, env=env: wanted(model, env, cell)):  # type: ignore[misc]
            some = True
            if launch.cells:
                yield launch
        if not some:
            raise SpecError(f"bench[{number}] measures nothing: exclude removes every cell", next="dgxlab plan")


def tool_of(entry: Bench) -> str:
    """Return the tool of a bench entry."""
    kinds = {BackendOpsBench: "backend-ops", LlamaBench: "llama-bench", BatchedBench: "batched-bench"}
    return kinds[type(entry)]


def expand(entry: Bench, env: Mapping[str, str], keep: Keep) -> Iterator[Launch]:
    """Expand one entry into launches, the unwanted cells left out of them; some may then have none."""
    if isinstance(entry, BackendOpsBench):
        return _expand_backend_ops(entry, env, keep)
    if isinstance(entry, LlamaBench):
        return _expand_llama_bench(entry, env, keep)
    return _expand_batched(entry, env, keep)


def _expand_backend_ops(entry: BackendOpsBench, env: Mapping[str, str], keep: Keep) -> Iterator[Launch]:
    combinations = [c for c in _product(entry.where) if not _excluded(c, entry.exclude)]
    if not combinations:
        return
    named = {"op_name": entry.op, "backend_name": entry.backend}
    pairs = [(c, Cell("backend-ops", _op_label(entry.op, c), {**named, **c})) for c in combinations]
    left = [(c, cell) for c, cell in pairs if keep("", cell)]
    regex = _selection([c for c, _ in left]) if left else ""
    argv = ("{bin}/test-backend-ops", "perf", "-o", entry.op, "-b", entry.backend, "-p", regex, "--output", "sql")
    yield Launch("backend-ops", tuple(cell for _, cell in left), argv, "", env, entry.limit_s)


def _expand_llama_bench(entry: LlamaBench, env: Mapping[str, str], keep: Keep) -> Iterator[Launch]:
    fixed: dict[str, Param] = {"repetitions": entry.repetitions, "args": " ".join(entry.args)}
    sizes = [(n, 0) for n in entry.n_prompt if n] + [(0, n) for n in entry.n_gen if n]
    for setting in _product(entry.axes):
        asked = [s for s in sizes if not _excluded({"n_prompt": s[0], "n_gen": s[1], **setting}, entry.exclude)]
        if not asked:
            continue
        row = _printed(setting)
        cells = {
            (pp, tg): Cell(
                "llama-bench", _bench_label(pp, tg, setting, entry.axes), {"n_prompt": pp, "n_gen": tg, **row}, fixed
            )
            for pp, tg in asked
        }
        left = {size: cell for size, cell in cells.items() if keep(entry.model, cell)}
        yield Launch(
            "llama-bench",
            tuple(left.values()),
            (
                "{bin}/llama-bench",
                *("-m", f"{{model:{entry.model}}}"),
                *("-p", _comma([pp for pp, _ in left if pp] or [0])),
                *("-n", _comma([tg for _, tg in left if tg] or [0])),
                *_flags(setting, LLAMA_BENCH_FLAGS),
                *("-r", str(entry.repetitions + 1)),
                *entry.args,
                *("-o", "jsonl"),
            ),
            entry.model,
            env,
            entry.limit_s,
        )


def _expand_batched(entry: BatchedBench, env: Mapping[str, str], keep: Keep) -> Iterator[Launch]:
    for setting in _product({"npp": entry.npp, "ntg": entry.ntg, **entry.axes}):
        asked = [pl for pl in entry.npl if not _excluded({**setting, "npl": pl}, entry.exclude)]
        if not asked:
            continue
        pp, tg = int(setting["npp"]), int(setting["ntg"])
        axes = {name: value for name, value in setting.items() if name not in ("npp", "ntg")}
        fixed: dict[str, Param] = {**axes, "args": " ".join(entry.args)}
        cells = {
            pl: Cell(
                "batched-bench",
                f"pp{pp} tg{tg} B{pl}{_varying(axes, entry.axes)}",
                {"pp": pp, "tg": tg, "pl": pl},
                fixed,
            )
            for pl in asked
        }
        left = {pl: cell for pl, cell in cells.items() if keep(entry.model, cell)}
        n_ctx = _context(pp + tg, max(asked), axes.get("n_ctx"))
        yield Launch(
            "batched-bench",
            tuple(left.values()),
            (
                "{bin}/llama-batched-bench",
                *("-m", f"{{model:{entry.model}}}"),
                *("-c", str(n_ctx)),
                *("-npp", str(pp), "-ntg", str(tg)),
                *("-npl", _comma([*left, *left, *list(left)[-1:]])),
                *_flags({k: v for k, v in axes.items() if k != "n_ctx"}, BATCHED_FLAGS),
                *entry.args,
                *("--output-format", "jsonl"),
            ),
            entry.model,
            env,
            entry.limit_s,
        )


def _context(per_sequence: int, sequences: int, given: Param | None) -> int:
    """Return n_ctx for `sequences` of `per_sequence` tokens.

    llama-batched-bench skips rows that do not fit without a word, and aborts when only its rounding made them fit.
    """
    need = sequences * -(-per_sequence // CTX_STEP) * CTX_STEP
    if given is None:
        return need
    if int(given) < need:
        raise SpecError(
            f"batched-bench with n_ctx {given} would skip its largest rows: {sequences} sequences of {per_sequence} "
            f"tokens need {need}",
            next=f"set n_ctx to {need} or leave it out",
        )
    return int(given)


def _product(axes: Mapping[str, Sequence[Param]]) -> Iterator[dict[str, Param]]:
    for values in itertools.product(*axes.values()):
        yield dict(zip(axes, values, strict=True))


def _excluded(combination: Mapping[str, Param], exclude: Sequence[Mapping[str, Param]]) -> bool:
    return any(all(combination.get(k) == v for k, v in rule.items()) for rule in exclude)


def _printed(setting: Mapping[str, Param]) -> dict[str, Param]:
    """Return the axes as llama-bench prints them in a row."""
    return {k: FLASH_ATTN.get(_text(v), v) if k == "flash_attn" else v for k, v in setting.items()}


def _flags(setting: Mapping[str, Param], names: Mapping[str, str]) -> list[str]:
    return [word for axis, value in setting.items() for word in (names[axis], _text(value))]


def _text(value: Param) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


def _comma(values: Sequence[object]) -> str:
    return ",".join(str(value) for value in values)


def _op_label(op: str, combination: Mapping[str, Param]) -> str:
    return f"{op} " + " ".join(f"{k}={v}" for k, v in combination.items())


def _bench_label(pp: int, tg: int, setting: Mapping[str, Param], axes: Mapping[str, Sequence[Param]]) -> str:
    name = f"pp{pp}" if pp else f"tg{tg}"
    depth = setting.get("n_depth", 0)
    rest = {k: v for k, v in setting.items() if k != "n_depth"}
    return name + (f" @ d{depth}" if depth else "") + _varying(rest, axes)


def _varying(setting: Mapping[str, Param], axes: Mapping[str, Sequence[Param]]) -> str:
    """Return the settings that an entry varies, for its cells' labels."""
    return "".join(f" {k}={_text(v)}" for k, v in setting.items() if len(axes.get(k, ())) > 1)


def _selection(combinations: Sequence[Mapping[str, Param]]) -> str:
    """Return an ECMAScript regex for `-p` that selects these combinations of op parameters.

    Lookaheads, because the order of the parameters in test-backend-ops' text is the test case's own.
    """
    axes = {k: list(dict.fromkeys(c[k] for c in combinations)) for k in combinations[0]}
    full = 1
    for values in axes.values():
        full *= len(values)
    if full == len(combinations) or len(combinations) > ALTERNATIVES:
        return "^" + "".join(_lookahead(k, values) for k, values in axes.items())
    each = ("".join(_lookahead(k, [v]) for k, v in c.items()) for c in combinations)
    return f"^({'|'.join(each)})"


def _lookahead(key: str, values: Sequence[Param]) -> str:
    return f"(?=(.*,)?{_literal(key)}=({'|'.join(_literal(_text(v)) for v in values)})(,|$))"


def _literal(text: str) -> str:
    return "".join(f"\\{c}" if c in r".^$|()[]{}*+?\/" else c for c in text)
