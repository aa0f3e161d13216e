"""`dgxlab watch`: a round for each saved state of a checkout, and a clean end."""

import json
import os
import re
import signal
from pathlib import Path

from dgxlab.cli.watch import _line
from dgxlab.lab.watching import Round
from tests import toy
from tests.cli.conftest import Project
from tests.cli.test_trees import STOCK, edit

NOISY = f"{STOCK}env: {{TOY: noisy}}\n"  # an A/A session without any noise does not count


def test_each_saved_state_is_a_round(project: Project, tmp_path: Path) -> None:
    project.spec("stock", NOISY)
    checkout = project.checkout(tmp_path / "llama.cpp")
    edit(checkout, 2)
    no_floor = project.run("watch", "stock", "--tree", checkout)
    assert (no_floor.rc, no_floor.next) == (8, "dgxlab noise experiments/stock.yaml --host local")
    project.ok("noise", "stock")
    child = project.spawn("watch", "stock", "--tree", checkout, "--format", "json")
    assert child.stdout
    first = json.loads(child.stdout.readline())
    assert (first["number"], first["gates"], first["error"]) == (1, ["passed", "passed"], "")
    (verdict,) = first["verdicts"]
    assert (verdict["name"], verdict["verdict"], round(verdict["effect"], 1)) == ("pp16", "slower", -0.5)
    edit(checkout, 3)
    second = json.loads(child.stdout.readline())
    assert second["name"] != first["name"]
    assert round(second["verdicts"][0]["effect"], 1) == -0.7
    program = checkout / "tools" / "llama-bench.c"
    program.write_text("int main(void) { return oops; }\n")
    third = json.loads(child.stdout.readline())
    assert [row["verdict"] for row in third["verdicts"]] == ["invalid"]
    assert "oops" in third["error"]
    toy.git(checkout, "checkout", "-q", "tools/llama-bench.c")
    suite = checkout / "tools" / "test-backend-ops.c"
    suite.write_text(suite.read_text().replace("int failing = ", "int failing = 1 || "))
    fourth = json.loads(child.stdout.readline())
    assert fourth["error"].count("MUL_MAT(type_a=q4_0,n=9)") == 1
    os.killpg(child.pid, signal.SIGINT)
    rest, err = child.communicate(timeout=60)
    assert (child.returncode, rest, err.splitlines()[-1]) == (0, "", "stopped after 4 rounds")
    assert re.search(r"(?m)^step \d of \d+: build stock-tree-\w+", err)
    kinds = [row["kind"] for row in project.json("sessions")]
    assert (kinds.count("screen"), kinds.count("noise")) == (4, 1)
    assert project.run("cancel").error == "no job is running that this record knows"


def test_a_running_round_is_cancelled(project: Project, tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    project.spec("stock", NOISY)
    project.ok("noise", "stock")
    checkout = project.checkout(tmp_path / "llama.cpp")
    edit(checkout, 2)
    source = checkout / "ggml" / "ggml.c"
    wait = f'const char * hold = access("{hold}", F_OK) ? getenv("TOY_HOLD") : "{hold}";'
    source.write_text(source.read_text().replace('const char * hold = getenv("TOY_HOLD");', wait))
    hold.touch()
    child = project.spawn("watch", "stock", "--tree", checkout)
    while not any(row["kind"] == "screen" and row["state"] == "running" for row in project.json("sessions")):
        assert child.poll() is None, child.communicate()
    os.killpg(child.pid, signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert (child.returncode, out, err.splitlines()[-1]) == (0, "", "stopped after no rounds")
    assert [row["state"] for row in project.json("sessions") if row["kind"] == "screen"] == ["cancelled"]
    assert project.run("cancel").error == "no job is running that this record knows"


def test_a_line_has_the_name_of_each_verdict() -> None:
    rows = (
        {"name": "m pp16", "label": "pp16", "metric": "avg_ts", "verdict": "slower", "effect": -0.5},
        {"name": "n pp16", "label": "pp16", "metric": "avg_ts", "verdict": "invalid", "effect": None},
    )
    line = _line(Round(1, "toy-tree-1a2b3c4d", "", 2.0, (), rows))
    assert "m pp16 slower -50.00 %, n pp16 invalid" in line
