"""Which source of an instance's load is in force after which messages."""

import pytest

from sglang_sbs.scheduling.received.load_source import LoadSource

STEPS = {
    "report": LoadSource.on_report,
    "poll": LoadSource.on_load_poll,
    "answer": LoadSource.on_answer,
    "silence": LoadSource.on_silence,
    "forget": LoadSource.forget,
}


@pytest.mark.parametrize(
    ("steps", "source"),
    [
        ("", "none"),
        ("answer", "http"),
        ("poll", "load_poll"),
        ("report", "endforward"),
        ("answer poll", "load_poll"),
        ("poll answer", "load_poll"),
        ("report poll", "endforward"),
        ("report answer", "endforward"),
        ("report silence", "interval"),
        ("report silence poll", "load_poll"),
        ("report silence answer", "http"),
        ("silence report", "endforward"),
        ("report forget", "none"),
        ("report forget poll", "load_poll"),
    ],
)
def test_the_strongest_source_since_the_last_silence_is_in_force(steps: str, source: str) -> None:
    load = LoadSource()
    for step in steps.split():
        STEPS[step](load)
    assert load.name == source
    assert load.reports is (source == "endforward")


def test_a_poll_counts_only_without_reports() -> None:
    load = LoadSource()
    assert load.on_load_poll()
    load.on_report()
    assert not load.on_load_poll()
