"""The report: one file that stands alone, and in which hostile text stays text."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from stories import make_ban, make_run, make_start

from phalanx.show.report import write_report

HOSTILE = "\"><script src=//evil.example/x.js></script><img src=x onerror=alert(1)>'&amp;"
VOID = {"meta", "img", "br", "source"}


class Reader(HTMLParser):
    """Collects tags and attributes, and checks that every tag is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def read(path: Path) -> Reader:
    reader = Reader()
    reader.feed(path.read_text(encoding="utf-8"))
    reader.close()
    assert reader.open == []
    return reader


def check_alone(reader: Reader) -> None:
    assert {tag for tag, _ in reader.tags}.isdisjoint(
        {"script", "link", "iframe", "object", "embed", "form", "a", "base"}
    )
    for _, attributes in reader.tags:
        assert not any(name.startswith("on") or name == "style" for name in attributes)
        for name in ("src", "srcset", "href"):
            assert re.fullmatch(
                r"data:image/png;base64,[A-Za-z0-9+/=]+", attributes.get(name) or "data:image/png;base64,A"
            )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "report.html"


def test_it_says_what_ran_who_was_banned_and_how_to_check(path: Path) -> None:
    write_report(path, make_run(), head="cd" * 32)
    reader = read(path)
    check_alone(reader)
    assert "3 of 8 peers attack from step 20: all 3 banned by step 58, final accuracy 96.6%" in reader.text
    for words in (
        "V4 gradient",
        "COMMIT of step 26 signed by peer 4",
        "04" * 32,
        "5 of 7 votes",
        "honest peers banned",
    ):
        assert words in reader.text
    assert "phalanx simulate --task digits --peers 8 --steps 100 --validators 1 --seed 7" in reader.text
    assert f"head='{'cd' * 32}'" in reader.text
    words = re.sub(r"base64,[A-Za-z0-9+/=]+|http-equiv", "", path.read_text())
    assert not re.search(r"http|//|@import|url\(", words)
    assert "prefers-color-scheme: dark" in path.read_text()


def test_a_duel_names_both_numbers(path: Path) -> None:
    bare = make_run(make_start(defense="mean"), (), 20)
    write_report(path, make_run(), unprotected=bare, command="phalanx demo")
    reader = read(path)
    check_alone(reader)
    for words in ("the same, mean", "15.0%", "96.6%", "phalanx demo"):
        assert words in reader.text


def test_hostile_text_stays_text(path: Path) -> None:
    started = make_start(
        task=HOSTILE, attack=HOSTILE, defense=HOSTILE, metric_name=HOSTILE, software={HOSTILE: HOSTILE}
    )
    ban = make_ban(1, 30, HOSTILE, reason=HOSTILE, exhibits=[HOSTILE])
    run = make_run(started, (ban,))
    write_report(path, run, unprotected=run, command=HOSTILE, log=HOSTILE)
    reader = read(path)
    check_alone(reader)
    assert HOSTILE in reader.text


def test_a_banned_honest_peer_is_not_hidden(path: Path) -> None:
    write_report(path, make_run(bans=(make_ban(2, 30),)))
    text = path.read_text()
    assert '<b class="bad">honest</b>' in text
    assert '<tr><td>honest peers banned</td><td class="number bad">1</td></tr>' in text


def test_a_run_that_has_just_begun_has_a_report_too(path: Path) -> None:
    write_report(path, [make_start()])
    assert "Nobody was banned." in read(path).text


def test_the_same_log_gives_the_same_report(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_report(tmp_path / name, make_run())
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
