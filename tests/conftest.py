"""What holds for every test: the same seeds, poisoned memory, one thread per worker, and no silent skips."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import settings

# Fixtures for the lab's pages.
from tests.helpers.lab_visits import browser as browser
from tests.helpers.lab_visits import lab as lab
from tests.helpers.lab_visits import visit as visit

# Reasons for which a test may be skipped where CI=true, word for word.
MAY_SKIP: frozenset[str] = frozenset()

# The suite draws the same examples every time; `make fuzz` is there to draw new ones.
settings.register_profile("house", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("house")


def pytest_configure(config: pytest.Config) -> None:
    # Plans follow built-in rates, so that no test depends on how busy the machine is.
    os.environ["AVOW_CALIBRATION"] = "off"
    # Kernels run in Python. Triton decides that when it is first loaded, and torch.compile loads it too.
    os.environ["TRITON_INTERPRET"] = "1"
    if hasattr(config, "workerinput"):
        # The workers share the cores; threads of their own would only wait for each other.
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test starts from the same state of every generator."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def unprejudiced() -> None:
    """No test knows what methods proved in another."""
    if (attend := sys.modules.get("avow.attend")) is not None:
        attend._trials = type(attend._trials)(attend._trials.clock)


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """Memory from `torch.empty` is nan, so that reading it before writing shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def unexcused(reports: list[pytest.TestReport | pytest.CollectReport]) -> list[str]:
    """The skips among some reports that nobody allowed, each with its reason."""
    found = []
    for report in reports:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reason = reason.removeprefix("Skipped: ")
        if reason not in MAY_SKIP:
            found.append(f"{report.nodeid}: {reason}")
    return found


def _skips(config: pytest.Config) -> list[str]:
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("CI") != "true" or terminal is None or hasattr(config, "workerinput"):
        return []
    return unexcused(terminal.stats.get("skipped", []))


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _skips(session.config) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for line in _skips(config):
        terminalreporter.write_line(f"skipped where nothing may be: {line}", red=True)
