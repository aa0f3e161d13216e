"""Every rule of the spec: one bad value each, and the sentence that comes of it."""

import pytest

from dgxlab.errors import SpecError
from dgxlab.spec import load
from tests.spec.specs import child_refusal, read, refusal, write

GATE = "op: MUL_MAT, backend: CPU"
AS = "as CUDA0 or CPU, not "
PROFILE = "model: q4k, npp: 8, ntg: 2, npl: 1"
SERVE = "n_prompt: 16, n_gen: 96, streams: [1, 8]"
VLLM = f"{SERVE}, engine: vllm, command: [vllm, serve, /m/x]"
NO_GPU = "cmake: {GGML_CUDA: false}\n"
URL = "llama_cpp.sources: must be a git URL without a password"

REFUSED = [
    # unknown keys, with the nearest
    ("sesion: {}", "sesion: unknown key; did you mean session?"),
    ("session: {zzz: 3}", "session.zzz: unknown key; known: block_minutes, cycles, drift_limit, effect, pin, thermal"),
    # one that belongs a level deeper
    ("cycles: 3", "cycles: unknown key; did you mean session.cycles?"),
    ("pin: e3a7", "pin: unknown key; did you mean llama_cpp.pin or session.pin?"),
    ("models: {m: {synthetic: {n_layers: 2}}}", "models.m.synthetic.n_layers: unknown key; did you mean n_layer?"),
    ("models: {a: {synthetic: {vocab_pin: x}}}", "models.a.synthetic.vocab_pin: unknown key; did you mean vocab?"),
    ("gates: [backendops: {}]", "gates[1].backendops: unknown key; did you mean backend-ops?"),
    ("matrix: {evn: {}}", "matrix.evn: unknown key; did you mean env?"),
    ("matrix: {env: {PATH: x}}", "matrix.env.PATH: cannot be set: it is the host's own"),
    ("matrix: {env: {A: []}}", "matrix.env.A: must not be empty"),
    ("matrix: {env: {A: [x, x]}}", "matrix.env.A: holds x twice"),
    # the top
    ("session: {drift_limit: 60%}", "session.drift_limit: must be at most 50%, or 0.5"),
    ("session: {drift_limit: 25}", "session.drift_limit: must be a share between 0 and 1, as in 2% or 0.02, not 25"),
    ("name: a/b", "name: must be a name of letters, digits, dots, dashes and underscores, 64 at most, not 'a/b'"),
    ('name: "x\\n"', "name: must be a name"),
    (f"name: {'x' * 65}", "name: must be a name"),
    ("name: 12", 'name: must be text, not 12: quote it: "12"'),
    ("hypothesis:", "hypothesis: must be text, not nothing"),
    ("series: [a, a]", "series: holds a twice"),
    ("cmake: []", "cmake: must be a map, not an empty list"),
    ("cmake: {a-b: 1}", "cmake.a-b: must be a name of letters, digits and underscores"),
    ("cmake: {A: 9.0}", 'cmake.A: must be text, not 9.0: quote it: "9.0"'),
    ('cmake: {A: "1\\n2"}', "cmake.A: must be one line"),
    ("cmake: {GGML_CUDA: 1}", "cmake.GGML_CUDA: must be true or false, not '1'"),
    (f"{NO_GPU}bench: [llama-bench: {{model: q4k, n_gen: 1, n_gpu_layers: [0, 99]}}]", "n_gpu_layers: no GPU backend"),
    (f"{NO_GPU}bench: [backend-ops: {{op: ADD, backend: CUDA0, where: {{m: 1}}}}]", "backend: CUDA0 is not built: "),
    *(
        (
            f"gates: [backend-ops: {{op: ADD, backend: {name}}}]",
            f"backend: must be a backend's exact name, {AS}'{name}'",
        )
        for name in ("cpu", "cuda0", "CUDA")
    ),
    ("gates: [backend-ops: {op: ADD, backend: Vulkan1}]", "gates[1].backend-ops.backend: Vulkan1 is not built: cmake "),
    ("cmake: {CMAKE_INSTALL_PREFIX: /x}", "cmake.CMAKE_INSTALL_PREFIX: cannot be set: dgxlab sets it"),
    ("cmake: {CMAKE_BUILD_RPATH_USE_ORIGIN: false}", "cannot be set: dgxlab sets it"),
    ("env: {a: x}", "env.a: must be a name of capital letters, digits and underscores"),
    ("env: {LD_LIBRARY_PATH: x}", "env.LD_LIBRARY_PATH: cannot be set: it changes which libraries load"),
    ("env: {PATH: x}", "env.PATH: cannot be set: it is the host's own"),
    ("env: {DGXLAB_ROOT: x}", "env.DGXLAB_ROOT: cannot be set: it belongs to dgxlab itself"),
    ("env: {GGML_BACKEND_PATH: x}", "env.GGML_BACKEND_PATH: cannot be set: it loads backends"),
    ("env: {GGML_NO_BACKTRACE: '0'}", "env.GGML_NO_BACKTRACE: cannot be set: it is set by dgxlab itself"),
    ("env: {LLAMA_ARG_BATCH: '1'}", "env.LLAMA_ARG_BATCH: cannot be set: it sets a flag behind the bench entry's back"),
    ("env: {HF_TOKEN: x}", "env.HF_TOKEN: looks like a secret, and a spec is recorded: it belongs to the host's env"),
    ("env: {LLAMA_API_KEY: x}", "env.LLAMA_API_KEY: looks like a secret"),
    (
        f"gates: [{{backend-ops: {{{GATE}, env: {{DB_PASSWORD: x}}}}}}]",
        "backend-ops.env.DB_PASSWORD: looks like a secret",
    ),
    # llama_cpp
    ("llama_cpp: {pin: e3a74b2}", "llama_cpp.pin: must be a full commit id: 40 hex digits, in lower case"),
    ("llama_cpp: {sources: []}", "llama_cpp.sources: must not be empty"),
    ("llama_cpp: {sources: [llama.cpp]}", "llama_cpp.sources[0]: must be a git URL without a password, a path"),
    ("llama_cpp: {sources: --upload-pack=x}", URL),
    ("llama_cpp: {sources: 'ext::sh -c x'}", URL),
    ("llama_cpp: {sources: 'https://me:secret@host/x'}", URL),
    ("llama_cpp: {sources: pypi:llama-cpp-python}", URL),
    # models
    ("models: {a: }", "models.a: must be a map, not nothing"),
    ("models: {a: {}}", "models.a: must have exactly one of path, synthetic"),
    ("models: {a: {path: /x, synthetic: {}}}", "models.a: must have exactly one of path, synthetic"),
    ("models: {a: {path: x.gguf}}", "models.a.path: must be a path on the host, as /... or ~/..., not 'x.gguf'"),
    ("models: {a: {synthetic: {arch: qwen9}}}", "models.a.synthetic.arch: must be llama, qwen3moe"),
    ("models: {a: {synthetic: {n_embd: 100}}}", "models.a.synthetic: n_embd 100"),
    ("models: {a: {synthetic: {n_layer: 2000000}}}", "models.a.synthetic.n_layer: must be at most 1000, not 2000000"),
    ("models: {a: {synthetic: {quant: q4_0}}}", "models.a.synthetic.quant: must be a type of llama-quantize"),
    ("models: {a: {synthetic: {pure: 1}}}", "models.a.synthetic.pure: must be true or false, not 1"),
    ("models: {m: {synthetic: {vocab: llama-spm}}}", "n_vocab 1000 is not what vocab llama-spm has: 32000"),
    ("models: {m: {synthetic: {vocab: falcon}}}", "vocab 'falcon' cannot be used: supported is llama-spm"),
    ("models: {m: {synthetic: {quant: NVFP4, n_ff: 96}}}", "n_ff 96 is no multiple of 64, the block length of NVFP4"),
    ("models: {m: {derived: {of: q4}}}", "models.m.derived.of: no model 'q4' under models; did you mean q4k"),
    ("models: {m: {derived: {of: m}}}", "models.m.derived.of: 'm' is not made from a path or a synthetic model"),
    ("models: {m: {derived: {of: o}}, o: {derived: {of: m}}}", "models.m.derived.of: 'o' is not made from a path"),
    ("models: {m: {derived: {of: small, quant: Q8_0}}}", "models.m.derived: the source is quantised already, in Q4_0"),
    ("models: {m: {derived: {of: q4k, quant: IQ2_XS}}}", "models.m.derived: IQ2_XS needs an importance matrix"),
    ("models: {m: {synthetic: {quant: Q2_K_S}}}", "models.m.synthetic: Q2_K_S needs an importance matrix"),
    ("models: {f: {synthetic: {quant: F16}}, m: {derived: {of: f, quant: MXFP4_MOE}}}", "MXFP4_MOE is for experts"),
    ("models: {m: {derived: {of: q4k, imatrix: x}}}", "models.m.derived.imatrix: must be a path on the host"),
    # gates
    ("gates: [x]", "gates[1]: must be a map, not 'x'"),
    ("gates: [backend-ops: ]", "gates[1].backend-ops: must be a map, not nothing"),
    ("gates: [backend-ops: {backend: CPU}]", "gates[1].backend-ops.op: missing"),
    ("gates: [backend-ops: {op: 'MUL_MAT,ADD', backend: CPU}]", "gates[1].backend-ops.op: must be one operation"),
    *(
        (f"gates: [backend-ops: {{{GATE}, expect: {text}}}]", "gates[0].backend-ops.expect: must be all of a positive")
        for text in ("0/0", "1102/1103", "x", "'5'", "1/1/1", "-1/-1", "'1/1 '")
    ),
    (f"gates: [backend-ops: {{{GATE}, expect: 5}}]", "gates[0].backend-ops.expect: must be all of a positive number"),
    (f"gates: [backend-ops: {{{GATE}, limit_s: 0}}]", "gates[0].backend-ops.limit_s: must be more than 0"),
    (f"gates: [backend-ops: {{{GATE}, env: {{PATH: x}}}}]", "gates[1].backend-ops.env.PATH: cannot be set"),
    ("gates: [engaged: {}]", "gates[1].engaged.stderr: missing"),
    ("gates: [engaged: {stderr: ''}]", "gates[1].engaged.stderr: must not be empty"),
    ("gates: [engaged: {stderr: x, tools: []}]", "gates[1].engaged.tools: must not be empty"),
    ("gates: [engaged: {stderr: x, tools: ncu}]", "gates[1].engaged.tools: must be backend-ops, llama-bench, "),
    (
        "bench: [llama-bench: {model: q4k, n_gen: 1}]\ngates: [engaged: {stderr: x, tools: batched-bench}]",
        "gates[1].engaged: none of its tools is in bench, which has llama-bench",
    ),
    # bench
    (f"bench: [profile: {{{PROFILE}, phase: tg}}]", "bench[0].profile.phase: must be prompt or decode, not 'tg'"),
    (f"bench: [profile: {{{PROFILE}, args: -pps}}]", "bench[0].profile.args: '-pps' is set by dgxlab"),
    (f"bench: [profile: {{{PROFILE}, repetitions: 0}}]", "bench[0].profile.repetitions: must be at least 1, not 0"),
    (f"bench: [serve: {{{SERVE}, model: small}}]", "model: model small has no vocabulary: give its recipe vocab"),
    (f"bench: [serve: {{{SERVE}, model: q4}}]", "bench[0].serve.model: no model 'q4' under models; did you mean"),
    (f"bench: [serve: {{{SERVE}}}]", "bench[0].serve: llama-server needs model and no command, vllm a command and no"),
    (f"bench: [serve: {{{SERVE}, model: q4, rates: 2}}]", "bench[0].serve: it needs either streams or rates"),
    ("bench: [serve: {model: q4, n_prompt: 1, n_gen: 66, rates: 2}]", "with rates, n_parallel must say how many"),
    (f"bench: [serve: {{{SERVE}, engine: vllm}}]", "bench[0].serve: llama-server needs model and no command, vllm a "),
    (f"bench: [serve: {{{VLLM}, n_ubatch: 512, args: -x}}]", "n_ubatch, args: what vllm is given belongs into command"),
    ("bench: [serve: {model: q4k, n_prompt: 1, n_gen: 65, streams: 1}]", "serve.n_gen: must be at least 66, not 65"),
    (
        f"bench: [serve: {{{SERVE}, model: q4k, args: [--port, 1]}}]",
        "bench[0].serve.args[0]: '--port' is set by dgxlab",
    ),
    (
        "bench: [llama-bench: {model: q4k, n_gen: [1, 2]}]\nholdout: [llama-bench: {model: q4k, n_gen: 2, args: -v}]",
        "holdout[0]: holds tg2 out, which bench measures and shows",
    ),
    ("holdout: [llama-bench: {model: q4, n_gen: 9}]", "holdout[0].llama-bench.model: no model 'q4' under models"),
    ("bench: []", "bench: must not be empty: nothing would be measured"),
    ("bench: [llama-bench: {model: q4, n_gen: 1}]", "bench[0].llama-bench.model: no model 'q4' under models; did you "),
    ("bench: [llama-bench: {model: q4k}]", "bench[0].llama-bench: measures nothing: give n_prompt, n_gen or both"),
    ("bench: [llama-bench: {model: q4k, n_prompt: [], n_gen: []}]", "bench[0].llama-bench: measures nothing"),
    *(
        (f"bench: [backend-ops: {{op: ADD, backend: CPU, where: {where}}}]", f"bench[0].backend-ops.where{message}")
        for where, message in (
            ("{}", ": must not be empty"),
            ("{m: [1, 1.0]}", ".m: holds 1.0 twice"),
            ("{m: ''}", ".m: must be text, a number, true or false"),
            ("{m: [[1]]}", ".m[0]: must be text, a number, true or"),
            ("{m.x: 1}", ".m.x: must be a parameter's name"),
        )
    ),
]

LLAMA = [
    ("n_promt: 5", "n_promt: unknown key; did you mean n_prompt?"),
    ("n_gen: [1, 1.5]", "n_gen[1]: must be a whole number, not 1.5"),
    ("n_gen: '8'", "n_gen: must be a whole number, not '8'"),
    ("n_gen: [8, 8]", "n_gen: holds 8 twice"),
    ("n_gen: 8, n_ubatch: []", "n_ubatch: must not be empty: nothing would be measured"),
    ("n_gen: 8, type_k: q4_k", "type_k: must be f16, bf16, q8_0, q4_0, q4_1, q5_0, q5_1 or iq4_nl, not 'q4_k'"),
    ("n_gen: 8, split_mode: rows", "split_mode: must be none, layer, row or tensor, not 'rows'"),
    ("n_gen: 8, flash_attn: maybe", "flash_attn: must be a whole number"),
    ("n_gen: 8, flash_attn: 2", 'flash_attn: must be "on", "off" or "auto", not 2'),
    ("n_gen: 8, flash_attn: ['on', true]", "flash_attn: holds 1 twice"),
    ("n_gen: 8, cpu_mask: ff", "cpu_mask: must be a mask in hexadecimal, in quotes: \"0xff\", not 'ff'"),
    ("n_gen: 8, n_gpu_layers: -2", "n_gpu_layers: must be at least -1, not -2"),
    ("n_gen: 8, limit_s: 1e9", "limit_s: must be at most 604800, not 1000000000.0"),
    ("n_gen: 8, env: {LD_AUDIT: x}", "env.LD_AUDIT: cannot be set"),
    ("n_gen: 8, args: [1.5]", 'args[0]: must be text, not 1.5: quote it: "1.5"'),
    ("n_gen: 8, args: ['']", "args[0]: must not be empty"),
    ("n_gen: 8, args: [-m, x]", "args[0]: '-m' has a key of its own: model"),
    ("n_gen: 8, args: [-v, --output=md]", "args[1]: '--output=md' is set by dgxlab"),
    ("n_gen: 8, args: [-hf, x/y]", "args[0]: '-hf' would measure another model: name it under models"),
    ("n_gen: 8, args: --help", "args: '--help' measures nothing"),
    ("n_gen: 8, exclude: [{}]", "exclude[0]: must not be empty"),
    ("n_gen: 8, exclude: [{n_gen: [8]}]", "exclude[0].n_gen: must be text, a number, true or false"),
    ("n_gen: 8, exclude: [{n_ubatch: 8}]", "exclude[0].n_ubatch: is not varied in this entry; known: n_gen"),
    ("n_gen: 8, n_ubatch: [1, 2], exclude: [{n_ubath: 1}]", "exclude[0].n_ubath: is not varied in this entry; did you"),
    ("n_gen: 8, exclude: [{n_gen: 9}]", "exclude[0].n_gen: excludes nothing: 9 is not among n_gen's values"),
    ("n_gen: 8, n_prompt: 4, exclude: [{n_gen: 8, n_prompt: 4}]", "exclude[0]: excludes nothing: a cell has n_prompt "),
]

BATCHED = [
    ("npp: 1, ntg: 1", "npl: missing"),
    ("npp: 1, ntg: 1, npl: 1, args: [-c, 4]", "args[0]: '-c' has a key of its own: n_ctx"),
    ("npp: 1, ntg: 1, npl: 1, exclude: [{npl: 2}]", "exclude[0].npl: excludes nothing: 2 is not among npl's values"),
    ("npp: 1, ntg: 1, npl: 1, repetitions: 3", "repetitions: unknown key"),
]
REFUSED += [
    (f"bench: [{tool}: {{model: q4k, {text}}}]", f"bench[0].{tool}.{message}")
    for tool, cases in (("llama-bench", LLAMA), ("batched-bench", BATCHED))
    for text, message in cases
]


@pytest.mark.parametrize(("text", "message"), REFUSED, ids=[text[:60] for text, _ in REFUSED])
def test_a_value_that_is_refused(text: str, message: str) -> None:
    """The error has the child's file and line, the dotted key, what is wanted and what is there."""
    error = child_refusal(text + "\n").message
    assert error.startswith(f"x.yaml:{2 + text.count(chr(10))}: ")
    assert message in error


def test_a_tag_as_pin_leads_to_its_id() -> None:
    assert child_refusal("llama_cpp: {pin: b6900}\n").next == "dgxlab pin b6900"


def test_all_errors_of_a_spec_are_listed_by_line() -> None:
    error = child_refusal("session: {cycels: 3}\nname: 1\nenv:\n  A: 1\n  PATH: x\n")
    assert error.message == "x.yaml:2: session.cycels: unknown key; did you mean cycles?"
    assert error.details.splitlines() == [
        error.message,
        'x.yaml:3: name: must be text, not 1: quote it: "1"',
        'x.yaml:5: env.A: must be text, not 1: quote it: "1"',
        "x.yaml:6: env.PATH: cannot be set: it is the host's own: hosts.yaml has path_prepend and root",
    ]
    assert error.next == "${EDITOR:-vi} x.yaml"


def test_very_many_errors_are_cut_off() -> None:
    lines = child_refusal("".join(f"k{number}: 1\n" for number in range(300))).details.splitlines()
    assert len(lines) == 101
    assert lines[-1] == "... and 200 more"


def test_a_message_is_one_printable_line() -> None:
    message = child_refusal('name: "a\\nb"\n').message
    assert message.endswith("not 'a\\nb'")
    assert message.isprintable()


def test_long_values_are_cut() -> None:
    assert len(child_refusal(f"name: {'x' * 10_000}\n").message) < 300


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: x\n", "x.yaml:1: llama_cpp: missing"),
        ("name: x\n\nllama_cpp: {}\n", "x.yaml:3: llama_cpp.pin: missing"),
        ("llama_cpp:\n", "x.yaml:1: llama_cpp: must be a map, not nothing"),
        (
            f"llama_cpp: {{pin: {'a' * 40}}}\n",
            "x.yaml:1: bench: missing: with neither bench nor a gate that runs by itself there is nothing to do",
        ),
    ],
)
def test_what_a_spec_needs(text: str, message: str) -> None:
    assert refusal(text).message == message


def test_names_that_only_resemble_secrets_are_allowed() -> None:
    assert {"KV_KEY", "N_TOKENS", "HF_TOKENIZER"} < read(
        "env: {KV_KEY: x, N_TOKENS: '4', HF_TOKENIZER: z}\n"
    ).env.keys()


def test_the_matrix_has_a_limit() -> None:
    """100,000 cells can be asked for, in all entries together; more is refused before anything expands."""
    hundred, ten = list(range(1, 101)), list(range(1, 11))
    entry = f"batched-bench: {{model: q4k, npp: {hundred}, ntg: {hundred}, npl: {ten}}}"
    assert read(f"bench:\n  - {entry}\n").bench
    message = child_refusal(f"bench:\n  - {entry}\n  - llama-bench: {{model: q4k, n_gen: 1}}\n").message
    assert message.startswith("x.yaml:4: bench[1]: makes more than 100,000 cells")
    where = ", ".join(f"k{number}: [1, 2]" for number in range(12_000))
    message = child_refusal(f"bench:\n  - backend-ops: {{op: ADD, backend: CPU, where: {{{where}}}}}\n").message
    assert "makes more than 100,000 cells" in message


@pytest.mark.parametrize("flags", ["$(id)", "-O2; id", "`id`", "-O2 | id", "-O2 && id", "-DX=<a>"])
def test_flags_are_no_commands(flags: str) -> None:
    """A shell reads what cmake makes of flags, and of nothing else."""
    text = f'cmake:\n  GGML_X: "{flags}"\n  CMAKE_CUDA_FLAGS: "{flags}"\n'
    assert child_refusal(text).message.startswith("x.yaml:4: cmake.CMAKE_CUDA_FLAGS: holds ")
    assert read('cmake: {CMAKE_CUDA_FLAGS: "-O2 -gencode arch=compute_121a,code=[sm_121a]"}\n').cmake


def test_the_next_command_is_safe_to_type() -> None:
    with pytest.raises(SpecError) as caught:
        load(write("nome: x\nllama_cpp: {}\n", "a;id.yaml"))
    assert caught.value.next == "${EDITOR:-vi} 'a;id.yaml'"


@pytest.mark.parametrize(
    ("cmake", "entry"),
    [
        ("{GGML_CUDA: false, GGML_VULKAN: true}", "llama-bench: {model: q4k, n_gen: 1, n_gpu_layers: 99}"),
        ("{GGML_CUDA: false, GGML_VULKAN: true}", "backend-ops: {op: ADD, backend: Vulkan0, where: {m: 1}}"),
        ("{GGML_CUDA: false}", "batched-bench: {model: q4k, npp: 1, ntg: 1, npl: 1, n_gpu_layers: [-1, 0]}"),
        ("{GGML_CUDA: true}", "backend-ops: {op: ADD, backend: CUDA1, where: {m: 1}}"),
    ],
)
def test_a_gpu_that_is_built_or_not_asked_for(cmake: str, entry: str) -> None:
    """Any GPU backend of llama.cpp's counts; without one no layers, or the tool's own choice, are the processor's."""
    assert read(f"cmake: {cmake}\nbench: [{entry}]\n").bench
