"""Plans over time: what an older dgxlab recorded is still read."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from dgxlab.model import ARM, WAIT_S, CheckCommand, GateStep, ParityGate, Plan, SyntheticModel, from_json, to_json
from dgxlab.store import Store
from dgxlab.tools import GreedyGate
from tests.conftest import PROJECT


def test_recorded_plans_decode_and_keep_their_digest(tmp_path: Path) -> None:
    shutil.copyfile(PROJECT / "results.db", tmp_path / "results.db")
    with Store.open(tmp_path / "results.db") as store:
        rows = [row for row in store.rows("SELECT plan, plan_digest FROM jobs") if '"wait_s"' not in row["plan"]]
    assert rows
    for row in rows:
        plan = from_json(Plan, json.loads(row["plan"]))
        assert (plan.digest, plan.wait_s) == (row["plan_digest"], WAIT_S)


def test_gates_have_the_shapes_in_plans_that_they_had() -> None:
    """A parity gate has one command's argv and environment, any other its commands: digests of plans stay."""
    commands = (CheckCommand(ARM, ("x",), {"A": "1"}, "m"),)
    parity = GateStep("g", "a", ParityGate("MUL_MAT", "CPU"), (CheckCommand(ARM, ("x",), {"A": "1"}),), like="h")
    greedy = GateStep("g", "a", GreedyGate("m"), commands)
    plan = Plan("J", "n", "e", (), (parity, greedy))
    assert from_json(Plan, to_json(plan)) == plan
    first, second = to_json(plan)["steps"]
    assert sorted(first) == ["argv", "arm", "env", "gate", "id", "kind", "like", "limit_s"]
    assert sorted(second) == ["arm", "commands", "files", "gate", "id", "kind", "limit_s", "text"]
    assert (first["kind"], first["env"], second["kind"]) == ("gate", {"A": "1"}, "check")


def test_waiting_is_no_part_of_the_work() -> None:
    plan = Plan("J", "n", "e", (), (), wait_s=0)
    assert plan.digest == replace(plan, wait_s=60, job_id="K").digest != replace(plan, name="m").digest
    assert from_json(Plan, to_json(plan)) == plan


def test_a_number_of_a_few_is_read_again_and_no_other() -> None:
    recipe = SyntheticModel(arch="qwen35", ssm_state=32)
    assert from_json(SyntheticModel, to_json(recipe)) == recipe
    for wrong in (33, True, "32", [32]):
        with pytest.raises(ValueError, match="is not one of 16, 32, 64, 128"):
            from_json(SyntheticModel, {**to_json(recipe), "ssm_state": wrong})
