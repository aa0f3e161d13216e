"""What a search takes from the record, and how often."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from dgxlab.lab.missing import answered, plan_missing
from dgxlab.lab.provision import probe_for
from dgxlab.lab.request import Request, sourced
from dgxlab.lab.search import Compared, Search, Step, Subject, bisect
from dgxlab.model import FileModel, Plan, Session
from dgxlab.stats import Verdict
from tests import toy
from tests.journals import experiment
from tests.lab.conftest import ToyLab, quiet


def test_each_session_of_the_record_answers_once(toy_lab: ToyLab) -> None:
    """And none for a host that is set to be another device."""
    changes = {"bench": (toy.llama_bench(n_prompt=(16,), n_gen=(0,)),), "session": Session(cycles=6)}
    baseline = toy_lab.experiment(name="stock", **changes)
    candidate = toy_lab.experiment(name="half", env={"TOY": "half"}, **changes)
    sessions = [toy_lab.run_well(candidate, "ab", baseline=baseline)[0].job_id for _ in range(2)]

    request, sides = sourced(toy_lab.lab.cache, Request("ab", candidate, baseline), quiet)

    def answer(used: Collection[str]) -> str:
        return answered(toy_lab.lab, request, sides, used)

    assert [answer(sessions[:number]) for number in range(3)] == [*sessions, ""]
    toy_lab.host.entry = replace(toy_lab.host.entry, processors=(0,))
    assert answer(()) == ""


def test_a_model_file_that_has_changed_is_measured_again(toy_lab: ToyLab) -> None:
    """As soon as the host is asked, or another job has read it."""
    (file := toy_lab.folder / "own.gguf").write_bytes(toy.GGUF)
    bench = (toy.llama_bench(n_prompt=(16,), n_gen=(0,)),)
    experiment = toy_lab.experiment(models={"m": FileModel(str(file))}, bench=bench, session=Session(cycles=6))
    job_id = toy_lab.run_well(experiment, "noise", baseline=experiment)[0].job_id
    request, sides = sourced(toy_lab.lab.cache, Request("noise", experiment, experiment), quiet)

    def left() -> Plan | None:
        return plan_missing(toy_lab.lab.store, request, sides, probe_for(toy_lab.host, *sides), job_id)[1]

    assert (left(), answered(toy_lab.lab, request, sides)) == (None, job_id)
    file.write_bytes(toy.GGUF + b"more")
    assert left()
    toy_lab.run(experiment)
    assert answered(toy_lab.lab, request, sides) == ""


def test_a_bisection_names_the_sessions_that_have_answered() -> None:
    """Its noise makes it ask for a step more than once."""
    seen: list[tuple[str, ...]] = []

    class Noisy(Search):
        def compare(
            self, lab: Any, baseline: Any, candidate: Any, watch: Any, used: Collection[str] | None = None
        ) -> Compared:
            seen.append(tuple(used or ()))
            verdict = Verdict("slower", 6, (), effect=-0.2, ci=(-0.45, 0.1), valid_cycles=6)
            return Compared(f"session {len(seen)}", ((Subject("pp16", "pp16", "avg_ts", "m"), verdict),))

    steps = [Step(str(number), replace(experiment(), name=f"step-{number}")) for number in range(3)]
    no_lab: Any = None
    answers = bisect(no_lab, steps, Noisy(), quiet).answers
    assert len({answer.step for answer in answers}) < len(answers)
    # the first session compares the ends; each later one knows those between it and the first
    later = [f"session {number}" for number in range(2, 2 + len(answers))]
    assert seen == [(), *(tuple(later[:number]) for number in range(len(answers)))]
