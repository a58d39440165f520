"""The etcd client where packets really vanish: members in network namespaces, whose cables are pulled."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support import etcd_netns

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 90.0


def test_a_member_whose_packets_vanish_costs_no_change_and_no_lease() -> None:
    if not etcd_netns.allowed():
        pytest.skip("this machine allows no network namespaces")
    done = subprocess.run(etcd_netns.command(), cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "leader lost" in done.stdout and "follower lost" in done.stdout
