"""Good histories, broken by hand: attempts, leases, tokens, processes and results."""

import msgspec
from torture.history import SurvivingProcess, Write

from tests.support.breakages import Breakages
from tests.support.hand_made_histories import HandMadeHistory

BROKEN_ATTEMPTS = Breakages[HandMadeHistory]()


@BROKEN_ATTEMPTS.breaks("tokens_grow", "the next attempt ran with an older token")
def _older_run(example: HandMadeHistory) -> None:
    example.history.lines.append(example.line("plain", "start", 0.5, attempt=2, token=0))


@BROKEN_ATTEMPTS.breaks("tokens_grow", "the token does not grow at a reap")
def _same_token(example: HandMadeHistory) -> None:
    example.change_event("plain", 4, token=1)
    example.change_event("plain", 5, token=2)


@BROKEN_ATTEMPTS.breaks("tokens_grow", "the ledger has an end with an old token")
def _stale(example: HandMadeHistory) -> None:
    example.change_attempt("plain", token=1)


@BROKEN_ATTEMPTS.breaks("writes_hold_their_lease", "a stale worker's end landed, under the token of another")
def _stale_end(example: HandMadeHistory) -> None:
    at = example.history.records["plain"].requested
    example.history.writes.append(Write("w1", "finish", "plain", 1, at + 8, at + 8.1, True))


@BROKEN_ATTEMPTS.breaks("writes_hold_their_lease", "a stale worker's words landed")
def _stale_words(example: HandMadeHistory) -> None:
    old = next(write for write in example.history.writes if write.job == "plain" and not write.landed)
    example.history.writes.append(msgspec.structs.replace(old, landed=True))


@BROKEN_ATTEMPTS.breaks("writes_hold_their_lease", "words landed after the end")
def _late_words(example: HandMadeHistory) -> None:
    at = example.history.records["plain"].requested
    example.history.writes.append(Write("w2", "append", "plain", 3, at + 9.5, at + 9.6, True))


@BROKEN_ATTEMPTS.breaks("attempts_are_ordinals", "a number was used twice")
def _reused(example: HandMadeHistory) -> None:
    example.history.attempts["plain"].append(example.history.attempts["plain"][0])


@BROKEN_ATTEMPTS.breaks("attempts_are_ordinals", "something ran that the ledger does not know")
def _unknown(example: HandMadeHistory) -> None:
    example.history.lines.append(example.line("plain", "start", 0.5, attempt=2))


@BROKEN_ATTEMPTS.breaks("returns_have_a_reason", "a neighbour took the lease of a worker that was there")
def taken(example: HandMadeHistory) -> None:
    example.change_event("plain", 4, lease="handed_over")
    example.history.faults.clear()
    example.history.exits.clear()


@BROKEN_ATTEMPTS.breaks("results_are_of_the_end", "the result is that of an earlier attempt")
def _old_result(example: HandMadeHistory) -> None:
    example.change_record("plain", result=0)


@BROKEN_ATTEMPTS.breaks("results_are_of_the_end", "the artifact of a success is not there")
def _no_artifact(example: HandMadeHistory) -> None:
    del example.history.made["plain/1.3"]


@BROKEN_ATTEMPTS.breaks("usage_adds_up", "what an attempt used was counted twice")
def _counted_twice(example: HandMadeHistory) -> None:
    example.change_record("plain", usage={"runs": 2})


@BROKEN_ATTEMPTS.breaks("usage_adds_up", "what an attempt used was not counted")
def _not_counted(example: HandMadeHistory) -> None:
    example.change_record("plain", usage={})


@BROKEN_ATTEMPTS.breaks("attempts_never_overlap", "two attempts at once")
def _overlap(example: HandMadeHistory) -> None:
    at = example.history.records["plain"].requested - example.at
    example.history.lines.append(example.line("plain", "start", at + 7.5, attempt=2, token=5))


@BROKEN_ATTEMPTS.breaks("attempts_start_once", "adopted by starting it again")
def _restarted(example: HandMadeHistory) -> None:
    at = example.history.records["plain"].requested - example.at
    example.history.lines.append(example.line("plain", "start", at + 6, pid=11, token=3))


@BROKEN_ATTEMPTS.breaks("attempts_start_once", "started twice under one token, by processes of the same number")
def _restarted_alike(example: HandMadeHistory) -> None:
    at = example.history.records["plain"].requested - example.at
    example.history.lines.append(example.line("plain", "start", at + 2.5))


@BROKEN_ATTEMPTS.breaks("attempts_start_once", "a failure of something that never ran")
def _never_failed(example: HandMadeHistory) -> None:
    _never_ran(example)
    example.change_attempt("plain", cause="exit", status="failed", exit_code=3)


@BROKEN_ATTEMPTS.breaks("attempts_start_once", "a success of something that never ran")
def _never_ran(example: HandMadeHistory) -> None:
    example.history.lines = [line for line in example.history.lines if line.job != "plain"]


@BROKEN_ATTEMPTS.breaks("attempts_start_once", "what was said not to have started has run")
def _drained(example: HandMadeHistory) -> None:
    example.change_attempt("plain", cause="drained")


@BROKEN_ATTEMPTS.breaks("success_has_its_witness", "a success without an end")
def _no_end(example: HandMadeHistory) -> None:
    example.history.lines = [line for line in example.history.lines if (line.job, line.what) != ("plain", "end")]


@BROKEN_ATTEMPTS.breaks("success_has_its_witness", "a success before the end")
def _too_soon(example: HandMadeHistory) -> None:
    example.change_attempt("plain", ended=example.history.records["plain"].requested + 6)


@BROKEN_ATTEMPTS.breaks("nothing_runs_after_the_end", "a grandchild lives on after a timeout")
def _kin(example: HandMadeHistory) -> None:
    at = example.history.records["plain"].requested - example.at
    example.history.lines.append(example.line("plain", "kin", at + 9.5, said=3))


@BROKEN_ATTEMPTS.breaks("nothing_runs_after_the_end", "a process is left when all is over")
def _left(example: HandMadeHistory) -> None:
    example.history.alive.append(SurvivingProcess("plain", 1, 10))


@BROKEN_ATTEMPTS.breaks("nothing_runs_after_the_end", "a process of a job that nobody knows is left")
def _left_unknown(example: HandMadeHistory) -> None:
    example.history.alive.append(SurvivingProcess("nobody's", 1, 10))


@BROKEN_ATTEMPTS.breaks(
    "losses_have_a_reason", "a child that stops by itself is called lost while a worker beats for it"
)
def _lost_too_soon(example: HandMadeHistory) -> None:
    lost(example)
    example.change_record("plain", policy={"stop_grace": 1.0, "stop_after": 4.0})


@BROKEN_ATTEMPTS.breaks("losses_have_a_reason", "a child that nobody touched is called lost")
def lost(example: HandMadeHistory) -> None:
    example.change_attempt("plain", cause="lost", status="failed", exit_code=None)


@BROKEN_ATTEMPTS.breaks("reaps_have_a_reason", "a lease is taken from a worker that was well")
def _reaped(example: HandMadeHistory) -> None:
    example.history.faults.clear()
