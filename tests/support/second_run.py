"""A second run for tests of real processes that fail while other tests load the machine (decision 23).

Only where several workers share the machine: a test that is run alone fails at once, and so does what no load explains
(`Untrue`). What needed its second run is shown at the end with what the first one said; more than a few of them fail
the session all the same.
"""

from __future__ import annotations

import pytest

FOLDERS = frozenset({"e2e", "integration"})
MOST = 4
"""So many tests of a session may need their second run."""
_PAUSE_S = 2  # the neighbours are at something else by then
_SHOWN_LINES = 60


class Untrue(AssertionError):
    """Somebody was told what is not so, or something was done twice: no load excuses that."""


def may_have_one(folder: str, config: pytest.Config) -> bool:
    """Whether a test of this folder of tests/ runs beside others, with processes of its own."""
    session = getattr(config, "workerinput", {"workercount": 1})
    return folder in FOLDERS and session["workercount"] > 1


def mark() -> pytest.MarkDecorator:
    """What pytest-rerunfailures looks for."""
    return pytest.mark.flaky(reruns=1, reruns_delay=_PAUSE_S, rerun_except=Untrue)


def first_runs(reporter: pytest.TerminalReporter) -> list[pytest.TestReport]:
    """The reports of the runs that failed and were repeated."""
    return list(reporter.stats.get("rerun", ()))


def show(reporter: pytest.TerminalReporter) -> None:
    """Say what the first runs said."""
    reports = first_runs(reporter)
    if not reports:
        return
    reporter.section("failed beside others, and were run again: defects to look into", sep="=")
    for report in reports:
        reporter.section(f"{report.nodeid} ({report.when})", sep="_")
        for line in report.longreprtext.splitlines()[-_SHOWN_LINES:]:
            reporter.write_line(line)
    if len(reports) > MOST:
        reporter.write_line(f"{len(reports)} second runs: more than {MOST} fail the session", red=True)


def too_many(session: pytest.Session) -> bool:
    """Whether so many needed a second run that the session fails."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    return isinstance(reporter, pytest.TerminalReporter) and len(first_runs(reporter)) > MOST
