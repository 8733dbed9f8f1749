"""The whole examination, as the command prints it."""

import json

from collectives import doctor
from collectives.doctor import trial
from collectives.doctor.finding import Finding


def test_the_report_marks_what_needs_attention():
    text = doctor.report([Finding("a", "fine"), Finding("bb", "hm", "do this"), Finding("c", "bad", "now", True)])
    assert text.splitlines() == [
        "✓ a   fine", "! bb  hm", "      → do this", "✗ c   bad", "      → now", "", "needs attention (✗): 1"
    ]  # fmt: skip


def test_this_machine_is_fit_and_the_shm_backend_works(capsys):
    assert doctor.main(["--quick"]) in (0, 1)  # 1 where the tests may use one processor only
    assert "backend='auto' takes " in capsys.readouterr().out
    found = trial.shm()
    assert not found.serious and found.facts["seconds"]["8"] > 0


def test_the_choice_is_what_init_would_take():
    assert doctor.choice([Finding("GPUs", "none", facts={"count": 0})]).facts == {"backend": "shm"}
    assert doctor.choice([Finding("GPUs", "two", facts={"count": 2})]).facts == {"backend": "cuda"}


def test_json_holds_every_finding(capsys):
    doctor.main(["--json", "--quick"])
    found = json.loads(capsys.readouterr().out)
    assert {"system", "processors", "memory", "GPUs", "choice"} <= {finding["topic"] for finding in found}
    assert all({"topic", "what", "advice", "serious", "facts"} == set(finding) for finding in found)


def test_a_trial_that_fails_is_a_finding(monkeypatch):
    def fail(*args, **options):
        raise MemoryError("no memory for 16 bytes")

    monkeypatch.setattr(trial.collectives, "spawn", fail)
    found = trial.shm()
    assert found.serious and "no memory for 16 bytes" in found.what
