"""Plans over time: what an older dgxlab recorded is still read."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

from dgxlab.model import WAIT_S, Plan, from_json, to_json
from dgxlab.store import Store
from tests.conftest import PROJECT


def test_recorded_plans_decode_and_keep_their_digest(tmp_path: Path) -> None:
    """Those of the shipped record, from before a plan said how long to wait."""
    shutil.copyfile(PROJECT / "results.db", tmp_path / "results.db")
    with Store.open(tmp_path / "results.db") as store:
        rows = [row for row in store.rows("SELECT plan, plan_digest FROM jobs") if '"wait_s"' not in row["plan"]]
    assert rows
    for row in rows:
        plan = from_json(Plan, json.loads(row["plan"]))
        assert (plan.digest, plan.wait_s) == (row["plan_digest"], WAIT_S)


def test_waiting_is_no_part_of_the_work() -> None:
    """However long a job may wait, it is the same work; the time travels with the plan."""
    plan = Plan("J", "n", "e", (), (), wait_s=0)
    assert plan.digest == replace(plan, wait_s=60, job_id="K").digest != replace(plan, name="m").digest
    assert from_json(Plan, to_json(plan)) == plan
