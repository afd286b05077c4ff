"""What a log tells: undone steps are left out, sentences say what happened."""

from __future__ import annotations

import pytest
from stories import DIGEST, make_ban, make_run, make_start

from phalanx.core.errors import LocalError
from phalanx.events import Evaluated, Resumed, RunFinished, StepFinished
from phalanx.show.story import clean, describe_attack, describe_ban, describe_end, format_metric, format_peers, tell


def test_what_a_resumed_run_did_twice_counts_once() -> None:
    whole = make_run()
    cut = whole.index(next(e for e in whole if isinstance(e, StepFinished) and e.step == 59)) + 1
    again = whole.index(next(e for e in whole if isinstance(e, StepFinished) and e.step == 49)) + 1
    resumed = tell([*whole[:cut], Evaluated(60, 0.0), Resumed(50), *whole[again:]])
    plain = tell(whole)
    assert (resumed.steps, resumed.metrics, resumed.bans) == (plain.steps, plain.metrics, plain.bans)
    assert resumed.finished == plain.finished


def test_resuming_a_finished_run_leaves_it_finished() -> None:
    assert tell([*make_run(), Resumed(100)]).finished is not None
    assert tell([*make_run(), Resumed(90)]).finished is None


def test_a_log_without_a_beginning_or_with_two_is_refused() -> None:
    with pytest.raises(LocalError, match="empty"):
        tell([])
    with pytest.raises(LocalError, match="does not begin with RunStarted"):
        tell(make_run()[1:])
    with pytest.raises(LocalError, match="two runs"):
        tell([*make_run(), make_start()])


def test_traffic_is_compared_with_an_all_reduce() -> None:
    assert tell(make_run()).traffic == pytest.approx(1.004, rel=1e-3)
    assert tell([make_start()]).traffic is None


@pytest.mark.parametrize(
    ("start", "bans", "sentence"),
    [
        ((1, 4), (make_ban(1, 30), make_ban(4, 40)), "all 2 banned by step 40, final accuracy"),
        ((1, 4), (make_ban(1, 30),), "1 banned by step 30, final accuracy"),
        ((1,), (make_ban(1, 30),), "it is banned by step 30, final accuracy"),
        ((1,), (), "none banned, final accuracy"),
        ((1,), (make_ban(2, 30),), "none banned, 1 honest banned, final accuracy"),
        ((), (), "final accuracy"),
    ],
)
def test_the_finding_says_who_was_banned(start: tuple[int, ...], bans: tuple, sentence: str) -> None:
    story = tell(make_run(make_start(8, start), bans))
    assert describe_end(story).startswith(sentence)


def test_an_unfinished_run_says_how_far_it_came() -> None:
    assert describe_end(tell([make_start(attackers=())])) == "0 of 100 steps finished"
    assert describe_end(tell(make_run(make_start(attackers=()), ())[:-1])).startswith("after 100 steps accuracy")


def test_the_attack_in_words() -> None:
    assert describe_attack(make_start()) == "3 of 8 peers attack from step 20"
    assert describe_attack(make_start(8, (1,), every=3)) == "1 of 8 peers attacks from step 20, every 3 steps"
    assert describe_attack(make_start(8, ())) == "8 honest peers"


def test_a_ban_says_who_which_rule_and_on_what_evidence() -> None:
    text = describe_ban(make_ban(3, 57))
    assert text.startswith("step 57: peer 3 (12D3..")
    assert "banned, accused by peer 0, V4 gradient: its gradient" in text
    assert text.endswith(
        "evidence: COMMIT of step 56 signed by peer 3 [03030303..] and 10 more signed messages, 5 of 7 votes"
    )
    proof = make_ban(3, 57, "E1 equivocation", evidence=["aa" * 32, "bb" * 32], exhibits=[], votes=None, accuser=None)
    assert describe_ban(proof).endswith("evidence: message [aaaaaaaa..], message [bbbbbbbb..]")
    assert "evidence: none in the log" in describe_ban(make_ban(3, 57, evidence=[], votes=None))


def test_text_from_a_log_is_one_line_of_printable_letters() -> None:
    assert clean("a\x1b[31m\nb") == "a?[31m?b"
    assert len(clean("x" * 1000)) == 200


def test_metrics_and_peers_as_text() -> None:
    assert format_metric(make_start(), 0.5) == "50.0%"
    assert format_metric(make_start(metric_name="perplexity"), 12.3456) == "12.35"
    assert format_metric(make_start(), None) == "not a number"
    assert [format_peers(x) for x in ([3], [5, 3], range(9))] == ["peer 3", "peers 3, 5", "9 peers"]


def test_the_final_metric_is_the_last_there_is() -> None:
    assert tell([make_start(), Evaluated(0, 0.1), Evaluated(5, 0.4)]).final_metric == 0.4
    assert tell([make_start(), Evaluated(0, 0.1), RunFinished(1, None, DIGEST)]).final_metric is None
