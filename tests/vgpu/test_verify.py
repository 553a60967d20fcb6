"""`megamoe verify`: runs, counts, exit status, pages, mutation testing of the forward kernel."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from megamoe import testing
from megamoe.cli import main
from megamoe.runtime.vgpu.findings import AccessPlace, Finding
from megamoe.runtime.vgpu.mutate import Mutant, mutants_of
from megamoe.verify import mutation
from megamoe.verify.cases import CASES_BY_NAME, VERIFY_CASES, Case
from megamoe.verify.matrix import run_matrix
from megamoe.verify.mutation_cases import CASES, GROUPS, MutationGroup
from megamoe.verify.picture import page, trace
from megamoe.verify.runs import Run, counts, execute, plan_runs

TINY = Case(name="tiny", tokens=(3, 5), route="one")
COUNTS = ["cases", "runs", "races", "poison_reads", "deadlocks", "wrong_results"]


def image_of(case: Case):
    return testing.compiled(*case.kernel)


def pick(place: str, opcode: str, kind: str, case: Case = TINY) -> Mutant:
    """The first mutant of the case's kernel with such a place, opcode and kind."""
    return next(
        m
        for m in mutants_of(image_of(case).ptx)
        if place in m.place and m.kind == kind and " ".join(m.old.split()).startswith(opcode)
    )


BROKEN = {
    "race": ("fc1_epilogue.py:", "cp.async.bulk.wait_group 0", "drop"),
    "deadlock": ("place.py:", "mbarrier.arrive.release", "drop"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_kernel_is_reported_as_what_it_is(kind: str) -> None:
    mutant = pick(*BROKEN[kind])
    image = image_of(TINY)
    broken = replace(image, ptx=mutant.apply(image.ptx))
    outcome = execute(Run(case=TINY), image=broken, first_only=True)
    assert [d.kind for d in outcome.defects] == [kind]


def test_a_wrong_result_is_reported_without_the_detector() -> None:
    """A store to `y` that loses its second half."""
    image = image_of(TINY)
    lines = image.ptx.split("\n")
    add = next(i for i, text in enumerate(lines) if "max.NaN.f32" in text or "max.f32" in text)
    lines[add] = lines[add].replace("max", "min")
    broken = replace(image, ptx="\n".join(lines))
    outcome = execute(Run(case=TINY), image=broken, detect=False)
    assert [d.kind for d in outcome.defects] == ["wrong_result"]


def test_a_case_that_must_fail_is_clean_if_it_does() -> None:
    case = CASES_BY_NAME["small_pool"]
    assert execute(Run(case=case)).defects == []
    # The same calls, expected to succeed, and calls that succeed, expected to fail.
    (defect,) = execute(Run(case=replace(case, fails=""))).defects
    assert defect.kind == "wrong_error"
    (defect,) = execute(Run(case=replace(TINY, fails="capacity"))).defects
    assert defect.text == "no PoolCapacityError was raised"


def test_command_counts_and_succeeds(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    result = CliRunner().invoke(
        main, ["verify", "--case", "no_tokens", "--pes", "3", "--seeds", "2", "--json", str(path)]
    )
    assert result.exit_code == 0, result.output
    values = json.loads(path.read_text())
    assert [values[key] for key in COUNTS] == [1, 2, 0, 0, 0, 0]
    assert values["warp_instructions"] > 1000
    assert values["findings"] == []
    # Without tokens only counts and signals move, by the warps that send and receive routes.
    moved = {role: sum(spaces.values()) for role, spaces in values["bytes"].items()}
    assert 0 < sum(moved.values()) < 2 * 3 * 10_000
    assert "math" not in moved or values["bytes"]["math"].get("peers_written", 0) == 0
    assert "mutation" not in values


def test_bytes_by_role_and_space_over_all_runs() -> None:
    """Each part of the sum, and its place in the file."""
    case = Case(name="two", tokens=(3, 5), hidden=512, top_k=1, route="one", calls=2)
    runs = [Run(case=case), Run(case=case, schedule="starve")]
    result = run_matrix(runs, processes=1)
    found = result.as_json()["bytes"]
    assert found == result.bytes_by_role()
    for role, spaces in found.items():
        assert set(spaces) <= {"own_read", "own_written", "peers_read", "peers_written"}, role
        assert all(spaces.values())
        for space, nbytes in spaces.items():
            parts = [
                outcome.bytes_by_role.get(role, {}).get(space, 0) for outcome in result.outcomes
            ]
            assert sum(parts) == nbytes
    # One expert, of the second PE: the first one's rows are fetched once and sent back once, each
    # with a word that says so.
    tokens = len(runs) * case.calls * case.tokens[0]
    row_bytes = 2 * case.cfg.hidden
    assert found["recv-and-place"]["peers_read"] == tokens * row_bytes
    assert found["math"]["peers_written"] == tokens * (row_bytes + 4)


def test_command_fails_on_a_finding_and_draws_it(monkeypatch, tmp_path: Path) -> None:
    case = CASES_BY_NAME["all_to_one_expert"]
    image = image_of(case)
    mutant = pick(*BROKEN["race"], case=case)
    broken = replace(image, ptx=mutant.apply(image.ptx))
    monkeypatch.setattr(testing, "compiled", lambda *_: broken)
    path, folder = tmp_path / "out.json", tmp_path / "pages"
    result = CliRunner().invoke(
        main,
        ["verify", "--case", case.name, "--schedule", "round_robin", "--completion", "late",
         "--json", str(path), "--out", str(folder)],
    )  # fmt: skip
    assert result.exit_code == 1, result.output
    values = json.loads(path.read_text())
    assert values["races"] > 0
    assert "pool_h[" in values["findings"][0]["text"]
    (drawn,) = folder.iterdir()
    text = drawn.read_text()
    assert text.count("<circle") == 2
    assert "(load)" in text


def test_command_refuses_unknown_cases() -> None:
    result = CliRunner().invoke(main, ["verify", "--case", "nothing"])
    assert result.exit_code == 1
    assert "there are one_pe" in result.output
    assert CliRunner().invoke(main, ["verify", "--all", "--case", "k1"]).exit_code == 2


def test_a_clean_run_has_no_marks() -> None:
    picture = trace(Run(case=TINY))
    assert picture.times == (None, None)
    assert "no defect" in page(picture)
    assert "<circle" not in page(picture)


def test_runs_take_turns_through_the_policies() -> None:
    runs = plan_runs(VERIFY_CASES, seeds=3)
    assert len(runs) == 3 * len(VERIFY_CASES)
    assert len({(r.schedule, r.completion) for r in runs}) == 9
    fixed = plan_runs(VERIFY_CASES, seeds=1, schedule="starve", completion="late")
    assert {(r.schedule, r.completion) for r in fixed} == {("starve", "late")}


SAMPLE = (
    ("fc1_epilogue.py:", "fence.proxy.async.shared", "drop"),
    ("await_routes", "ld.acquire", "scope"),
    ("await_routes", "ld.acquire", "skip"),
    ("load.py:", "mbarrier.arrive.expect_tx", "less"),
    ("fc2_epilogue.py:", "red.release", "relax"),
    ("init_barriers", "fence.mbarrier_init", "drop"),
)


def test_a_sample_of_mutants(monkeypatch) -> None:
    """All are killed but the last, which is a survivor until it is listed."""
    group = MutationGroup(name="some", cases=CASES[:2], hasty=())
    case = group.runs[0].case
    wanted = {(pick(*sample, case=case).line, sample[2]) for sample in SAMPLE}

    def chosen(mutant: Mutant) -> bool:
        return (mutant.line, mutant.kind) in wanted

    monkeypatch.setattr(mutation, "equivalent_reasons", lambda kernel: {})
    result = mutation.run_mutation(groups=[group], chosen=chosen)
    assert len(result.verdicts) == len(SAMPLE)
    (survivor,) = result.of("survivor")
    assert survivor.mutant.opcode.startswith("fence.mbarrier_init")
    listed = {survivor.mutant.key: "because", "gone.py:f:bar.sync:drop": "no longer there"}
    monkeypatch.setattr(mutation, "equivalent_reasons", lambda kernel: listed)
    values = mutation.run_mutation(groups=[group], chosen=chosen).as_json()
    assert values["kernels"] == {"some": len(SAMPLE)}
    assert values["mutants"] == len(SAMPLE)
    assert values["killed"] == len(SAMPLE) - 1
    assert values["survivors"] == []
    assert [e["reason"] for e in values["equivalent"]] == ["because"]
    assert values["unused_equivalent"] == ["gone.py:f:bar.sync:drop"]


def test_groups_are_one_kernel_each() -> None:
    kernels = [{run.case.kernel for run in group.runs} for group in GROUPS]
    assert [len(problems) for problems in kernels] == [1] * len(GROUPS)
    assert len(set.union(*kernels)) == len(GROUPS)
    # Runs are told apart by their names.
    for group in GROUPS:
        assert len({str(run) for run in group.runs}) == len(group.runs)


def test_groups_of_clusters_have_whole_clusters() -> None:
    group = MutationGroup(name="pairs", config=(("cluster", "weights"),))
    assert {run.case.grid for run in group.runs} == {2, 4}
    assert {run.case.grid for run in GROUPS[0].runs} == {1, 2, 3}


def test_what_load_brought_does_not_count_in_an_abandoned_epoch() -> None:
    hasty = CASES_BY_NAME["hasty"]

    def finding(role: str, where: str, kind: str = "poison_read") -> Finding:
        copy = AccessPlace(
            what="asynchronous write", pe=0, cta=0, warp=0, lanes=1, role=role,
            opcode="cp.async.bulk", ptx_line=1, source="",
        )  # fmt: skip
        return Finding(
            kind=kind, message="", access_1=copy, access_2=copy, missing_edge="", where=where, pe=0
        )

    assert not counts(hasty, finding("load", "smem[16]"))
    assert counts(CASES_BY_NAME["ragged"], finding("load", "smem[16]"))
    assert counts(hasty, finding("recv-and-place", "smem[16]"))
    assert counts(hasty, finding("load", "comb[0, 0]"))
    assert counts(hasty, finding("load", "smem[16]", kind="race"))


def test_only_other_instructions_of_a_further_kernel_are_judged() -> None:
    mutants = mutants_of(image_of(TINY).ptx)
    known = Counter(mutant.key for mutant in mutants)
    assert mutation.fresh(mutants, Counter()) == mutants
    assert mutation.fresh(mutants, known) == []
    key = mutants[0].key
    assert {m.key for m in mutation.fresh(mutants, known - Counter([key]))} == {key}


def test_equivalent_entries_have_reasons() -> None:
    listed = [mutation.equivalent_reasons(group.name) for group in GROUPS]
    assert all(len(reason.split()) > 5 for reasons in listed for reason in reasons.values())
    entries = json.loads(mutation.EQUIVALENT_FILE.read_text())
    names = {group.name for group in GROUPS}
    assert all(set(entry.get("kernels", names)) <= names for entry in entries)


@pytest.mark.slow
def test_fifty_runs_are_clean() -> None:
    started = time.perf_counter()
    result = run_matrix(plan_runs(VERIFY_CASES, seeds=3))
    assert len(result.outcomes) >= 50
    assert [str(o.run) for o in result.failed] == []
    print(f"{len(result.outcomes)} runs in {time.perf_counter() - started:.0f} s")


@pytest.mark.slow
def test_every_mutant_is_reported_or_equivalent() -> None:
    result = mutation.run_mutation()
    assert len(result.verdicts) >= 150
    assert [v.mutant.description for v in result.of("survivor")] == []
    assert result.unused == []
