"""The real llama-server of the pin under the client, by both of its APIs, and with its prompt cache on."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dgxlab.lab.provision import vocabulary
from dgxlab.model import SyntheticModel
from dgxlab.source import PinCache
from dgxlab.synth import write
from dgxlab.tools.llama_server import ServeBench
from dgxlab.tools.streams import incomplete, unfair
from tests.conftest import PROJECT
from tests.journals import PIN

pytestmark = pytest.mark.llama

RECIPE = SyntheticModel(
    n_layer=1, n_embd=64, n_ff=64, n_head=2, n_head_kv=2, n_vocab=32000, vocab="llama-spm", plain_text=True, quant="F16"
)
PP, TG = 16, 240  # together all of a slot's context, which has a multiple of 256 tokens
BENCH = ServeBench("m", (PP,), (TG,), (1, 4), repetitions=1, axes={"n_threads": (1,)})

DRAFT = ("--spec-type", "draft-simple", "--spec-draft-model", "{model:m}", "--spec-draft-n-max", "7")
ASK = "import sys; from dgxlab.tools import load; {change}; load.main(*sys.argv[1:])"
CACHED = (
    "load.prompts = lambda count, tokens, n_vocab, seed: [[4000 + i] * tokens for i in range(count)]; "
    "body = load.Api.body; load.Api.body = lambda self, *args: {**body(self, *args), 'cache_prompt': True}"
)
Drive = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def drive(server_bin: Path, pin_cache: PinCache, tmp_path_factory: pytest.TempPathFactory) -> Drive:
    """Load a server of a tiny model; returns what was printed."""
    folder = tmp_path_factory.mktemp("served")
    write(RECIPE, folder / "m.gguf", vocabulary(pin_cache, replace(RECIPE, vocab_pin=PIN), folder))
    (launch,) = BENCH.launches({}, lambda model, cell: True)
    *_, settings = launch.argv[:5]
    known = {"{bin}/llama-server": str(server_bin / "llama-server"), "{model:m}": str(folder / "m.gguf")}
    server = [known.get(word, word) for word in launch.argv[5:]]

    def run(engine: str, change: str = "pass", args: Sequence[str] = (), **changes: Any) -> list[dict[str, Any]]:
        asked = json.dumps({**json.loads(settings), "engine": engine, **changes})
        own = [known.get(word, word) for word in args]
        argv = [sys.executable, "-c", ASK.format(change=change), asked, *server, *own]
        ended = subprocess.run(argv, cwd=PROJECT, capture_output=True, text=True, start_new_session=True, check=True)
        return [json.loads(line) for line in ended.stdout.splitlines()]

    return run


@pytest.mark.parametrize("engine", ["llama-server", "vllm"])
def test_every_stream_is_whole(drive: Drive, engine: str) -> None:
    about, *rows = drive(engine)
    assert about["server"]["model"].endswith("m.gguf")
    assert about["server"]["slots"] == (4 if engine == "llama-server" else None)
    assert [row["pl"] for row in rows] == [1, 4]
    for wave in (wave for row in rows for wave in row["waves"]):
        assert list(incomplete(wave["streams"], PP, TG)) == []
        for slot, stream in enumerate(wave["streams"]):
            assert min(stream["at_us"]) >= 0
            assert (stream["end"]["ms"] is None) == (engine == "vllm")
            assert stream["end"].get("slot") == (slot if engine == "llama-server" else None)


def test_requests_that_arrive_wait_for_a_slot(drive: Drive) -> None:
    _, row = drive("llama-server", rate=[100.0], requests=12)
    for wave in row["waves"]:
        assert list(incomplete(wave["streams"], PP, TG)) == []
        assert [each["sent_us"] for each in wave["streams"]] == sorted(each["sent_us"] for each in wave["streams"])
        spans = [(each["sent_us"], each["at_us"][0], sum(each["at_us"])) for each in wave["streams"]]
        ends = [sent + whole for sent, _, whole in spans]
        # of 12 requests for 4 slots some get their first token only when another has got its last
        assert any(sent < end <= sent + first for sent, first, _ in spans for end in ends)


def test_a_draft_model_is_no_proxy_that_collects(drive: Drive) -> None:
    """The draft model is the model itself, so that most of a draft is accepted."""
    _, row = drive("llama-server", args=DRAFT, pl=[1], tg=100)
    for wave in row["waves"]:
        (stream,) = wave["streams"]
        assert list(incomplete([stream], PP, 100)) == []
        assert stream["end"]["accepted"] > 50
        assert not any("collects" in why for why in unfair([stream]))


def test_a_prompt_cache_is_seen(drive: Drive) -> None:
    _, *rows = drive("llama-server", CACHED)
    (first, second) = rows[0]["waves"]
    assert list(incomplete(first["streams"], PP, TG)) == []
    (problem,) = incomplete(second["streams"], PP, TG)
    assert problem == "stream 0: 1 tokens of its prompt were computed and 15 came from a cache, of 16"
